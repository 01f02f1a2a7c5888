"""Run a command on hosts within this machine: `on_hosts.py HOSTS each WORD...` or `on_hosts.py HOSTS first WORD...`.

The hosts are namespaces (tests/hosts/network.py), so this needs root and iproute2. `each` runs the command on every
host, with the host's number in place of {node}. `first` runs it on host 0, with {agent} as a program that runs a
command on another host, as ssh does. The exit code is the first that is not 0, or 0.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

from hosts.network import Host, Network, lacking


def main(words: Sequence[str]) -> int:
    """Run the command; return its exit code."""
    hosts, where, *command = words
    if reason := lacking():
        print(reason, file=sys.stderr)
        return 2
    with TemporaryDirectory(prefix="fastcoll-agent-") as folder, Network(int(hosts)) as network:
        agent = Path(folder, "agent")
        agent.write_text(agent_of(network))
        agent.chmod(0o700)
        started = []
        for host in network.hosts if where == "each" else network.hosts[:1]:
            filled = [
                word.replace("{node}", str(host.index)).replace("{agent}", str(agent)) for word in command
            ]
            started.append(host.start(filled))
        codes = [each.process.wait() for each in started]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


def agent_of(network: Iterable[Host]) -> str:
    """Return the script of a program that runs a command on another host: `agent [OPTION...] HOST WORD...`."""
    lines = ["#!/bin/sh", 'while [ "${1#-}" != "$1" ]; do shift; done', "host=$1", "shift", "case $host in"]
    lines += [f'{host.name}) exec {shlex.join(host.enter())} sh -c "$*" ;;' for host in network]
    return "\n".join([*lines, '*) echo "there is no host $host" >&2; exit 255 ;;', "esac", ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
