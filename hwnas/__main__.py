"""The command line `hwnas COMMAND …`, the same as `python -m hwnas.COMMAND …`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from hwnas import __version__
from hwnas.cli.command import COMMANDS
from hwnas.cli.progress import show
from hwnas.errors import UnknownName


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that is named first; return its exit code, or 2 if there is no such command."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help", "help"):
        show("\n".join(["usage: hwnas COMMAND [key=value ...]", "", "commands (more about one: hwnas COMMAND --help):",
                        *(f"  {command:10} {what}" for command, what in COMMANDS.items())]))
        return 0
    if name == "--version":
        show(f"hwnas {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"UnknownName: {UnknownName('command', name, COMMANDS)}", file=sys.stderr)
        return 2
    module = import_module(f"hwnas.{name}")
    if hasattr(module, "__path__"):  # a package: its command is in __main__
        module = import_module(f"hwnas.{name}.__main__")
    code: int = module.command(rest)
    return code


if __name__ == "__main__":
    sys.exit(main())
