from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from training_fixtures import stripes  # noqa: E402

from hwnas.accuracy.certificate import Certificate  # noqa: E402
from hwnas.accuracy.zero_cost import Pool, Scorer  # noqa: E402
from hwnas.cli.progress import Console  # noqa: E402
from hwnas.data.dataset import Dataset  # noqa: E402
from hwnas.errors import ConfigError, DataError, TrainingError, UnknownName  # noqa: E402
from hwnas.latency.model import Predictions  # noqa: E402
from hwnas.samplers.informed import Context, Scored, certified, informed, scored  # noqa: E402
from hwnas.samplers.known import Mix  # noqa: E402
from hwnas.samplers.loading import load_sampler  # noqa: E402
from hwnas.search import road  # noqa: E402
from hwnas.space.search_space import SearchSpace  # noqa: E402
from hwnas.study.objective import Objective  # noqa: E402


class Rows:
    """Settings as a sampler's functions get them: the codes are what is read."""

    def __init__(self, codes: Any) -> None:
        self.codes = np.asarray(codes, float)


@pytest.fixture(scope="module")
def space() -> SearchSpace:
    return SearchSpace.load("mnasnet_small", channels=1, classes=4, image_size=16)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("stripes", stripes(64, 0), stripes(40, 1), stripes(40, 2), ("a", "b", "c", "d"), 1, 16,
                   (0.3,), (0.2,), "stripes")


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path))


def made_up(space: SearchSpace, codes: Any) -> Any:
    """A score of about what scores are: depth, widths and a little of everything else."""
    networks = [space.decode(space.to_params(row)) for row in codes]
    return np.array([np.log(one.macs) + 0.2 * len(one.blocks()) + 0.3 * sum(block.se > 0 for block in one.blocks())
                     for one in networks])


def test_scores_of_others_are_read_from_the_pool(space: SearchSpace) -> None:
    codes = space.sample(np.random.default_rng(1), 200)
    read = Scored(space, codes[:160], np.column_stack([made_up(space, codes[:160]), np.full(160, 3.0)]))
    found = read(Rows(codes[160:]))
    assert found.shape == (40, 2)
    assert np.corrcoef(found[:, 0], made_up(space, codes[160:]))[0, 1] > 0.9
    assert read.spearman[0] > 0.9
    assert np.isfinite(found).all()
    again = Scored(space, codes[:160], made_up(space, codes[:160])[:, None])(Rows(codes[160:]))
    np.testing.assert_array_equal(again[:, 0], found[:, 0])


def test_networks_without_a_score_are_left_out_of_what_is_learnt(space: SearchSpace) -> None:
    codes = space.sample(np.random.default_rng(1), 60)
    scores = made_up(space, codes)[:, None]
    scores[::2] = np.nan
    assert np.isfinite(Scored(space, codes, scores)(Rows(codes))).all()
    scores[:50] = np.nan
    with pytest.raises(DataError, match=r"5 of 60 networks of space mnasnet_small have this zero-cost score; 16 are"):
        Scored(space, codes, scores)


def test_a_pool_is_scored_once_and_goes_on_where_it_was_ended(space: SearchSpace, dataset: Dataset,
                                                              monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def score(self: Any, one: Any, name: str, seed: int) -> float:
        asked.append(one.id)
        if len(asked) == 21:
            raise KeyboardInterrupt
        if len(asked) == 3:
            raise TrainingError("no such score")
        return float(one.params)

    monkeypatch.setattr(Scorer, "_score", score)
    with pytest.raises(KeyboardInterrupt):
        Pool(dataset, space, ["naswot"], 24).scores(Console(quiet=True))
    found = Pool(dataset, space, ["naswot"], 24).scores(Console(quiet=True))
    assert len(asked) == 21 + 24 - 16  # those after the last write once more
    assert found.shape == (24, 1)
    assert np.isnan(found[2, 0])
    assert np.isfinite(np.delete(found, 2)).all()
    both = Pool(dataset, space, ["zico", "naswot"], 24).scores(Console(quiet=True))
    np.testing.assert_array_equal(both[:, 1], found[:, 0])
    assert len(asked) == 29 + 24


@pytest.mark.parametrize("damage", [lambda text: text[:-9], lambda text: text.replace("scores/1", "scores/9"),
                                    lambda text: json.dumps([1]), lambda text: text.replace('"seconds"', '"second"')])
def test_a_torn_or_foreign_pool_is_named(space: SearchSpace, dataset: Dataset, monkeypatch: pytest.MonkeyPatch,
                                         damage: Any) -> None:
    monkeypatch.setattr(Scorer, "_score", lambda *_: 1.0)
    pool = Pool(dataset, space, ["naswot"], 8)
    pool.scores(Console(quiet=True))
    pool.path.write_text(damage(pool.path.read_text()))
    with pytest.raises(DataError, match=r"scores-\w+\.json: .*(Delete it|Update hwnas)"):
        Pool(dataset, space, ["naswot"], 8).scores(Console(quiet=True))


def test_the_samplers_model_sees_them_and_asks_otherwise(space: SearchSpace, dataset: Dataset,
                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    import optuna

    def odd(network: Any) -> float:
        """Nothing that parameters, MACs or depth tell."""
        return float(sum(one.kernel * (-1) ** index for index, one in enumerate(network.blocks())))

    monkeypatch.setattr(Scorer, "_score", lambda self, one, name, seed: odd(one))
    stream = io.StringIO()
    read = scored(dataset, space, ["naswot"], 1, Console(stream=stream))
    assert "rank correlation of those read for others: naswot" in stream.getvalue()

    def predict(codes: Any) -> Predictions:
        macs = np.array([space.decode(space.to_params(row)).macs for row in codes]) / 1e6
        return Predictions(macs, macs, macs, 0.01 * macs)

    def asked(scores: Any) -> list[dict[str, Any]]:
        context = Context(space, predict, Objective(target_ms=1.0), scores=scores)
        sampler = informed(context, 0, 4, mix=Mix(60, 40, 1, 20, 10), zero_cost=["naswot"] if scores else [])
        study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
        found = []
        for _ in range(12):
            trial = study.ask()
            found.append({one.name: trial.suggest_categorical(one.name, one.choices) for one in space.parameters})
            network = space.decode(found[-1])
            trial.set_user_attr("top1_proxy", 0.5 + 0.01 * odd(network))
            study.tell(trial, [0.5 + 0.01 * odd(network), network.macs / 1e6])
        return found

    without = asked(None)
    told = asked(read)
    assert without[:4] == told[:4]
    assert without != told
    assert asked(read) == told


def test_a_search_computes_what_its_certificate_leaves_on(space: SearchSpace, dataset: Dataset,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    taus = {"zero_cost:params": 0.3, "zero_cost:macs": 0.2, "zero_cost:naswot": 0.5, "zero_cost:zico": 0.1}
    content = {"estimators": {name: {"kendall_tau": tau, "low": tau / 2, "high": 1} for name, tau in taus.items()}}
    certificate = Certificate(Path("certificate.json"), content)
    monkeypatch.setattr("hwnas.samplers.informed.scored", lambda *given: asked.append(given[2]) or "scores")

    def told(sampler: str, names: list[str]) -> Any:
        options = SimpleNamespace(sampler=sampler, sampler_options={"zero_cost": names}, threads=1)
        plan: Any = SimpleNamespace(options=options, space=space)
        return road._zero_cost(plan, dataset, certificate, Console(stream=io.StringIO()))

    assert told("hwnas", ["zico", "naswot"]) == "scores"
    assert told("hwnas", ["zico"])(SimpleNamespace(codes=np.zeros((3, 2)))).shape == (3, 0)
    assert told("hwnas", []) is None
    assert told("mine", ["naswot"]) is None
    assert asked == [["naswot"]]


@pytest.mark.parametrize(("value", "error", "said"), [
    ("naswot", ConfigError, "must be a list of different zero-cost scores, got 'naswot'"),
    (["naswot", "naswot"], ConfigError, "must be a list of different"),
    (["nasbot"], UnknownName, "Did you mean naswot"),
    (["macs"], UnknownName, "unknown sampler_options.zero_cost 'macs'"),
    (3, ConfigError, "must be a list")])
def test_wrong_names_are_told_before_anything_is_scored(value: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        load_sampler("hwnas", 0, None, zero_cost=value)
    with pytest.raises(UnknownName, match="key of sampler_options"):
        load_sampler("random", 0, None, zero_cost=["naswot"])


def test_scores_that_nobody_computed_are_no_silent_gap(space: SearchSpace) -> None:
    context = Context(space, lambda codes: None, Objective(target_ms=1.0))  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match="the context has none"):
        informed(context, 0, 8, zero_cost=["naswot"])


def test_a_certificate_switches_off_what_it_judges_and_finds_useless() -> None:
    def certificate(**taus: float) -> Mapping[str, Any]:
        return {"estimators": {f"zero_cost:{name}": {"kendall_tau": tau, "low": tau - 0.2, "high": tau + 0.2}
                               for name, tau in taus.items()}}

    names, stream = ["naswot", "zico"], io.StringIO()
    console = Console(stream=stream)
    assert certified(names, None, console) == names
    assert certified(names, certificate(naswot=0.1), console) == names  # without controls it judges nothing
    assert certified(names, certificate(params=0.3, macs=0.2, naswot=0.5), console) == names
    assert stream.getvalue() == ""
    assert certified(names, certificate(params=0.3, macs=0.2, naswot=0.5, zico=0.3), console) == ["naswot"]
    assert "zico is left out: the certificate's zero_cost:zico ranks no better" in stream.getvalue()
