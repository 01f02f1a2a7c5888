"""Failpoints of compiled code: no code where they are off, and every action where they are on."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from fastcoll.compiler import compiling, machine_code
from fastcoll.failpoints import number_of
from fastcoll.kernels.failing import reached
from fastcoll.kernels.pyobjects import Index, integer

PLACE = number_of("shm.barrier.enter")


def passes(number: Index) -> int:
    if integer(number) > 5:
        reached(PLACE + integer(number))
    return integer(number)


def plain(number: Index) -> int:
    return integer(number)


def mapped(function):
    """Return the parts of a function's machine code that are mapped."""
    file = compiling.entry(function, False)
    found = machine_code._Object(file)
    sections = [found.sections[number] for number in found.offsets]
    return [file[section.offset : section.offset + section.size] for section in sections]


def test_a_failpoint_that_is_off_is_not_in_the_machine_code():
    assert mapped(passes) == mapped(plain)


SCRIPT = textwrap.dedent("""
    import os, signal, threading, time
    from fastcoll import failpoints
    from fastcoll.kernels.failing import reached
    from fastcoll.compiler.jit import entry, locked_entry

    NAME = "shm.barrier.enter"
    PLACE = failpoints.number_of(NAME)

    @entry
    def passes() -> int:
        reached(PLACE)
        return 7

    @locked_entry
    def passes_with_the_gil() -> int:
        reached(PLACE)
        return 7

    def arm(what, rank=0):
        failpoints.arm(failpoints.parse(f"{NAME}:{what}"), rank)

    def status_of(what):
        if (pid := os.fork()) == 0:
            arm(what)
            passes.call()
            os._exit(99)
        status = os.waitpid(pid, os.WUNTRACED)[1]
        if os.WIFSTOPPED(status):
            os.kill(pid, signal.SIGCONT)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 99
            return "stopped"
        return os.waitstatus_to_exitcode(status)

    assert passes.call() == passes_with_the_gil.call() == 7
    assert [status_of(what) for what in ("kill", "exit", "exit=5", "stop")] == [-9, 1, 5, "stopped"]
    assert [status_of("kill@2"), status_of("kill#1")] == [99, 99]

    def seconds(call):
        began = time.monotonic()
        call()
        return time.monotonic() - began

    arm("delay=1000@3")  # for which the first two do not wait
    passes.call()
    passes.call()
    arm("delay=0.05@2")
    passes.call()
    assert seconds(passes.call) >= 0.05
    arm("jitter=0.002")
    naps = set()
    for _ in range(20):
        passes.call()
        naps.add(failpoints._words[failpoints.ROW_WORDS * PLACE + failpoints.NAP + 1])
    assert len(naps) > 1 and max(naps) < 2_000_000

    def raises(call):
        try:
            call()
            for _ in range(1000): pass
        except failpoints.FailpointError:
            return True

    arm("raise@2")
    for call in (passes.call, passes_with_the_gil.call):
        arm("raise@2")
        assert not raises(call) and raises(call) and not raises(call)
    arm("raise")
    raised = []
    thread = threading.Thread(target=lambda: raised.append(raises(passes.call)))
    thread.start()
    thread.join()
    assert raised == [True]
    print("as it should be")
""")


@pytest.mark.long
def test_every_action_of_compiled_code():
    env = {**os.environ, "FASTCOLL_FAILPOINT": "shm.barrier.enter:delay=0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=600, env=env
    )
    assert (done.returncode, done.stdout) == (0, "as it should be\n"), done.stderr
