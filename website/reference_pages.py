"""The pages of the reference: every public name with its docstring, every command with its options, every setting."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import griffe

from fastcoll.config import SETTINGS
from fastcoll.tools.command import COMMANDS

# Page -> title, and the modules whose public names it has. A name of `fastcoll` belongs to the page with its module.
_OF_FASTCOLL = {
    "groups": (
        "Processes and groups",
        ("job", "launch", "core.group", "profiling", "record", "rendezvous", "_version"),
    ),
    "collectives": (
        "Collectives",
        ("api.collectives", "core.reduce_op", "core.work", "api.gradients", "api.objects", "api.multigpu"),
    ),
    "messages": ("Messages", ("api.p2p", "core.message", "core.operands", "core.request")),
    "stores": ("Stores", ("store",)),
    "errors": ("Errors", ("errors",)),
}
_MODULES = (
    "symmetric", "elastic", "rpc", "rpc.autograd", "rpc.functions", "torch", "torch.hooks", "jax", "ray", "torchft"
)  # fmt: skip

_DOCTEST = re.compile(r"((?:^ *(?:>>>|\.\.\.) .*\n)+)", re.MULTILINE)


def pages() -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each page."""
    package = griffe.load("fastcoll", submodules=True)
    for name, text in _by_topic(package):
        yield f"reference/{name}.md", text
    for module in _MODULES:
        yield f"reference/{module}.md", _module(package[module])
    yield "reference/commands.md", _commands()
    yield "reference/settings.md", _settings()


def _by_topic(package: griffe.Module) -> Iterator[tuple[str, str]]:
    names = {page: list[str]() for page in _OF_FASTCOLL}
    for name in map(str, package.exports or []):
        found = package[name]
        if found.is_module:  # it has a page of its own
            continue
        module = (found.target_path if found.is_alias else found.path).removeprefix("fastcoll.")
        page = next(
            page
            for page, (_, modules) in _OF_FASTCOLL.items()
            if any(module.startswith(f"{each}.") for each in modules)
        )
        names[page].append(name)
    for page, (title, _) in _OF_FASTCOLL.items():
        yield page, "\n".join([f"# {title}", "", *(f"::: fastcoll.{name}\n" for name in names[page])])


def _module(module: griffe.Module) -> str:
    names = [str(name) for name in module.exports or []]
    names = names or [
        name for name in module.members if not name.startswith("_") and not module[name].is_alias
    ]
    about = _DOCTEST.sub(r"```python\n\1```\n", f"{module.docstring.value if module.docstring else ''}\n")
    return "\n".join([f"# {module.path}", "", about, "", *(f"::: {module.path}.{name}\n" for name in names)])


def _commands() -> str:
    parts = ["# Commands", ""]
    for name, (_, about) in COMMANDS.items():
        words = [sys.executable, "-m", "fastcoll", name, "--help"]
        environment = {**os.environ, "COLUMNS": "80", "NO_COLOR": "1"}
        shown = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
        about = f"{about[0].upper()}{about[1:]}."
        parts.append(f"## python -m fastcoll {name}\n\n{about}\n\n```text\n{shown.rstrip()}\n```\n")
    return "\n".join(parts)


def _settings() -> str:
    rows = [f"| `{name}` | {each.meaning} | {each.default!r} |" for name, each in SETTINGS.items()]
    return "\n".join(["# Settings", "", "| variable | meaning | default |", "|---|---|---|", *rows, ""])
