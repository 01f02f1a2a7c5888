"""A Slurm of two hosts: munged, slurmctld and slurmd on hosts that are namespaces, from Debian's packages.

All files, munge's key and socket included, are in one folder, so a Slurm installation of this machine is not touched.
The daemons and their children run in the hosts' process namespaces and end with these.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from hosts.network import Host, Network, lacking
from hosts.nodes import Node

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "squeue")
_CPUS = 4  # of each node, on any machine
_ANSWER_SECONDS = 180.0
_LOOK_SECONDS = 0.05
_CONFIG = """
ClusterName=fastcoll
SlurmctldHost={first.name}({first.address})
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdParameters=config_overrides
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=1,batch_sched_delay=0
SelectType=select/linear
SwitchType=switch/none
{nodes}
PartitionName=all Nodes={names} Default=YES State=UP OverSubscribe=FORCE:4
"""


def slurm_lacking() -> str | None:
    """Return why no Slurm can run here, with the cure; None: it can."""
    if missing := [name for name in _PROGRAMS if shutil.which(name) is None]:
        return f"Slurm is not installed (no {', '.join(missing)}): apt-get install slurm-wlm munge"
    return lacking()


class Cluster:
    """A running Slurm, made by `slurm_cluster`."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.hosts = network.hosts
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        # As in an activated environment: the programs are those installed with this Python.
        self._environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> Node:
        """Start a command on the first host, in the current directory."""
        return Node(self.hosts[0], words, {**self._environment, **(env or {})})

    def ask(self, *words: str) -> str:
        """Return a short command's output on the first host, even if it fails, as while the daemons start."""
        command = [*self.hosts[0].enter(), *words]
        return subprocess.run(command, env=self._environment, capture_output=True, text=True).stdout

    def await_answer(self, answer: str, *words: str) -> None:
        """Wait until a command prints `answer`; AssertionError: it has not within the time limit."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (found := self.ask(*words).strip()) != answer:
            assert time.monotonic() < deadline, f"{' '.join(words)} prints {found!r} and not {answer!r}"
            time.sleep(_LOOK_SECONDS)

    def daemon(self, host: Host, log: Path, *words: str) -> subprocess.Popen[bytes]:
        """Start a daemon, which ends with its host."""
        with log.open("a") as file:
            return host.start(words, self._environment, stdout=file, stderr=file).process


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[Cluster]:
    """Yield a Slurm of two hosts that accepts jobs; its files and logs are in `folder`."""
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with Network(2, own_pids=True) as network:
            _configure(network.hosts, folder)
            cluster, first = Cluster(network, folder), network.hosts[0]
            for host, words in _daemons(network.hosts, folder):
                daemons.append(cluster.daemon(host, folder / f"{words[0]}.{host.name}.log", *words))
                while words[0] == "munged" and not (folder / "munge.socket").exists():
                    assert daemons[-1].poll() is None, (folder / f"munged.{first.name}.log").read_text()
                    time.sleep(_LOOK_SECONDS)
            cluster.await_answer("idle 2", "sinfo", "--noheader", "--format=%T %D")
            yield cluster
    finally:
        for each in daemons:
            each.wait(_ANSWER_SECONDS)  # it ends with its host


def _configure(hosts: Sequence[Host], folder: Path) -> None:
    nodes = [
        f"NodeName={host.name} NodeAddr={host.address} CPUs={_CPUS} RealMemory=500 State=UNKNOWN"
        for host in hosts
    ]
    names = ",".join(host.name for host in hosts)
    text = _CONFIG.format(first=hosts[0], folder=folder, nodes="\n".join(nodes), names=names)
    (folder / "slurm.conf").write_text(text)
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(secrets.token_bytes(64))
    (folder / "munge.key").chmod(0o400)


def _daemons(hosts: Sequence[Host], folder: Path) -> Iterator[tuple[Host, list[str]]]:
    """Return each daemon's host and command. The hosts share one munged through its socket in the file system."""
    files = [("socket", "munge.socket"), ("key-file", "munge.key"), ("pid-file", "munged.pid")]
    files += [("log-file", "munged.log"), ("seed-file", "munged.seed")]
    options = [f"--{option}={folder / name}" for option, name in files]
    yield hosts[0], ["munged", "--foreground", "--force", *options]
    yield hosts[0], ["slurmctld", "-D"]
    for host in hosts:
        yield host, ["slurmd", "-D", "-N", host.name]
