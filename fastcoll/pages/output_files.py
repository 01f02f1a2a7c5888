"""The files that commands write at the end: whether they can be is checked before a long run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ..errors import UsageError


def writable(name: str | Path) -> Path:
    """Return the path of a file that can be written; the check leaves no file.

    Raises:
        UsageError: it cannot be written.
    """
    path = Path(name)
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be written: there is no folder {folder}")
    try:
        if path.exists():
            os.close(os.open(path, os.O_WRONLY))
        else:
            # Tried, because the folder's mode does not show whether root can write.
            tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}") from error
    return path
