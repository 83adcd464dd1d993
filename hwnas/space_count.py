"""How many different networks a space holds, exactly, without listing them."""

from __future__ import annotations

from collections import Counter

from hwnas.space_codes import Coding
from hwnas.space_def import StageDef


def count_networks(coding: Coding) -> int:
    """Dynamic programming over stages on (channels, widths that still could have given the same channels).

    A network that an earlier width multiplier gives as well is counted there only.
    """
    space = coding.space
    total = 0
    for width in range(len(space.widths)):
        states: Counter[tuple[int, int]] = Counter()
        for value in sorted({int(v) for v in coding.value_index[0][width]}):
            states[value, _earlier(coding, 0, width, value, (1 << width) - 1)] = 1
        for index, stage in enumerate(space.stages):
            states = _through_stage(coding, index, stage, width, states)
        total += sum(count for (_, earlier), count in states.items() if earlier == 0)
    return total * len(space.image_sizes) * len(space.stem_strides) * len(space.activations) * len(space.heads)


def _through_stage(coding: Coding, index: int, stage: StageDef, width: int, states: Counter[tuple[int, int]]
                   ) -> Counter[tuple[int, int]]:
    run = next((run for run in coding.runs if index in run), None)
    if run is not None:
        settings = _settings(stage, True) - 1
        if index != run[0]:
            return states
        factor = sum(settings**depth for depth in range(len(run) + 1))
        return Counter({state: count * factor for state, count in states.items()})
    found: Counter[tuple[int, int]] = Counter()
    reachable = sorted({int(v) for v in coding.value_index[index + 1][width]})
    for (before, earlier), count in states.items():
        for value in reachable:
            same = stage.stride == 1 and coding.values[index][before] == coding.values[index + 1][value]
            left = _earlier(coding, index + 1, width, value, earlier)
            found[value, left] += count * _settings(stage, same)
    return found


def _earlier(coding: Coding, unit: int, width: int, value: int, candidates: int) -> int:
    """Bit mask of the `candidates` (width codes below `width`) that can also give `value` in this unit."""
    return sum(1 << code for code in range(width)
               if candidates >> code & 1 and value in coding.value_index[unit][code])


def _settings(stage: StageDef, same: bool) -> int:
    """Different stages for one input and output width; `same`: its first block can add its input."""
    total = 0
    for op in stage.ops:
        if not op.takes_repeats:
            total += 1
            continue
        depths = sum(len(stage.skips) if same or repeats > 1 else 1 for repeats in stage.repeats)
        total += depths * (len(stage.kernels) if op.takes_kernel else 1) * (len(stage.ses) if op.takes_se else 1)
    return total
