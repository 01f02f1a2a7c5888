"""The job's shared secret: where it comes from, and how both ends of a connection prove that they have it.

Whoever has it may join the job. It authenticates the opening of connections; it encrypts nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Sequence

from .. import config
from ..errors import UsageError
from .address import is_loopback

_log = logging.getLogger("fastcoll")
PROOF_SIZE = 32
SAME_SECRET = "give every rank of the job the same FASTCOLL_SECRET or FASTCOLL_SECRET_FILE"
_MAX_FILE = 4096
_warned = False


def job_secret() -> bytes:
    """FASTCOLL_SECRET, else what the file FASTCOLL_SECRET_FILE holds; empty without either."""
    secret: str = config.get("FASTCOLL_SECRET")
    path: str = config.get("FASTCOLL_SECRET_FILE")
    return secret.encode() if secret or not path else _read(path)


def proof(key: bytes, label: str, openings: Sequence[bytes]) -> bytes:
    """32 bytes of HMAC-SHA256 over a label and both openings of a connection.

    The label tells the protocol and the direction, so that no proof can be sent back; the openings each have a fresh
    nonce, so that no proof can be used again.
    """
    return hmac.digest(key, label.encode() + b"".join(openings), hashlib.sha256)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Whether two proofs are equal, in a time that does not tell where they differ."""
    return hmac.compare_digest(given, expected)


def warn_if_open(host: str, where: str) -> None:
    """Warn, once a process, that it listens at `where`, and the job has no secret. Nobody else reaches loopback."""
    global _warned
    if _warned or job_secret() or is_loopback(host):
        return
    _warned = True
    _log.warning(
        "listening on %s without a secret: whoever reaches that address may join the job; give every rank the same "
        "FASTCOLL_SECRET or FASTCOLL_SECRET_FILE",
        where,
    )


def _read(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"FASTCOLL_SECRET_FILE={path!r} cannot be read: {error.strerror}") from error
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise UsageError(f"FASTCOLL_SECRET_FILE={path!r} is no file")
        mode = stat.S_IMODE(state.st_mode)
        # Its group may read it, as in Kubernetes' volumes.
        if mode & 0o027 or state.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"FASTCOLL_SECRET_FILE={path!r} is open to others (mode {mode:04o}, owner {state.st_uid}); it must be "
                "yours or root's, and nobody else's to read: chmod 600 (Kubernetes: defaultMode: 0400)"
            )
        data = os.read(fd, _MAX_FILE + 1)
    finally:
        os.close(fd)
    secret = data.strip()
    if not secret or len(data) > _MAX_FILE:
        raise UsageError(
            f"FASTCOLL_SECRET_FILE={path!r} must hold 1 to {_MAX_FILE} bytes; head -c 32 /dev/urandom | base64 "
            "makes a good secret"
        )
    return secret
