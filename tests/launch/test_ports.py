"""Choosing a free port."""

from __future__ import annotations

import os
import socket

import pytest

from fastcoll.errors import ResourceError
from fastcoll.launch import nodes as ports
from fastcoll.system.address import tcp_sockets


def test_sockets_are_seen() -> None:
    for address in ("127.0.0.1", "::1"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as listener:
            port, inode = listener.getsockname()[1], str(os.fstat(listener.fileno()).st_ino)
            assert (port, "0A", inode) in set(tcp_sockets())
        assert (port, "0A", inode) not in set(tcp_sockets())


def test_a_free_port_can_be_bound() -> None:
    port = ports.free_port()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", port))
    assert port < ports._first_outgoing_port()


def test_ports_in_use_are_not_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    # 18453, where the store of a job at 23453 would listen, is used
    used = set(range(65536)) - {23453, 23456, 18456}
    monkeypatch.setattr("fastcoll.system.address.tcp_sockets", lambda: [(port, "", "") for port in used])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ports, "_LOWEST", 23450)
        patch.setattr(ports, "_first_outgoing_port", lambda: 23460)
        assert ports.free_port() == 23456
    used |= set(range(65536))
    with pytest.raises(ResourceError, match=r"no free TCP port in 10000.*65536 are in use"):
        ports.free_port()


def test_several_ports_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastcoll.system.address.tcp_sockets", list)
    monkeypatch.setattr(ports, "_LOWEST", 23450)
    monkeypatch.setattr(ports, "_first_outgoing_port", lambda: 23458)
    assert sorted(ports.free_ports(8)) == list(range(23450, 23458))
    with pytest.raises(ResourceError, match="no free TCP port"):
        ports.free_ports(9)
