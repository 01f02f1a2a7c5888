"""`pytest` without arguments omits slow tests in both of its processes, and counts them in the last line."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = """
    import pytest

    def test_short():
        pass

    @pytest.mark.long
    def test_long():
        assert False

    @pytest.mark.timed
    def test_of_a_promised_time():
        assert False

    @pytest.mark.ranks(2, 4, init=False)
    def test_of_ranks(world_size):
        assert world_size == 2
"""


@pytest.mark.long
@pytest.mark.parametrize("options", [[], ["-p", "no:xdist"]], ids=["two processes", "one"])
def test_the_last_line_counts_what_is_left_out(options: list[str], pytester: pytest.Pytester) -> None:
    here = Path(__file__).parent
    pytester.makeini(f"[pytest]\npythonpath = {here}\ntestpaths = tests")
    tests = pytester.mkdir("tests")
    (tests / "conftest.py").write_text((here / "conftest.py").read_text())
    pytester.makepyfile(**{"tests/test_them": TESTS})
    result = pytester.runpytest_subprocess("-p", "no:hypothesispytest", *options)
    result.assert_outcomes(passed=2, deselected=0 if not options else 3)
    assert result.outlines[-1] == "left out: 2 that take long (pytest tests); 1 of promised times (-m timed)"
