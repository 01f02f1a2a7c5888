"""A test that hangs fails after its limit, with the stacks of the processes that it has started."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = """
    import subprocess, sys, time
    import pytest
    from limits import Limits, unlimited

    @pytest.fixture
    def limits(pytestconfig):
        return next(each for each in pytestconfig.pluginmanager.get_plugins() if isinstance(each, Limits))

    def test_of_a_process_that_hangs(limits):
        program = "import time\\ndef is_stuck(): print(flush=True); time.sleep(1000)\\nis_stuck()"
        with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            limits.set_limit(0.1, again=100)

    @pytest.mark.limit(100)
    def test_of_another(limits):
        assert limits.sent[:2] == [100, 100]

    def test_of_a_block_outside_the_limit(limits):
        limits.set_limit(200, again=100)
        with unlimited():
            assert limits.sent[0] is None
        assert limits.sent[:2] == [200, 100]

    def test_that_hangs_itself(limits):
        limits.set_limit(0.1)
        while True:
            time.sleep(1)
"""


@pytest.mark.long
def test_a_test_that_hangs_shows_its_stacks(pytester: pytest.Pytester) -> None:
    here = Path(__file__).parent
    pytester.makeini(f"[pytest]\npythonpath = {here}")
    pytester.makeconftest((here / "conftest.py").read_text())
    pytester.makepyfile(TESTS)
    first = pytester.runpytest_subprocess("-k", "not itself")
    assert first.parseoutcomes() == {"passed": 2, "failed": 1, "deselected": 1}
    first.stdout.fnmatch_lines(["*exceeded its limit*", "* is_stuck (<string>:2)*"])
    second = pytester.runpytest_subprocess("-k", "itself")
    assert second.ret == -9
    second.stderr.fnmatch_lines(["*a test did not end*", "*test_that_hangs_itself (*"])


@pytest.mark.long
def test_a_run_in_two_processes_ends_after_one_of_them_has_died(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist")
    here = Path(__file__).parent
    pytester.makeini(f"[pytest]\npythonpath = {here}")
    pytester.makeconftest((here / "conftest.py").read_text())
    files = {f"test_{index}": "def test_that_passes(): pass" for index in range(6)}
    pytester.makepyfile(
        **files, test_last="import os, signal\ndef test_last(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    result = pytester.runpytest_subprocess("-n", "2", "--dist", "loadfile")
    result.assert_outcomes(passed=6, failed=1)
    result.stdout.fnmatch_lines(["worker 'gw*' crashed while running 'test_last.py::test_last'"])
