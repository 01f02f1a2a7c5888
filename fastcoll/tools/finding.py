"""The doctor's result for one thing that it checked.

A `problem` is a part that will not work. A `warning` is a part that is slower or untested, or may fail later. `none` is
an optional part that is not installed.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """The result of one check; `cure` is how to fix a warning or a problem."""

    level: Literal["ok", "none", "warning", "problem"]
    about: str
    text: str
    cure: str = ""
