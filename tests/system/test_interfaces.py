"""The choice of a group's addresses: by the variable, or by the route to the master."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from fastcoll import config
from fastcoll.errors import UsageError
from fastcoll.store import HashStore, PrefixStore
from fastcoll.store.views import local_address
from fastcoll.system import interfaces
from fastcoll.system.interfaces import (
    Interface,
    Wanted,
    address_for_others,
    choose,
    choose_here,
    interfaces_here,
    parse,
    parse_inet6,
)
from fastcoll.system.processes import Member

LO, ETH0, ETH1, DOCKER = (
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5"),
    Interface("eth1", "10.1.0.5"),
    Interface("docker0", "172.17.0.1"),
)
LO6, ETH06, IB6 = Interface("lo", "::1"), Interface("eth0", "fd00::5"), Interface("ib0", "fd01::5")
HERE = [LO, ETH0, ETH1, DOCKER, LO6, ETH06, IB6]


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No interface is named by a setting, and this machine has those of HERE."""
    monkeypatch.setattr(interfaces, "interfaces_here", lambda: HERE)
    for name in ("FASTCOLL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    config.forget()
    yield
    config.forget()


@pytest.mark.parametrize("family", [None, 4, 6])
def test_loopback_is_refused_between_hosts(monkeypatch: pytest.MonkeyPatch, family: int | None) -> None:
    monkeypatch.setenv("FASTCOLL_SOCKET_IFNAME", "eth0,lo")
    here = Member.here(0, 2, "tcp")
    near = [here, replace(here, rank=1)]
    assert [each.name for each in choose_here("", near, family)] == ["eth0", "lo"]
    far = replace(here, rank=1, boot_id="another", host="b")
    why = r"_IFNAME names lo, .* rank 1 \(pid \d+ on b\) is on another host .* eth0 10\.0\.0\.5"
    with pytest.raises(UsageError, match=why):
        choose_here("", [here, far], family)


@pytest.mark.parametrize("text", [",", "eth0,", "eth0,eth0", "eth0,^eth1", "^", "^^eth0"])
def test_names_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match=r"^FASTCOLL_SOCKET_IFNAME=.* cannot be understood"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "by_route", "family", "expected"),
    [
        ("", "10.1.0.5", None, [ETH1]),
        ("", "10.1.0.5", 4, [ETH1]),
        ("", "fd00::5", None, [ETH06]),
        ("", "10.0.0.5", 6, [ETH06]),  # the group has settled on IPv6
        ("", "127.0.0.1", 6, [LO6]),
        ("", "10.9.9.9", None, [Interface("", "10.9.9.9")]),  # a second address of some interface
        ("eth1", "10.0.0.5", None, [ETH1]),
        ("eth1, eth0", "10.0.0.5", None, [ETH1, ETH0]),
        ("eth1,eth0", "fd00::5", None, [ETH1, ETH0]),  # eth1 has no IPv6
        ("ib0", "10.0.0.5", None, [IB6]),
        ("eth0", "127.0.0.1", 6, [ETH06]),
        ("^docker0", "10.0.0.5", None, [ETH0]),
        ("^eth0,docker0", "10.0.0.5", None, [ETH1]),
        ("^lo", "127.0.0.1", None, [ETH0]),
        ("^nothing", "127.0.0.1", None, [LO]),
    ],
)
def test_choice(text: str, by_route: str, family: int | None, expected: list[Interface]) -> None:
    assert choose(parse(text), HERE, by_route, family) == expected


@pytest.mark.parametrize(
    ("text", "family", "message"),
    [
        ("eth0,eth7", None, r"GLOO_SOCKET_IFNAME names eth7, but .* there are lo 127\.0\.0\.1, eth0 10"),
        *((text, 4, "no IPv4 address to use") for text in ("ib0", "eth0,ib0")),
        *((text, 6, "no IPv6 address to use") for text in ("eth1", "^eth0,lo,ib0")),
    ],
)
def test_no_such_interface_or_no_address_of_the_groups_family(
    text: str, family: int | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        choose(parse(text, "GLOO_SOCKET_IFNAME"), HERE, "10.0.0.5", family)


def test_the_settings_come_before_gloos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert interfaces.wanted_here() == Wanted(("eth1",), False, "GLOO_SOCKET_IFNAME")
    monkeypatch.setenv("FASTCOLL_SOCKET_IFNAME", "^eth1")
    config.forget()
    assert interfaces.wanted_here() == Wanted(("eth1",), True, "FASTCOLL_SOCKET_IFNAME")


def test_ranks_of_one_network_use_loopback() -> None:
    me = Member.here(0, 2, "tcp")
    for family, expected in ((None, LO), (6, LO6)):
        assert choose_here("", [me, replace(me, rank=1)], family) == [expected]


@pytest.mark.parametrize("change", [{"boot_id": "another"}, {"network": "net:[1]"}])
@pytest.mark.parametrize(
    ("local", "default", "expected"),
    [
        ("10.1.0.5", "10.0.0.5", ETH1),
        ("127.0.0.1", "10.0.0.5", ETH0),  # the master itself, or its name means loopback there
        ("", "10.0.0.5", ETH0),  # not a TCP store
        ("fe80::1", "10.0.0.5", ETH0),
        ("", "127.0.0.1", ETH0),  # no default route: the first interface
    ],
)
def test_ranks_of_several_networks_use_the_route_to_the_master(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], local: str, default: str, expected: Interface
) -> None:
    monkeypatch.setattr(interfaces, "own_address", lambda: default)
    me = Member.here(0, 2, "tcp")
    store = HashStore()
    store.local_address = local  # as a TCPStore has
    wrapped = PrefixStore("a", PrefixStore("b", store))
    assert choose_here(local_address(wrapped), [me, replace(me, rank=1, **change)], None) == [expected]


def test_a_machine_without_a_default_route_has_an_address_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interfaces, "own_address", lambda: "127.0.0.1")
    assert address_for_others() == ETH0.address
    monkeypatch.setenv("FASTCOLL_SOCKET_IFNAME", "eth1")
    config.forget()
    assert address_for_others() == ETH1.address


def test_the_kernels_table_of_ipv6_addresses() -> None:
    table = (
        "fd000000000000000000000000000002 04 40 00 82     eth0\n"
        "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert parse_inet6(table) == [Interface("eth0", "fd00::2"), Interface("lo", "::1")]


def test_this_machine_has_a_loopback() -> None:
    assert LO in interfaces_here()
