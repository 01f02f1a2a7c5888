"""The prose of the package and the docs is plain English, and a class name stands for one thing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODULES = {path: path.read_text() for path in sorted((ROOT / "fastcoll").rglob("*.py"))}
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")]

START = r"(?:^|[.;:,(]\s+)"
MARKS = {
    "a relative clause without a noun": START
    + r"(?:[Ww]ho|[Ww]hoever)\s+(?:is|has|had|was|waits|reads|sends|takes|holds|dials|leaves|comes|calls|wants|begins|"
    r"gives|sees|does|completes|needs|ends|writes|asks|knows|looks|drives|meets|dies|joins)\b"
    "|"
    + START
    + r"[Ww]hat (?:is|has|it|they|others|makes|comes|goes|was|can|could|ranks?|does|this|an?|the|no)\b",
    "a verb of speech for data": r"\b(?:tells?|told|hears?|heard)\b",
    "'through' for finished": r"\b(?:is|are|was|were) through\b",
    "'come to' for reach": r"\b(?:comes?|came) (?:to|by)\b",
    "'any more', 'no word'": r"\bany more\b|\bno word\b|\bwithout a word\b",
}
"""Constructions that readers have to read twice. A text without them can still be bad."""

MOST_MARKS = 4
"""Per 1,000 lines of docstrings, comments and docs."""

NAMED_TWICE = {"Backend", "Future"}
"""`fastcoll.Backend` is a string, as in torch; `fastcoll.rpc.Future` derives from `core.future.Future`."""


def prose_of(source: str) -> Iterator[str]:
    """Yield the docstrings and comments of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("# ")


def marks_in(text: str) -> list[str]:
    return [mark for mark, pattern in MARKS.items() for _ in re.finditer(pattern, text, re.MULTILINE)]


def test_marks_are_found() -> None:
    assert len(marks_in("Who has read releases the lock. The rank tells the others that it is through.")) == 3
    assert marks_in("The thread that has read releases the lock, and publishes that it has finished.") == []


def test_the_prose_is_plain_english() -> None:
    lines, found = 0, []
    texts = [(path, text) for path, source in MODULES.items() for text in prose_of(source) if text]
    texts += [(page, re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)) for page in PAGES]
    for path, text in texts:
        lines += text.count("\n") + 1
        found += [f"{path.relative_to(ROOT)}: {mark}" for mark in marks_in(text)]
    assert 1000 * len(found) <= MOST_MARKS * lines, sorted(found)


def test_a_class_name_stands_for_one_thing() -> None:
    places = defaultdict(list)
    for path, source in MODULES.items():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ClassDef) and node.name not in NAMED_TWICE:
                places[node.name].append(str(path.relative_to(ROOT)))
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
