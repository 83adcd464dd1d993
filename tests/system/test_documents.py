"""Documents: what is read, what is refused and by which one line; identities; and locks."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from hwnas.errors import StudyError, TableError, UserError
from hwnas.system import documents
from hwnas.system.documents import Document, check_identity, load_yaml, yaml_text
from hwnas.system.paths import hold

NOTE = Document("hwnas-note", 2, "a note", "Write it again.")
APART = Document("hwnas-note", 2, "a note", "Write it again.", TableError, two_fields=True)


@pytest.mark.parametrize("document", [NOTE, APART])
def test_what_is_written_is_read_and_so_is_an_older_version(document: Document, tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    assert document.find(path) is None
    for header in (document.header, Document("hwnas-note", 1, "", "", two_fields=document.two_fields).header):
        path.write_text(json.dumps({**header, "text": "ü"}))
        assert document.read(path)["text"] == "ü"
    (tmp_path / "note.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert document.read(tmp_path / "note.json.gz") == document.find(path)


@pytest.mark.parametrize(("content", "fault"), [
    (b'{"format": "hwnas-note/2"', "torn, not whole JSON"), (b"\xff", "torn, not whole JSON"), (b"[]", "not a note"),
    (b'{"format": "hwnas-table/1"}', "not a note"), (b"{}", "not a note"),
    (b'{"format": "hwnas-note", "version": 2}', "not a note"), (b'{"format": "hwnas-note/x"}', "format version 'x'"),
    (b'{"format": "hwnas-note/3"}', "format version 3; this hwnas reads up to 2"),
])
def test_a_fault_is_one_line_that_names_file_and_remedy(content: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_bytes(content)
    with pytest.raises(StudyError) as caught:
        NOTE.read(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert fault in said
    assert said.endswith(("Write it again.", "Update hwnas."))
    assert "\n" not in said


def test_other_styles_torn_archives_and_missing_fields_are_told_too(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text('{"format": "hwnas-note/2"}')
    with pytest.raises(TableError, match="not a note"):
        APART.read(path)
    torn = tmp_path / "note.json.gz"
    torn.write_bytes(gzip.compress(b'{"format": "hwnas-note/2"}' * 50)[:30])
    with pytest.raises(StudyError, match=r"note\.json\.gz: torn"):
        NOTE.read(torn)
    torn.write_bytes(b"plain")
    with pytest.raises(StudyError, match="not gzip"):
        NOTE.read(torn)
    with pytest.raises(StudyError, match=r"not whole \(KeyError: 'text'\)\. Write it again"), NOTE.reading(path):
        NOTE.read(path)["text"]
    with pytest.raises(StudyError, match="cannot be read"):
        NOTE.read(tmp_path)


def test_an_identity_names_the_work_and_what_differs() -> None:
    check_identity({"a": (1, 2)}, {"a": [1, 2]}, Path("x"))
    with pytest.raises(StudyError, match=r"x is of another training: a was 1, is 2, b was None, is 3. Give"):
        check_identity({"a": 1}, {"a": 2, "b": 3}, Path("x"))
    with pytest.raises(StudyError, match=r"a was 0, is 1, .* and 2 more"):
        check_identity(dict.fromkeys("abcdef", 0), dict.fromkeys("abcdef", 1), Path("x"))


def test_a_lock_is_held_by_one_process_and_free_when_that_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.lock"
    script = (f"from pathlib import Path\nfrom hwnas.system.paths import hold\n"
              f"with hold(Path({str(path)!r}), wait=False) as held:\n    print(held)")

    def other_has_it() -> str:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300)
        return done.stdout.strip()

    with hold(path) as held:
        assert held
        assert other_has_it() == "False"
    assert other_has_it() == "True"


def test_a_lock_that_another_has_is_waited_for_no_longer_than_asked(tmp_path: Path) -> None:
    path, told = tmp_path / "a.lock", list[str]()
    with hold(path), pytest.raises(UserError, match=r"another process has held .*a\.lock for 0\.01 s"), \
            hold(path, lambda: told.append("waiting"), most_s=0.01):
        pytest.fail("two have it")
    assert told == ["waiting"]


BOMB = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 40))
MERGED = "a0: &a0 {x: 1}\n" + "".join(f"a{n}: &a{n} {{<<: [*a{n - 1}, *a{n - 1}]}}\n" for n in range(1, 40))


@pytest.mark.parametrize("text", [
    BOMB, MERGED, "a: &a [*a]", "a: &a {b: *a}", "[" * 500_000, "- " * 100_000, "x: " + "9" * 5000,
    "a: 1" + ":1" * 9000, "[" + "x, " * 300_000, "x" * (1 << 20) + "y", "a: [1", "a: *b", "? [1]\n: 2",
    "a: 2001-99-99", "!!python/name:os.system", "a: 1\na: 2", "- {b: {c: 1, c: 1}}"],
    ids=lambda text: text[:12])
@pytest.mark.parametrize("most", [2_000, pytest.param(documents._MOST_VALUES, marks=pytest.mark.soak)])
def test_yaml_that_would_take_long_or_is_none_is_refused_with_little_memory(text: str, most: int, monkeypatch) -> None:
    monkeypatch.setattr(documents, "_MOST_VALUES", most)  # events are traced slowly
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            load_yaml(text)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_keys_of_other_types_and_merged_sections_are_no_repetition() -> None:
    assert load_yaml("{0: a, '0': b}") == {0: "a", "0": "b"}
    assert load_yaml("a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n")["c"] in ({"x": 1, "y": 2}, {"y": 2})


def test_yaml_of_sane_size_may_have_aliases(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("a: &a [1, ü]\nb: *a\n")
    assert load_yaml(yaml_text(tmp_path / "a.yaml")) == {"a": [1, "ü"], "b": [1, "ü"]}
    with open(tmp_path / "large.yaml", "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        yaml_text(tmp_path / "large.yaml")
