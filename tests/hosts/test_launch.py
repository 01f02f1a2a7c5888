"""Launchers on several hosts: ranks find one another, and a failure on one host ends the others.

launch/test_restarts.py has launchers that join, leave and are killed; rendezvous/test_detect.py has all variables.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from hosts.network import Network
from hosts.nodes import LIMIT, SECRET, Node, await_line, finish, launched, output_of, ranks_on, until

Join = Callable[..., Network]
Script = Callable[[str], list[str]]

MEET = """
import os, fastcoll as dist
from fastcoll.rendezvous import meet
meeting = meet("env://", -1, -1, 200, "")
meeting.store.set(f"host/{meeting.rank}", os.uname().nodename)
hosts = [meeting.store.get(f"host/{rank}").decode() for rank in range(meeting.world_size)]
print(meeting.rank, os.environ["LOCAL_RANK"], os.environ["GROUP_RANK"], *hosts, flush=True)
meeting.store.add("done", 1)
while meeting.rank == 0 and meeting.store.add("done", 0) < meeting.world_size:
    pass
meeting.close(0)
"""
JOIN = "import fastcoll as dist\nprint('here', flush=True)\ndist.init_process_group(timeout=600)"
LIST = "cat /proc/[0-9]*/cmdline | tr '\\0' ' '; true"  # a process may end meanwhile
WAIT = "import time\nprint('here', flush=True)\ntime.sleep(600)"
# The named rank waits for a file, and then runs the code after it.
ON_SIGN = """
import os, signal, sys, time
print("here", flush=True)
while os.environ["RANK"] not in sys.argv[2] or not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


def await_ranks(nodes: Sequence[Node], each: int) -> None:
    """Wait until all ranks, `each` on every host, have printed that they have joined."""
    for node in nodes:
        for rank in range(each * node.host.index, each * (node.host.index + 1)):
            await_line(node, f"[{rank}] here", nodes)


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], list[str]]:
    """Write the program that every rank runs."""

    def write(text: str) -> list[str]:
        (tmp_path / "script.py").write_text(text)
        return [str(tmp_path / "script.py")]

    return write


@pytest.fixture
def own_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the user's own secret, because no other is given."""
    monkeypatch.delenv("FASTCOLL_SECRET", raising=False)


def run(
    network: Network, ranks: int, program: Sequence[str], **options: object
) -> list[tuple[int, str, str]]:
    """Return exit code, output and stderr of each host's launcher."""
    with launched(network, ranks, program, **{"env": SECRET, **options}) as nodes:  # type: ignore[arg-type]
        finish(nodes)
        return [(node.code or 0, node.out, node.err) for node in nodes]


def test_ranks_of_two_hosts_meet_over_ipv6(join_hosts: Join, script: Script) -> None:
    network = join_hosts(2, own_pids=True)
    done = run(network, 2, script(MEET), address=network.hosts[0].addresses6[0])
    assert [code for code, _, _ in done] == [0] * 2, done
    hosts = "host0 host0 host1 host1"
    for node, (_, out, err) in enumerate(done):
        lines = [f"[{rank}] {rank} {rank % 2} {node} {hosts}" for rank in (2 * node, 2 * node + 1)]
        assert sorted(out.splitlines()) == lines
        assert "secret" not in err


@pytest.mark.usefixtures("own_secret")
def test_hosts_with_different_homes_get_an_error(join_hosts: Join, script: Script, tmp_path: Path) -> None:
    """The connecting side fails; the serving side continues to wait, because any stranger could connect."""
    program = [sys.executable, *script(MEET)]
    choose = ["sh", "-c", 'XDG_CONFIG_HOME=$0/$(hostname) exec "$@"', str(tmp_path)]
    options = ["--no_python", "--nodes_port", "0"]
    with launched(join_hosts(2), 1, [*choose, *program], options=options) as nodes:
        assert nodes[1].wait_for_code() == 1, output_of(nodes)
        its = f"{tmp_path}/host1/fastcoll/secret"
        why = f"has another secret, and this process has the user's own, in {its}; give every"
        assert why in nodes[1].err
        dropped = r"dropped a connection from 10\.77\.0\.2: it refused this side's proof: .* give every rank"
        until(lambda: re.search(dropped, nodes[0].err), nodes)


@pytest.mark.usefixtures("own_secret")
def test_without_a_secret_one_warning_has_the_address(join_hosts: Join, script: Script) -> None:
    (_, _, first), (_, _, second) = run(join_hosts(2), 1, script(MEET), env={"FASTCOLL_INSECURE": "1"})
    launchers = [line for line in first.splitlines() if not line.startswith("[")]
    assert len(launchers) == 1
    assert re.search(r"listening on 10\.77\.0\.1:\d+ .*without a secret", launchers[0]), first
    assert "secret" not in second


@pytest.mark.parametrize(("victim", "others"), [(0, JOIN), (2, WAIT)], ids=["0-joining", "2-busy"])
def test_a_failed_rank_is_named_on_all_hosts(
    join_hosts: Join, script: Script, victim: int, others: str
) -> None:
    failing = f"import os\nif os.environ['GROUP_RANK'] == '{victim}':\n    raise SystemExit('no data')\n"
    with launched(join_hosts(3, own_pids=True), 1, script(failing + others), env=SECRET) as nodes:
        finish(nodes)
        assert [node.code for node in nodes] == [1, 1, 1], output_of(nodes)
        for node in nodes:
            where = "" if node.host.index == victim else "on another node "
            line = rf"fastcoll.launch: {where}rank {victim} \(pid \d+ on host{victim}\) failed first: exit code 1"
            assert len(re.findall(line, node.err)) == 1, output_of(nodes)


@pytest.mark.parametrize(
    ("last", "code", "text"),
    [
        (
            "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(600)",
            130,
            "the launcher on host host1 was ended: signal SIGINT",
        ),
        (
            "os.kill(os.getpid(), signal.SIGKILL)",
            137,
            r"rank 3 \(pid \d+ on host1\) failed first: signal SIGKILL",
        ),
    ],
    ids=["ctrl-c", "killed"],
)
def test_ctrl_c_or_a_death_on_one_host_ends_all_and_is_named(
    join_hosts: Join, script: Script, tmp_path: Path, last: str, code: int, text: str
) -> None:
    program = script(ON_SIGN + last)
    with launched(join_hosts(2), 2, [*program, str(tmp_path / "go"), "3"], env=SECRET) as nodes:
        await_ranks(nodes, 2)
        (tmp_path / "go").touch()
        finish(nodes)
        assert [node.code for node in nodes] == [code] * 2, output_of(nodes)
        assert re.search(f"fastcoll.launch: on another node {text}", nodes[0].err), output_of(nodes)
        assert code == 130 or re.search(f"fastcoll.launch: {text}", nodes[1].err), output_of(nodes)


@pytest.mark.long
def test_a_node_that_has_finished_affects_no_other(join_hosts: Join, script: Script, tmp_path: Path) -> None:
    text = "import os, sys, time\nwhile os.environ['RANK'] == '1' and not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    program = script(f"{text}\nprint('done')")
    with launched(join_hosts(2), 1, [*program, str(tmp_path / "go")], env=SECRET) as nodes:
        finish(nodes[:1])
        (tmp_path / "go").touch()
        finish(nodes)
        assert [(node.code, node.out[4:], node.err) for node in nodes] == [(0, "done\n", "")] * 2


@pytest.mark.long  # test_failures.py has, in short, launchers that do not reach one another, on node 0 and on others
@pytest.mark.parametrize("vanishes", [0, 1])
def test_a_failure_on_an_unreachable_host_ends_that_host(
    join_hosts: Join, script: Script, tmp_path: Path, vanishes: int
) -> None:
    program = script(ON_SIGN + f"sys.exit(os.environ['RANK'] == '{vanishes}')")
    network = join_hosts(2)
    with launched(network, 1, [*program, str(tmp_path / "go"), "01"], env=SECRET) as nodes:
        await_ranks(nodes, 1)
        network.cut(network.hosts[vanishes])
        (tmp_path / "go").touch()
        finish(nodes)
        assert [node.code for node in nodes] == [1 - vanishes, vanishes], output_of(nodes)


def test_launchers_do_not_meet_if_disabled(join_hosts: Join, script: Script) -> None:
    program = script("import os\nos.system('ss -ltnH')")
    for code, out, _ in run(join_hosts(2), 1, program, options=["--nodes_port", "0"]):
        assert (code, out) == (0, "")


@pytest.mark.timed
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_launcher_ends_all_within_two_seconds(join_hosts: Join, script: Script, victim: int) -> None:
    """No rank is in a call, so only launchers can detect it."""
    with launched(join_hosts(3, own_pids=True), 2, script(WAIT), env=SECRET) as nodes:
        await_ranks(nodes, 2)
        others = [node for node in nodes if node.host.index != victim]
        started = time.monotonic()
        nodes[victim].end()
        finish(others)
        for node in nodes:
            while "script.py" in (listed := node.host.namespace.run("sh", "-c", LIST)):
                assert time.monotonic() - started < LIMIT, listed
        assert time.monotonic() - started < 2
        assert [node.code for node in others] == [1, 1], output_of(nodes)
        for node in others:
            assert f"on another node the launcher of node {victim} (" in node.err, output_of(nodes)
            assert "ended unexpectedly" in node.err


# ---- without a launcher of ours -------------------------------------------------------------------------------

SUM = """
import numpy as np, fastcoll as dist
dist.init_process_group(timeout=200)
x = np.array([2.0 ** dist.get_rank()])
dist.all_reduce(x)
print(dist.get_rank(), x[0])
dist.destroy_process_group()
"""


def slurm(rank: int) -> dict[str, str]:
    """Return srun's variables for a rank, with two ranks on each of two nodes. They name no port."""
    job = "JOB_ID=77 STEP_ID=0 JOB_NAME=train STEP_NODELIST=host[0-1] JOB_NUM_NODES=2 STEP_NUM_NODES=2"
    task = f"PROCID={rank} LOCALID={rank % 2} NTASKS=4 STEP_NUM_TASKS=4"
    return {f"SLURM_{name}": value for name, value in (each.split("=") for each in f"{job} {task}".split())}


def test_ranks_of_srun_meet_with_the_secret_of_a_home_that_their_hosts_share(join_hosts: Join) -> None:
    one, two = join_hosts(2, own_pids=True)
    with ranks_on([one, one, two, two], ["-c", SUM], slurm) as ranks:
        finish(ranks)
        found = [(each.code, each.out) for each in ranks]
        assert found == [(0, f"{rank} 15.0\n") for rank in range(4)], output_of(ranks)


# ---- generations ----------------------------------------------------------------------------------------------

TRAIN = """
import os, sys, time
import numpy as np
import fastcoll as dist
dist.init_process_group(timeout=200)
x = np.ones(1)
dist.all_reduce(x)
print(f"{dist.get_rank()} in {x[0]:.0f}", flush=True)
while x[0] < 1e6:
    x[0] = 2e6 * os.path.exists(sys.argv[1])
    dist.all_reduce(x)
    time.sleep(0.01)
dist.destroy_process_group()
"""


@pytest.mark.long  # the others detect it by a call that fails after some 10 s
def test_a_host_that_is_cut_off_is_left_out(join_hosts: Join, script: Script, tmp_path: Path) -> None:
    network = join_hosts(3, own_pids=True)
    options = [
        "--nnodes=1:3",
        "--max-restarts=1",
        "--monitor-interval=0.05",
        "--grace=0.5",
        "--rdzv-backend=c10d",
    ]
    options += ["--rdzv-conf=last_call_timeout=100", f"--rdzv-endpoint={network.hosts[0].address}:29400"]
    with launched(network, 1, [*script(TRAIN), str(tmp_path / "go")], env=SECRET, options=options) as nodes:
        await_line(nodes[0], " in 3\n", nodes)
        network.cut(network.hosts[2])
        await_line(nodes[0], " in 2\n", nodes)
        (tmp_path / "go").touch()
        finish(nodes)
        assert [node.code for node in nodes] == [0, 0, 1], output_of(nodes)
        assert "the launcher that leads the job ended unexpectedly, or is unreachable" in nodes[2].err
