"""The results of pytest runs inside tests, for the README's table of operations (test_operations_table.py)."""

from __future__ import annotations

import os


def results_in(name: str) -> list[str]:
    """Return pytest options that write NAME.xml into the folder OPERATIONS_RESULTS, if it is set."""
    folder = os.environ.get("OPERATIONS_RESULTS")
    return [f"--junitxml={folder}/{name}.xml"] if folder else []
