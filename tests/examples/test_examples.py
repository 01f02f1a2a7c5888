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


def saved(folder, name, *words, ranks):
    """Return the array that an example saves, and what it prints."""
    lines = run(name, *words, "--save", folder / "saved.npy", ranks=ranks)
    return np.load(folder / "saved.npy"), "\n".join(lines)


@pytest.mark.long
def test_digits_learns_the_same_with_any_number_of_ranks(tmp_path):
    weights = {}
    for ranks in (None, 2, 4):
        weights[ranks], text = saved(tmp_path, "digits.py", ranks=ranks)
        assert re.search(rf"^{ranks or 1} ranks.*\n*sum of squared weights", text, re.DOTALL)
        assert float(re.search(r"([\d.]+)%", text)[1]) > 95
    for ranks in (2, 4):
        np.testing.assert_allclose(weights[ranks], weights[None], rtol=0, atol=1e-5)


@pytest.mark.long  # tests/callers calls the same functions
def test_the_heated_plate_has_the_same_bits_with_any_number_of_ranks(tmp_path):
    plate, _ = saved(tmp_path, "compiled/heat.py", "--points", 30, ranks=None)
    hot = np.vstack([np.ones(32), plate, np.zeros(32)])
    means = (hot[:-2, 1:-1] + hot[2:, 1:-1] + hot[1:-1, :-2] + hot[1:-1, 2:]) / 4
    assert np.abs(means - plate[:, 1:-1]).max() < 1e-4, "it is the fixed point of its step"
    for ranks in (2, 3):
        again, text = saved(tmp_path, "compiled/heat.py", "--points", 30, ranks=ranks)
        assert f"{ranks} ranks, " in text
        np.testing.assert_array_equal(again, plate)


@pytest.mark.long  # tests/with_jax tests derivatives through collectives
def test_logistic_regression_has_the_same_result_with_any_number_of_ranks(tmp_path):
    pytest.importorskip("jax", reason="pip install jax")
    weights = {}
    for ranks in (None, 3):
        weights[ranks], text = saved(tmp_path, "compiled/logistic_regression.py", ranks=ranks)
        said = re.search(rf"{ranks or 1} ranks: ([\d.]+)% right, loss 0.6931 to ([\d.]+)", text)
        assert said, text
        assert float(said[1]) > 90
    np.testing.assert_allclose(weights[3], weights[None], rtol=0, atol=1e-3)


@pytest.mark.long  # tests/elastic also kills and replaces ranks
def test_elastic_digits_learns_the_same_whichever_rank_is_killed(tmp_path):
    def learn(*words, **launch):
        result, *changes = run("elastic_digits.py", *words, "--epochs", 3, "--save", file, **launch)
        assert "69 steps" in result
        assert float(re.search(r"([\d.]+)%", result)[1]) > 85
        return np.load(file), changes

    file = tmp_path / "weights.npy"
    alone, _ = learn()
    # The result is the same whether or not the joiner joins in time.
    options = ["--min_ranks", "2", "--max_restarts", "1"]
    weights, changes = learn("--kill", "2:15", "3:45", ranks=4, options=options)
    assert "now 3 ranks, 4 before" in changes
    assert len(changes) >= 2
    np.testing.assert_allclose(weights, alone, rtol=0, atol=1e-9)


def test_the_tour_is_the_program_of_its_page():
    names = [path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith("torch_")]
    assert [name for name in names if f'"{name}"' not in Path(__file__).read_text()] == [], "not tested here"
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
