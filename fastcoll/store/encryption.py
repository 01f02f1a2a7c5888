"""Encryption of connections (FASTCOLL_ENCRYPT=1): TLS 1.3 after the handshake of opening.py.

Both sides have proven that they have the endpoint's key. From it and from both openings each side derives the same
seed, which is new for each connection, and from the seed an Ed25519 key and its certificate. Ed25519 signs without
randomness and the certificate's other fields are constant, so both sides have the same certificate, to the byte. Each
side presents it, and trusts no other. So TLS authenticates both sides, and binds its session to this handshake: a man
in the middle, who can pass on the openings and the proofs, cannot take part in TLS. TLS agrees on fresh keys for the
traffic (ECDHE), so an attacker who records a job's traffic and gets the secret later cannot decrypt it. The
cryptography is OpenSSL's, by Python's `ssl`, and that of the package `cryptography`.

system/tunnels.py moves the bytes. A connection's descriptor and socket object stay the same, but they are a socket
pair's, so options and states of TCP must be taken from `carrier`.
"""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .. import config
from ..errors import UnavailableError, UsageError, install
from ..system.processes import Member
from .opening import SEED_SIZE, Role
from .secret import SAME_SECRET, job_secret

if TYPE_CHECKING:
    import ssl

    from ..system.tunnels import Tunnel

_BEGINS, _ENDS = datetime(1970, 1, 1), datetime(9999, 12, 31)  # whatever the clocks of the hosts show

_tunnels: WeakKeyDictionary[socket.socket, Tunnel] = WeakKeyDictionary()


def encrypts() -> bool:
    """Return whether this process encrypts its connections.

    Raises:
        UsageError: FASTCOLL_ENCRYPT=1, but the job has no secret.
        UnavailableError: FASTCOLL_ENCRYPT=1, but `cryptography` is not installed, or OpenSSL refuses its keys.
    """
    if not config.get("FASTCOLL_ENCRYPT"):
        return False
    if not job_secret():
        raise UsageError(
            "FASTCOLL_ENCRYPT=1 needs a secret, from which the keys are made, and FASTCOLL_INSECURE=1 is set; "
            f"{SAME_SECRET}"
        )
    _check_packages()
    return True


@functools.cache
def _check_packages() -> None:
    try:
        _context(bytes(SEED_SIZE), Role.ANSWERS)
    except ImportError as error:
        raise UnavailableError(
            f"FASTCOLL_ENCRYPT=1 needs the package cryptography ({error}): {install('encrypt')}"
        ) from error
    except OSError as error:  # ssl.SSLError is one
        raise UnavailableError(
            f"FASTCOLL_ENCRYPT=1 cannot be used, because OpenSSL refuses keys of Ed25519 here: {error}"
        ) from error


def encrypt(connection: socket.socket, seed: bytes, role: Role, received: bytes = b"") -> None:
    """Encrypt a connection after its handshake; its descriptor and socket object stay the same.

    TLS's own handshake takes place later, on another thread. If it fails, the connection ends.

    Args:
        connection: no thread uses it, and no poller watches it.
        seed: that of the handshake; empty: do nothing, because the connection is not encrypted.
        role: this side's.
        received: bytes behind the handshake that were received already.

    Raises:
        OSError: no descriptor is free; the connection is unchanged.
    """
    if seed:
        from ..system.tunnels import dig

        _tunnels[connection] = dig(connection, _context(seed, role), role is Role.ANSWERS, received)


def descriptors() -> int:
    """Return how many file descriptors a connection takes."""
    return 3 if encrypts() else 1


def carrier(connection: socket.socket) -> socket.socket:
    """Return the TCP connection that carries a connection: itself unless it is encrypted."""
    tunnel = _tunnels.get(connection)
    return connection if tunnel is None else tunnel.tcp


def holds_bytes(connection: socket.socket) -> bool:
    """Return whether some sent bytes wait to be encrypted, so that TCP does not have them yet."""
    tunnel = _tunnels.get(connection)
    return tunnel is not None and tunnel.holds_bytes()


def failure(connection: socket.socket) -> OSError | None:
    """Return why an encrypted connection that has ended was broken; None: the peer closed it."""
    tunnel = _tunnels.get(connection)
    return None if tunnel is None else tunnel.error


def check_nodes(transport: str, members: Sequence[Member]) -> None:
    """Refuse a transport that is not encrypted, among members on several nodes, if connections are to be encrypted.

    Raises:
        UsageError: it is refused.
    """
    far = next((member for member in members if not member.same_node(members[0])), None)
    if far is not None and encrypts():
        raise UsageError(
            f"FASTCOLL_ENCRYPT=1: {transport} does not encrypt, and {far} is not on the node of {members[0]}; use the "
            "backend 'auto' or 'tcp', or protect the network between the nodes and unset FASTCOLL_ENCRYPT"
        )


def _context(seed: bytes, role: Role) -> ssl.SSLContext:
    """Return TLS's settings for one side of a connection."""
    import ssl

    from cryptography import x509
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fastcoll")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(_BEGINS).not_valid_after(_ENDS)
    certificate = builder.sign(key, None).public_bytes(forms.Encoding.PEM)
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, forms.NoEncryption())

    is_server = role is Role.ANSWERS
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate is this connection's, whatever the peer's address
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate.decode())
    if is_server:
        context.num_tickets = 0  # no session is resumed
    file = os.memfd_create(
        "fastcoll"
    )  # `ssl` takes a key from a file only; this one is in this process's memory
    try:
        os.write(file, private + certificate)
        context.load_cert_chain(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
    return context
