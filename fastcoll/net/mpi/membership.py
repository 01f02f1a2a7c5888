"""The communicator of each group: only the group's members make it, and it is freed when all of them have left.

This file also has the rendezvous of an MPI job in which no address of a store is set: rank 0 serves a store, and sends
its address to the other ranks over MPI. And it has the notices by which a rank announces that it leaves or fails.

A communicator must not be freed while a message in it has yet to arrive, because MPI would reuse its number for a new
communicator, and deliver the message there. So a rank that leaves a group only *retires* the group's communicator. It
frees the communicator when every member has announced that it has left; it checks this for all retired communicators
whenever it makes or retires one. The communicator of a failed group is kept until MPI is finalized.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...core.monitor import LEAVING
from ...errors import RendezvousError, ResourceError, StoreTimeoutError, UnavailableError, UsageError
from ...rendezvous.assemble import assemble
from ...rendezvous.control import NOTICE_SIZE, Control, Notice, NoticeError
from ...rendezvous.detect import MPI_SOURCES, detect, number_in
from ...store import HashStore, Rendezvous, Store, TCPStore
from ...store.encryption import check_nodes, descriptors
from ...store.opening import derive_key
from ...store.secret import PROOF_SIZE, SAME_SECRET, is_proof, job_secret, proof
from ...store.store import listed
from ...store.tcp_store import LostError, connect
from ...system.address import make_room
from ...system.interfaces import address_for_others
from ...system.processes import Member
from .agreement import Requests, abandon
from .library import MpiLibrary, load

_log = logging.getLogger("fastcoll")
_STORE_TAG = 32749
"""Tag of the message that has the store's address. The message is sent in MPI_COMM_WORLD, in which the user's program
may send messages, too."""
_STORE_BYTES = 512
_ERROR = "! "  # begins a message in which rank 0 sends an error instead of the address
_LOOPBACK = "127.0.0.1"
_LEAST_TAG_LIMIT = 32767  # every MPI allows tags up to this

retired: deque[tuple[Any, MpiControl]] = deque()
"""Communicators that this rank has left, and that other members may still use."""


# ---- the store -------------------------------------------------------------------------------------


def meet_through_mpi(rank: int, world_size: int, timeout: float) -> Rendezvous:
    """Meet the other ranks of the MPI job in a store that rank 0 serves; collective.

    If `rank` or `world_size` is -1, it is taken from MPI.

    Raises:
        UsageError: MPI has another rank or world size.
        UnavailableError: there is no MPI, or another MPI's launcher has started this process.
        RendezvousError: rank 0 could not serve the store.
        StoreTimeoutError: rank 0 did not arrive within `timeout` seconds.
    """
    library, began = load(), time.monotonic()
    world = library.MPI.COMM_WORLD
    for name, given, there in (("rank", rank, world.rank), ("world_size", world_size, world.size)):
        if given not in (-1, there):
            raise UsageError(f"{name} is {given}, but MPI started this process with {there}; leave it out")
    if world.size == 1:
        for source in MPI_SOURCES if world_size == -1 else ():
            if (size := number_in(os.environ, source.size, 1) or 1) > 1:
                raise UnavailableError(
                    f"mpiexec has started {size} ranks ({source.size}), but {library.name}, the library of mpi4py, "
                    "finds only this one; use the mpiexec of this library. For a world of this process alone, pass "
                    "rank=0 and world_size=1"
                )
        return Rendezvous(HashStore(), 0, 1, _LOOPBACK)
    if world.rank == 0:
        return _serve_store(library, timeout)
    while True:
        host, port = _receive_store_address(library, timeout, began)
        try:
            connect(host, port, job_secret(), timeout, was_there=True).close()
            break
        except LostError:  # rank 0 served this store in an attempt that failed; it sends another address
            continue
    store = TCPStore(host, port, timeout=timeout)
    return Rendezvous(store, world.rank, world.size, store.local_address)


def _serve_store(library: MpiLibrary, timeout: float) -> Rendezvous:
    """Serve the store, and send its address to all other ranks; if that fails, send them the error."""
    world, began = library.MPI.COMM_WORLD, time.monotonic()
    try:
        make_room(world.size * descriptors(), f"the store for {world.size} ranks")
        # RANK and WORLD_SIZE may be those of another job, since MPI does not read them.
        host = _LOOPBACK if detect(os.environ, 0, world.size).on_one_node else address_for_others()
        store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
    except Exception as error:
        abandon(*_send_to_all(library, f"{_ERROR}{error}"))
        raise
    try:
        sent, data = _send_to_all(library, f"{host} {store.port}")
        _await(library, sent, data, timeout, range(1, world.size), began)
    except BaseException:
        store.close()
        raise
    return Rendezvous(store, 0, world.size, host)


def _send_to_all(library: MpiLibrary, text: str) -> tuple[list[Any], bytes]:
    """Begin to send a text to the ranks that wait for the store's address; return the requests and their memory."""
    world, data = library.MPI.COMM_WORLD, text.encode()[:_STORE_BYTES].ljust(_STORE_BYTES)
    with library.lock:
        return [
            world.Isend([data, library.MPI.BYTE], peer, _STORE_TAG) for peer in range(1, world.size)
        ], data


def _receive_store_address(library: MpiLibrary, timeout: float, began: float) -> tuple[str, int]:
    """Receive the address of rank 0's store, within `timeout` seconds from `began`.

    If several addresses have arrived, the last one is valid, because rank 0 sent the others in attempts that failed.
    RendezvousError: rank 0 has sent an error.
    """
    world = library.MPI.COMM_WORLD
    data = np.zeros(_STORE_BYTES, np.uint8)
    there = True
    while there:
        with library.lock:
            request = world.Irecv([data, library.MPI.BYTE], 0, _STORE_TAG)
        try:
            _await(library, [request], data, timeout, [0], began)
        except BaseException:
            with library.lock:
                request.Cancel()
                request.Wait()
            raise
        with library.lock:
            there = world.Iprobe(0, _STORE_TAG)
    text = data.tobytes().decode(errors="ignore").rstrip()
    if text.startswith(_ERROR):
        raise RendezvousError(f"rank 0 cannot serve the store: {text.removeprefix(_ERROR)}")
    host, port = text.split()
    return host, int(port)


def _await(
    library: MpiLibrary, posted: list[Any], keep: Any, timeout: float, peers: Sequence[int], began: float
) -> None:
    """Wait until the messages in `posted` are complete, at most `timeout` seconds from `began`.

    Calls MPI repeatedly, because the first message to a peer needs a connection, and MPI makes connections only while
    it is called.
    """
    requests = Requests(library, dedicated=False)

    def look() -> None:
        if time.monotonic() > began + timeout:
            late = listed([peers[k] for k in requests.open()])
            raise StoreTimeoutError(f"rank(s) {late} did not call init_process_group within {timeout:g} s")

    requests.finish(posted, look, 0, keep)


# ---- a group's communicator --------------------------------------------------------------------------


def make_comm(
    library: MpiLibrary, store: Store, name: str, members: Sequence[Member], rank: int, timeout: float
) -> tuple[Any, bool]:
    """Make the communicator of a group's members, in the order of `members`.

    Collective over the members. Returns the communicator, and whether the MPI library of every member is CUDA-aware.

    Raises:
        UsageError: FASTCOLL_ENCRYPT=1, and the members are on several nodes.
        UnavailableError: the members are not ranks of one MPI job.
        RendezvousError: a member did not prove over MPI that it has the job's secret.
        ResourceError: MPI has too many communicators.
        PeerDiedError, StoreTimeoutError: a member died or did not arrive.
    """
    check_nodes("MPI", members)
    world = library.MPI.COMM_WORLD
    free_finished(library)
    contribution = [world.rank, world.size, int(library.cuda_aware), os.urandom(16).hex()]
    contributions = assemble(store, members, rank, contribution, timeout, f"making the group {name!r}")
    ranks = [world_rank for world_rank, *_ in contributions]
    if len(set(ranks)) < len(ranks) or any(size != world.size for _, size, *_ in contributions):
        shown = ", ".join(
            f"{member} is rank {world_rank} of {size}"
            for member, (world_rank, size, *_) in zip(members, contributions, strict=True)
        )
        raise UnavailableError(
            f"the ranks are not ranks of one MPI job: by MPI, {shown}; start all of them with one mpiexec or srun, "
            f"of {library.name}"
        )
    nonces = "".join(nonce for *_, nonce in contributions)
    # All members were alive when they contributed, a moment ago. So from here on, calls of MPI that may block are used.
    with library.lock:
        chosen = world.Get_group().Incl(ranks)
        try:
            # Two threads may make groups of the same name at the same time; their tags must differ.
            comm = world.Create_group(chosen, zlib.crc32(nonces.encode()) % _LEAST_TAG_LIMIT)
        except library.MPI.Exception as error:
            raise ResourceError(
                f"making the group {name!r}: {library.name} makes no further communicator ({error}); destroy groups "
                "that are no longer used, on all of their ranks"
            ) from error
        finally:
            chosen.Free()
        comm.Set_errhandler(library.MPI.ERRORS_RETURN)
    _check_proofs(library, comm, members, nonces)
    return comm, all(aware for _, _, aware, _ in contributions)


def _check_proofs(library: MpiLibrary, comm: Any, members: Sequence[Member], nonces: str) -> None:
    """Exchange proofs over MPI that each member has the job's secret.

    They are needed because MPI does not authenticate ranks, and receivers unpickle some messages. If a proof is wrong,
    the communicator is abandoned and every member raises RendezvousError.
    """
    key = derive_key(job_secret(), nonces.encode())
    due = [proof(key, f"fastcoll over MPI, rank {rank}", ()) for rank in range(comm.size)]
    given, byte = np.empty((comm.size, PROOF_SIZE), np.uint8), library.MPI.BYTE
    with library.lock:
        comm.Allgather([due[comm.rank], byte], [given, byte])
    for member, one, expected in zip(members, given, due, strict=True):
        if not is_proof(one.tobytes(), expected):
            abandon([], comm)
            raise RendezvousError(
                f"over MPI, {member} has another secret than {members[comm.rank]}; {SAME_SECRET}"
            )


def retire_comm(library: MpiLibrary, comm: Any, control: MpiControl, failed: bool) -> None:
    """Retire a communicator.

    If the group has failed, the communicator is kept until MPI is finalized. If not, this rank must have no pending
    operation in the communicator.
    """
    if failed:
        abandon([], (comm, control))  # MPI may still be reading the notices
    else:
        retired.append((comm, control))
    free_finished(library)


def free_finished(library: MpiLibrary) -> None:
    """Free the communicators that every member has left.

    Communicators with a message that was never received are kept. There is no lock, because a signal handler may call
    this during another call; so a communicator is in no list while a call looks at it.
    """
    for _ in range(len(retired)):
        try:
            comm, control = retired.popleft()
        except IndexError:  # another call has taken the others
            return
        if not control.is_over():
            retired.append((comm, control))
            continue
        with library.lock:
            if not comm.Iprobe():
                comm.Free()


class MpiControl(Control):
    """Notices that a rank leaves or fails the group, sent as MPI messages.

    Each rank sends at most two notices to each other rank. MPI does not report that a rank died (mpiexec then ends the
    other ranks), so `lost` stays empty.
    """

    def __init__(self, library: MpiLibrary, comm: Any, tag: int) -> None:
        super().__init__(comm.size)
        self._library = library
        self._comm = comm
        self._tag = tag
        self.peers = {peer for peer in range(comm.size) if peer != comm.rank}
        self._sent: list[Any] = []

    def send(self, notice: Notice) -> None:
        """Send a notice to all peers. MPI copies such a short message, so its memory need not be kept."""
        data = [notice.to_bytes(), self._library.MPI.BYTE]
        with self._lock, self._library.lock:
            self._sent += [self._comm.Isend(data, peer, self._tag) for peer in self.peers]

    def is_over(self) -> bool:
        """Return whether every peer has left or failed, and all notices to peers have been sent."""
        self.look(again=True)
        with self._library.lock:
            self._sent = [request for request in self._sent if not request.Test()]
        over = {peer for peer, notice in self.received.items() if notice.state != LEAVING}
        return not self._sent and over >= self.peers

    def close(self) -> None:
        """Do nothing, because the communicator is freed when all members have left."""

    def close_inherited(self) -> None:
        """Do nothing, because a forked child cannot use MPI."""

    def _read(self) -> None:
        MPI = self._library.MPI
        with self._library.lock:
            while message := self._comm.Improbe(MPI.ANY_SOURCE, self._tag):
                status, data = MPI.Status(), bytearray(NOTICE_SIZE)
                message.Recv([data, MPI.BYTE], status)
                try:
                    self._receive(status.Get_source(), Notice.from_bytes(bytes(data), self._comm.size))
                except NoticeError as error:
                    _log.warning("cannot read a notice of group rank %d: %s", status.Get_source(), error)
