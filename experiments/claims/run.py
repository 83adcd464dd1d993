"""Compute the figures of the pages for users, of the experiments and of some records again; name what differs.

    python experiments/claims/run.py      (make claims)

Every number of the prose of README.md, docs/results.md and docs/guides/ is a claim, unless it stands in code, an
address or a name, or is allowed in `pages.py` with a reason. Of experiments/README.md the tables in `tables.py` are
held, of docs/decisions/ what `records.py` lists. Nothing is measured or trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.claims import pages, records, tables
from experiments.claims.check import Outcome, check, check_tables
from experiments.claims.sources import ROOT


def outcomes() -> dict[str, Outcome]:
    """What holds and what does not, by document."""
    others = {"experiments/README.md": (tables.claims(), tables.tables()), **records.records()}
    held = {name: check(name, _text(name), page.claims, allowed=page.allowed) for name, page in pages.pages().items()}
    for name, (claims, rows) in others.items():
        parts = check(name, _text(name), claims), check_tables(name, _text(name), rows)
        held[name] = Outcome(sum(part.held for part in parts), [line for part in parts for line in part.problems])
    return held


def _text(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def main() -> None:
    """Print what differs and end with 1, or how many figures were held."""
    held = outcomes()
    problems = [problem for outcome in held.values() for problem in outcome.problems]
    print("\n".join(problems) or "\n".join(f"{name}: {outcome.held} figures follow from files in the repository"
                                           for name, outcome in held.items() if outcome.held))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
