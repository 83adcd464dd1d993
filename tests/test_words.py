"""Words: what is public says what it is for, and values are named by nouns."""

from __future__ import annotations

import ast
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


def test_no_name_hides_its_noun() -> None:
    places = [f"{path}:{node.lineno}" for path, tree in trees().items() for node in ast.walk(tree)
              if (isinstance(node, ast.Name) and node.id in BLURRED)
              or (isinstance(node, ast.arg) and node.arg in BLURRED)]
    assert not places, f"say what the value is, not {' or '.join(sorted(BLURRED))}"
