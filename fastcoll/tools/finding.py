"""The doctor's result for one thing that it checked.

The levels: `problem` means that the part will not work; `warning`, that it is slower or untested, or may fail later;
`none`, that it is optional and not in use; `ok`, that it works.
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Finding(NamedTuple):
    """The result for the part `about`; `cure` is how to mend a warning or a problem."""

    level: Literal["ok", "none", "warning", "problem"]
    about: str
    text: str
    cure: str = ""
