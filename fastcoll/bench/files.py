"""Whether what a run is to write can be written: before the run, not after it."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..errors import UnavailableError, UsageError
from .plot import PICTURES


def check_writable(path: Path) -> None:
    """Refuse a file that cannot be written; leaves nothing.

    Raises:
        UsageError: it cannot.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
        else:
            tempfile.TemporaryFile(dir=folder).close()  # leaves nothing; a mode does not bind root
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error


def pictures(paths: Sequence[Path]) -> list[Path]:
    """The files to draw: a name without an ending is a PNG and an SVG."""
    return [
        full
        for path in paths
        for full in ([path] if path.suffix else [path.with_suffix(".png"), path.with_suffix(".svg")])
    ]


def default_picture() -> list[Path]:
    """What a run of all operations draws in the working directory, where it can."""
    possible = importlib.util.find_spec("matplotlib") is not None and os.access(".", os.W_OK)
    return [Path("fastcoll-bench.png")] if possible else []


def check_pictures(paths: Sequence[Path]) -> None:
    """Refuse pictures that cannot be drawn or written.

    Raises:
        UsageError: a name's ending is not known, or it cannot be written.
        UnavailableError: without matplotlib.
    """
    for path in paths:
        check_writable(path)
        if path.suffix not in PICTURES:
            raise UsageError(f"--plot {path}: the name must end in {', '.join(PICTURES)}")
    if paths and importlib.util.find_spec("matplotlib") is None:
        raise UnavailableError("--plot needs matplotlib; pip install 'fastcoll[bench]'")
