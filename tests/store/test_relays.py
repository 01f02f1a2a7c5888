"""Relays between two jobs of one user: refused if they lead to another job, allowed if they only forward."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
from soak.proxy import Proxy

from fastcoll import StoreError
from fastcoll.store import TCPStore
from fastcoll.store.opening import (
    OPENING_SIZE,
    ConnectionKind,
    Dialing,
    Endpoint,
    Opening,
    OpeningResult,
    Role,
)
from fastcoll.store.secret import PROOF_SIZE
from fastcoll.store.store_protocol import StoreServer
from fastcoll.system import address
from fastcoll.system.address import name_of, place_of


@pytest.fixture(autouse=True)
def own_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use the user's own secret, in a home of this test's, because no other is given."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.mark.parametrize("has_secret", [False, True])
def test_a_rank_is_relayed_to_another_port_only_if_the_job_has_a_secret(
    monkeypatch: pytest.MonkeyPatch, has_secret: bool
) -> None:
    """Without one, the store at the end of a relay may be that of another job of the user."""
    monkeypatch.setenv("FASTCOLL_SECRET", "of this job" * has_secret)
    cure = (
        r"has another address: .* forwards .*user's own.*; give this job one of its own: .* FASTCOLL_SECRET"
    )
    with TCPStore("127.0.0.1", 0, is_master=True) as store:
        relay = Proxy(("127.0.0.1", store.port))
        try:
            with nullcontext() if has_secret else pytest.raises(StoreError, match=cure):
                TCPStore("127.0.0.1", relay.port).close()
        finally:
            relay.close()
        with TCPStore("127.0.0.1", store.port) as direct:
            assert direct.add("came", 1) == 1


@pytest.mark.parametrize(
    ("dialed", "called", "result"),
    [
        (("10.0.0.1", 500), ("a", 500), OpeningResult.WELCOME),
        (("10.0.0.1", 500), ("another of its names", 500), OpeningResult.WELCOME),
        (("::ffff:10.0.0.1", 500), ("another of its names", 500), OpeningResult.WELCOME),
        (("192.168.0.9", 500), ("A", 500), OpeningResult.WELCOME),  # the address is translated in between
        (("192.168.0.9", 500), ("b", 500), OpeningResult.PLACE),
        (("10.0.0.1", 501), ("a", 501), OpeningResult.PLACE),
        (("127.0.0.1", 500), ("localhost", 500), OpeningResult.PLACE),
    ],
)
def test_which_clients_a_store_accepts(
    dialed: tuple[str, int], called: tuple[str, int], result: OpeningResult
) -> None:
    """The store is "a" at 10.0.0.1:500, with the secret of all of the user's jobs."""
    server = StoreServer(b"the user's own", 1.0, name_of("a", 500))
    server.connect(1, 0.0, lambda: place_of("10.0.0.1", 500))
    client = Endpoint(name_of(*called), 1, 2, b"the user's own", True)
    server.receive(1, Dialing(client, 0, ConnectionKind.STORE, 0, place_of(*dialed)).opening, 0.0)
    ((_, answer),) = server.outbox
    assert Opening.from_bytes(answer[:OPENING_SIZE], Role.ANSWERS).result is result
    assert len(answer) == OPENING_SIZE + (PROOF_SIZE if result is OpeningResult.WELCOME else 0)


def test_loopback_differs_from_machine_to_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def here() -> list[bytes]:
        own = [name_of(host, 500) for host in ("localhost", "127.0.0.1", "::1", "0.0.0.0")]
        return [*own, place_of("127.0.0.1", 500), place_of("::1", 500)]

    mine, elsewhere = here(), place_of("10.0.0.1", 500)
    monkeypatch.setattr(address, "network_here", lambda: "another machine")
    assert not set(mine) & set(here())
    assert place_of("10.0.0.1", 500) == elsewhere
