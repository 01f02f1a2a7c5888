"""How long a launcher waits before it restarts failed ranks."""

from __future__ import annotations

_FIRST, _MOST = 1.0, 30.0  # seconds
_LONG_LIFE = 60.0  # seconds; a failure after a longer life is not part of a crash loop


class Pauses:
    """The pauses after failures in a row: 0 s after the first, then 1, 2, 4 ... 30 s.

    After a process has run for 60 s, its failure counts as the first again.
    """

    def __init__(self) -> None:
        self._quick = 0  # failures in a row; all but the first came after a short life

    def after(self, lived: float) -> float:
        """Return the pause in seconds after a failure of a process that has run for `lived` seconds."""
        self._quick = 1 if lived >= _LONG_LIFE else self._quick + 1
        return 0.0 if self._quick == 1 else min(_FIRST * 2.0 ** (self._quick - 2), _MOST)
