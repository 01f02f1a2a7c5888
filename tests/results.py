"""Where runs inside tests leave their results, for README's table of operations (test_operations_table.py)."""

from __future__ import annotations

import os


def results_in(name: str) -> list[str]:
    """Options of a pytest that writes NAME.xml into the folder that OPERATIONS_RESULTS names, if it is set."""
    folder = os.environ.get("OPERATIONS_RESULTS")
    return [f"--junitxml={folder}/{name}.xml"] if folder else []
