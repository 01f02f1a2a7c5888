"""The script for a machine with a GPU, run on one without: its steps, its report and its limits."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import gpu_machine
import pytest
from gpu_machine import ANY, FAILED, GPU, NO_GPU, NO_TIME, OUT_OF_TIME, PASSED, REHEARSED, Machine, Step
from programs import until


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide a GPU that this machine may have."""
    monkeypatch.setattr(gpu_machine, "has_gpu", lambda python, environ: False)


@pytest.fixture
def machine(tmp_path: Path, without_gpu: None) -> Machine:
    folder = tmp_path / "work"
    folder.mkdir()
    return Machine(tmp_path, None, folder, 600.0, True)


def python(name: str, code: str, needs: str = ANY, seconds: float = 60.0, **more: Any) -> Step:
    return Step(name, "a check", ("{python}", "-c", code), seconds, needs, **more)


def test_every_step_has_a_result_and_later_steps_run_after_a_failure(
    machine: Machine, tmp_path: Path
) -> None:
    machine.take(python("fails", "print('the <reason>\\x1b'); raise SystemExit(3)"))
    machine.take(python("hangs", "import time; print('begun', flush=True); time.sleep(600)", seconds=1.0))
    machine.take(python("needs one", "pass", GPU))
    machine.take(python("rehearses", "import sys; print(sys.argv[1:])", GPU, rehearsal=("--host",)))
    machine.take(python("passes", "import os; print(os.environ['WHERE'])", environ={"WHERE": "here"}))
    machine.seconds = 0.0
    machine.take(python("is late", "pass"))
    results = [FAILED, OUT_OF_TIME, NO_GPU, REHEARSED, PASSED, NO_TIME]
    assert [done.result for done in machine.done] == results
    assert [done.output.strip() for done in machine.done][2:5] == ["", "['--host']", "here"]
    # A step that takes too long may report before it is killed.
    assert machine.done[1].output.startswith("begun\n")
    assert machine.done[1].output.endswith("KeyboardInterrupt\n")
    report = json.loads((tmp_path / "report.json").read_text())
    assert [step["result"] for step in report["steps"]] == results
    cases = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [[child.tag for child in case] for case in cases] == [
        ["failure"], ["failure"], ["skipped"], ["skipped"], [], ["skipped"]
    ]  # fmt: skip
    text = (tmp_path / "report.md").read_text()
    assert "# Without a GPU" in text
    assert "| needs one | a check | no GPU | 0.0 |" in text
    assert "the <reason>" in text
    assert "here" in (tmp_path / "log.txt").read_text()


def test_processes_that_a_step_leaves_behind_are_ended(machine: Machine) -> None:
    code = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE)"
    machine.take(python("leaves", f"{code}; print(p.pid, flush=True); import os; os._exit(0)"))
    state = Path(f"/proc/{machine.done[0].output.strip()}/stat")

    def has_ended() -> bool:
        return not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX"

    until(has_ended)


def test_wheels_are_installed_beside_the_packages_of_this_python(tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    name = "carried-1.0"
    with zipfile.ZipFile(wheels / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "from numpy import pi\n")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    made = gpu_machine.environment_with(wheels, tmp_path)
    assert made != sys.executable
    code, output = gpu_machine.run([made, "-c", "import carried; print(carried.pi)"], {}, tmp_path, 60.0)
    assert (code, output[:4]) == (0, "3.14")


def test_each_step_can_be_named_and_its_files_exist() -> None:
    steps = gpu_machine.steps(tiny=False)
    names = [step.name for step in steps]
    assert len(names) > 30
    files = {word.partition("::")[0] for step in steps for word in step.command if word.startswith("/")}
    assert all(Path(file).exists() for file in files), files
    # The most important: something moves, and nothing blocks.
    assert names.index("smoke, shm, 2 ranks") < names.index("bandwidth") < names.index("conformance: cupy")


@pytest.mark.usefixtures("without_gpu")
@pytest.mark.limit(600)  # a cold cache on a busy machine
@pytest.mark.long
def test_what_can_run_without_a_gpu_runs(tmp_path: Path) -> None:
    """The cases run with arrays of the host, and conformance with a fake GPU."""
    words = ["--out", str(tmp_path), "--rehearse", "--tiny", "--steps"]
    some = "facts|smoke, shm|load_module|killed, shm|structured|refused|conformance: torch|cores: shm, 4|bandwidth"
    code = gpu_machine.main([*words, some])
    results = {
        step["step"]: step["result"] for step in json.loads((tmp_path / "report.json").read_text())["steps"]
    }
    assert code == 0, (tmp_path / "log.txt").read_text()
    assert results == {
        "facts": PASSED,
        "smoke, shm, 2 ranks": REHEARSED,
        "load_module, shm, 2 ranks": REHEARSED,
        "killed, shm, 3 ranks": REHEARSED,
        "conformance: torch": REHEARSED,
        "bandwidth": NO_GPU,
        "refused, nccl, 2 ranks": REHEARSED,
        "structured, shm, 2 ranks": REHEARSED,
        "all_reduce on cores: shm, 4 ranks": PASSED,
    }
