"""Several calls at the same time, in threads of one process, as ranks make them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

DEADLINE = 60.0  # the first call may compile


def together(*calls: Callable[[], Any], deadline: float = DEADLINE) -> list[Any]:
    """Run calls at the same time; return the result or exception of each."""
    results: list[Any] = [None] * len(calls)

    def one(place: int) -> None:
        try:
            results[place] = calls[place]()
        except BaseException as error:
            results[place] = error

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(deadline)
    assert not any(thread.is_alive() for thread in threads), "a call did not come back"
    return results
