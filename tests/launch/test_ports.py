"""Choosing a port that nobody uses."""

from __future__ import annotations

import socket

import pytest

from fastcoll.errors import ResourceError
from fastcoll.launch import nodes as ports

TABLE = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 1 1 0
   1: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 0:0 0:0 0 0 0 2 1 0
"""


def test_ports_in_use() -> None:
    assert ports.ports_in_use(TABLE) == {8080, 22}
    assert ports.ports_in_use("") == set()


def test_a_free_port_can_be_bound() -> None:
    port = ports.free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert port < ports._first_outgoing_port()


def test_ports_in_use_are_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {23453, 23456, 18456}  # 18453, at which the store of a job at 23453 would be, is not
    monkeypatch.setattr(ports, "ports_in_use", lambda table: set(range(65536)) - free)
    monkeypatch.setattr(ports, "_LOWEST", 23450)
    monkeypatch.setattr(ports, "_first_outgoing_port", lambda: 23460)
    assert ports.free_port() == 23456


def test_no_port_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "ports_in_use", lambda table: set(range(65536)))
    with pytest.raises(ResourceError, match=r"no free TCP port in 10000.*65536 are in use"):
        ports.free_port()
