"""Planted changes of the package's own source, which a test must detect."""

from __future__ import annotations

import inspect
import textwrap
from typing import Any

import pytest


def plant(patch: pytest.MonkeyPatch, owner: Any, name: str, old: str, new: str) -> None:
    """Change the text of a function of a class or module, for one test."""
    function: Any = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(function))
    assert old in source, f"{name} has changed; so must the change that is planted"
    source = source.replace(old, new).replace("super()", f"super({owner.__name__}, self)")
    exec(source, function.__globals__, found := {})
    patch.setattr(owner, name, found[name])
