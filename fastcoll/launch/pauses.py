"""How long a launcher waits before it starts again what has failed."""

from __future__ import annotations

_FIRST, _MOST = 1.0, 30.0  # seconds
_LONG_LIFE = 60.0  # seconds, after which a failure is no part of a crash loop


class Pauses:
    """Seconds to wait after each failure: none after the first, then 1, 2, 4 ... 30; anew after a long life."""

    def __init__(self) -> None:
        self._quick = 0  # failures in a row, each after a short life

    def after(self, lived: float) -> float:
        """The pause after a failure of what has run for `lived` seconds."""
        self._quick = 1 if lived >= _LONG_LIFE else self._quick + 1
        return 0.0 if self._quick == 1 else min(_FIRST * 2.0 ** (self._quick - 2), _MOST)
