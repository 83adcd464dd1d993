"""What a choice of a traced network's parts leaves out, and that it is said in one way."""

from __future__ import annotations

from hwnas.networks.traced import BlockRun, ChannelGroup, TracedNetwork

# A stem, a stage, a second one of two blocks of which the last may go, and a head.
TRACED = TracedNetwork(
    "anything", 3, 10, "swish", {"depth": (2, 1), "b": (1, 0), "width.stream2": (1.0, 0.5), "width.outer4": (1.0, 0.5),
                                 "width.inner4": (1.0, 0.25)},
    (BlockRun("b", ("b.1",)),), ("b.0", "b.1"),
    (ChannelGroup("stem", 16, "stream2"), ChannelGroup("b.1.0", 32, "inner4"), ChannelGroup("head", 64, "outer4")),
    (), ("a", "b"), (2, 4), ("width.outer4",),
    {"stem": ("stem", "a.0"), "b.1.0": ("b.1.0",), "head": ("head",)}, {}, 0)
WHOLE = {"depth": 2, "b": 1, "width.stream2": 1.0, "width.outer4": 1.0, "width.inner4": 1.0}


def test_all_that_is_not_said_stays_whole() -> None:
    assert TRACED.choose({}) == WHOLE
    assert TRACED.choose({"width.outer4": 0.5}) == WHOLE | {"width.outer4": 0.5}
    assert TRACED.channels_of_groups(TRACED.choose({"width.outer4": 0.5})) == {"stem": 16, "b.1.0": 32, "head": 32}


def test_what_changes_nothing_is_the_least() -> None:
    short = TRACED.choose({"depth": 1})
    assert short == WHOLE | {"depth": 1, "b": 0, "width.inner4": 0.25}, "of a stage that is gone nothing counts"
    assert TRACED.choose({"depth": 1, "b": 0}) == short
    assert TRACED.choose({"b": 0}) == WHOLE | {"b": 0, "width.inner4": 0.25}
    assert (TRACED.stages_left_out(short), TRACED.blocks_left_out(short)) == (("b",), ["b.1"])
