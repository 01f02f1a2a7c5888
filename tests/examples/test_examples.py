"""The examples, run by the commands in their first lines."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name, *words, ranks=None, options=()):
    """Return the sorted lines that an example prints, without the launcher's prefixes; `options` are the launcher's."""
    launch = [] if ranks is None else ["-m", "fastcoll.launch", "-n", str(ranks), *options]
    command = [sys.executable, *launch, str(EXAMPLES / name), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return sorted(re.sub(r"^\[(new )?\d+\] ", "", line) for line in done.stdout.splitlines())


def test_every_example_is_tested():
    source = Path(__file__).read_text()
    ours = [path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("torch_")]
    assert [name for name in ours if f'"{name}"' not in source] == []


@pytest.mark.long
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


@pytest.mark.long  # tests/elastic also kills and replaces ranks
def test_elastic_digits_learns_the_same_whichever_rank_is_killed(tmp_path):
    def learn(*words, **launch):
        result, *changes = run("elastic_digits.py", *words, "--epochs", 5, "--save", file, **launch)
        assert "115 steps" in result
        assert float(re.search(r"([\d.]+)%", result)[1]) > 90
        return np.load(file), changes

    file = tmp_path / "weights.npy"
    alone, _ = learn()
    fewer, changes = learn("--kill", "2:30", "3:70", ranks=4, options=["--min_ranks", "2"])
    assert changes == ["now 2 ranks, 3 before", "now 3 ranks, 4 before"]
    # The result is the same whether or not the joiner joins in time.
    replaced, changes = learn("--kill", "1:30", ranks=4, options=["--min_ranks", "2", "--max_restarts", "1"])
    assert "now 3 ranks, 4 before" in changes
    for weights in (fewer, replaced):
        np.testing.assert_allclose(weights, alone, rtol=0, atol=1e-9)


def test_the_tour_is_the_program_of_its_page():
    page = (EXAMPLES.parent / "docs" / "tour.md").read_text()
    shown = "".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    program = (EXAMPLES / "tour.py").read_text().split('"""\n', 1)[1]
    assert [line for line in program.splitlines() if line] == [line for line in shown.splitlines() if line]
    assert run("tour.py", ranks=2) == [f"I am rank {rank} of 2, on the backend shm" for rank in (0, 1)]


@pytest.mark.long  # kernels/test_custom.py tests reductions of the user
def test_argmax():
    lines = run("argmax.py", ranks=4)
    assert len(lines) == 5
    assert lines == run("argmax.py")
