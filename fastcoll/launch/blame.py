"""Whom to name when several ranks failed: not one that failed only because another one did.

A rank at fault lets go of its groups on its way out. That is when the others fail, and they may be gone
before it is.
"""

from __future__ import annotations

import re

CAUSE_SECONDS = 1.0  # for the rank at fault to end too, after one that failed because of it

_FOLLOWED = re.compile(
    r"^fastcoll\.errors\.(?:GroupError|PeerDiedError|CollectiveTimeoutError|AbortedError)\b", re.MULTILINE
)


def follows(lines: str) -> bool:
    """Whether a rank that ended with these lines on stderr shows the failure of a group (`GroupError`)."""
    return _FOLLOWED.search(lines) is not None
