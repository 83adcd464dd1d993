"""The race of networks with new heads, such as detectors. None is judged untrained; all start from the first one.

A cut of a detector needs hundreds of steps, and small objects are lost with the pixels. So fewer networks share the
seconds. Of networks that are about as fast, the one on the largest images is trained. The reasons are in
docs/decisions/detection.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hwnas.search.course import Course
from hwnas.search.race import FINISH, NEARLY, Race, Train, is_cut_of
from hwnas.study.lines import Line


class NewHeadRace(Race):
    """A race of networks with new heads."""

    most_pieces = 2  # few, as all others start from the weights of the first network
    size_step = 7 / 8  # nothing is judged, so more sizes cost only their timing
    share_of_first = 0.25

    def _begin(self, line: Line, among: Sequence[Line]) -> Iterator[Train]:
        """Yield its leg from the weights of the slowest network that it is a cut of, once that one is trained."""
        sources = [other for other in self.lines if is_cut_of(line.architecture, other.architecture)
                   and other is not line and (other in self.finished or other in among)]
        source = max(sources, key=lambda line: (line.latency_ms, line.id), default=None)  # whatever number it has
        if source is None:
            yield from super()._begin(line, among)
        elif FINISH in source.rungs:
            yield Train(FINISH, line, source, f"cut from trial {source.number}")

    def _best_first(self) -> Sequence[Line]:
        """Return the judged lines, the largest images first."""
        return sorted(self._judged, key=lambda line: -line.px)

    def _is_better(self, line: Line, other: Line) -> bool:
        """Return whether a line has larger images and is nearly as slow."""
        return line.px > other.px and NEARLY * line.latency_ms >= other.latency_ms

    def _price(self, line: Line, among: Sequence[Line]) -> float:
        """Return the same price for every line."""
        return 1.0


def race_of(course: Course, lines: Sequence[Line], chosen: Sequence[int] | None = None) -> Race:
    """Return the race with its present lines, a NewHeadRace if its networks have new heads."""
    return (NewHeadRace if course.has_new_head else Race)(course, lines, chosen)
