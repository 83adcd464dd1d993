"""Target: a deployment as data: runtime, precision, threads, batch. No code, no measured number."""

from __future__ import annotations

from dataclasses import dataclass

from hwnas.cli.options import Config, option, read_options

PRECISIONS = ("fp32", "bf16", "fp16", "int8")


@dataclass(frozen=True, slots=True)
class Target:
    """A deployment protocol. `threads == 0` means every core the process may use; `vendor` is the CPU make it names.

    Tables belong to hosts, not to targets: xeon_int8 and epyc_int8 share the table of the host they run on.
    """

    name: str = option()
    runtime: str = option(help="a name of hwnas.runtimes")
    precision: str = option(choices=PRECISIONS)
    threads: int = option(1, low=0, high=4096, help="0: every core that the process may use")
    batch: int = option(1, low=1, high=4096, help="images a call")
    vendor: str = option("", help="the CPU make it names")
    device: str = option("cpu")
    price_per_hour: float | None = option(None, low=0, as_given=True, help="of the machine, in any currency")

    @classmethod
    def from_config(cls, config: Config) -> Target:
        """Read and check a `conf/target/*.yaml`; ConfigError names key, rule and value."""
        return read_options(cls, config, "target")
