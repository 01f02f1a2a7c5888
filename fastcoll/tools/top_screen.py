"""Where `top` shows its views: in place on a terminal, where the key q ends it, elsewhere as lines."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.live import Live

from .printing import Printer
from .rates import View
from .top_view import COLUMNS, cells, render

_QUIT = b"q", b"Q", b""  # b"": the terminal is gone


class Screen:
    """Shows views; `live` is where they replace one another, None: they follow one another."""

    def __init__(self, console: Console, live: Live | None, has_keys: bool) -> None:
        self._console, self._live, self._has_keys = console, live, has_keys
        self._printer = Printer()

    def show(self, view: View) -> None:
        """Show a view."""
        width, height = self._console.size
        if self._live is not None:
            self._live.update(render(view, width, height), refresh=True)
        elif self._console.is_terminal:
            self._console.print(render(view, width))
        else:
            self._printer.anew()
            for line in (view.title, view.summary, *view.troubles):
                self._printer.say(line)
            self._printer.table([column.name for column in COLUMNS], [cells(row, True) for row in view.rows])
            self._printer.say(view.end or None)
            sys.stdout.flush()

    def leave(self, view: View) -> None:
        """Show the last view again where it stays, if it was shown in place; call this when the screen is closed."""
        if self._live is not None:
            self._console.print(render(view, self._console.width))

    def wait(self, seconds: float) -> bool:
        """Wait, at most until the user presses q; return whether the user has."""
        if not self._has_keys:
            time.sleep(seconds)
            return False
        end = time.monotonic() + seconds
        while select.select([sys.stdin], [], [], max(0.0, end - time.monotonic()))[0]:
            if os.read(sys.stdin.fileno(), 1) in _QUIT:
                return True
        return False


@contextmanager
def opened(once: bool) -> Iterator[Screen]:
    """Yield a screen for one view, or for many."""
    console = Console(highlight=False)
    if once or not console.is_terminal or console.is_dumb_terminal:
        yield Screen(console, None, False)
        return
    with ExitStack() as stack:
        if has_keys := sys.stdin.isatty():
            settings = termios.tcgetattr(sys.stdin)
            stack.callback(termios.tcsetattr, sys.stdin, termios.TCSADRAIN, settings)
            tty.setcbreak(sys.stdin)
        # SIGTERM must not leave the terminal as it is now.
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        stack.callback(signal.signal, signal.SIGTERM, before)
        live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False))
        yield Screen(console, live, has_keys)
