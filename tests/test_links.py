"""Links between the documents: each leads to a file that is there, and to a heading of it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
_CODE = re.compile(r"```.*?```|`[^`]*`", re.DOTALL)


def documents() -> list[str]:
    told = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    return told.split() or sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))


def anchors_of(path: Path) -> set[str]:
    """What a link may say behind `#`, as code forges name headings."""
    headings = re.findall(r"(?m)^#+ (.*)$", re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", documents())
def test_links_lead_somewhere(name: str) -> None:
    path = ROOT / name
    links = re.findall(r"\]\(([^)\s]+)\)", _CODE.sub("", path.read_text(encoding="utf-8")))
    for link in links:
        if re.match(r"\w+:", link):
            continue
        address, _, anchor = link.partition("#")
        target = (path.parent / address).resolve() if address else path
        assert target.exists(), f"{name}: {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), f"{name}: {link}"
