"""What is left of a traced network when parts of it are cut, by its operators alone."""

from __future__ import annotations

from dataclasses import replace

from hwnas.networks.traced import BlockRun, ChannelGroup, TracedNetwork, TracedOperator
from hwnas.space.architecture import Cut

STEM, A, B, HEAD = ("stem", 16), ("a.0", 32), ("b.0", 32), ("head", 64)
# A stem, a stage, a second one of two blocks of which the last may go, with squeeze-and-excite, and a head.
TRACED = TracedNetwork(
    "anything", 3, 10, "swish", {"depth": (2, 1), "b": (1, 0), "width.stream2": (1.0, 0.5), "width.outer4": (1.0, 0.5)},
    (BlockRun("b", ("b.1",)),),
    (ChannelGroup("stem", 16, "stream2"), ChannelGroup("b.0", 32, "stream4"), ChannelGroup("head", 64, "outer4")),
    (TracedOperator(0, "", "stem", (("", 3),), (STEM,), 3, 1, 2),
     TracedOperator(1, "a.0", "dense", (STEM,), (STEM,), 3, 2, 2),
     TracedOperator(2, "b.0", "dense", (STEM,), (B,), 3, 2, 4),
     TracedOperator(2, "b.1", "depthwise", (B,), (B,), 5, 4, 4),
     TracedOperator(2, "b.1", "se", (B,), (("", 8),), 1, 0, 0),
     TracedOperator(2, "b.1", "se", (("", 8),), (B,), 1, 0, 0),
     TracedOperator(2, "b.1", "pointwise", (B,), (B,), 1, 4, 4),
     TracedOperator(3, "", "pointwise", (B,), (HEAD,), 1, 4, 4),
     TracedOperator(3, "", "linear", (HEAD, ("", 8)), (("", 10),), 1, 0, 0)), ("a", "b"), {}, {}, 0)


def convolutions_of(cut: Cut) -> list[tuple[str, int, int, int, int, int]]:
    return [operator for block in cut.blocks() for operator in block.convolutions()]


def test_a_cut_keeps_the_channels_and_blocks_that_are_chosen() -> None:
    whole, short = TRACED.make_cut({}, 32), TRACED.make_cut({"b": 0, "width.outer4": 0.5}, 32)
    assert (len(whole.blocks()), len(short.blocks())) == (6, 5)
    assert convolutions_of(short)[-2:] == [("pointwise", 32, 32, 1, 8, 8), ("linear", 40, 10, 1, 1, 1)]
    narrow = TRACED.make_cut({"width.stream2": 0.5}, 16)
    assert convolutions_of(narrow)[:3] == [
        ("stem", 3, 8, 3, 16, 8), ("dense", 8, 8, 3, 8, 8), ("dense", 8, 32, 3, 8, 4)]
    assert narrow.macs < short.macs < whole.macs
    assert short.image_size // short.total_stride == 8
    assert {block.activation for block in whole.blocks()} == {"swish"}


def test_layers_behind_the_stages_read_what_the_last_one_that_is_left_writes() -> None:
    short = TRACED.make_cut({"depth": 1}, 32)
    assert convolutions_of(short)[2:] == [("pointwise", 16, 64, 1, 16, 16), ("linear", 72, 10, 1, 1, 1)]
    assert TRACED.make_cut({"depth": 1, "b": 0}, 32) == short, "of a stage that is gone nothing counts"
    assert TRACED.make_cut({"b": 0}, 32).id != TRACED.make_cut({}, 32).id


def test_without_a_path_around_a_block_its_readers_read_what_the_one_before_it_writes() -> None:
    blocks = (TracedOperator(1, "b.0", "dense", (STEM,), (A,), 3, 2, 2),
              TracedOperator(1, "b.1", "dense", (A,), (B,), 3, 2, 2),
              TracedOperator(2, "", "linear", (B,), (("", 10),), 1, 0, 0))
    groups = tuple(ChannelGroup(name, 32, name) for name in ("a.0", "b.0"))
    traced = replace(TRACED, groups=groups, operators=(TRACED.operators[0], *blocks), stages=("b",),
                     choices={"b": (1, 0), "width.a.0": (1.0, 0.5), "width.b.0": (1.0, 0.25)})
    cut = traced.make_cut({"b": 0, "width.a.0": 0.5}, 32)
    assert convolutions_of(cut)[-1] == ("linear", 16, 10, 1, 1, 1)
    assert dict(cut.chosen)["width.b.0"] == 0.25, "a share that changes nothing is the least"
