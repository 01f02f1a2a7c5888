"""The job's secret: where it comes from, and how both ends of a connection prove that they have it.

Any process with the secret may join the job. The secret authenticates the ends of a connection; encryption.py encrypts.
The first of these that applies is used:

    given            FASTCOLL_SECRET, else the content of the file FASTCOLL_SECRET_FILE
    none             if FASTCOLL_INSECURE=1 is set
    the user's own   the file fastcoll/secret in the user's configuration folder, created at first use; machines with a
                     shared home have the same file
    this machine's   the file /dev/shm/.fastcoll-<uid>-secret, if the file above does not exist and cannot be created;
                     created at first use

A process reads its secret before it opens a socket. Without a secret it listens only if FASTCOLL_INSECURE=1 is set.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from .. import config
from ..errors import UnavailableError, UsageError

_log = logging.getLogger("fastcoll")
PROOF_SIZE = 32
SAME_SECRET = "give every rank of the job the same FASTCOLL_SECRET or FASTCOLL_SECRET_FILE"
_MAX_FILE = 4096
_MACHINES = Path("/dev/shm")
_warned = False


class _Secret(NamedTuple):
    text: bytes
    source: str  # where it comes from, for messages
    is_users: bool = False  # it is the user's own or this machine's, and so the same for all jobs of the user


def job_secret() -> bytes:
    """Return the job's secret; empty if none is given and FASTCOLL_INSECURE=1 is set.

    Raises:
        UsageError: the secret's file is unsafe or unreadable, or cannot be created.
    """
    return _secret().text


def source() -> str:
    """Return the source of this process's secret, for messages."""
    return _secret().source


def is_users() -> bool:
    """Return whether the secret is the user's own or this machine's: the same for all jobs of the user."""
    return _secret().is_users


def proof(key: bytes, label: str, openings: Sequence[bytes]) -> bytes:
    """Return 32 bytes of HMAC-SHA256 over a label and both openings of a connection.

    The label has the protocol and the direction, so that a peer cannot return this side's proof as its own. Each
    opening has a new nonce, so that a proof cannot be used for another connection.
    """
    return hmac.digest(key, label.encode() + b"".join(openings), hashlib.sha256)


def is_proof(given: bytes, expected: bytes) -> bool:
    """Return whether two proofs are equal, in constant time."""
    return hmac.compare_digest(given, expected)


def warn_if_open(where: str) -> None:
    """Warn, once per process, that it listens at `where` without a secret (FASTCOLL_INSECURE=1)."""
    global _warned
    if _warned or job_secret():
        return
    _warned = True
    _log.warning(
        "FASTCOLL_INSECURE=1: listening on %s without a secret, so any process that reaches that address may join the "
        "job",
        where,
    )


def check_unpickling(doing: str) -> None:
    """Raise in a job without a secret, in which data of other processes must not be unpickled.

    Unpickling runs code that the data chooses, and without a secret any process may have joined the job and sent it.

    Args:
        doing: the refused action, with which the error begins: "NAME unpickles data of the other ranks". It must name
            the other processes, because the error continues with "they".

    Raises:
        UnavailableError: the job has no secret, because of FASTCOLL_INSECURE=1.
    """
    if not job_secret():
        raise UnavailableError(
            f"{doing}, and with FASTCOLL_INSECURE=1 they have not proven that they belong to the job; {SAME_SECRET}"
        )


def _secret() -> _Secret:
    given: str = config.get("FASTCOLL_SECRET")
    file: str = config.get("FASTCOLL_SECRET_FILE")
    if given:
        return _Secret(os.fsencode(given), "that of FASTCOLL_SECRET")
    if file:
        return _Secret(_read_given(file), f"that in FASTCOLL_SECRET_FILE={file}")
    if config.get("FASTCOLL_INSECURE"):
        return _Secret(b"", "none, by FASTCOLL_INSECURE=1")
    folder = config.user_folder()
    homes = () if folder is None else (folder / "secret",)
    return _own((*homes, _MACHINES / f".fastcoll-{os.geteuid()}-secret"))


def _read_given(path: str) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UsageError(f"FASTCOLL_SECRET_FILE={path!r} cannot be read: {error.strerror}") from error
    try:
        state = os.fstat(fd)
        if not stat.S_ISREG(state.st_mode):
            raise UsageError(f"FASTCOLL_SECRET_FILE={path!r} is no file")
        mode = stat.S_IMODE(state.st_mode)
        # The file's group may read it, as in volumes of Kubernetes.
        if mode & 0o027 or state.st_uid not in (0, os.geteuid()):
            raise UsageError(
                f"FASTCOLL_SECRET_FILE={path!r} is open to others (mode {mode:04o}, owner {state.st_uid}); it must be "
                "yours or root's, and not readable by others: chmod 600 (Kubernetes: defaultMode: 0400)"
            )
        secret = _content(fd)
    finally:
        os.close(fd)
    if not secret:
        raise UsageError(
            f"FASTCOLL_SECRET_FILE={path!r} must hold 1 to {_MAX_FILE} bytes; head -c 32 /dev/urandom | base64 "
            "makes a good secret"
        )
    return secret


def _content(fd: int) -> bytes:
    """Return the secret in an open file; empty if the file is empty or too long."""
    data = os.read(fd, _MAX_FILE + 1)
    return b"" if len(data) > _MAX_FILE else data.strip()


# ---- the user's own ----------------------------------------------------------------------------------------


@functools.cache
def _own(places: tuple[Path, ...]) -> _Secret:
    """Return the secret in the first of the files that exists or can be created; read it once per process."""
    refused: list[str] = []
    for path in places:
        try:
            if not os.path.lexists(path):
                _make(path)
            return _read_own(path)
        except OSError as error:
            refused.append(f"{path} ({error.strerror})")
    raise UsageError(
        "this job has no secret, and fastcoll does not listen without one: none is given, and the user's own cannot be "
        f"stored in {' or '.join(refused)}; {SAME_SECRET}, or let any process join by FASTCOLL_INSECURE=1"
    )


def _read_own(path: Path) -> _Secret:
    """Return the secret in the user's own file.

    UsageError: other users may have read the file, or it has no usable secret. OSError: the file does not exist, or its
    folder is not accessible.
    """
    os.lstat(path)
    why = ""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        why = "it is a link" if error.errno == errno.ELOOP else error.strerror or str(error)
        raise _refused(path, why) from error
    try:
        if why := _openness(os.fstat(fd)):
            raise _refused(path, why)
        if text := _content(fd):
            return _Secret(text, f"the user's own, in {path}", True)
        raise _refused(path, f"it holds no secret of 1 to {_MAX_FILE} bytes")
    finally:
        os.close(fd)


def _openness(state: os.stat_result) -> str:
    """Return why a file is not private to this user; empty if it is private."""
    if not stat.S_ISREG(state.st_mode):
        return "it is no file"
    if state.st_uid != os.geteuid():
        return f"it belongs to user {state.st_uid}, and this process is user {os.geteuid()}'s"
    mode = stat.S_IMODE(state.st_mode)
    return f"others may open it (mode {mode:04o})" if mode & 0o177 else ""


def _refused(path: Path, why: str) -> UsageError:
    return UsageError(
        f"the user's own secret in {path} is refused: {why}; {SAME_SECRET}, or remove that file (rm -f {path}), so "
        "that the next start makes a new one"
    )


def _make(path: Path) -> None:
    """Create the file `path` with a new secret, unless another process creates it first.

    OSError: the file cannot be created.

    The file is written under a temporary name, and gets its name by `link`, which does not replace an existing file. So
    if several processes create it at the same time, all of them then read the same secret.
    """
    if path.parent != _MACHINES:
        _check_folder(path.parent)
        # A missing home folder is not created, although root could create it: `mkdir` without `parents` fails.
        for folder in (path.parent.parent, path.parent):
            folder.mkdir(0o700, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.urandom(8).hex()}")
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.fchmod(fd, 0o600)  # the umask may have removed bits of the mode above
        if why := _openness(os.fstat(fd)):  # on a file system without owners or modes
            raise PermissionError(errno.EPERM, f"a file made there is not private: {why}")
        os.write(fd, os.urandom(32).hex().encode() + b"\n")
        os.fsync(fd)
        with suppress(FileExistsError):
            os.link(part, path)
    finally:
        os.close(fd)
        os.unlink(part)


def _check_folder(folder: Path) -> None:
    """Raise PermissionError if the folder is in another user's home, as under sudo with the caller's HOME."""
    nearest = next(each for each in (folder, *folder.parents) if each.exists())
    state = nearest.stat()
    if state.st_uid != os.geteuid() and not state.st_mode & stat.S_ISVTX:
        raise PermissionError(errno.EACCES, f"{nearest} belongs to user {state.st_uid}")
