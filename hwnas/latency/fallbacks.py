"""Which kinds of blocks a target runs as asked, and which in fallback: measured block by block, kept beside the
latency tables.

Three blocks of a kind in a row are compiled in each precision of the runtime; the middle one's nodes are looked at.

Format history
    1   first: key, host, runtime, space, blocks (kind, activation, precision, time, shares, what falls back).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from hwnas.errors import CandidateError, ConfigError, TableError, TargetError
from hwnas.latency.copies import noise
from hwnas.latency.deployment import key_of
from hwnas.latency.table import TableKey, table_path
from hwnas.latency.timing import image_shape, prepare_network
from hwnas.runtimes.executed import INSERTED, PRECISION, executed
from hwnas.runtimes.runtime import inspected
from hwnas.space.architecture import Architecture, BlockDef
from hwnas.space.blocks.block import BlockSpec
from hwnas.space.family import Family
from hwnas.space.restriction import Variant
from hwnas.system.cores import usable_cores
from hwnas.system.documents import Document
from hwnas.system.paths import home, table_dirs, temporary_folder, write_atomic
from hwnas.target import PRECISIONS, Host, Target, measuring_lock

if TYPE_CHECKING:
    from hwnas.cli.progress import Console
    from hwnas.latency.deployment import Deployment
    from hwnas.runtimes.executed import Executed, ExecutedNode
    from hwnas.runtimes.runtime import Runtime
    from hwnas.space.search_space import SearchSpace

MATERIAL = 0.05  # share of a block's time from which what falls back counts; a convolution that does always counts
COSTLY = 0.15  # share from which a search leaves the kind out: docs/decisions/fallbacks.md
REPEATS = 100  # inferences of each kind
_DRAWN = 200  # networks of the space whose blocks stand for its kinds
_MIDDLE = "blocks.0.1"
_SHAPE = {"host": {"name": str}, "key": str, "runtime": str, "space": str, "blocks": [dict]}
FALLBACKS_TABLE = Document("hwnas-block-check", 1, "a table of how blocks are executed",
                           "Check the space again: hwnas check target=… space=…", TableError,
                           two_fields=True, shape=_SHAPE)


@dataclass(frozen=True, slots=True)
class CheckedBlock:
    """One kind of block in one precision. `ms` is of one block, from the runtime's instrumented profile; shares are of
    that. `falls`: what falls back, in words; empty for nothing. `refused`: why it cannot be run at all.

    `told`: the runtime tells in what its nodes are executed; where not, nothing is known to fall back or not to.
    `fallback_share` counts the conversions around what falls back too, `inserted_share` all conversions.
    """

    kind: str
    se: bool
    activation: str
    block: str
    precision: str
    ms: float | None
    fallback_share: float
    inserted_share: float
    falls: str
    weighted_falls: bool = False
    refused: str = ""
    told: bool = True

    @property
    def in_fallback(self) -> bool:
        """Whether so much falls back that the kind is no longer what was asked for."""
        return bool(self.refused) or self.weighted_falls or self.fallback_share >= MATERIAL

    @property
    def costly(self) -> bool:
        """Whether a kind loses much to the fallback: it cannot be run, one of its convolutions falls back, or COSTLY of
        its time is lost."""
        return bool(self.refused) or self.weighted_falls or self.fallback_share >= COSTLY

    @property
    def cost(self) -> str:
        """What falls back, and what that takes, with its name."""
        return f"{self.name}: {self.refused or f'{self.falls}, {self.fallback_share:.0%} of its time'}"

    @property
    def name(self) -> str:
        """As people say it: `ir with squeeze-and-excite, hard_swish`."""
        return f"{self.kind}{' with squeeze-and-excite' * self.se}, {self.activation}"

    @property
    def variant(self) -> Variant:
        """What a search space can leave out."""
        return Variant.named(self.kind, self.se, self.activation)


def kinds_of(space: SearchSpace, seed: int = 0) -> list[BlockSpec]:
    """A block of the space for each kind, with and without squeeze-and-excite, and activation: of those that occur in
    networks drawn from it the one of median MACs, smallest maps first among equals."""
    rng = np.random.default_rng(seed)
    drawn = [space.decode(space.to_params(row)) for row in space.sample(rng, _DRAWN)]
    blocks: dict[tuple[int, bool, str], set[BlockSpec]] = {}
    for network in [*space.known.values(), *drawn]:
        for stage in network.staged_blocks()[1:-1]:
            for block in stage:
                if not block.rules.vanishes:
                    blocks.setdefault((block.rank, block.se > 0, block.activation), set()).add(block)
    return [sorted(occurring, key=lambda block: (block.macs, block.size, block.key))[len(occurring) // 2]
            for _, occurring in sorted(blocks.items())]


def network_of(block: BlockSpec, channels: int, classes: int) -> Architecture:
    """A network of three blocks of this kind, width, kernel and map, one behind the other."""
    three = BlockDef(block.kind, 3, block.kernel, 1, block.expansion, block.out_channels, block.se,
                     block.rules.adds_input)
    return Architecture.parse(f"stem{block.out_channels}s1 {three} head0 {block.activation}@{block.out_size}",
                              channels, classes)


def check_blocks(space: SearchSpace, target: Target, runtime: Runtime, repeats: int,
                 progress: Callable[[float, str], None], precisions: Sequence[str] | None = None
                 ) -> list[CheckedBlock]:
    """Every kind of the space in `precisions` (None: in every one that the runtime has on its host, the target's
    first)."""
    if isinstance(space.definition, Family):
        raise ConfigError(f"space {space.name} is cut by what its network runs, and has no kinds of blocks to check. "
                          "Check one of its networks: model=FILE.onnx.")
    kinds, rows = kinds_of(space), []
    precisions = precisions or _precisions(target, runtime)
    with temporary_folder() as folder, measuring_lock(usable_cores()):
        for index, block in enumerate(kinds):
            progress(index / len(kinds), block.key)
            network = network_of(block, space.channels, space.classes)
            for precision in precisions:
                each = replace(target, precision=precision)
                rows.append(_checked(block, network, each, runtime, repeats, Path(folder)))
    return rows


def _precisions(target: Target, runtime: Runtime) -> list[str]:
    able = [target.precision]
    for precision in PRECISIONS:
        try:
            runtime.check(replace(target, precision=precision))
        except TargetError:
            continue
        able.append(precision)
    return list(dict.fromkeys(able))


def _checked(block: BlockSpec, network: Architecture, target: Target, runtime: Runtime, repeats: int, folder: Path
             ) -> CheckedBlock:
    middle = network.staged_blocks()[1][1]
    said = (block.kind, block.se > 0, block.activation, middle.key, target.precision)
    try:
        path = prepare_network(network, target, folder)
        compiled = inspected(runtime, path, target)
        nodes = compiled.profile(noise(target.batch, image_shape(network)), repeats)  # another machine compiles it here
    except CandidateError as error:
        return CheckedBlock(*said, None, 0.0, 0.0, "", refused=str(error))
    return _told(said, executed(nodes, path, target))


def _told(said: tuple[str, bool, str, str, str], whole: Executed) -> CheckedBlock:
    nodes = [node for node in whole.nodes if node.block == _MIDDLE]
    ms = sum(node.ms for node in nodes)
    falling = [node for node in nodes if node.falls_back]
    roles = {node.role for node in falling}
    around = [node for node in nodes if INSERTED in node.findings and node.serves in roles]
    inserted = [node for node in nodes if INSERTED in node.findings]
    weighted = {each.name for each in whole.operators if each.weighted}
    return CheckedBlock(*said, ms, _share([*falling, *around], ms), _share(inserted, ms), _words(falling),
                        any({*node.made_of} & weighted for node in falling),
                        told=any(node.precision for node in whole.nodes))


def _share(nodes: Sequence[ExecutedNode], ms: float) -> float:
    return sum(node.ms for node in nodes) / ms if ms else 0.0


def _words(falling: Sequence[ExecutedNode]) -> str:
    return ", ".join(dict.fromkeys(f"{node.role} in {node.precision}" if PRECISION in node.findings
                                   else f"{node.role}: {node.findings[0]}" for node in falling))


def blocks_path(folder: Path, host_name: str, key: TableKey, space_name: str) -> Path:
    """Where the table of a space's blocks lies below a `latency_tables` folder."""
    beside = table_path(folder, host_name, key)
    return beside.parent / "blocks" / f"{beside.stem}-{space_name}.json"


def save_blocks(rows: Sequence[CheckedBlock], key: TableKey, host: Host, runtime: str, space_name: str) -> Path:
    """Keep them in the user's folder, beside the latency tables of this host."""
    path = blocks_path(home() / "latency_tables", host.name, key, space_name)
    data = {**FALLBACKS_TABLE.header, "host": host.to_dict(), "runtime": runtime, "key": str(key), "space": space_name,
            "blocks": [asdict(row) for row in rows]}
    write_atomic(path, json.dumps(data, indent=1, allow_nan=False))
    return path


def measure_blocks(deployment: Deployment, space: SearchSpace, console: Console, repeats: int = REPEATS,
                   precisions: Sequence[str] | None = None) -> tuple[list[CheckedBlock], Path]:
    """`check_blocks` on the deployment's device; kept in the file that is returned. TargetError for a target that the
    device cannot run, or where no kind could be looked at."""
    target, runtime = deployment.target, deployment.device.runtime(deployment.target.runtime)
    runtime.check(target)
    with console.step("check") as report:
        rows = check_blocks(space, target, runtime, repeats, report, precisions)
    if all(row.refused for row in rows):
        raise TargetError(f"target {target.name}: no kind of block of space {space.name} could be looked at: "
                          f"{rows[0].refused}")
    return rows, save_blocks(rows, key_of(deployment, space), deployment.device.host, runtime.version(), space.name)


def find_blocks(host_name: str, key: TableKey, space_name: str, runtime: str | None) -> list[CheckedBlock] | None:
    """What was measured, the user's table before a shipped one; None where there is none of this runtime version (None:
    of any). TableError for a file that is broken."""
    for path in (blocks_path(folder, host_name, key, space_name) for folder in table_dirs()):
        data = FALLBACKS_TABLE.find(path)
        if data is not None and runtime in (None, data["runtime"]):
            with FALLBACKS_TABLE.reading(path):
                return [CheckedBlock(**row) for row in data["blocks"]]
    return None


def warning(rows: Sequence[CheckedBlock], target: Target) -> str:
    """One line that names the kinds which the target runs in fallback; empty where it runs none so."""
    falling = [row for row in rows if row.precision == target.precision and row.in_fallback]
    every = sum(row.precision == target.precision for row in rows)
    words = "; ".join(row.cost for row in falling)
    return f"{target.name} runs {len(falling)} of {every} kinds of blocks in fallback: {words}" if falling else ""


def left_out(rows: Sequence[CheckedBlock], target: Target) -> dict[Variant, str]:
    """The variants of blocks that a search leaves out, and what each of them costs, in words."""
    return {row.variant: row.cost for row in rows if row.precision == target.precision and row.costly}
