"""Progress in a notebook is one line, and nothing when quiet."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_fixtures import PATHS

from hwnas.cli.notebook import open_console
from hwnas.cli.progress import Console

CELL = """
from hwnas.cli.notebook import open_console
console = open_console(quiet=QUIET)
for title in ("train <1>", "export"):
    with console.step(title) as report:
        for row in range(500):
            report(row / 500, "some note")
print(*console.spent_s)
"""


@pytest.mark.parametrize("quiet", [False, True])
def test_a_thousand_reports_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: bool) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", PATHS)
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    cell = nbformat.v4.new_code_cell(CELL.replace("QUIET", str(quiet)))
    nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[cell]), timeout=300,
                            resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"] for output in cell.outputs if output.output_type == "display_data"]
    assert len(shown) == (0 if quiet else 1)
    assert all(data["text/plain"].startswith("export: done in") for data in shown)
    assert all("<progress value" in data["text/html"] for data in shown)
    assert [output.text for output in cell.outputs if output.output_type == "stream"] == ["train <1> export\n"]


def test_outside_of_a_notebook_it_is_the_commands_console() -> None:
    assert type(open_console(quiet=True)) is Console
