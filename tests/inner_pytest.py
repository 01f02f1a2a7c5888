"""One run of pytest on many small files, for tests of the plugin: one process for all of them."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest

_OUTCOME = re.compile(r"^(\S+\.py)::(.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b", re.MULTILINE)
_HEADER = re.compile(
    r"^_{3,} (?:ERROR at setup of |ERROR collecting )?(.+?)(?:\[n\d+\])? _{3,}$", re.MULTILINE
)


class InnerRun:
    """The outcomes of each file, and the text for each failed test."""

    def __init__(self, folder: Path, files: dict[str, str], *options: str) -> None:
        self.folder = folder
        # Without this file pytest searches all parent folders, in which other jobs of this machine may have one.
        for name, text in {"pytest.ini": "[pytest]", **files}.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        own = ["-v", "-rs", "-p", "no:hypothesispytest", "--continue-on-collection-errors"]
        command = [sys.executable, "-m", "pytest", *own, f"--basetemp={folder / 'tmp'}", *options]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
        self.code = done.returncode
        self.text = done.stdout + done.stderr
        print(self.text)  # pytest shows it with failures
        # With CI in the environment the summary repeats complete messages.
        self._shown, _, self._summary = done.stdout.partition("short test summary info")

    def outcomes(self, file: str) -> Counter[str]:
        """Return the number of tests of a file by outcome."""
        return Counter(how.lower() for name, _, how in _OUTCOME.findall(self._shown) if name == file)

    def said(self, test: str) -> pytest.LineMatcher:
        """Return the text for a failed test, or a file that could not be collected."""
        headers = list(_HEADER.finditer(self._shown))
        ends = [*(header.start() for header in headers[1:]), len(self._shown)]
        texts = {one[1]: self._shown[one.end() : end] for one, end in zip(headers, ends, strict=True)}
        assert test in texts, f"nothing is said of {test}"
        return pytest.LineMatcher(texts[test].splitlines())

    def summary(self) -> pytest.LineMatcher:
        """Return the last lines, with the reasons of skips."""
        return pytest.LineMatcher(self._summary.splitlines())
