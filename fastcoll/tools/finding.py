"""What the doctor says of one thing that a check looked at.

`problem` is what will not work; `warning` what is slower, untested, or may fail later; `none` what is not there, and
is needed only by who wants it.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """One thing that was looked at; the cure of a warning or problem is what to do about it."""

    level: Literal["ok", "none", "warning", "problem"]
    about: str
    text: str
    cure: str = ""
