"""Metrics of real jobs: exact numbers, deaths, restarts, ports; and a real Prometheus that scrapes them."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import programs
import pytest
from programs import python, until
from prometheus_client.parser import text_string_to_metric_families

from fastcoll.launch.nodes import free_port
from fastcoll.metrics.totals import Totals

LAUNCH = (sys.executable, "-m", "fastcoll.launch", "--no-prefix", "--nproc-per-node", "2")
HEAD = """
import os, signal, sys, time
import numpy as np
import fastcoll as dist
def stay(name="go"):
    while not os.path.exists(name): time.sleep(0.01)
def done(name):
    open(name, "w").close()
restarts, rank = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), int(os.environ.get("RANK", "-1"))
x = np.ones(1000)
"""
CALLS = """
dist.init_process_group()
for _ in range(5): dist.all_reduce(x)
dist.broadcast(x, 0)
short = dist.new_group([0, 1])
dist.all_reduce(x[:10], group=short)
dist.destroy_process_group(short)
for _ in range(2): dist.barrier()
done(f"ready{rank}")
stay()
dist.destroy_process_group()
"""
EXACT = {
    ("WORLD", "all_reduce"): 5, ("WORLD", "broadcast"): 1, ("WORLD", "barrier"): 2, ("group0", "all_reduce"): 1,
}  # fmt: skip
BYTES = {("WORLD", "all_reduce"): 40_000, ("WORLD", "broadcast"): 8000, ("group0", "all_reduce"): 80}

Values = dict[tuple[str, ...], float]
Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, port: int) -> Iterator[Start]:
    """Start a command on a script; what still runs at the end is killed."""
    monkeypatch.chdir(tmp_path)
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "FASTCOLL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as started:

        def begin(text: str, *command: str, **environ: str) -> subprocess.Popen[str]:
            script = tmp_path / "script.py"
            script.write_text(HEAD + text)
            env = {**os.environ, "FASTCOLL_METRICS": str(port), **environ}
            process = subprocess.Popen([*command, str(script)], env=env, stderr=subprocess.PIPE, text=True)
            started.callback(lambda: process.communicate())
            started.callback(process.kill)
            return process

        yield begin


def scrape(port: int) -> Callable[[str], Values]:
    """Return a function that returns the samples of a name, by the values of their labels in alphabetical order."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=")
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = [sample for family in families for sample in family.samples]
    return lambda name: {
        tuple(value for _, value in sorted(sample.labels.items())): sample.value
        for sample in samples
        if sample.name == f"fastcoll_{name}"
    }


def is_open(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def ready(job: subprocess.Popen[str], *names: str) -> None:
    """Wait until a job has made these files; fail if it ends before, or with where its ranks are if it hangs."""

    def are_made() -> bool:
        return all(map(os.path.exists, names))

    until(lambda: are_made() or job.poll() is not None, lambda: status(job))
    assert are_made(), job.communicate()[1]


def status(job: subprocess.Popen[str]) -> str:
    """Return where the ranks of a job are."""
    return subprocess.run(
        [sys.executable, "-m", "fastcoll", "status", str(job.pid)], capture_output=True, text=True
    ).stdout


def end(process: subprocess.Popen[str]) -> str:
    """Let a job end, and return its stderr."""
    Path("go").touch()
    _, text = process.communicate(timeout=programs.LIMIT)
    assert process.returncode == 0, text
    return text


def of_both_ranks(values: dict[tuple[str, str], int]) -> Values:
    return {(*names, str(rank)): value for names, value in values.items() for rank in range(2)}


# ---- exact numbers -----------------------------------------------------------------------------------------


def test_a_launcher_serves_exact_numbers_and_the_port_is_closed_after_the_job(
    start: Start, port: int
) -> None:
    job = start(CALLS, *LAUNCH)
    ready(job, "ready0", "ready1")
    found = scrape(port)
    assert found("calls_total") == of_both_ranks(EXACT)
    assert found("bytes_total") == of_both_ranks(BYTES)
    assert found("ranks") == {(): 2}
    assert found("restarts_total") == {(): 0}
    assert found("errors_total") == found("failed_ranks_total") == {}
    end(job)
    assert not is_open(port)


def test_without_a_launcher_the_first_rank_serves_until_it_leaves(start: Start, port: int) -> None:
    forks = """
parent = os.getpid()
if not os.fork():
    done(f"forked{rank}")
    while os.getppid() == parent: time.sleep(0.01)
    os._exit(0)
dist.destroy_process_group()
"""
    text = CALLS.replace("dist.destroy_process_group()\n", forks) + "done(f'left{rank}')\nstay('over')\n"
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    jobs = [start(text, sys.executable, RANK=str(rank), **common) for rank in range(2)]
    for rank in range(2):
        ready(jobs[rank], f"ready{rank}")
    found = until(lambda: (values := scrape(port))("ranks") == {(): 2} and values)
    assert found("calls_total") == of_both_ranks(EXACT)
    assert found("restarts_total") == {}, "only a launcher knows them"
    Path("go").touch()
    for rank in range(2):
        ready(jobs[rank], f"left{rank}", f"forked{rank}")
    assert not is_open(port), "the process goes on, and so does a child that it has forked in the job"
    Path("over").touch()
    for job in jobs:
        end(job)


@pytest.mark.long
def test_the_caller_of_run_serves(start: Start, port: int) -> None:
    text = """
def main():
    for _ in range(3): dist.all_reduce(x)
    dist.barrier()
    if dist.get_rank() == 0: done("ready")
    stay()
dist.run(main, ranks=2)
done("left")
stay("over")
"""
    job = start(text, sys.executable)
    ready(job, "ready")
    assert scrape(port)("calls_total")["WORLD", "all_reduce", "1"] == 3
    Path("go").touch()
    ready(job, "left")
    assert not is_open(port)
    Path("over").touch()
    end(job)


def test_a_rank_that_waits_has_waiting_time_and_the_late_rank_has_none(start: Start, port: int) -> None:
    text = """
dist.init_process_group()
dist.barrier()
if rank:
    done("late")
    stay()
dist.barrier()
dist.destroy_process_group()
"""
    job = start(text, *LAUNCH)
    ready(job, "late")
    before = scrape(port)("waiting_seconds_total")  # in the first barrier each may have waited
    key, late = ("WORLD", "0"), ("WORLD", "1")
    after = until(lambda: (now := scrape(port)("waiting_seconds_total"))[key] > before[key] + 0.3 and now)
    assert after[late] == before[late]
    end(job)


def test_the_calls_of_a_rank_that_has_ended_at_once_are_counted(start: Start, port: int) -> None:
    text = """
dist.init_process_group()
dist.all_reduce(x)
dist.barrier()
if rank: os._exit(0)
stay()
dist.destroy_process_group()
"""
    job = start(text, *LAUNCH)
    key = "WORLD", "barrier", "1"
    until(lambda: is_open(port) and scrape(port)("calls_total").get(key))
    found = until(lambda: (values := scrape(port))("ranks") == {(): 1} and values)
    calls = found("calls_total")
    assert (calls["WORLD", "all_reduce", "1"], calls[key]) == (1, 1)
    end(job)


# ---- failures and restarts -----------------------------------------------------------------------------------


def test_a_killed_rank_keeps_its_numbers_and_is_counted_with_the_error_and_the_joiner(
    start: Start, port: int
) -> None:
    text = """
if rank < 0:  # the joiner
    stay()
    sys.exit()
dist.init_process_group()
for _ in range(4): dist.all_reduce(x)
dist.barrier()
done(f"ready{rank}")
if rank == 1:
    stay("kill")
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except dist.GroupError:
    done("failed")
stay()
"""
    job = start(text, *LAUNCH, "--min_ranks", "1", "--max-restarts", "1")
    ready(job, "ready0", "ready1")
    before = scrape(port)("calls_total")
    assert before["WORLD", "all_reduce", "1"] == 4
    Path("kill").touch()
    ready(job, "failed")
    found = until(lambda: (values := scrape(port))("restarts_total") == {(): 1} and values)
    assert found("failed_ranks_total") == {("SIGKILL",): 1}
    assert found("errors_total") == {("PeerDiedError", "WORLD", "0"): 1}
    assert found("ranks") == {(): 1}
    assert found("calls_total") == before
    end(job)


@pytest.mark.long
def test_counters_go_on_when_all_ranks_restart(start: Start, port: int) -> None:
    text = """
dist.init_process_group()
for _ in range(4): dist.all_reduce(x)
if restarts == 0 and rank == 0: sys.exit(3)
dist.barrier()
done(f"ready{rank}")
stay()
dist.destroy_process_group()
"""
    job = start(text, *LAUNCH, "--max-restarts", "1")
    ready(job, "ready0", "ready1")
    found = scrape(port)
    assert found("restarts_total") == {(): 1}
    assert found("failed_ranks_total")["3",] == 1
    assert found("calls_total")["WORLD", "all_reduce", "0"] == 8
    assert found("calls_total")["WORLD", "barrier", "0"] == 1
    end(job)


def test_ctrl_c_closes_the_port(start: Start, port: int) -> None:
    job = start("stay()", *LAUNCH)
    until(lambda: is_open(port))
    job.send_signal(2)
    job.communicate(timeout=programs.LIMIT)
    assert job.returncode == 130
    assert not is_open(port)


# ---- refusals ----------------------------------------------------------------------------------------------

INIT = "import fastcoll; fastcoll.init_process_group()"


@pytest.fixture(params=["launcher", "rank"])
def refused(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[object], str]:
    """Return a function that starts a launcher or a rank with a value of FASTCOLL_METRICS, and returns its stderr."""
    (tmp_path / "script.py").write_text("raise AssertionError('no rank may start')")
    command = ["-m", "fastcoll.launch", "script.py"] if request.param == "launcher" else ["-c", INIT]

    def start(value: object) -> str:
        done = python(*command, environ={"FASTCOLL_METRICS": str(value)}, cwd=tmp_path)
        assert done.returncode == 1, done
        assert "no rank may start" not in done.stderr
        return done.stderr

    return start


def test_a_port_that_is_taken_is_an_error_with_the_variable_the_port_and_its_holder(
    refused: Callable[[object], str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = refused(port)
    assert f"FASTCOLL_METRICS=127.0.0.1:{port}: no metrics can be served there: " in text
    assert f"port {port} is in use by pid {os.getpid()} (" in text


@pytest.mark.parametrize("value", ["x", "0", "65536", "host:", "1.5"])
def test_a_wrong_value_is_an_error_that_names_the_variable(
    value: str, refused: Callable[[object], str]
) -> None:
    assert f"FASTCOLL_METRICS={value!r} cannot be used (must be a port from 1 to 65535" in refused(value)


def test_without_prometheus_client_the_error_has_the_extra(tmp_path: Path, port: int) -> None:
    (tmp_path / "prometheus_client.py").write_text("raise ImportError")
    done = python("-c", INIT, environ={"FASTCOLL_METRICS": str(port)}, cwd=tmp_path)
    assert (
        "FASTCOLL_METRICS needs prometheus_client, which is not installed: pip install '.[metrics]'"
        in done.stderr
    )


# ---- Prometheus ----------------------------------------------------------------------------------------------


def ask(port: int, query: str) -> list[dict[str, Any]]:
    """Return the result of a query to Prometheus' HTTP API; empty while the server starts."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={query}", timeout=60) as answer:
            return json.load(answer)["data"]["result"]
    except OSError:  # a refused connection, or status 503
        return []


@pytest.mark.long
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_prometheus_scrapes_a_job(start: Start, port: int, tmp_path: Path) -> None:
    job, its = start(CALLS, *LAUNCH), free_port()
    ready(job, "ready0", "ready1")
    (tmp_path / "prometheus.yml").write_text(
        "scrape_configs:\n"
        "  - {job_name: fastcoll, scrape_interval: 200ms, scrape_timeout: 200ms,\n"
        f"     static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}\n"
    )
    words = (
        "--config.file=prometheus.yml",
        f"--web.listen-address=127.0.0.1:{its}",
        "--storage.tsdb.path=data",
    )
    with subprocess.Popen(["prometheus", *words], stderr=subprocess.PIPE, text=True) as server:
        try:
            found = until(lambda: ask(its, "fastcoll_calls_total"))
            values = {
                (each["metric"]["group"], each["metric"]["operation"], each["metric"]["rank"]): float(
                    each["value"][1]
                )
                for each in found
            }
            assert values == of_both_ranks(EXACT)
            (total,) = ask(its, "sum(fastcoll_bytes_total)")
            assert float(total["value"][1]) == 2 * sum(BYTES.values())
        finally:
            server.kill()
            server.communicate()
    end(job)


def test_a_rank_that_a_real_time_signal_ends_is_counted() -> None:
    totals = Totals()
    for code in (3, -9, -40):
        totals.failed(code)
    (exits,) = [each for each in totals.metrics(is_launcher=True) if each.name == "fastcoll_failed_ranks"]
    assert [sample.labels["exit"] for sample in exits.samples] == ["3", "SIGKILL", "signal 40"]
