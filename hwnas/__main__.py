"""`hwnas COMMAND …`, the same as `python -m hwnas.COMMAND …`; and completion for bash."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

from hwnas import __version__
from hwnas.cli.command import COMMANDS, GROUPS, REMOVED_COMMANDS, names_in, option_keys
from hwnas.cli.progress import show
from hwnas.errors import UnknownName
from hwnas.system.paths import search_space_dirs

BASH = r"""_hwnas() {
    local word="${COMP_LINE:0:$COMP_POINT}" IFS=$'\n'
    word="${word##* }"
    COMPREPLY=($(compgen -W "$(COMP_LINE="${COMP_LINE:0:$COMP_POINT}" hwnas -sc query=bash)" -- "$word"))
    if [[ "$word" == *=* && "$COMP_WORDBREAKS" == *=* ]]; then  # bash replaces what follows the last = only
        COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*=}"}"}")
    fi
}
complete -o nospace -o default -F _hwnas hwnas"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that is named first; returns its exit code, or 2 if there is no such command."""
    name, *rest = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help", "help"):
        show("\n".join(["usage: hwnas COMMAND [key=value ...]", "", "commands (hwnas COMMAND --help tells more):",
                        *(f"  {command:10} {what}" for command, (_, what) in COMMANDS.items()), "",
                        'completion in bash: eval "$(hwnas -sc install=bash)"']))
        return 0
    if name == "--version":
        show(f"hwnas {__version__}")
        return 0
    if name in ("-sc", "--shell-completion") and rest in (["install=bash"], ["query=bash"]):
        show(BASH if rest == ["install=bash"] else "\n".join(completions(os.environ.get("COMP_LINE", ""))))
        return 0
    if name not in COMMANDS:
        print(f"UnknownName: {UnknownName('command', name, COMMANDS, REMOVED_COMMANDS)}", file=sys.stderr)
        return 2
    module = import_module(COMMANDS[name][0])
    if hasattr(module, "__path__"):  # a package: its command stands in __main__
        module = import_module(f"{COMMANDS[name][0]}.__main__")
    code: int = module.command(rest)
    return code


def completions(line: str) -> list[str]:
    """Completions of the last word of a command line. A blank at the end means that the word is complete."""
    words = line.split(" ")
    if len(words) < 3:
        return [f"{name} " for name in COMMANDS]
    if words[1] not in COMMANDS:
        return []
    key, equals, value = words[-1].partition("=")
    if not equals:
        return option_keys(words[1])
    before, comma, _ = value.rpartition(",")
    return [f"{key}={before}{comma}{name} " for name in _values(key.lstrip("+"))]


def _values(key: str) -> list[str]:
    """Names that an option accepts; [] if they are not known."""
    if key == "space":
        return sorted({path.stem for folder in search_space_dirs() for path in folder.glob("*.yaml")})
    return names_in(key) if key in GROUPS else []


if __name__ == "__main__":
    sys.exit(main())
