"""In CI a test that skips fails, unless tests/conftest.py lists the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = """
    import pytest

    def test_listed():
        pytest.skip("3 ranks need more than 1 hosts")

    def test_other():
        pytest.skip("no time today")

    @pytest.mark.ranks(1, init=False)
    def test_of_ranks():
        pytest.skip("no ranks today")

    @pytest.mark.skipif(True, reason="not on Sundays")
    def test_marked():
        pass

    @pytest.mark.xfail(strict=True)
    def test_expected_to_fail():
        assert False
"""
MODULE = "import pytest; pytest.importorskip('nothing_of_this_name', reason='no module today')"


@pytest.mark.long
@pytest.mark.parametrize(
    ("ci", "options", "skipped", "failed"),
    [("true", [], 1, 4), ("", ["--no-skips"], 0, 5)],
)
def test_a_skip_that_is_not_listed_fails(
    ci: str,
    options: list[str],
    skipped: int,
    failed: int,
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CI", ci)
    here = Path(__file__).parent
    pytester.makeini(f"[pytest]\npythonpath = {here}")
    pytester.makeconftest((here / "conftest.py").read_text())
    pytester.makepyfile(test_them=TESTS, test_module=MODULE)
    result = pytester.runpytest_subprocess(
        "--continue-on-collection-errors", "-p", "no:hypothesispytest", *options
    )
    outcomes = result.parseoutcomes()
    assert outcomes.pop("xfailed") == 1
    assert outcomes.get("skipped", 0) == skipped
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == failed
    result.stdout.fnmatch_lines(
        ["*test_other was skipped in CI, and tests/conftest.py does not list the reason: no time*"]
    )
