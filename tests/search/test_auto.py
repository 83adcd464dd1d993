"""`around=auto`: which networks race, by published top-1 and latencies that were kept; what is said of the others."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest
import yaml
from around_fixtures import small_search
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from table_fixtures import measurement_of

from hwnas.cli.command import compose
from hwnas.cli.progress import Console
from hwnas.errors import BudgetError, ConfigError, MissingWeights
from hwnas.networks.baselines import Baseline
from hwnas.networks.weights import PretrainedOptions
from hwnas.search import auto
from hwnas.search.auto import MOST, Contender, TrainingCost, choose_around, choose_networks
from hwnas.search.plan import Plan, make_plan
from hwnas.system.run_folder import RunFolder
from hwnas.target import Target
from hwnas.zoo import waves
from hwnas.zoo.published import find_published
from hwnas.zoo.record import ZooRecord

# Milliseconds of networks on images of 32 px. The first cannot be cut, and the last is no more accurate than the third.
TIMES = {"mobilevit_xxs": 6.0, "resnet10t": 3.0, "mobilenetv2_050": 2.0, "test_efficientnet": 1.0, "test_resnet": 4.0}
CHOSEN = ("resnet10t", "mobilenetv2_050", "test_efficientnet")
TARGET = Target("xeon_int8", "openvino", "int8")
candidates = st.lists(st.builds(
    Contender, st.sampled_from([f"{family}{size}" for family in ("resnet", "tf_resnet", "vgg", "regnet", "ghostnet",
                                                                 "convnext") for size in range(4)]),
    st.integers(60, 90).map(float), st.integers(1, 30).map(float)), max_size=12, unique_by=lambda each: each.name)


@given(candidates, st.none() | st.integers(1, 30).map(float), st.integers(1, MOST))
def test_a_choice_is_of_the_front_below_the_cap_and_of_different_families(
        networks: list[Contender], cap_ms: float | None, most: int) -> None:
    within = [each for each in networks if cap_ms is None or each.latency_ms <= cap_ms]
    chosen = choose_networks(networks, cap_ms, most)
    assert {*chosen} <= {*within}
    assert len({each.family for each in chosen}) == len(chosen) <= most
    assert not [(each, other) for each in chosen for other in within if other.latency_ms <= each.latency_ms
                and other.top1 >= each.top1 and (other.latency_ms, other.top1) != (each.latency_ms, each.top1)]
    assert bool(chosen) == bool(within)
    if chosen:
        assert chosen[0].top1 == max(each.top1 for each in within)
    assert chosen == choose_networks(networks[::-1], cap_ms, most) or len({
        (each.latency_ms, each.top1) for each in networks}) < len(networks)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with weights of all networks, and of one whose top-1 is not published."""
    folder = tmp_path_factory.mktemp("weights")
    for name in (*TIMES, "mobilenetv2_035"):
        save_file(Baseline(name).build(3, 1000, 64).state_dict(), folder / f"{name}.safetensors")
    return folder


@pytest.fixture
def home(weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with these weights, in which all networks were timed."""
    monkeypatch.setenv("HWNAS_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("HWNAS_WEIGHTS", raising=False)
    shutil.copytree(weights, tmp_path / "home" / "weights")
    monkeypatch.setattr(waves, "run_child", lambda *given, **options: pytest.fail("something is timed"))
    keep(TIMES)
    return tmp_path / "home"


def keep(times_ms: Mapping[str, float]) -> None:
    ZooRecord.open(TARGET).keep({f"{name}@32": measurement_of(ms) for name, ms in times_ms.items()}, {})


def plan_of(*more: str, console: Console | None = None) -> Plan:
    given = [option for option in small_search("auto") if not option.startswith("n_trials")]
    return make_plan(compose("search", [*given, *more]), console or Console(quiet=True))


def test_the_front_of_what_can_be_cut_races_and_goes_on_with_the_same_networks(home: Path, tmp_path: Path) -> None:
    out, console = tmp_path / "run", Console(quiet=True)
    plan = plan_of(f"out={out}", console=console)
    assert plan.options.arounds == CHOSEN
    assert {*plan.starts} == {*plan.space.arounds} == {*CHOSEN}
    assert yaml.safe_load(plan.yaml)["around"] == yaml.safe_load(plan.config)["around"] == [*CHOSEN]
    said = "\n".join(console.remarks)
    assert all(name in said for name in (*TIMES, "mobilenetv2_035"))
    assert "mobilenetv2_035: its top-1 is not published" in said
    assert "% published for timm's weights" in said, "nothing says whose weights lie there"
    assert re.search(r"test_resnet [^;]*, as resnet10t is no slower and no less accurate", said)
    RunFolder.create(out).write_config(plan.yaml)
    keep({"test_efficientnet": 10.0})
    again = plan_of(f"out={out}")
    assert (again.options.arounds, again.space.fingerprint) == (CHOSEN, plan.space.fingerprint)


def test_searches_around_one_network_have_folders_of_their_own_where_their_cuts_differ(home: Path) -> None:
    outs = {plan_of("around=resnet10t", f"dataset.image_size={px}").out for px in (32, 64)}
    assert len(outs) == 2
    assert all(out.name.startswith("xeon_int8-around_resnet10t") for out in outs)
    assert plan_of().out.name == "xeon_int8-around_auto-digits"


def choice_of(console: Console | None = None, training_s: float | None = None, cap_ms: float | None = None,
              cuttable: Collection[str] = TIMES) -> tuple[str, ...]:
    """The choice if a step of a network on one core takes as many seconds as TIMES says, and so do its cuts."""
    def cost(name: str) -> TrainingCost:
        if name not in cuttable:
            raise ConfigError(f"around={name}: it has nothing to cut.")
        return TrainingCost(TIMES.get(name, 1.0), 2 * TIMES.get(name, 1.0))

    return choose_around(PretrainedOptions(), 32, [TARGET], cost, console or Console(quiet=True), cap_ms=cap_ms,
                         timing_s=30.0, training_s=training_s, seed=0)


def test_what_is_published_of_these_very_weights_is_told_as_theirs(home: Path) -> None:
    (home / "weights" / "resnet10t.safetensors").rename(home / "weights" / "resnet10t.c3_in1k.safetensors")
    console = Console(quiet=True)
    choice_of(console)
    said = console.remarks[-1]
    assert re.search(r"resnet10t \([\d.]+ % published, ", said)
    assert re.search(r"mobilenetv2_050 \([\d.]+ % published for timm's weights", said)


def test_networks_over_the_cap_do_not_race_unless_all_are(home: Path) -> None:
    assert choice_of(cap_ms=2.5) == ("mobilenetv2_050", "test_efficientnet")
    console = Console(quiet=True)
    assert choice_of(console, cap_ms=0.5) == ("test_efficientnet",)
    assert "none keeps the cap" in console.remarks[-1]


def test_one_network_alone_is_taken_without_timing(home: Path) -> None:
    for path in (home / "weights").iterdir():
        if path.stem != "mobilenetv2_035":
            path.unlink()
    console = Console(quiet=True)
    assert choice_of(console, cuttable=["mobilenetv2_035"]) == ("mobilenetv2_035",)
    assert console.remarks == ["around=auto is around=mobilenetv2_035: there is no other network to choose."]


@pytest.mark.parametrize(("change", "error", "said"), [
    (["pretrained.folder={empty}"], MissingWeights, r"resnet18\.pth.*pretrained\.download=true"),
    (["pretrained.use=false"], ConfigError, "pretrained weights"),
    (["pretrained.file={empty}/file"], ConfigError, r"pretrained\.folder=DIR"),
    (["sampler=random"], ConfigError, "asks no sampler"),
    (["accuracy=proxy"], ConfigError, "estimates nothing")])
def test_what_cannot_be_chosen_from_is_one_line(home: Path, tmp_path: Path, change: list[str], error: type[Exception],
                                                said: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "file").touch()
    with pytest.raises(error, match=said):
        plan_of(*(option.format(empty=tmp_path / "empty") for option in change))


def test_nothing_published_nothing_timed_and_no_time_are_errors(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(auto, "find_published", lambda *given: None)
        with pytest.raises(ConfigError, match="there is none to choose by"):
            plan_of()
    record = ZooRecord.open(TARGET)
    record.path.unlink()
    with pytest.raises(BudgetError, match="9 s are too few"):
        plan_of("budget.minutes=1")
    record.timed = {}
    record.keep({}, {f"{name}@32": "it takes 9 GB" for name in TIMES})
    with pytest.raises(ConfigError, match=r"no network could be timed.*it takes 9 GB"):
        plan_of()


def test_fewer_networks_race_if_the_seconds_are_few(home: Path) -> None:
    """The slower a network, the longer its steps: first fewer race, then the slowest is left out, then a fast one."""
    choices = [choice_of(training_s=training_s) for training_s in (None, 1e5, 5000, 3000, 700, 1.0)]
    assert choices[0] == choices[1]
    sizes = [len(names) for names in choices]
    assert sizes[0] == 4
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == 1
    assert choices[-1] == ("test_efficientnet",)
    slowest_ms = [TIMES[names[0]] for names in choices]
    assert slowest_ms == sorted(slowest_ms, reverse=True)


def test_a_network_that_cannot_be_cut_leaves_its_place_to_another(home: Path) -> None:
    console = Console(quiet=True)
    assert choice_of(console, cuttable=["test_resnet"]) == ("test_resnet",)
    assert "nothing to cut" in console.remarks[0]
    assert choice_of(cuttable=["mobilevit_xxs"], training_s=1.0) == ("mobilevit_xxs",)
    with pytest.raises(ConfigError, match="nothing to cut"):
        choice_of(cuttable=[])


def test_top1_is_that_of_the_weights_that_the_file_or_its_origin_names(tmp_path: Path) -> None:
    def top1(stem: str, origin: str = "") -> float | None:
        save_file({}, tmp_path / f"{stem}.safetensors", {"origin": origin})
        tag = auto.find_tag("resnet34", PretrainedOptions(folder=tmp_path))
        (tmp_path / f"{stem}.safetensors").unlink()
        published = find_published("resnet34", tag, 224)
        return published and published.top1

    named, other = top1("resnet34.a3_in1k"), top1("resnet34.ra4_e3600_r224_in1k")
    assert named != other
    assert top1("resnet34", "huggingface.co/timm/resnet34.a3_in1k") == named
    assert top1("resnet34_mine") is not None
    assert find_published("mobilenetv2_035", "", 224) is None
    # Of small images no other weights count than of large ones.
    assert {find_published("resnet34", "", px).model for px in (64, 160, 288)} == {
        find_published("resnet34", "", 224).model}
    small, large = (find_published("resnet34", "", px) for px in (112, 224))
    assert small is not None
    assert large is not None
    assert small.gmacs == pytest.approx(large.gmacs / 4, rel=0.02)
