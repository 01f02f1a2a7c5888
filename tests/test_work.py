"""Work and ProgressQueue: Ctrl-C under other libraries' handlers, and where Python starts no thread."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest

from fastcoll.work import ProgressQueue, Work


def refuse(start: Callable[[Any], None], thread: Any) -> None:
    raise RuntimeError("can't start new thread")


def interrupt(start: Callable[[Any], None], thread: Any) -> None:
    """As Ctrl-C when the thread has begun."""
    start(thread)
    raise KeyboardInterrupt


@pytest.mark.parametrize(("trouble", "kind"), [(refuse, RuntimeError), (interrupt, KeyboardInterrupt)])
def test_a_thread_that_did_not_start_leaves_the_queue_usable(
    monkeypatch: pytest.MonkeyPatch, trouble: Callable[..., None], kind: type[BaseException]
) -> None:
    queue, start, ran = ProgressQueue("troubled"), threading.Thread.start, []
    before = threading.active_count()
    monkeypatch.setattr(threading.Thread, "start", lambda thread: trouble(start, thread))
    with pytest.raises(kind):
        queue.submit("first", lambda: ran.append("first"))
    assert queue.pending == 0
    monkeypatch.undo()
    assert queue.submit("second", lambda: ran.append("second") or "done").result() == "done"
    assert ran == ["second"]
    queue.close()
    assert threading.active_count() <= before


def test_ctrl_c_ends_a_wait_also_where_a_handler_restarts_system_calls() -> None:
    work, main = Work("what never ends"), threading.main_thread().ident
    assert main is not None
    signal.siginterrupt(signal.SIGINT, False)
    timers = [
        threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGINT]),
        threading.Timer(20, work._finish),
    ]
    try:
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            work.wait()
        assert not work.is_completed()
    finally:
        signal.siginterrupt(signal.SIGINT, True)
        for timer in timers:
            timer.cancel()
