"""Progress in a notebook is one line, and nothing when quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fixtures import PATHS

from hwnas.cli.progress import Console, open_console

CELL = """
from hwnas.cli.progress import open_console
console = open_console(quiet=QUIET)
for title in ("train <1>", "export"):
    with console.step(title) as report:
        for row in range(500):
            report(row / 500, "some note")
print(*console.spent_s)
"""


def test_a_thousand_reports_are_one_line_and_none_when_quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    cells = [nbformat.v4.new_code_cell(CELL.replace("QUIET", quiet)) for quiet in ("False", "True")]
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=cells), timeout=300,
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown, none = ([output["data"] for output in cell.outputs if output.output_type == "display_data"]
                   for cell in cells)
    assert (len(shown), none) == (1, [])
    assert shown[0]["text/plain"].startswith("export: done in")
    assert "<progress value" in shown[0]["text/html"]
    for cell in cells:
        assert [output.text for output in cell.outputs if output.output_type == "stream"] == ["train <1> export\n"]


def test_outside_of_a_notebook_it_is_the_commands_console() -> None:
    assert type(open_console(quiet=True)) is Console
