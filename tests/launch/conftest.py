"""Fixtures: a script in a new directory, and launchers that run it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from launch.launching import COMMAND, HEAD, LIMIT, Launch, Script, Started, Starter


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Write script.py into the current directory."""
    for name in ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "FASTCOLL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return lambda text, head=HEAD: (tmp_path / "script.py").write_text(head + text) and None


@pytest.fixture
def launch(script: Script) -> Launch:
    """Run a launcher with some options, among them script.py, and return when it has ended."""

    def run(
        text: str, *options: str, command: list[str] = COMMAND, head: str = HEAD, **more: Any
    ) -> subprocess.CompletedProcess[str]:
        script(text, head)
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        return subprocess.run([*command, *options], text=True, timeout=LIMIT, **streams)

    return run


@pytest.fixture
def start(script: Script) -> Iterator[Starter]:
    """Start a launcher on script.py; launchers that still run at the end are killed."""
    with ExitStack() as stack:

        def begin(*options: str, program: str = "script.py", command: list[str] = COMMAND) -> Started:
            process = subprocess.Popen(
                [*command, *options, program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            stack.callback(lambda: process.stdout.closed or process.communicate())
            stack.callback(process.kill)
            return process

        yield begin
