"""How the package is built: no file uses private names of another, and inheritance is shallow."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "fastcoll"
TREES = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}

OF_OTHERS = {
    "_ARRAY_API", "_exit", "_fields", "_replace", "_asdict", "_make", "_C", "_cache", "_codegen", "_data_layout",
    "_addressof", "_world", "_FrameAction", "_FrameExecStrategy",
    "_internal_kv_get", "_internal_kv_put", "_internal_kv_del",
    "_is_profiler_enabled", "_EffectType", "_register_effectful_op", "_rendezvous_handlers",
    "_functions", "_backward_cls", "_backward_hooks", "_sequence_nr", "_set_sequence_nr", "_use_count", "_indices",
    "_values", "_getframe", "_execution_engine", "_args_from_interpreter_flags",
}  # fmt: skip
"""Private names of Python's own and of other libraries, which have no public ones for it."""

ROLES = {
    "__init__", "__main__", "backend", "calls", "command", "context", "fast", "hooks", "monitor", "pipe",
    "recovery_endpoint", "symmetric", "waiting", "work",
}  # fmt: skip
"""What several rooms have, each its own."""


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that a file defines or assigns, also as attributes of self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return names


def foreign_names(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each use of another file's private name."""
    tree = TREES[file]
    own = own_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            if (
                node.attr.startswith("_")
                and not node.attr.startswith("__")
                and not of_self
                and node.attr not in own
            ):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("fastcoll")):
            yield from (
                (node.lineno, each.name) for each in node.names if each.name[:1] == "_" != each.name[1:2]
            )


def test_no_file_uses_private_names_of_another() -> None:
    found = [
        f"{file.relative_to(PACKAGE)}:{line} {name}"
        for file in TREES
        for line, name in foreign_names(file)
        if name not in OF_OTHERS
    ]
    assert not found, found


def classes(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, list[str]]]:
    """Yield each class of a file, and the names of its bases that are not imported from another library."""
    foreign = {
        each.asname or each.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and not node.level
        for each in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names = [ast.unparse(base).split("[")[0].rpartition(".")[2] for base in node.bases]
            yield node, [name for name in names if name not in foreign and name != node.name]


def test_no_class_is_more_than_two_levels_below_an_interface() -> None:
    """Exceptions have a tree of their own."""
    bases: dict[str, list[str]] = {}
    for tree in TREES.values():
        for node, names in classes(tree):
            bases.setdefault(node.name, []).extend(names)

    def depth(name: str) -> int:
        return max((1 + depth(base) for base in bases[name] if base in bases), default=0)

    deep = {name: depth(name) for name in bases if depth(name) > 2}
    assert all(name.endswith("Error") for name in deep), deep


MOST_SHARED = 18
"""Private names that a class shares with a base class of another file; they may only become fewer."""


def private_members(node: ast.ClassDef) -> set[str]:
    """Return the private names that a class defines, or uses as attributes of self, cls or super()."""
    names = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef):
            names.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.Attribute) and ast.unparse(each.value) in ("self", "cls", "super()"):
            names.add(each.attr)
    return {name for name in names if re.match("_[^_]", name)}


def test_few_private_names_are_shared_with_a_base_of_another_file() -> None:
    """A name that subclasses in other files override or use is public."""
    found: dict[str, list[tuple[Path, ast.ClassDef, list[str]]]] = {}
    for file, tree in TREES.items():
        for node, bases in classes(tree):
            found.setdefault(node.name, []).append((file, node, bases))

    def above(bases: list[str]) -> Iterator[tuple[Path, ast.ClassDef]]:
        for name in bases:
            for file, node, further in found.get(name, []):
                yield file, node
                yield from above(further)

    shared = {
        f"{file.relative_to(PACKAGE)}: {node.name}.{name}"
        for each in found.values()
        for file, node, bases in each
        for place, base in above(bases)
        if place != file
        for name in private_members(node) & private_members(base)
    }
    assert len(shared) <= MOST_SHARED, sorted(shared)


MOST_FUNCTIONS, MOST_CALLED_ONCE = 70, 302
"""Functions per 1,000 lines, and private functions that one place calls; both may only become fewer."""


def called_once(tree: ast.Module) -> list[str]:
    """Return the private functions without decorators whose only use is one call."""
    uses, calls = Counter[str](), Counter[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name | ast.Attribute):
            uses[node.id if isinstance(node, ast.Name) else node.attr] += 1
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            calls[node.func.id if isinstance(node.func, ast.Name) else node.func.attr] += 1
    return [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and re.match("_[^_]", node.name) and not node.decorator_list
        if uses[node.name] == calls[node.name] == 1
    ]


def test_functions_are_few_and_seldom_called_once() -> None:
    lines = sum(file.read_text().count("\n") for file in TREES)
    nodes = [node for tree in TREES.values() for node in ast.walk(tree)]
    functions = sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in nodes)
    assert 1000 * functions <= MOST_FUNCTIONS * lines, functions
    assert sum(len(called_once(tree)) for tree in TREES.values()) <= MOST_CALLED_ONCE


def test_no_module_has_the_name_of_another_unless_it_plays_its_role() -> None:
    names = [file.stem for file in TREES if file.stem not in ROLES]
    assert sorted(names) == sorted(set(names))


NOT_OURS = {
    "custom_all_reduce.py",
    "hello.py",
    "program.py",
    "setup.py",
    "script.py",
    "train.py",
}  # subclassed in vLLM and by users


def test_files_named_in_the_package_and_its_architecture_exist() -> None:
    root = PACKAGE.parent
    there = [f"/{path.relative_to(root)}" for path in root.rglob("*.py") if "build" not in path.parts]
    texts = [*PACKAGE.rglob("*.py"), *(root / "docs").glob("architecture*.md"), root / "CONTRIBUTING.md"]
    missing = {
        f"{text.relative_to(root)}: {name}"
        for text in texts
        for name in re.findall(r"(?<![\w/.-])[a-z_0-9/]+\.py\b", text.read_text())
        if name.rpartition("/")[2] not in NOT_OURS and not any(path.endswith(f"/{name}") for path in there)
    }
    assert not missing, sorted(missing)
