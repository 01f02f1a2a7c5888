"""A host without free ports for listening and dialing, or without memory for sockets."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts.network import Network

WITHOUT_PORTS = """
import contextlib, socket, sys
from fastcoll.errors import ResourceError
from fastcoll.rendezvous import dials
from fastcoll.system.interfaces import Interface
from fastcoll.rendezvous.listener import Listener
from fastcoll.store import TCPStore, tcp_store
from fastcoll.store.opening import ConnectionKind, Endpoint

here = sys.argv[1]
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
    file.write("40000 40001")
store = TCPStore(here, 5000, is_master=True, timeout=60)  # its own client has one port
with contextlib.ExitStack() as stack:
    taken = stack.enter_context(socket.create_server((here, 0)))

    def dial():
        endpoint = Endpoint(bytes(16), 0, 2, b"", False)
        made = dials.Dial(endpoint, 1, "rank 1", ConnectionKind.DATA, 0, Interface("eth0", here), (here, 5000))
        dials.dial_all([made], lambda: None)

    dials.PORTLESS_SECONDS = tcp_store.PORTLESS_SECONDS = 0.2
    for what in (
        lambda: TCPStore(here, 0, is_master=True, timeout=60),
        lambda: Listener([Interface("eth0", here)]),
        lambda: TCPStore(here, 5000, timeout=60),
        dial,
    ):
        try:
            what()
        except ResourceError as error:
            print(error)
    # Until the port is free, which is soon after the first attempt has found none.
    dials.PORTLESS_SECONDS = tcp_store.PORTLESS_SECONDS = 600
    attempt = tcp_store.portless

    def attempted(*args):
        lacking = attempt(*args)
        taken.close()
        return lacking

    tcp_store.portless = attempted
    with TCPStore(here, 5000, timeout=60) as client:
        client.set("went", "on")
    print(store.get("went").decode())
"""


def test_a_rank_without_a_free_port_says_so(join_hosts: Callable[..., Network]) -> None:
    (host,) = join_hosts(1)
    env = [f"PYTHONPATH={':'.join(sys.path)}", "FASTCOLL_SECRET=of this test"]
    output = host.namespace.run("env", *env, sys.executable, "-c", WITHOUT_PORTS, host.address).splitlines()
    why = "no port is free on host0, of those from 40000 to 40001 (net.ipv4.ip_local_port_range); end what uses them"
    assert [line.partition(":")[0] for line in output] == [
        f"the store cannot listen on {host.address}",
        f"cannot listen on {host.address} (eth0)",
        f"cannot connect to the store at {host.address}",
        f"cannot connect to {host.address}",
        "on",
    ]
    assert all(why in line for line in output[:-1])


def test_a_kernel_that_is_short_of_memory_is_waited_for() -> None:
    program = Path(__file__).with_name("short_of_memory.py")
    words = [sys.executable, "-m", "fastcoll.launch", "-n", "2", str(program)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    if "seccomp" in done.stderr:
        pytest.skip(f"seccomp hands no calls to another thread here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    failed = re.search(r"rank 1: (\d+) failed", done.stdout)
    assert failed, done.stdout + done.stderr
    assert int(failed[1]) > 10
