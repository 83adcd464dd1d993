"""Hooks of mkdocs: pages that stand elsewhere in the repository, and links that leave the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Pages that stand outside of docs/, by their path on the site.
ELSEWHERE = {"index.md": "README.md", "experiments.md": "experiments/README.md", "changelog.md": "CHANGELOG.md",
             "contributing.md": "CONTRIBUTING.md", **{f"experiments-{name}.md": f"experiments/{name}/README.md"
                                                      for name in ("race", "detection", "latency", "sampler", "int8",
                                                                   "serve")}}


def on_config(config: Any) -> None:
    """List every decision, by its first heading, where the navigation says DECISIONS."""
    decisions = sorted((ROOT / "docs/decisions").glob("*.md"), key=lambda path: (path.name != "README.md", path.name))
    pages = [{path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# "): f"decisions/{path.name}"}
             for path in decisions]
    config.nav = [{"Decisions": pages} if entry == {"Decisions": "DECISIONS"} else entry for entry in config.nav]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that stand outside of docs/."""
    from mkdocs.structure.files import File

    for page, path in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Make links lead to pages of the site; one to a file that is no page becomes that file's name."""
    own = page.file.src_uri
    folder = (ROOT / ELSEWHERE[own] if own in ELSEWHERE else ROOT / "docs" / own).parent
    pages = {ROOT / path: name for name, path in ELSEWHERE.items()}

    def lead(match: re.Match[str]) -> str:
        mark, text, address, anchor = match.groups()
        if re.match(r"\w+:", address) or not address:
            return match.group()
        target = (folder / address).resolve()
        name = pages.get(target)
        if name is None and target.is_relative_to(ROOT / "docs") and target.is_file() and target.suffix != ".ipynb":
            name = target.relative_to(ROOT / "docs").as_posix()
        if name is None:
            return text
        up = "../" * own.count("/")
        return f"{mark}[{text}]({up}{name}{anchor or ''})"

    return re.sub(r"(!?)\[([^\]]*)\]\(([^)\s#]*)(#[^)\s]*)?\)", lead, markdown)
