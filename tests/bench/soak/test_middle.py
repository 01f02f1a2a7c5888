"""One group for each harm that a man in the middle does, at a known byte of its connections."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from soak.middle import Case, Harm

from fastcoll.store.opening import OPENING_SIZE, PROOF_SIZE

BENCH = Path(__file__).parents[3] / "bench"
HEADER = (
    OPENING_SIZE + PROOF_SIZE
)  # of the first call, on a connection for collectives; its data begins after 64 bytes
DATA = HEADER + 64 + 100
SURVIVED, NAMED, WRONG = "survived", "named", "wrong data"
# The harm, where it is done, and what it may be for a rank.
CASES = {
    "cut": (Case("cut", 1, DATA, 1, True), {NAMED}),
    "doubled in an opening": (Case("double", 1, 50, 30, False), {NAMED}),
    "flipped in a proof": (Case("flip", 1, OPENING_SIZE + 4, 3, True), {NAMED}),
    "stalled": (Case("stall", 1, DATA, 1, True), {SURVIVED}),
    "doubled": (Case("double", 1, DATA, 8, True), {NAMED}),
    "flipped in a header": (Case("flip", 1, HEADER + 2, 5, True), {NAMED}),
    "flipped in data": (Case("flip", 1, DATA, 5, True), {SURVIVED, WRONG}),
    "flipped in encrypted data": (Case("flip", 1, 5000, 5, True, True), {NAMED}),
}
PROGRAM = """
import json, sys
from soak.fleet import load
from soak.middle import Case, run_case
load()
print(json.dumps(run_case(Case(*json.loads(sys.argv[1])))))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_a_harm_is_named_or_survived(name: str) -> None:
    case, allowed = CASES[name]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(case)],
        cwd=BENCH,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout)
    assert set(outcomes) <= allowed, outcomes
    assert outcomes.count(WRONG) == (WRONG in allowed)


def test_a_harm_is_done_once() -> None:
    flip = Harm(Case("flip", 0, 5, 1, False))
    assert [flip(at, bytes(4)) for at in (0, 4, 4)] == [bytes(4), bytes([0, 2, 0, 0]), bytes(4)]
    double = Harm(Case("double", 0, 1, 2, False))
    assert double(0, b"abcd") == b"abcbcd"
    with pytest.raises(ConnectionAbortedError):
        Harm(Case("cut", 0, 0, 1, False))(0, b"a")
