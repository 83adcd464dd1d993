"""The predictors beside each other: each takes architectures and gives ms, or NaN where it has no answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.latency.peers.isolated import Isolated
from experiments.latency.peers.parts import CALL, KERNELS, Block, Kernel, network_kernels
from hwnas.errors import MeasurementInvalid
from hwnas.latency.model import LatencyModel
from hwnas.latency.table import LatencyTable, TimedNetwork
from hwnas.space.architecture import Architecture

FOLDS, TREES = 10, 200
_LEAST_MS = 1e-4  # of a part, however much of its time the call takes
Predict = Callable[[Sequence[Architecture]], np.ndarray]


@dataclass(frozen=True)
class Method:
    """A predictor, what it needs (measurements, and seconds that measuring them took), and how it works."""

    name: str
    predict: Predict
    n_measured: int
    seconds: float
    remark: str


def isolated_sums(known: Isolated, blocks: Sequence[Block]) -> list[Method]:
    """Blocks timed alone, added up; and the same with the cost of a call taken off all of them but one."""
    n, seconds = _cost(known, [block.key for block in blocks])

    def predict(architectures: Sequence[Architecture], call_ms: float = 0.0) -> np.ndarray:
        return np.array([sum(np.maximum(known.ms.get(Block(spec).key, np.nan) - call_ms, _LEAST_MS)
                             for spec in one.blocks()) + call_ms for one in architectures])

    call_ms = known.ms.get(CALL.key, 0.0)
    return [Method("isolated blocks", predict, n, seconds, "each block timed alone, summed"),
            Method("isolated blocks less calls", lambda some: predict(some, call_ms), n + 1, seconds,
                   f"the same less {call_ms * 1e3:.1f} us a block beyond the first (the cost of a call)")]


def flops_regression(networks: Sequence[TimedNetwork], table: LatencyTable, seconds: float) -> Method:
    """Latency on MACs, log-log or linear, whichever cross-validates better on the calibration networks."""
    macs = np.array([one.architecture.macs for one in networks], float)
    ms = np.array([one.measurement.at_ms(table.quiet_ms) for one in networks])
    forms = {"log-log": _log_line, "linear": _line}
    errors = {name: _cross_validated(form, macs, ms) for name, form in forms.items()}
    chosen = min(errors, key=lambda name: errors[name])
    fitted = forms[chosen](macs, ms)
    remark = ", ".join(f"{name} {error:.1%}" for name, error in errors.items())
    return Method("FLOPs regression", lambda some: fitted(np.array([one.macs for one in some], float)), len(networks),
                  seconds, f"{chosen} line on MACs (cross-validated: {remark})")


def forests(known: Isolated, kernels: Sequence[Kernel], networks: Sequence[TimedNetwork], table: LatencyTable,
            seconds: float) -> list[Method]:
    """nn-Meter's way: a random forest for each kind of kernel, a network the sum of its kernels.

    Also less the cost of calls, and put on a line fitted on the calibration networks (which need measuring as well).
    """
    n, own_seconds = _cost(known, [one.key for one in kernels])
    plain, less = (_Forests(known, kernels, call) for call in (0.0, known.ms.get(CALL.key, 0.0)))
    ms = np.array([one.measurement.at_ms(table.quiet_ms) for one in networks])
    line = _log_line(less([one.architecture for one in networks]), ms)
    return [Method("kernel forests", plain, n, own_seconds, "random forest per kind of fused kernel, summed"),
            Method("kernel forests less calls", less, n, own_seconds, "the same, one call's cost a network"),
            Method("kernel forests, scaled", lambda some: line(less(some)), n + len(networks), own_seconds + seconds,
                   "the same on a log-log line fitted on the table's whole networks: both sets of measurements")]


def ours(model: LatencyModel, n: int, seconds: float) -> Method:
    """The model of this project."""
    return Method("ours", lambda some: model.predict_architectures(some).mean, n, seconds,
                  "costs and residual fitted on whole networks")


class _Forests:
    """A fitted forest for each kind; `call_ms` is taken off every kernel, and added once a network."""

    def __init__(self, known: Isolated, kernels: Sequence[Kernel], call_ms: float) -> None:
        self.call_ms = call_ms
        self.fitted = {kind: _forest(known, [one for one in kernels if one.kind == kind], call_ms)
                       for kind in KERNELS}
        self._entries: dict[Kernel, float] = {}

    def __call__(self, architectures: Sequence[Architecture]) -> np.ndarray:
        """Latency [n] in ms."""
        listed = [network_kernels(one) for one in architectures]
        for kind in KERNELS:
            new = list({one: None for some in listed for one in some if one.kind == kind and one not in self._entries})
            if new:
                self._entries.update(zip(new, self._predicted(kind, new), strict=True))
        return np.array([sum(self._entries[one] for one in some) for some in listed]) + self.call_ms

    def _predicted(self, kind: str, kernels: Sequence[Kernel]) -> np.ndarray:
        predict = self.fitted[kind]
        if predict is None:
            raise MeasurementInvalid(f"no kernel of kind {kind} was timed alone. Time more: --isolated NUMBER")
        return predict(np.array([one.features for one in kernels]))


def _forest(known: Isolated, kernels: Sequence[Kernel], call_ms: float) -> Callable[[np.ndarray], np.ndarray] | None:
    from sklearn.ensemble import RandomForestRegressor

    timed = [(one, ms) for one in kernels if (ms := _alone_ms(known.ms, one, call_ms)) is not None]
    if not timed:
        return None
    rows, ms = np.array([one.features for one, _ in timed]), np.array([ms for _, ms in timed])
    # Differences (additions, squeeze-and-excite) may be about 0: they have no logarithm worth fitting.
    whole = timed[0][0].before is None
    forest = RandomForestRegressor(TREES, random_state=0, n_jobs=1)
    forest.fit(rows, np.log(ms) if whole else ms)
    return lambda wanted: np.asarray(np.exp(forest.predict(wanted)) if whole else forest.predict(wanted))


def _alone_ms(ms: Mapping[str, float], one: Kernel, call_ms: float) -> float | None:
    """What a kernel takes by itself, as timed; None where it, or what it is timed behind, was not."""
    found = ms.get(one.key)
    if one.before is not None:
        before = ms.get(one.before.key)
        return None if found is None or before is None else found - before
    return None if found is None else max(found - call_ms, _LEAST_MS)


def _cost(known: Isolated, names: Sequence[str]) -> tuple[int, float]:
    timed = [name for name in dict.fromkeys(names) if name in known.ms]
    return len(timed), sum(known.seconds[name] for name in timed)


def _cross_validated(form: Callable[[np.ndarray, np.ndarray], Callable[[np.ndarray], np.ndarray]], x: np.ndarray,
                     ms: np.ndarray) -> float:
    """Mean relative error on networks left out."""
    order = np.random.default_rng(0).permutation(len(x))
    errors = np.zeros(len(x))
    for fold in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, fold)
        errors[fold] = np.abs(form(x[rest], ms[rest])(x[fold]) / ms[fold] - 1)
    return float(errors.mean())


def _log_line(x: np.ndarray, ms: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """A sum of differences may come out below 0, which has no logarithm: it counts as the least time."""
    slope, start = np.polyfit(np.log(np.maximum(x, _LEAST_MS)), np.log(ms), 1)
    return lambda wanted: np.asarray(np.exp(start + slope * np.log(np.maximum(wanted, _LEAST_MS))))


def _line(x: np.ndarray, ms: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Least relative squares."""
    rows = np.column_stack([np.ones(len(x)), x])
    (start, slope), *_ = np.linalg.lstsq(rows / ms[:, None], np.ones(len(x)), rcond=None)
    return lambda wanted: np.asarray(np.maximum(start + slope * wanted, 1e-6))
