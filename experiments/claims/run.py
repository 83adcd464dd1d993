"""Compute the figures of README.md and experiments/README.md again from files in the repository, name what differs.

    python experiments/claims/run.py      (make claims)

Every number of the README's prose is a claim, unless it stands in code, an address or a name, or in `readme.ALLOWED`
with a reason. Of experiments/README.md the tables in `tables.py` are held. Nothing is measured or trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from experiments.claims import readme, tables
from experiments.claims.check import Outcome, check, check_tables
from experiments.claims.sources import ROOT


def outcomes() -> dict[str, Outcome]:
    """What holds and what does not, by document."""
    first, second = "README.md", "experiments/README.md"
    text = (ROOT / second).read_text(encoding="utf-8")
    rows, sentences = check_tables(second, text, tables.tables()), check(second, text, tables.claims())
    return {first: check(first, (ROOT / first).read_text(encoding="utf-8"), readme.claims(), allowed=readme.ALLOWED),
            second: Outcome(rows.held + sentences.held, rows.problems + sentences.problems)}


def main() -> None:
    """Print what differs and end with 1, or how many figures were held."""
    held = outcomes()
    problems = [problem for outcome in held.values() for problem in outcome.problems]
    print("\n".join(problems) or "\n".join(f"{name}: {outcome.held} figures follow from files in the repository"
                                           for name, outcome in held.items()))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
