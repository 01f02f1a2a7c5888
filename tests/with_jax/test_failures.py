"""Errors in JAX's programs: wrong calls, calls that differ, dead and late ranks, Ctrl-C, the end of a program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytest

import fastcoll as dist

SECONDS = 180  # for a process that imports JAX, on a loaded machine


@pytest.mark.ranks(2, timeout=120)
def test_wrong_calls(rank, world_size, jax, fj):
    token = fj.create_token()
    cases = (
        (lambda x: fj.all_reduce(x, "sum"), dist.UsageError, "op is 'sum'"),
        (lambda x: fj.broadcast(x, src=2), dist.UsageError, "src is 2; the group WORLD has ranks 0..1"),
        (lambda x: fj.send(x, dst=1 - rank, tag=-1), dist.UsageError, "tag is -1"),
        (lambda x: fj.all_reduce(x, group="all"), dist.UsageError, "group is 'all'"),
        (lambda x: fj.reduce_scatter(x), dist.ArrayError, r"shape \(3,\); give one of shape \(2, ...\)"),
        (lambda x: fj.all_to_all(x[0]), dist.ArrayError, r"x is of shape \(\)"),
        (lambda x: fj.all_gather(jax.random.key(1)), dist.ArrayError, "jax.random.key_data"),
        (lambda x: fj.all_gather(x.astype("int4")), dist.ArrayError, "less than a byte"),
        (lambda x: fj.all_reduce(x, token=x), dist.UsageError, "token is an array of float32"),
        (lambda x: fj.all_reduce({"a": x}), dist.UsageError, r"of type dict; give an array.*jax\.tree\.map"),
        (lambda x: fj.broadcast([x, x], 0), dist.UsageError, "of type list; give an array"),
        (lambda x: fj.send(None, 1 - rank), dist.UsageError, "of type NoneType; give an array"),
        (
            lambda x: jax.vmap(lambda t: fj.all_reduce(x, token=t)[0])(token[None]),
            dist.UsageError,
            "in_axes=None",
        ),
    )
    for wrong, kind, text in cases:
        for mode in (lambda f: f, jax.jit):
            with pytest.raises(kind, match=text):
                mode(wrong)(jax.numpy.ones(3))
    assert float(fj.all_reduce(jax.numpy.float32(1))) == 2


@pytest.mark.ranks(1, timeout=120)
def test_an_error_caught_in_compiled_code_does_not_reach_a_later_program(rank, world_size, jax, fj):
    @numba.njit
    def caught(x):
        try:
            dist.send(x, 5)
        except Exception:
            return True
        return False

    jax.config.update("jax_cpu_enable_async_dispatch", False)  # on the thread that has caught the error
    assert caught(np.ones(1))
    assert float(fj.all_reduce(jax.numpy.float32(3))) == 3
    jax.config.update("jax_cpu_enable_async_dispatch", True)


@pytest.mark.ranks(2, timeout=120)
@pytest.mark.parametrize("with_token", [False, True])
def test_calls_that_differ(rank, world_size, jax, fj, with_token):
    def total(x):
        return fj.all_reduce(x, token=fj.create_token())[0] if with_token else fj.all_reduce(x)

    def exchange(x):
        return fj.sendrecv(x, x, dst=1 - rank, src=1 - rank)

    jitted, posted = jax.jit(total), jax.jit(exchange)
    for _ in range(2):
        for program, text in (
            (jitted, "the ranks' calls"),
            (posted, ".*3 elements.*4 elements|.*4 el.*3 el"),
        ):
            with pytest.raises(
                (jax.errors.JaxRuntimeError, ValueError), match=f"INVALID_ARGUMENT: .*MismatchError: {text}"
            ):
                program(jax.numpy.ones(3 + rank)).block_until_ready()
            dist.barrier()
        assert jitted(jax.numpy.ones(2)).tolist() == [2, 2]
        assert posted(jax.numpy.ones(2)).tolist() == [1, 1]
    dist.barrier()


@pytest.mark.ranks(2, timeout=120)
def test_a_rank_that_does_not_call(rank, world_size, jax, fj):
    from fastcoll.jax.own_groups import copy_of

    group = dist.new_group()
    jitted = jax.jit(lambda x: fj.all_reduce(x, group=group))
    assert float(jitted(np.float32(1))) == 2
    if rank == 0:
        copy_of(group).timeout = 0.5
        with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"DEADLINE_EXCEEDED: .*rank 1"):
            jitted(np.float32(1)).block_until_ready()
    dist.barrier()


@pytest.mark.ranks(2, timeout=120)
def test_a_group_is_left_after_running_programs(rank, world_size, jax, fj):
    group = dist.new_group()
    slow = jax.jit(lambda x: fj.all_reduce(jax.lax.fori_loop(0, 500, lambda _, v: v + 1.0, x), group=group))
    x = np.full(400_000, rank, np.float32)  # JAX runs smaller programs at once
    slow(x)
    y = slow(x)
    slow(x)  # without a reference to the result
    dist.destroy_process_group(group)
    assert float(y[0]) == 1001


@pytest.mark.ranks(2, timeout=120)
def test_a_program_continues_while_another_thread_makes_a_group(rank, world_size, jax, fj):
    """Rank 0 begins to make the group before its first program reaches its call, and rank 1 after that call."""
    group = dist.new_group()
    fj.barrier()
    slow = jax.jit(lambda x: fj.all_reduce(jax.lax.fori_loop(0, 500, lambda _, v: v + 1.0, x)))
    y = slow(np.full(400_000, rank, np.float32))  # JAX runs smaller programs at once
    if rank == 1:
        y.block_until_ready()
    fj.barrier(group=group)
    assert float(y[0]) == 1001


@pytest.mark.ranks(2, timeout=120)
def test_threads_make_copies_of_their_groups_in_any_order(rank, world_size, jax, fj, monkeypatch):
    from fastcoll.jax.own_groups import copy_of
    from fastcoll.job.world import current_job

    def make_group(*arguments):
        has_begun.set()
        return make(*arguments)

    pair = [dist.new_group(timeout=20), dist.new_group(timeout=20)]
    job, has_begun = current_job(), threading.Event()
    make = job.make_group
    monkeypatch.setattr(job, "make_group", make_group)
    with ThreadPoolExecutor(1) as pool:
        made = pool.submit(copy_of, pair[rank])
        assert has_begun.wait(60)
        assert copy_of(pair[1 - rank]).name == f"{pair[1 - rank].name} (JAX)"
        assert made.result().name == f"{pair[rank].name} (JAX)"


def script(tmp_path, text):
    """Start two processes that run a script, which has `fj`, `jax`, `dist`, `rank` and `x`."""
    head = f"""
        import os, signal, sys
        import jax
        import fastcoll as dist
        dist.init_process_group(init_method="file://{tmp_path}/store", rank=int(sys.argv[1]), world_size=2, timeout=60)
        import fastcoll.jax as fj
        rank = dist.get_rank()
        x = jax.numpy.ones(3) + rank
        total = jax.jit(lambda x: fj.all_reduce(x, token=fj.create_token())[0])
        ordered = jax.jit(fj.all_reduce)
        total(x).block_until_ready(), ordered(x).block_until_ready()
        print("ready", flush=True)
    """
    code = textwrap.dedent(head) + textwrap.dedent(text)
    options = {**dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), "text": True}
    return [subprocess.Popen([sys.executable, "-c", code, str(rank)], **options) for rank in range(2)]


def ends(processes):
    """Return (exit code, output, errors) of each process."""
    reported = []
    for process in processes:
        try:
            out, errors = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            raise
        reported.append((process.returncode, out.replace("ready\n", ""), errors))
    return reported


@pytest.mark.long
def test_the_exit_of_a_process_waits_for_running_programs(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    text = """
        slow = jax.jit(lambda x: fj.all_reduce(jax.lax.fori_loop(0, 3_000_000, lambda _, v: v + 1.0, x[0])))
        late = jax.jit(lambda x: fj.all_reduce(x * 2, token=fj.create_token())[0])
        late(x), late(x).block_until_ready()
        for _ in range(3 * rank):
            slow(x), late(x), late(x)
        if rank == 0:
            for _ in range(3):
                slow(x).block_until_ready()
                late(x).block_until_ready()
                last = late(x).block_until_ready()
            print(last.tolist())
    """
    (first, second) = ends(script(tmp_path, text))
    assert first[:2] == (0, "[6.0, 6.0, 6.0]\n"), first
    assert second[:2] == (0, ""), second
    assert "Traceback" not in first[2] + second[2]


@pytest.mark.long
def test_an_exception_ends_a_rank_while_programs_run(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    text = """
        y = total(x)
        if rank == 1:
            y.block_until_ready()
            ordered(x), total(x)
            raise ValueError("the end")
        try:
            y.block_until_ready()
            total(x).block_until_ready()
            for _ in range(3):
                ordered(x).block_until_ready()
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            print(error)
    """
    (first, second) = ends(script(tmp_path, text))
    assert first[0] == 0, first
    assert "ValueError: the end" in first[1], first
    assert second[0] == 1, second
    assert second[2].rstrip().endswith("ValueError: the end"), second


@pytest.mark.long  # test_conformance_jax.py has every call, with a token
def test_a_killed_rank(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    text = """
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        for _ in range(2):
            try:
                ordered(x).block_until_ready()
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                print(error)
    """
    (first, second) = ends(script(tmp_path, text))
    assert second[0] == -signal.SIGKILL
    lines = first[1].splitlines()
    assert first[0] == 0, first
    assert len(lines) == 2, first
    for line in lines:
        assert re.match(r"UNAVAILABLE: fastcoll.errors.PeerDiedError: .*rank 1", line), first


@pytest.mark.long
def test_ctrl_c_if_jax_runs_programs_on_the_callers_thread(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    text = """
        jax.config.update("jax_cpu_enable_async_dispatch", False)

        def interrupt(*_):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt("by a signal")

        if rank == 0:
            signal.signal(signal.SIGINT, interrupt)
            try:
                print("waiting", flush=True)
                total(x).block_until_ready()
            except (KeyboardInterrupt, ValueError, jax.errors.JaxRuntimeError) as error:
                text = f"{type(error).__name__}: {error}"
                print("interrupted" if "KeyboardInterrupt" in text else text, flush=True)
            os._exit(0)
        sys.stdin.readline()
    """
    processes = script(tmp_path, text)
    first, second = processes
    while first.stdout.readline() != "waiting\n":
        assert first.poll() is None
    first.send_signal(signal.SIGINT)  # before the call, or in it
    first.wait(SECONDS)
    second.kill()
    (one, _) = ends(processes)
    assert one[:2] == (0, "interrupted\n"), one


@pytest.mark.long
def test_other_releases_are_refused(monkeypatch):
    jax = pytest.importorskip("jax", reason="pip install jax")
    for release in ("0.8.3", "0.11.0"):
        code = f"import jax; jax.__version__ = {release!r}\ntry: import fastcoll.jax\nexcept ImportError as e: print(e)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS)
        assert f"this is {release}: pip install 'jax==0.10.*', or a newer fastcoll" in done.stdout, done
    assert jax.__version__.startswith(("0.9.", "0.10."))


@pytest.mark.ranks(1)
def test_another_layout_of_frames_is_refused(jax, monkeypatch):
    from fastcoll.jax import xla_frames

    xla_frames._prepare.cache_clear()
    monkeypatch.setattr(xla_frames, "_EXPECTED", [176, *xla_frames._EXPECTED[1:]])
    with pytest.raises(dist.UnavailableError, match="does not lay out call frames as"):
        xla_frames.ready()
    monkeypatch.undo()
    xla_frames.ready()


@pytest.mark.long
def test_programs_that_jax_keeps_on_disk(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    code = """if True:
        import sys, jax
        jax.config.update("jax_compilation_cache_dir", sys.argv[1])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        import fastcoll as dist, fastcoll.jax as fj
        hits = []
        jax.monitoring.register_event_listener(lambda name, **_: "cache_hits" in name and hits.append(name))
        with dist.world():
            f = jax.jit(lambda x: fj.all_gather(fj.all_reduce(x, token=fj.create_token())[0] + 1))
            for _ in range(2):
                print(f(jax.numpy.arange(3.0)).tolist())
            print(len(hits) > 0)
    """
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [sys.executable, "-c", code, str(tmp_path)]
    for hit in ("False", "True"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
        assert done.stdout.splitlines() == ["[[1.0, 2.0, 3.0]]"] * 2 + [hit], done
