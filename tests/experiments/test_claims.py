"""Claims: a document that says other than the files, or more than them, is named with its line and both values."""

from __future__ import annotations

from experiments.claims import pages
from experiments.claims.check import Claim, Table, check, check_tables
from experiments.claims.sources import ROOT

PROSE = """# On 2 machines
int8 takes 0.5 ms, `n=7`
and −1.2 points ([3](x/4.md)).
"""
TABLE = """
| | ms |
|---|---|
| **cold** | |
| ours | 1.25 (1.2 to 1.3) |
"""


def claimed(*figures: float) -> Claim:
    return Claim("takes {} ms, `n=7` and {} points", lambda: figures)


def test_figures_agree_to_the_digits_that_are_written() -> None:
    outcome = check("a.md", PROSE, [claimed(0.52, -1.16)], allowed={"([3]": "an address"})
    assert (outcome.held, outcome.problems) == (2, [])


def test_a_figure_that_differs_is_named_with_its_line_and_both_values() -> None:
    (problem,) = check("a.md", PROSE, [claimed(0.5, 1.2)]).problems
    assert problem.startswith("a.md:2: says −1.2, the files give 1.200")


def test_what_the_document_no_longer_says_is_named() -> None:
    problems = check("a.md", PROSE, [Claim("takes {} s", lambda: [1])], allowed={"17 mice": "none"}).problems
    assert "no longer says: takes {} s" in problems[0]
    assert "allows what it no longer says: 17 mice" in problems[1]


def test_a_number_without_a_claim_is_named() -> None:
    problems = check("a.md", PROSE, [], allowed={}).problems
    assert [problem.split(" in: ")[0] for problem in problems] == ["a.md:2: no claim computes '0.5'",
                                                                  "a.md:3: no claim computes '−1.2'",
                                                                  "a.md:3: no claim computes '3'"]


def test_rows_of_a_table_are_held_by_group() -> None:
    def problems(**rows: list[float | None]) -> list[str]:
        named = {name.replace("_", ": "): figures for name, figures in rows.items()}
        return check_tables("a.md", TABLE, [Table("| | ms |", lambda: named)]).problems

    assert problems(cold_ours=[1.254, None, 1.3]) == []
    assert "a.md:5: says 1.2, the files give 1.40" in problems(cold_ours=[1.25, 1.4, 1.3])[0]
    assert "3 figures where 2 are computed" in problems(cold_ours=[1.25, 1.2])[0]
    assert "has no row warm: ours" in problems(cold_ours=[1.25, 1.2, 1.3], warm_ours=[1.0])[0]


def test_the_pages_for_users_say_what_the_files_give() -> None:
    for name, page in pages.pages().items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert check(name, text, page.claims, allowed=page.allowed).problems == []
