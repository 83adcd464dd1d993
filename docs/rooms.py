"""Draws docs/rooms.svg from the imports of the code: python docs/rooms.py

A box is a package or a room of one file; an arrow goes from a package to one that it uses. Arrows that follow from
others are left out.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "hwnas"
PICTURE = ROOT / "docs" / "rooms.svg"
EVERYWHERE = {"errors", "lazy", "face"}  # used by all, so arrows to them would say nothing
OUTSIDE = {"api", "testing", "__init__"}  # for users
SINGLE = {"stats", "pictures", "target"}  # rooms of one file
COMMANDS = "commands"
WIDTH, BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 1180, 206, 70, 28, 108
INK, MUTED, LINE, FILL, EDGE = "#1c2430", "#667085", "#98a2b3", "#f8fafc", "#d0d5dd"


def module_files() -> dict[str, Path]:
    """Each module of the package by its name without `hwnas.`; a package by its own name."""
    files = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return files


def imports(path: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    """Modules of hwnas that a file imports, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively; write hwnas.… in full"
            names = [str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name.removeprefix("hwnas.") for name in names if name.startswith("hwnas.")
                    and name.removeprefix("hwnas.") in modules)


@cache
def graph() -> dict[str, set[str]]:
    """For each module, the modules that it imports."""
    modules = module_files()
    return {name: set(imports(path, modules)) - {name} for name, path in modules.items()}


def room(module: str) -> str:
    """The package that a module belongs to, or its own name where it lies in the root."""
    return module.partition(".")[0]


def rooms() -> dict[str, set[str]]:
    """For each package, the packages that it uses; the single-file commands count as one."""
    uses: dict[str, set[str]] = {}
    for module, imported in graph().items():
        if room(module) not in EVERYWHERE | OUTSIDE:
            uses.setdefault(_box(module), set()).update(_box(name) for name in imported if room(name) not in EVERYWHERE)
    return {name: used - {name} for name, used in uses.items()}


def _box(module: str) -> str:
    return room(module) if room(module) in SINGLE or (PACKAGE / room(module)).is_dir() else COMMANDS


def _levels(uses: Mapping[str, set[str]]) -> dict[str, int]:
    """A row for each package: above all that it uses, right below the lowest that uses it: arrows are short."""
    lowest: dict[str, int] = {}

    def bottom(name: str) -> int:
        if name not in lowest:
            lowest[name] = 1 + max(map(bottom, uses[name]), default=-1)
        return lowest[name]

    for name in uses:
        bottom(name)
    levels: dict[str, int] = {}
    for name in sorted(uses, key=lambda name: -lowest[name]):
        users = [levels[user] for user, used in uses.items() if name in used]
        levels[name] = min(users, default=max(lowest.values()) + 1) - 1
    return levels


def _direct(uses: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """Of the packages that each uses, those that none of the others uses already (the transitive reduction)."""
    def reached(name: str) -> set[str]:
        return set().union(*({other} | reached(other) for other in uses[name]))

    return {name: sorted(used for used in all_used if not any(used in reached(other) for other in all_used - {used}))
            for name, all_used in uses.items()}


def _about(name: str) -> tuple[str, str]:
    """A package's size and the first words of its docstring."""
    if name == COMMANDS:
        names = sorted(module for module in module_files() if "." not in module
                       and not (PACKAGE / module).is_dir() and module not in SINGLE | EVERYWHERE | OUTSIDE)
        return f"{len(names)} modules", " · ".join(names)
    doc = ast.get_docstring(ast.parse(module_files()[name].read_text())) or ""
    count = sum(path.name != "__init__.py" for path in (PACKAGE / name).rglob("*.py")) or 1
    head, _, tail = doc.splitlines()[0].partition(": ")
    return f"{count} module{'s' if count > 1 else ''}", head if not tail or tail.startswith("python") else tail


def _wrapped(text: str, width: int = 37, lines: int = 3) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width, max_lines=lines, placeholder=" …")


def draw() -> str:
    """The picture as SVG text: packages that use nothing below, commands on top."""
    uses = rooms()
    levels, direct = _levels(uses), _direct(uses)
    top = max(levels.values())
    rows = [sorted(name for name in uses if levels[name] == level) for level in range(top, -1, -1)]
    place: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        users = {name: [place[user][0] for user in direct if name in direct[user]] or [0.0] for name in row}
        row.sort(key=lambda name, users=users: (sum(users[name]) / len(users[name]), name))
        left = (WIDTH - len(row) * BOX_WIDTH - (len(row) - 1) * GAP) / 2
        for column, name in enumerate(row):
            place[name] = (left + column * (BOX_WIDTH + GAP), 20 + number * ROW)
    height = 20 + len(rows) * ROW
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
             f'viewBox="0 0 {WIDTH} {height}" font-family="DejaVu Sans, Verdana, sans-serif">',
             f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    parts += [_arrow(place[name], place[used], place) for name in sorted(direct) for used in direct[name]]
    parts += [_drawn_box(name, *place[name]) for name in sorted(place)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _arrow(user: tuple[float, float], used: tuple[float, float], place: Mapping[str, tuple[float, float]]) -> str:
    """From the foot of one box to the head of another; rows in between are passed beside their boxes."""
    x, y, end = user[0] + BOX_WIDTH / 2, user[1] + BOX_HEIGHT, used[0] + BOX_WIDTH / 2
    path = f"M{x:.0f},{y:.0f}"
    for top in sorted({top for _, top in place.values() if user[1] < top < used[1]}):
        lefts = sorted(left for left, other in place.values() if other == top)
        lanes = [lefts[0] - GAP / 2, *(left + BOX_WIDTH + GAP / 2 for left in lefts)]
        straight = x + (end - x) * (top - y) / (used[1] - y)
        lane = min(lanes, key=lambda lane, straight=straight: abs(lane - straight))
        path += f"{_bend(x, y, lane, top)} V{top + BOX_HEIGHT:.0f}"
        x, y = lane, top + BOX_HEIGHT
    return (f'<path d="{path}{_bend(x, y, end, used[1])}" fill="none" stroke="{LINE}" stroke-width="1.3"/>'
            f'<circle cx="{end:.0f}" cy="{used[1]:.0f}" r="3" fill="{LINE}"/>')


def _bend(x0: float, y0: float, x1: float, y1: float) -> str:
    middle = (y0 + y1) / 2
    return f" C{x0:.0f},{middle:.0f} {x1:.0f},{middle:.0f} {x1:.0f},{y1:.0f}"


def _drawn_box(name: str, x: float, y: float) -> str:
    size, words = _about(name)
    lines = [f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" fill="{FILL}" '
             f'stroke="{EDGE}"/>',
             f'<text x="{x + 10:.0f}" y="{y + 18:.0f}" font-size="13" font-weight="bold" fill="{INK}">'
             f'{escape(name)}</text>',
             f'<text x="{x + BOX_WIDTH - 10:.0f}" y="{y + 18:.0f}" font-size="10" text-anchor="end" fill="{MUTED}">'
             f'{escape(size)}</text>']
    lines += [f'<text x="{x + 10:.0f}" y="{y + 34 + 13 * i:.0f}" font-size="9.5" fill="{MUTED}">{escape(line)}</text>'
              for i, line in enumerate(_wrapped(words))]
    return "\n".join(lines)


if __name__ == "__main__":
    PICTURE.write_text(draw(), encoding="utf-8")
