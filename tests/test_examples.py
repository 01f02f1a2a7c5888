"""The examples, run as their first lines say."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastcoll.launch.ports import free_port

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name, *words, ranks=None):
    """The lines that an example prints, without the launcher's prefixes, sorted."""
    launch = [] if ranks is None else ["-m", "fastcoll.launch", "-n", str(ranks)]
    command = [sys.executable, *launch, str(EXAMPLES / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return sorted(re.sub(r"^\[\d+\] ", "", line) for line in done.stdout.splitlines())


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    ours = [path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("torch_")]
    assert [name for name in ours if f'"{name}"' not in source] == []


def test_digits_learns_the_same_with_any_number_of_ranks(tmp_path):
    weights = {}
    for ranks in (None, 2, 4):
        file = tmp_path / f"{ranks}.npy"
        (accuracy, checksum) = run("digits.py", "--save", file, ranks=ranks)
        assert accuracy.startswith(f"{ranks or 1} ranks")
        assert float(re.search(r"([\d.]+)%", accuracy)[1]) > 95
        assert checksum.startswith("sum of squared weights")
        weights[ranks] = np.load(file)
    for ranks in (2, 4):
        np.testing.assert_allclose(weights[ranks], weights[None], rtol=0, atol=1e-5)


def test_tour_spawn(monkeypatch):
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    # Four processes write to one pipe, so lines may run into one another.
    said = re.findall(r"Worker \d ready", "".join(run("tour_spawn.py")))
    assert sorted(said) == [f"Worker {rank} ready" for rank in range(4)]


@pytest.mark.parametrize("name", ["tour_send_recv.py", "tour_isend_irecv.py"])
def test_tour_messages(name):
    lines = run(name, ranks=2)
    assert "Received array:" in lines
    assert " [12. 13. 14. 15.]]" in lines


def test_tour_training():
    lines = run("tour_training.py", ranks=2)
    assert len(lines) == 2
    assert all(float(line.split()[-1]) < 0.01 for line in lines)
    assert len({line.partition(":")[2] for line in lines}) == 1


def test_tour_groups():
    assert run("tour_groups.py", ranks=4) == ["Rank 0: 48", "Rank 1: 48", "Rank 2: 48", "Rank 3: 64"]


def test_argmax():
    lines = run("argmax.py", ranks=4)
    assert len(lines) == 5
    assert lines == run("argmax.py")
