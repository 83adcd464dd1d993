"""Compute the figures of README.md, of the experiments and of some records again from files; name what differs.

    python experiments/claims/run.py      (make claims)

Every number of the README's prose is a claim, unless it stands in code, an address or a name, or in `readme.ALLOWED`
with a reason. Of experiments/README.md the tables in `tables.py` are held, of docs/decisions/ what `records.py` lists.
Nothing is measured or trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.claims import readme, records, tables
from experiments.claims.check import Outcome, check, check_tables
from experiments.claims.sources import ROOT


def outcomes() -> dict[str, Outcome]:
    """What holds and what does not, by document."""
    pages = {"experiments/README.md": (tables.claims(), tables.tables()), **records.records()}
    held = {"README.md": check("README.md", _text("README.md"), readme.claims(), allowed=readme.ALLOWED)}
    for name, (claims, rows) in pages.items():
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
                                           for name, outcome in held.items()))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
