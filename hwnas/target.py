"""Target: a deployment as data; no code, no measured number. Host: the machine that a number was measured on."""

from __future__ import annotations

import os
import platform
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hwnas.cli.options import Config, option, read_options
from hwnas.errors import TargetError
from hwnas.system.cores import text_of, usable_cores, whole_number
from hwnas.system.documents import check_shape
from hwnas.system.paths import hold, holder

PRECISIONS = ("fp32", "bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment protocol. `threads == 0`: every core that the process may use; `vendor`: the CPU make in its name.

    Tables belong to hosts, not to targets: xeon_int8 and epyc_int8 share the table of the host they run on.
    """

    name: str = option()
    runtime: str = option(help="a name of hwnas.runtimes")
    precision: str = option(choices=PRECISIONS)
    threads: int = option(1, low=0, high=4096, help="0: every core that the process may use")
    batch: int = option(1, low=1, high=4096, help="images a call")
    vendor: str = option("", help="the CPU make it names")
    device: str = option("cpu")
    price_per_hour: float | None = option(None, low=0, help="of the machine, in any currency")

    @classmethod
    def from_config(cls, config: Config) -> Target:
        """Return the checked target of a `conf/target/*.yaml`. Raises ConfigError with key, rule and value."""
        return read_options(cls, config, "target")


@dataclass(frozen=True, slots=True)
class TargetSet:
    """The targets of one machine among which a search chooses for each network, by their names in `conf/target`.

    `threads`: if it is given, each target is used with each of these numbers of threads.
    """

    name: str = option()
    deployments: tuple[str, ...] = option(what="a list of names of targets")
    threads: tuple[int, ...] | None = option(None, low=0, high=4096, what="null or a list of numbers of threads")
    price_per_hour: float | None = option(None, low=0, help="of the machine, in any currency")


def most_threads(targets: Iterable[Target]) -> int:
    """Return the threads of the target that has most; 0, which means all cores, if one of them has 0."""
    threads = [target.threads for target in targets]
    return max(threads) if all(threads) else 0


def describe_targets(name: str, targets: Sequence[Target]) -> dict[str, Any]:
    """Return the plain values of the one target of a run, or of all targets of the set `name`."""
    return asdict(targets[0]) if len(targets) == 1 else {"name": name, "targets": [asdict(each) for each in targets]}


def read_targets(section: Mapping[str, Any]) -> tuple[Target, ...]:
    """Return the targets that `describe_targets` described. Raises ConfigError with key, rule and value."""
    sections = section.get("targets")
    if not isinstance(sections, list) or not sections:
        return (Target.from_config(section),)
    return tuple(map(Target.from_config, sections))


def target_named(section: Mapping[str, Any], name: str) -> Target:
    """Return the target `name` of the ones that `describe_targets` described; the first if there is no such name."""
    targets = read_targets(section)
    return next((target for target in targets if target.name == name), targets[0])


ISA_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16",
             "asimd", "asimddp", "i8mm", "bf16", "sve")
CPUINFO = Path("/proc/cpuinfo")
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,80}")
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
LOCK_FOLDERS = (Path("/dev/shm"), Path("/run/lock"))
_VENDORS = {"AuthenticAMD": "amd", "GenuineIntel": "intel", "HygonGenuine": "hygon"}


_FINGERPRINT = {"name": str, "cpu": str, "vendor": str, "family": int, "model": int, "stepping": int, "flags": [str],
                "cores": int, "memory_gib": float, "kernel": str, "governor": str, "parts": str, "given": str,
                "huge_pages": str, "numa_nodes": int}
_STATE = ("kernel", "governor", "huge_pages", "numa_nodes")  # what changes the speed of one machine
_OF_GPU = ("gpu", "gpu_driver", "gpu_cuda", "gpu_memory_gib")  # only if a target runs on one


@dataclass(frozen=True, slots=True)
class Host:
    """A machine as its latencies depend on it: CPU make, model and stepping, ISA flags, usable cores, memory, kernel.

    `parts`: on ARM, implementer, part and revision of each kind of core. `given`: the user's name for it, $HWNAS_HOST.
    `huge_pages`: the kernel's rule for transparent huge pages: always, madvise or never. `gpu`: the GPU that a target
    runs on, with its memory, its driver's version and the newest CUDA of this driver. It is empty for targets on the
    CPU.
    """

    cpu: str
    vendor: str
    family: int
    model: int
    stepping: int
    flags: tuple[str, ...]
    cores: int
    memory_gib: float
    kernel: str
    governor: str
    parts: str = ""
    given: str = ""
    huge_pages: str = ""
    numa_nodes: int = 0
    gpu: str = ""
    gpu_driver: str = ""
    gpu_cuda: str = ""
    gpu_memory_gib: float = 0.0

    @property
    def name(self) -> str:
        """The folder's name in `latency_tables/`: the CPU's identity and the usable cores, e.g. `amd-epyc-f26m2s1-2c`,
        then the GPU.

        Raises TargetError for a CPU that looks like others: its latencies would be taken for theirs.
        """
        if self.given:
            return self.given
        if not (self.family or self.model or self.parts):
            raise TargetError(f"this machine's CPU ({self.cpu or self.vendor}) names neither family nor part, so that "
                              "its latencies could be taken for another's. Name the machine: HWNAS_HOST=my-board-4c")
        # The CPU's own name, without trade marks, clock and number of cores.
        text = re.sub(r"\(r\)|\(tm\)|\bcpu\b|@.*|\d+-core|processor", " ", self.cpu.lower())
        text = _plain(text) or platform.machine().lower()
        prefix = "" if text.startswith(self.vendor) else f"{self.vendor}-"
        kind = self.parts or f"f{self.family}m{self.model}s{self.stepping}"
        gpu = f"-{_plain(self.gpu.lower())}" if self.gpu else ""
        return f"{prefix}{text}-{kind}-{self.cores}c{gpu}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for tables and `environment.json`."""
        values = {"name": self.name, **asdict(self), "flags": list(self.flags)}
        return {key: value for key, value in values.items() if self.gpu or key not in _OF_GPU}

    def changes_since(self, before: Mapping[str, Any]) -> str:
        """Return in words the settings that differ from `before`, a table's entry of this host; empty if none does."""
        return ", ".join(f"{key.replace('_', ' ')} {before[key] or 'unknown'} then, {value or 'unknown'} now"
                         for key in _STATE if key in before and before[key] != (value := getattr(self, key)))

    @classmethod
    def from_dict(cls, data: Any, where: str) -> Host:
        """Return the host of which `to_dict` made `data`, on another machine. Raises ValueError if it is no
        fingerprint, TargetError if its name is not plain."""
        check_shape(data, _FINGERPRINT)
        host = cls(**{key: data[key] for key in _FINGERPRINT if key != "name"} | {"flags": tuple(data["flags"])})
        if not PLAIN_NAME.fullmatch(host.name):
            raise TargetError(f"{where} calls itself {host.name[:100]!a}, which is no plain name. Name it: "
                              "device_name=my-board-4c")
        return host

    @classmethod
    def detect(cls) -> Host:
        """Return this machine's fingerprint from /proc and /sys (fields that cannot be read are empty or 0).

        Raises TargetError if $HWNAS_HOST is no plain folder name.
        """
        # A paragraph of /proc/cpuinfo describes a core, in lines "key : value".
        cores = [{key.strip(): value.strip() for key, _, value in (line.partition(":") for line in part.splitlines())}
                 for part in text_of(CPUINFO).split("\n\n")]  # one empty entry if there is no such file
        info, user_name = cores[0], os.environ.get("HWNAS_HOST", "")
        if user_name and not PLAIN_NAME.fullmatch(user_name):
            raise TargetError(f"HWNAS_HOST={user_name!r} is no plain name. Use letters, digits, dots and dashes.")
        flags = set((info.get("flags") or info.get("Features") or "").split())
        vendor = info.get("vendor_id", platform.machine())
        huge_pages = re.search(r"\[(\w+)\]", text_of(_HUGE_PAGES))  # always [madvise] never
        return cls(
            cpu=info.get("model name", platform.processor() or platform.machine()),
            vendor=_VENDORS.get(vendor, vendor.lower()),
            family=whole_number(info.get("cpu family", "")), model=whole_number(info.get("model", "")),
            stepping=whole_number(info.get("stepping", "")),
            flags=tuple(flag for flag in ISA_FLAGS if flag in flags), cores=len(usable_cores()),
            memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            kernel=platform.release(), governor=text_of(_GOVERNOR), parts=_arm_parts(cores), given=user_name,
            huge_pages=huge_pages[1] if huge_pages else "",
            numa_nodes=len([*Path("/sys/devices/system/node").glob("node[0-9]*")]))


def _plain(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text).strip("-")


def _arm_parts(cores: list[dict[str, str]]) -> str:
    """Return implementer, part, variant and revision of each kind of core, e.g. `i41pd08r0p3` of a Raspberry Pi 4."""
    keys = ("CPU implementer", "CPU part", "CPU variant", "CPU revision")
    kinds = {tuple(core.get(key, "0").removeprefix("0x") for key in keys) for core in cores if "CPU part" in core}
    return "-".join(sorted("i{}p{}r{}p{}".format(*kind) for kind in kinds))


@contextmanager
def measuring_lock(cores: Iterable[int], progress: Callable[[float, str], None] | None = None) -> Iterator[None]:
    """Allow one measurement at a time on each of `cores`, because two would disturb each other, whoever starts them.

    `progress` receives who measures, and since when. The locks are taken in order, so that processes cannot wait for
    each other in a ring.
    """
    def queued(path: Path) -> None:
        if progress is not None:
            progress(0.0, f"waiting for another measurement on this host: {holder(path)}")

    with ExitStack() as locks:
        for core in sorted(cores):
            path = _lock_folder() / f"hwnas-measuring-core{core}.lock"
            locks.enter_context(hold(path, partial(queued, path)))
        yield


def _lock_folder() -> Path:
    """Return a folder that all users of this machine share, whatever their TMPDIR is."""
    return next((folder for folder in LOCK_FOLDERS if os.access(folder, os.W_OK | os.X_OK)),
                Path(tempfile.gettempdir()))
