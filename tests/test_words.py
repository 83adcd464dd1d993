"""Words: what is public says what it is for, and values are named by nouns."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hwnas

PACKAGE = Path(hwnas.__file__).parent
TREES = {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Methods that another project's base class asks for and documents.
ELSEWHERE = {"infer_relative_search_space", "sample_relative", "sample_independent", "before_trial", "after_trial",
             "reseed_rng", "get_trials"}
# Names that hide the noun, and how often they stand in hwnas/ today: these figures only fall.
BLURRED = {"one": 532, "found": 475}


def classes() -> dict[str, ast.ClassDef]:
    return {node.name: node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def documented(node: ast.ClassDef) -> set[str]:
    return {part.name for part in node.body if isinstance(part, FUNCTIONS) and ast.get_docstring(part)}


def bases(node: ast.ClassDef) -> set[str]:
    """Names of the classes that `node` is made of, as they are written."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return {base.attr if isinstance(base, ast.Attribute) else base.id for base in plain
            if isinstance(base, ast.Attribute | ast.Name)}


def explained(node: ast.ClassDef, every: dict[str, ast.ClassDef]) -> set[str]:
    """Methods that a base class of `node`, or a protocol, documents."""
    names = set().union(*(documented(other) for other in every.values() if "Protocol" in bases(other)))
    for base in bases(node) & set(every):
        names |= documented(every[base]) | explained(every[base], every)
    return names


def silent(body: list[ast.stmt], prefix: str, inherited: set[str], every: dict[str, ast.ClassDef]) -> Iterator[str]:
    for node in body:
        if not isinstance(node, (*FUNCTIONS, ast.ClassDef)) or node.name.startswith("_"):
            continue
        if not ast.get_docstring(node) and node.name not in inherited:
            yield f"{prefix}{node.name}"
        if isinstance(node, ast.ClassDef):
            yield from silent(node.body, f"{prefix}{node.name}.", explained(node, every) | ELSEWHERE, every)


def all_silent() -> set[str]:
    every = classes()
    modules = {path for path, tree in TREES.items() if not ast.get_docstring(tree)}
    return modules | {f"{path}: {name}" for path, tree in TREES.items() for name in silent(tree.body, "", set(), every)}


def test_what_is_public_has_a_docstring() -> None:
    assert not all_silent()


def test_no_more_names_hide_their_noun() -> None:
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    names += [node.arg for node in nodes if isinstance(node, ast.arg)]
    uses = Counter(name for name in names if name in BLURRED)
    grown = {name: uses[name] for name, most in BLURRED.items() if uses[name] > most}
    assert not grown, f"say what the value is: {grown} uses where {BLURRED} stood before"
