"""Words: what is public says what it is for, and values are named by nouns."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import hwnas

PACKAGE = Path(hwnas.__file__).parent
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Methods that another project's base class asks for and documents.
ELSEWHERE = {"infer_relative_search_space", "sample_relative", "sample_independent", "before_trial", "after_trial",
             "reseed_rng", "get_trials"}
# Names that hide the noun: a value is called by what it is.
BLURRED = {"one", "found"}
MOST_WORDS = 25  # of a sentence
RIDDLES = re.compile(r"\b(told|tells?|stands?|lies?|hears?|heard|begun)\b", re.IGNORECASE)
NOUN_FIRST = re.compile(r"(The|An?|These|Those|Its|Their|All|Every|Each|As|So|What|Whether|Where|How|Which)\b")
PRINTED = {f"tasks/detection/boxes.py: {name}" for name in ("pick", "read_objects")}  # by cards, with their docstring


@cache
def trees() -> dict[str, ast.Module]:
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def documented(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, FUNCTIONS) and ast.get_docstring(part)}


def bases(node: ast.ClassDef) -> set[str]:
    """Names of the classes that `node` is made of, as they are written."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {base.attr if isinstance(base, ast.Attribute) else base.id for base in plain
            if isinstance(base, ast.Attribute | ast.Name)}


@cache
def protocols() -> set[str]:
    """Methods that a protocol documents."""
    return set().union(*(documented(node) for node in classes().values() if "Protocol" in bases(node)))


def explained(node: ast.ClassDef) -> set[str]:
    """Methods that a base class of `node` documents."""
    above = [classes()[base] for base in bases(node) & set(classes())]
    return set().union(*(documented(base) | explained(base) for base in above))


def silent(body: list[ast.stmt], prefix: str, inherited: set[str]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and node.name not in inherited:
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from silent(node.body, f"{prefix}{node.name}.", explained(node) | protocols() | ELSEWHERE)


def test_what_is_public_has_a_docstring() -> None:
    modules = [path for path, tree in trees().items() if not ast.get_docstring(tree)]
    assert not [*modules, *(f"{path}: {name}" for path, tree in trees().items()
                            for name in silent(tree.body, "", set()))]


def sentences() -> Iterator[tuple[str, str]]:
    """Sentences of docstrings, each with its place. A line that holds code, a table or a list is none."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and (text := ast.get_docstring(node)):
                prose = "\n".join("" if line.startswith((" ", "|")) else line for line in text.split("\n"))
                for sentence in re.split(r"(?<=[.!?:;])\s+|\n\s*\n", re.sub(r"`[^`]*`", "it", prose)):
                    yield f"{path}:{getattr(node, 'lineno', 1)}: {' '.join(sentence.split())}", sentence


def test_docstrings_are_plain_sentences() -> None:
    assert not [place for place, text in sentences() if RIDDLES.search(text)], "say is, says, returns, receives, if"
    assert not [place for place, text in sentences() if len(text.split()) > MOST_WORDS], "make it two sentences"


def test_functions_are_told_in_the_imperative() -> None:
    places = [f"{path}: {node.name}" for path, tree in trees().items() for node in ast.walk(tree)
              if isinstance(node, FUNCTIONS) and NOUN_FIRST.match(ast.get_docstring(node) or "")
              and not any("property" in ast.unparse(each) for each in node.decorator_list)]
    assert {*places} <= PRINTED


def test_no_name_hides_its_noun() -> None:
    places = [f"{path}:{node.lineno}" for path, tree in trees().items() for node in ast.walk(tree)
              if (isinstance(node, ast.Name) and node.id in BLURRED)
              or (isinstance(node, ast.arg) and node.arg in BLURRED)]
    assert not places, f"say what the value is, not {' or '.join(sorted(BLURRED))}"
