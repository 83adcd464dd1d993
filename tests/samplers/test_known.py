"""KnownObjectiveSampler: what Optuna asks of a sampler, what it learns, what it never asks twice, what it refuses."""

from __future__ import annotations

import re
from functools import cache

import numpy as np
import optuna
import pytest
from optuna._hypervolume import compute_hypervolume
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.samplers import BaseSampler, RandomSampler
from optuna.trial import FrozenTrial, TrialState

import hwnas.samplers.known as known_module
from experiments.common import hypervolume_2d
from hwnas.errors import BudgetError, SamplerError
from hwnas.samplers.domain import Coding, Domain, History
from hwnas.samplers.known import KnownFunctions, KnownObjectiveSampler
from hwnas.samplers.model import MOST_FITTED, Surrogate

SPACE = {**{f"op{i}": CategoricalDistribution(["none", "small", "large"]) for i in range(6)},
         "depth": IntDistribution(1, 6), "width": CategoricalDistribution([8, 16, 32, 64])}
COST = {"none": 0.0, "small": 1.0, "large": 3.0}
GOOD = {"none": 0.0, "small": 0.5, "large": 0.8}


def cost_ms(one) -> float:
    return 0.1 * one["depth"] * one["width"] / 8 + 0.3 * sum(COST[one[f"op{i}"]] for i in range(6)) + 0.2


def cost_of(codes) -> np.ndarray:
    coding = Coding(SPACE)
    return np.array([[cost_ms(coding.decode(row))] for row in codes])


def accuracy(one) -> float:
    weights = (1.0, 0.2, 0.7, 0.4, 0.9, 0.1)
    gain = sum(weight * GOOD[one[f"op{i}"]] for i, weight in enumerate(weights)) / 3.3
    return float(0.5 + 0.3 * gain + 0.1 * np.log2(one["depth"] * one["width"]) / 9 + 0.05 * (one["op0"] == one["op2"]))


def suggested(trial: optuna.Trial) -> dict:
    return {name: trial.suggest_categorical(name, one.choices) if isinstance(one, CategoricalDistribution)
            else trial.suggest_int(name, one.low, one.high) for name, one in SPACE.items()}


def random_setting(rng: np.random.Generator) -> dict:
    return {name: one.choices[int(rng.integers(len(one.choices)))] if isinstance(one, CategoricalDistribution)
            else int(rng.integers(one.low, one.high + 1)) for name, one in SPACE.items()}


def objective(trial: optuna.Trial) -> tuple[float, float]:
    one = suggested(trial)
    return accuracy(one), cost_ms(one)


def sampler_of(seed: int = 0, *, over=None, **options) -> KnownObjectiveSampler:
    return KnownObjectiveSampler(SPACE, KnownFunctions(cost_of, over=over), seed=seed, **options)


def study_of(sampler: BaseSampler, directions=("maximize", "minimize")) -> optuna.Study:
    return optuna.create_study(directions=directions, sampler=sampler)


def searched(sampler: BaseSampler, n: int) -> optuna.Study:
    study = study_of(sampler)
    study.optimize(objective, n)
    return study


@cache
def trials_of(seed: int) -> list[FrozenTrial]:
    return searched(sampler_of(seed), 14).trials


def begun(n: int = 14, seed: int = 0) -> optuna.Study:
    """A study of so many trials, 14 at most, of which the last ones are the model's."""
    study = study_of(sampler_of(seed))
    study.add_trials(trials_of(seed)[:n])
    return study


def prepare(study: optuna.Study) -> tuple[Domain, History]:
    sampler = sampler_of()
    domain = sampler._prepare_domain(study)
    return domain, sampler._read_history(study, domain)


def share(study: optuna.Study) -> float:
    values = np.array([trial.values for trial in study.trials if trial.state == TrialState.COMPLETE])
    return hypervolume_2d(values[:, 0], np.log2(values[:, 1]), (0.5, np.log2(6.0)))


def test_equal_seeds_ask_alike_and_nothing_is_asked_twice() -> None:
    runs = [[trial.params for trial in trials] for trials in (
        trials_of(1)[:12], searched(sampler_of(1), 12).trials, searched(sampler_of(2), 12).trials)]
    assert runs[0] == runs[1] != runs[2]
    assert len({tuple(one.items()) for one in runs[0]}) == 12


def test_workers_that_ask_at_once_are_given_different_settings() -> None:
    study = begun()
    others = [optuna.load_study(study_name=study.study_name, storage=study._storage, sampler=sampler_of()), study]
    asked = [others[index % 2].ask(SPACE) for index in range(8)]
    assert len({tuple(trial.params.items()) for trial in asked}) == 8
    for trial in asked[:4]:
        study.tell(trial, objective(optuna.trial.FixedTrial(trial.params)))


def test_what_a_running_trial_works_at_counts_and_goes_with_it() -> None:
    study = begun()
    pending = study.ask(SPACE)
    assert study.ask(SPACE).params != pending.params
    study.tell(pending, state=TrialState.FAIL)
    assert study.ask(SPACE).params != pending.params  # failed for a reason of its own: not again


def test_a_lost_trials_setting_may_be_asked_for_again() -> None:
    study = begun(seed=1)
    first = study.ask(SPACE)
    study._storage.set_trial_user_attr(first._trial_id, "outcome", "lost")
    study.tell(first, state=TrialState.FAIL)
    _, history = prepare(study)
    assert len(history.values) == len(np.unique(history.taken, axis=0)) == 14
    again = optuna.load_study(study_name=study.study_name, storage=study._storage, sampler=sampler_of(1))
    asked = [again.ask(SPACE).params for _ in range(6)]
    assert first.params in asked


@pytest.mark.parametrize(("sampler", "direction", "n"), [(RandomSampler(seed=3), "minimize", 40),
                                                         (None, "maximize", 24)])
def test_beliefs_are_nearer_to_the_truth_than_noisy_values_whoever_asked(sampler, direction, n):
    sign, noise = 1 if direction == "maximize" else -1, 0.1
    ours = sampler_of(learnt=lambda trial: (trial.values[0], noise))
    study, rng, truth = study_of(sampler or ours, (direction, "minimize")), np.random.default_rng(0), {}
    for _ in range(n):
        trial = study.ask(SPACE)
        value, cost = objective(optuna.trial.FixedTrial(trial.params))
        truth[trial.number] = sign * value
        study.tell(trial, (sign * value + noise * rng.normal(), cost))
    study.tell(study.ask(SPACE), state=optuna.trial.TrialState.FAIL)
    study.ask(SPACE)  # is running
    beliefs = ours.beliefs(study)
    assert list(beliefs) == list(truth)
    away = {number: abs(study.trials[number].values[0] - value) for number, value in truth.items()}
    assert sum(abs(beliefs[number].mean - value) for number, value in truth.items()) < 0.7 * sum(away.values())
    inside = [beliefs[number].low <= value <= beliefs[number].high for number, value in truth.items()]
    assert np.mean(inside) > 0.7
    assert all(belief.low < belief.mean < belief.high for belief in beliefs.values())
    assert ours.beliefs(begun(3)) == {}  # of so few values


@pytest.mark.parametrize("value", [0.5, None])
def test_constant_and_failed_first_trials_do_not_stop_it(value: float | None) -> None:
    study = study_of(sampler_of(n_startup_trials=4))
    for _ in range(8):
        trial = study.ask(SPACE)
        if value is None:
            study.tell(trial, state=TrialState.FAIL)
        else:
            study.tell(trial, (value, cost_ms(trial.params)))
    assert len({tuple(trial.params.items()) for trial in study.trials}) == 8


@pytest.mark.soak
def test_collapsed_networks_do_not_spoil_the_model() -> None:
    def collapsing(trial: optuna.Trial) -> tuple[float, float]:
        value, cost = objective(trial)
        return (0.1 if trial.number % 5 == 4 else value), cost

    shares = []
    for seed in range(4):
        study = study_of(sampler_of(seed))
        study.optimize(collapsing, 40)
        good = [trial for trial in study.trials if trial.number % 5 != 4]
        found = hypervolume_2d([trial.values[0] for trial in good], [np.log2(trial.values[1]) for trial in good],
                               (0.5, np.log2(6.0)))
        shares.append(found / share(searched(sampler_of(seed), 32)))
    assert np.mean(shares) > 0.85


def test_a_cap_is_kept_and_one_that_leaves_nothing_names_the_nearest() -> None:
    study = study_of(sampler_of(over=lambda codes: cost_of(codes) - 1.0), ["maximize"])
    study.optimize(lambda trial: accuracy(suggested(trial)), 12)
    assert max(cost_ms(trial.params) for trial in study.trials) <= 1.0
    with pytest.raises(BudgetError, match=r"nearest is over it by 0\.29"):
        study_of(sampler_of(over=lambda codes: cost_of(codes) - 0.01), ["maximize"]).ask(SPACE)


def test_a_reward_is_searched_by_its_learnt_part() -> None:
    study = study_of(KnownObjectiveSampler(
        SPACE, KnownFunctions(factor=lambda codes: cost_of(codes) ** -0.07), seed=1,
        learnt=lambda trial: (trial.user_attrs["accuracy"], 0.0)), ["maximize"])
    plain = study_of(RandomSampler(seed=0), ["maximize"])

    def rewarded(trial: optuna.Trial) -> float:
        one = suggested(trial)
        trial.set_user_attr("accuracy", accuracy(one))
        return accuracy(one) * cost_ms(one) ** -0.07

    study.optimize(rewarded, 20)
    plain.optimize(rewarded, 60)
    assert study.best_value > plain.best_value


def test_three_objectives_with_two_known() -> None:
    def two(codes):
        return np.column_stack([cost_of(codes), 8.0 * 2.0 ** codes[:, 7] * (codes[:, 6] + 1)])

    def three(trial: optuna.Trial) -> tuple[float, float, float]:
        return (*objective(trial), float(trial.params["width"] * trial.params["depth"]))

    def volume(study: optuna.Study) -> float:
        points = np.array([[-trial.values[0], *np.log(trial.values[1:])] for trial in study.trials])
        worst = np.array([-0.5, np.log(6), np.log(300)])
        return float(compute_hypervolume(points[(points <= worst).all(axis=1)], worst))

    ours = study_of(KnownObjectiveSampler(SPACE, KnownFunctions(two), seed=0),
                    ["maximize", "minimize", "minimize"])
    random = study_of(RandomSampler(seed=0), ["maximize", "minimize", "minimize"])
    ours.optimize(three, 20)
    random.optimize(three, 80)
    assert volume(ours) > volume(random)


@pytest.mark.parametrize(("known", "message"), [
    (lambda codes: 1 / 0, "ZeroDivisionError"), (lambda codes: [[float("nan")]] * len(codes), "no finite"),
    (lambda codes: [[1.0]], "cannot reshape"), (lambda codes: [[1.0, 2.0]] * len(codes), "the study has 1"),
    (None, "Give a function")])
def test_a_known_objective_that_cannot_be_used_is_one_clear_error(known, message: str) -> None:
    with pytest.raises(SamplerError, match=message):
        study_of(KnownObjectiveSampler(SPACE, KnownFunctions(known), seed=0)).ask(SPACE)


def test_a_rare_cost_of_nothing_does_not_outweigh_all_others() -> None:
    """The 512 settings that ranges are read off do not hold the free one; a logarithm of 0 would be without end."""
    space = {name: IntDistribution(0, 9) for name in "abcdef"}
    domain = Domain(space, KnownFunctions(lambda codes: codes @ 10.0 ** np.arange(6)), 1)
    free, small, large = domain.costs(np.array([[0] * 6, [0, 0, 0, 1, 0, 0], [9] * 6]))[:, 0]
    assert free < small < large
    assert large - free < 2 * (large - small) + np.log(1e3)


def test_objectives_and_parameters_that_cannot_be_modelled_are_named() -> None:
    with pytest.raises(SamplerError, match="parameter odd: FloatDistribution"):
        study_of(KnownObjectiveSampler({"odd": FloatDistribution(0, 1)})).ask(SPACE)
    for directions in (["maximize", "maximize"], ["maximize", *["minimize"] * 3]):
        with pytest.raises(SamplerError, match=r"at most 2 can be searched with, minimised"):
            study_of(sampler_of(), directions).ask(SPACE)


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    text = known_module.__doc__ or ""
    example = "\n".join(line[4:] for line in text.split("\n") if line.startswith("    ") or not line.strip())
    exec(example.replace("n_trials=30", "n_trials=10"), {"__name__": "example"})
    assert re.search(r"\[\[0\.\d+", capsys.readouterr().out)


def test_a_sampler_may_serve_studies_of_other_directions() -> None:
    sampler = sampler_of(0)
    searched(sampler, 9)
    study = study_of(sampler, ["minimize", "minimize"])
    study.optimize(lambda trial: (1 - objective(trial)[0], objective(trial)[1]), 16)
    assert max(1 - trial.values[0] for trial in study.trials[8:]) > 0.75


@pytest.mark.soak
def test_the_dearest_networks_are_searched_too_also_right_below_a_cap() -> None:
    """Where accuracy grows with cost, the dearest that is allowed belongs to the front."""
    space = {f"width{i}": IntDistribution(1, 8) for i in range(5)}

    def macs(codes) -> np.ndarray:
        return 5.0 + codes.sum(axis=1)

    def grows(trial: optuna.Trial) -> tuple[float, float]:
        one = {name: trial.suggest_int(name, 1, 8) for name in space}
        return 1 - 1 / sum(one.values()), float(sum(one.values()))

    for cap in (None, 24.0):
        over = None if cap is None else lambda codes, cap=cap: macs(codes) - cap
        study = study_of(KnownObjectiveSampler(space, KnownFunctions(macs, over=over), seed=0))
        study.optimize(grows, 40)
        dearest = max(trial.values[1] for trial in study.trials)
        assert dearest == cap if cap else dearest >= 34


@pytest.mark.parametrize("cap_ms", [4.0, 9.5])
def test_the_last_of_the_first_trials_lies_right_below_a_cap_that_random_networks_seldom_reach(cap_ms: float) -> None:
    def asked(seed: int, **options) -> list[float]:
        return [trial.values[1] for trial in searched(sampler_of(seed, **options), 8).trials]

    def over(codes) -> np.ndarray:
        return cost_of(codes) - cap_ms

    free = [trial.values[1] for trial in trials_of(0)[:8]]
    capped, again, other = asked(0, over=over), asked(0, over=over), asked(1, over=over)
    assert max(capped) == capped[7]
    assert 0.8 * cap_ms <= capped[7] <= cap_ms
    assert capped == again
    assert 0.8 * cap_ms <= other[7] <= cap_ms
    unlimited = asked(0, over=lambda codes: cost_of(codes) - 300.0)  # above all that there is
    assert free[:7] == unlimited[:7]  # the other places are where they were
    assert unlimited[7] > 0.8 * 10.4  # the dearest of all


@pytest.mark.soak
def test_a_long_study_keeps_its_front() -> None:
    rng, study = np.random.default_rng(0), study_of(sampler_of())
    for _ in range(MOST_FITTED + 200):
        one = random_setting(rng)
        study.add_trial(optuna.create_trial(params=one, distributions=SPACE, values=[accuracy(one), cost_ms(one)]))
    model = Surrogate(*prepare(study))
    known = {(value, round(cost, 9)) for value, cost in zip(model.values, np.exp(model.costs[:, 0]), strict=True)}
    assert {(trial.values[0], round(trial.values[1], 9)) for trial in study.best_trials} <= known
