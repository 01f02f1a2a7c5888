"""The example of the heat equation: same bits with any number of ranks, and the fixed point of its step."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HEAT = Path(__file__).parents[2] / "examples" / "compiled" / "heat.py"


def solve(ranks, file):
    launch = [] if ranks == 1 else ["-m", "fastcoll.launch", "-n", str(ranks)]
    command = [sys.executable, *launch, str(HEAT), "--points", "30", "--save", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"{ranks} ranks, " in done.stdout
    return np.load(file)


@pytest.mark.long  # test_njit.py calls the same functions
def test_the_plate_is_the_same_with_any_number_of_ranks(tmp_path):
    plate = solve(1, tmp_path / "1.npy")
    hot = np.vstack([np.ones(32), plate, np.zeros(32)])
    means = (hot[:-2, 1:-1] + hot[2:, 1:-1] + hot[1:-1, :-2] + hot[1:-1, 2:]) / 4
    assert np.abs(means - plate[:, 1:-1]).max() < 1e-4
    for ranks in (2, 3):
        np.testing.assert_array_equal(solve(ranks, tmp_path / f"{ranks}.npy"), plate)
