"""The types that mypy and pyright infer in a user's program: user_types.py has the expected ones."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fastcoll

ROOT = Path(__file__).parents[1]
USER = ROOT / "tests" / "user_types.py"


def check(*words: str, cwd: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long  # pyright checks the same program, as strictly, in a third of the time
def test_mypy(tmp_path: Path) -> None:
    """With all strict options, and without those for our own code; torch is skipped, as it takes half a minute."""
    config = tmp_path / "mypy.ini"
    config.write_text("[mypy]\nfollow_imports = silent\n[mypy-torch.*]\nfollow_imports = skip\n")
    check("mypy", "--strict", f"--config-file={config}", f"--cache-dir={tmp_path}", str(USER), cwd=ROOT)


@pytest.mark.long
def test_pyright(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(USER.read_text())
    settings = {
        "typeCheckingMode": "strict",
        "enableTypeIgnoreComments": False,
        "reportUnnecessaryTypeIgnoreComment": "error",
        "extraPaths": [str(ROOT)],
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    check("pyright", "--pythonpath", sys.executable, "--project", str(tmp_path), cwd=tmp_path)


def test_the_program_has_every_function_that_may_be_asynchronous() -> None:
    program = USER.read_text()
    for name in fastcoll.__all__:
        function = getattr(fastcoll, name)
        if inspect.isfunction(function) and "async_op" in inspect.signature(function).parameters:
            assert f"dist.{name}(" in program, name
