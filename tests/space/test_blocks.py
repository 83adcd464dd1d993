"""BlockSpec: keys, and counts that follow from its convolutions."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hwnas
from hwnas.space.architecture import BlockDef
from hwnas.space.blocks.block import KINDS, BlockSpec, round_to_divisor

torch = pytest.importorskip("torch")


@pytest.mark.parametrize(("channels", "expected"), [
    (1, 8), (8, 8), (12, 16), (16, 16), (18, 24), (20, 24), (30, 32), (72, 72), (91, 88), (99, 96)])
def test_rounding_never_loses_more_than_a_tenth(channels: int, expected: int) -> None:
    assert round_to_divisor(channels) == expected
    assert expected >= 0.9 * channels


@pytest.mark.parametrize(("block", "key"), [
    (BlockSpec("ir", 24, 40, 56, 5, 2, 3.0, 0.25), "ir/24x56x56/40/s2/k5/e3/se0.25/relu"),
    (BlockSpec("cn", 16, 16, 32, 3, skip=True), "cn/16x32x32/16/s1/k3/skip/relu"),
    (BlockSpec("ds", 32, 16, 112, 3, activation="relu6"), "ds/32x112x112/16/s1/k3/relu6"),
    (BlockSpec("head", 320, 1280, 7, 1, classes=1000), "head/320x7x7/1280/s1/k1/classes1000/relu"),
])
def test_key_names_everything_that_is_timed(block: BlockSpec, key: str) -> None:
    assert block.key == key


def test_counts_of_macs_weights_and_moved_elements_of_all_known_kinds():
    block = BlockSpec("ir", 24, 40, 56, 5, 2, 3.0, 0.25)
    assert (block.mid_channels, block.se_channels, block.out_size) == (72, 6, 28)
    assert block.macs == 24 * 72 * 56**2 + 72 * 25 * 28**2 + 2 * 72 * 6 + 72 * 40 * 28**2
    batch_norms, se_biases = 2 * (72 + 72 + 40), 72 + 6
    assert block.params == 24 * 72 + 72 * 25 + 2 * 72 * 6 + 72 * 40 + batch_norms + se_biases
    block = BlockSpec("head", 64, 64, 4, 0, classes=10)
    assert (block.macs, block.params, block.out_size) == (640, 650, 1)
    plain, skipping = BlockSpec("cn", 16, 16, 8), BlockSpec("cn", 16, 16, 8, skip=True)
    assert plain.activation_elements == 2 * 16 * 64
    assert skipping.activation_elements == 4 * 16 * 64
    with pytest.raises(ValueError, match="unknown block kind 'xy'"):
        BlockSpec("xy", 8, 8, 8).convolutions()


@pytest.mark.parametrize("name", KINDS)
def test_a_kind_says_all_that_is_asked_of_it(name: str) -> None:
    kind = KINDS[name]
    assert kind.name == name
    block = BlockSpec(name, 16, 24, 8, 3, 1, 2.0 if kind.expands else 1.0, classes=10 if kind.ends else 0,
                      operators=(("dense", 16, 24, 3, 8, 8),) if name == "traced" else ())
    assert block.key.startswith(f"{name}/16x8x8/24/s1/k3/")
    assert block.params > block.weights > 0
    assert block.macs > 0
    assert {role for role, *_ in block.convolutions()} <= {"dense", "pointwise", "depthwise", "se", "linear"}
    if kind.words:
        text = str(BlockDef.parse(f"{name}_k3_c24"))
        assert BlockDef.parse(text) == BlockDef.parse(f"{name}_k3_c24")
        assert isinstance(block.rules.build(block), torch.nn.Module)


def test_words_tell_kinds_apart() -> None:
    words = [word for kind in KINDS.values() for word in kind.words]
    assert len(set(words)) == len(words)


def test_no_module_but_the_kinds_own_knows_one_by_name() -> None:
    package = Path(hwnas.__file__).parent
    names = {name for name, kind in KINDS.items() if kind.words} - {"id"}  # also a column's name
    texts = {path: text for path in package.rglob("*.py") for text in [path.read_text()]
             if any(f"{quote}{name}{quote}" in text for name in names for quote in "'\"")}
    knowing = {str(path.relative_to(package)) for path, text in texts.items() for node in ast.walk(ast.parse(text))
               if isinstance(node, ast.Constant) and node.value in names}
    assert knowing == {"space/blocks/mobile.py", "space/blocks/convnext.py"}
