"""The ranks of a job on other machines, as their launchers see them (launch/node_views.py), for `top`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, get_type_hints

from .. import config
from ..errors import FastcollError, StoreError
from ..launch.node_views import ASKED, NODES, view_key
from ..store.tcp_store import TCPStore, client_of
from .blame import ELSEWHERE
from .jobs_here import ProcessMemory, RunningJob, launchers_of
from .rates import RankRates, View

_STORE_SECONDS = 2.0  # for each request to the launchers' store
_FIRST_SECONDS = (
    10.0  # how long `--once` waits for the other machines: each starts a process, which reads twice
)
_STALE_SECONDS = (
    5.0  # a view that has not changed for longer is of a launcher that has ended, or cannot be reached
)
# The connection to the store depends on these, as the user's own secret does (store/secret.py); they are taken from the
# launcher.
_CONNECTION_SETTINGS = (
    "FASTCOLL_SECRET",
    "FASTCOLL_SECRET_FILE",
    "FASTCOLL_INSECURE",
    "FASTCOLL_ENCRYPT",
    "HOME",
    "XDG_CONFIG_HOME",
)
_NO_LAUNCHERS = (
    "the ranks of other machines are not shown, because fastcoll's launcher has not started this job; "
    "run top on those machines, too"
)
_TYPES = get_type_hints(RankRates)


class NodeView(NamedTuple):
    """What the launcher of one node has seen of its ranks; the values are those of `View`."""

    rows: Sequence[RankRates]
    slow: tuple[int, float] | None
    troubles: Sequence[str]


def encode(view: View, number: int) -> str:
    """Return a view of this node's ranks as JSON; `number` makes it differ from the one before."""
    rows = [row._asdict() for row in view.rows if row.state]
    return json.dumps({"number": number, "rows": rows, "slow": view.slow, "troubles": list(view.troubles)})


def decode(data: bytes) -> NodeView:
    """Return what was given to `encode`. ValueError: it is something else."""
    try:
        found, rows = json.loads(data), []
        for fields in found["rows"]:
            if fields["memory"] is not None:
                fields["memory"] = ProcessMemory(*map(int, fields["memory"]))
            if any(not isinstance(value, _TYPES[name]) for name, value in fields.items()):
                raise ValueError(f"no row: {fields}")
            rows.append(RankRates(**fields))
        slow = None if found["slow"] is None else (int(found["slow"][0]), float(found["slow"][1]))
        return NodeView(rows, slow, [str(text) for text in found["troubles"]])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no view: {data[:80]!r}") from error


def merged(own: View, others: Sequence[NodeView]) -> View:
    """Return this machine's view with the ranks of other machines; if both have a rank, the former counts."""
    here = {row.rank for row in own.rows if row.state}
    there = [row for other in others for row in other.rows if row.rank not in here]
    if not there:
        return own
    shown = {row.rank for row in there}
    rows = [row for row in own.rows if row.rank not in shown]
    slow = [each for each in (own.slow, *(other.slow for other in others)) if each is not None]
    texts = dict.fromkeys([*own.troubles, *(text for other in others for text in other.troubles)])
    return own._replace(
        rows=sorted([*rows, *there], key=lambda row: row.rank),
        slow=max(slow, key=lambda each: (each[0] >= 0, each[1]), default=None),
        troubles=list(texts),
    )


class OtherNodes:
    """Reads the views of the other machines' launchers, as long as it is asked.

    If other programs than fastcoll's launcher have started the job, there are none, and the view says so.
    """

    def __init__(self, job: RunningJob) -> None:
        self._awaited = {peer.rank for peer in job.unseen() if job.whereabouts(peer) == ELSEWHERE}
        self._until = time.monotonic() + _FIRST_SECONDS
        self._last: dict[int, tuple[bytes, float]] = {}  # by launcher: its last view, and when it has changed
        self._store: TCPStore | None = None
        self._trouble = ""
        if not self._awaited:
            return
        if (found := launchers_of(job.first.process.pid)) is None:
            self._trouble = _NO_LAUNCHERS
            return
        address, environment = found
        for name in _CONNECTION_SETTINGS:
            os.environ.pop(name, None)
            if (value := environment.get(name.encode())) is not None:
                os.environ[name] = os.fsdecode(value)
        config.forget()
        try:
            self._store = client_of("FASTCOLL_LAUNCHERS", address, _STORE_SECONDS)
        except FastcollError as error:
            self._give_up(error)

    def __enter__(self) -> OtherNodes:
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def add_to(self, own: View) -> View:
        """Return this machine's view with the ranks of the others."""
        others = []
        for text in self._read():
            with suppress(ValueError):
                others.append(decode(text))
        view = merged(own, others)
        return view._replace(troubles=[*view.troubles, self._trouble]) if self._trouble else view

    def are_late(self, view: View) -> bool:
        """Return whether a view lacks ranks of other machines that may soon be read."""
        shown = {row.rank for row in view.rows if row.state}
        return self._store is not None and time.monotonic() < self._until and not self._awaited <= shown

    def _read(self) -> list[bytes]:
        """Ask the launchers to go on, and return their last views."""
        if self._store is None:
            return []
        try:
            self._store.add(ASKED, 1)
            numbers = range(self._store.add(NODES, 0))
            texts = self._store.peek([view_key(number) for number in numbers]) if numbers else []
        except StoreError as error:
            self._give_up(error)
            return []
        now = time.monotonic()
        for number, text in zip(numbers, texts, strict=True):
            if text is None:
                self._last.pop(number, None)
            elif number not in self._last or self._last[number][0] != text:
                self._last[number] = text, now
        return [text for text, changed in self._last.values() if now - changed < _STALE_SECONDS]

    def _give_up(self, error: FastcollError) -> None:
        self._trouble = f"the ranks of other machines are not shown: {error}"
        self.__exit__()
