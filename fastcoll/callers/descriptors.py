"""Group descriptors for compiled callers, and the Python code that runs the calls that native code cannot complete.

A compiled caller gets the address of a descriptor (`group_descriptor`), a table of words whose layout is in
kernels/c_entries.py. The caller calls the C function whose address is in the word C_ENTRY:

    int64 c_entry(int64 descriptor, int64 op, int64 data, int64 out, int64 nbytes, int64 call, int64 peer)

    op               a number from `code_of` (core/signature.py), or one of kernels/c_entries.py
    data, out        addresses of contiguous, aligned memory, which belongs to the call until it returns; `nbytes` is
                     the size of the array that a rank contributes or gets; if an array has a block for each rank, the
                     size of one block:

        all_reduce, scan, exscan, reduce, broadcast   in place at `data`
        all_gather, gather       data: a block      out: a block for each rank (gather: on the root alone)
        reduce_scatter, scatter  data: a block for each rank (scatter: on the root alone)      out: a block
        all_to_all               data and out: a block for each rank; they share no memory
        SPLIT                    all_to_all with blocks of any sizes; nbytes: address of a table of sizes in bytes:
                                 of each block in data, then of each block in out
        REDUCE_SCATTER_SPLIT     reduce_scatter with blocks of any sizes; nbytes: address of a table of sizes in
                                 bytes: of each block in data, then of out
        SEND, RECV               data: the message
        POST_SEND, POST_RECV     data: the message; out: the owner of its memory, which the request keeps alive; 0:
                                 the caller keeps the memory alive
        WAIT, TEST               data: the number of a request
        WAIT_ANY                 data: address of a table of `nbytes` request numbers, followed by the address of
                                 each request's descriptor
        barrier                  nothing

    call             from `call_word`; for messages from `message_word`
    peer             group rank of the root or of the other side; ANY: receive from any rank; FOREIGN + a global
                     rank: the caller gave this global rank, which is not in the group

It returns 0 when the operation is complete. RECV, and WAIT for a receive, return the sender's group rank; POST_SEND and
POST_RECV the number of a request; TEST whether the request has ended; WAIT_ANY the index of a request that has ended.
RAISED means that there is an exception, which the same thread gets from `take_error`. It is the error that the same
call from Python would raise, and has the same effect on peers. The call blocks as the operation does, within the
group's timeout; meanwhile Python's signal handlers run in the main thread. The caller may hold the GIL or not; if it
does, the C function releases the GIL while the native call runs. If the backend has no native call for the operation,
`_call_in_python` wraps the memory in arrays and calls the group's method; if a native call returns early, it completes
that call.

A descriptor does not keep its group alive. Its words stay until the process ends (384 bytes per group that compiled
callers have used). When the group ends, the words that describe it are zeroed, and a later call raises
NotInitializedError.

After RAISED the operation may still be queued behind asynchronous operations, and run later. So the caller must never
free the memory at `data` and `out` after RAISED.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from ..api.p2p import waitany
from ..arrays.dtypes import NUMPY
from ..core import signature
from ..core.group import ProcessGroup
from ..core.operands import ANY_TAG, LARGEST_TAG, Array
from ..core.operations import KINDS, METHODS, NATIVE, NO_ARRAY, OPERATIONS
from ..core.operations import call as call_method
from ..core.reduce_op import CUSTOM, PREDEFINED, PREMUL_SUM, ReduceOp
from ..core.status import LATER
from ..core.work import Work
from ..errors import NotInitializedError, UsageError
from ..job.groups import Group, NonMember, group_rank, groups, member_of
from ..kernels import c_entries as d
from ..kernels import shared_words
from ..kernels.primitives import address_of
from ..p2p import handles
from ..p2p.pipe import ANY
from ..p2p.transfers import DTYPE_BITS, kind_of
from ..system.forks import at_fork

FOREIGN = 1 << 40
"""Added to a global rank that is passed as `peer` although it is not in the group."""

INVALID_TAG = ANY_TAG - 1
"""The tag in the word of a message whose tag is out of range and may not fit into the word."""

SPLITS = 1 << 8
"""A bit in the word of a refused call. It means that the call's split sizes are wrong."""

_DTYPE_MASK = (1 << DTYPE_BITS) - 1
_lock = threading.RLock()  # reentrant, because a signal handler may call compiled code
_errors: dict[int, BaseException] = {}
_dtypes: dict[int, np.dtype[Any]] = {}
_custom: list[ReduceOp] = []


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # the thread that held it is not in this process
    for world in _descriptors[:1]:
        world.clear()  # the child may initialise a world of its own


at_fork("group descriptors", _after_fork)


# ---- call words -----------------------------------------------------------------------------------------


def call_word(operation: str, dtype: np.dtype[Any], op: ReduceOp | None = None) -> int:
    """Return the `call` word of a collective; the same in all processes, except for custom operations.

    Raises:
        UsageError: PREMUL_SUM, too many custom operations, or another dtype has the same code.
    """
    word = signature.encode(operation, dtype)
    _keep(_dtypes, _dtype_in(word), dtype)
    return word if op is None else word | op_word(op) << signature.OP_SHIFT


def op_word(op: ReduceOp) -> int:
    """Return the bits of a reduce operation in a call word.

    They are its code and, above the code, the number of a custom operation, which is valid in this process only.

    Raises:
        UsageError: PREMUL_SUM, whose factor does not fit into a word, or too many custom operations.
    """
    if op.code == PREMUL_SUM:
        raise UsageError(
            "PREMUL_SUM's factor cannot be passed to compiled code; scale the array there, and use SUM"
        )
    if op.code < CUSTOM:
        return op.code
    with _lock:
        for number, known in enumerate(_custom, 1):
            if known is op:
                return number << 16 | op.code
        if len(_custom) == 0xFFFF:
            raise UsageError("more than 65,535 custom operations; make a ReduceOp once and keep it")
        _custom.append(op)
        return len(_custom) << 16 | op.code


def message_word(tag: int, dtype: np.dtype[Any]) -> int:
    """Return the `call` word of a message; the same in all processes."""
    word = kind_of(tag, dtype)
    _keep(_dtypes, word & _DTYPE_MASK, dtype)
    return word


def learn(dtype: np.dtype[Any]) -> None:
    """Register a dtype, so that this process can decode it from the words of collectives and messages."""
    call_word("broadcast", dtype)
    message_word(0, dtype)


def _keep(known: dict[int, Any], code: int, value: Any) -> None:
    if known.setdefault(code, value) != value:
        raise UsageError(
            f"{value} and {known[code]} have the same code in compiled code; rename a field of one"
        )


def _dtype_in(word: int) -> int:
    """Return the dtype's code in a call word.

    It is the code that messages use, with one bit less for dtypes that are not in the table of dtypes, because a call
    word has no room for that bit.
    """
    return word >> 8 & 0xFF | (word >> 48 & 0x1FFF) << 8


def _op_in(word: int) -> ReduceOp:
    code, number = word >> signature.OP_SHIFT & 0xFFFF, word >> signature.ROOT_SHIFT & 0xFFFF
    if code < CUSTOM:
        return PREDEFINED[code]
    found = _custom[number - 1 : number] if number else [op for op in _custom if op.code == code]
    if len(found) != 1:
        raise UsageError(
            "this process cannot find the custom operation of the compiled code; pass it as an argument"
        )
    return found[0]


# ---- descriptors --------------------------------------------------------------------------------------


class _Descriptor:
    """The descriptor of one group, or of the current world.

    Attributes:
        memory: keeps the memory alive to which the words point.
    """

    def __init__(self, number: int, c_entry: int) -> None:
        self.words = np.zeros(d.DESCRIPTOR_WORDS, np.int64)
        self.address = address_of(self.words)
        self.group: Callable[[], ProcessGroup | None] = lambda: None
        self.memory: Any = None
        self.words[d.NUMBER], self.words[d.C_ENTRY], self.words[d.ERRORS] = number, c_entry, id(_errors)
        self.words[d.ASK], self.words[d.TORN], self.words[d.AGAIN] = (
            id(_call_in_python),
            id(_torn),
            id(_again),
        )

    def fill(self, group: ProcessGroup) -> None:
        """Write the group's words; the caller holds `_lock`."""
        if self.group() is group or group.gate.closed:
            return
        self.clear()
        ranks, native_calls = np.array(group.ranks, np.int64), group.backend.native_calls
        self.memory = ranks, native_calls and native_calls.memory
        if native_calls is not None:
            self._publish(d.CONTEXT, native_calls.context)
            self._publish(d.MAILBOX, native_calls.mailbox)
        if group.ranks != tuple(range(group.size)):
            self.words[d.RANKS] = address_of(ranks)
        self.words[d.RANK] = group.rank
        self._publish(d.SIZE, group.size)
        self.group = weakref.ref(group, self._ended)
        group.at_the_end.append(partial(self._ended, self.group))

    def _publish(self, word: int, value: int) -> None:
        """Write a word that compiled callers read without the GIL; they then see what it refers to."""
        shared_words.publish.call(self.address + 8 * word, value)

    def open(self, op: int, native_call: int) -> None:
        """Let compiled callers make an operation by its native call; the caller holds `_lock`."""
        self._publish(d.NATIVE_CALLS + op, native_call)

    def _ended(self, group: Callable[[], ProcessGroup | None]) -> None:
        if self.group is group:
            self.clear()

    def clear(self) -> None:
        """Zero the words of the group, which has ended."""
        self.group = lambda: None
        self.words[d.NATIVE_CALLS :] = 0
        for word in (d.SIZE, d.RANK, d.RANKS, d.CONTEXT, d.MAILBOX):
            self.words[word] = 0
        if self.memory is not None:
            _retired.append(self.memory)
            self.memory = None


_retired: deque[Any] = deque(maxlen=32)
"""The memory of the last 32 groups that ended (61 KiB each), because a thread may have read an address in a descriptor
and not used it yet. The native call that it makes then finds that the group has ended. The memory is freed too early
only if 32 groups end between the read and the use."""

_descriptors: list[_Descriptor] = []
_numbers: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()
WORLD, NOBODY = 0, 1
"""Numbers of two descriptors: of the current world, and of all groups that this process is not in."""


def group_descriptor(group: Group) -> int:
    """Return the address of a group's descriptor.

    None means the world; its descriptor stays the same when one world follows another.

    The caller keeps the group alive while compiled code uses the descriptor.
    """
    with _lock:
        if not _descriptors:
            world, nobody = (_Descriptor(number, d.c_entry_address()) for number in (WORLD, NOBODY))
            nobody.words[d.RANK] = nobody.words[d.SIZE] = -1
            _descriptors.extend((world, nobody))
        if group is None:
            return _descriptors[WORLD].address
        if isinstance(group, NonMember):
            return _descriptors[NOBODY].address
        if not isinstance(group, ProcessGroup):
            raise UsageError(
                f"group is {group!r}; give a group made by new_group, or None for the default group"
            )
        number = _numbers.get(group)
        if number is None:
            number = len(_descriptors)
            made = _Descriptor(number, d.c_entry_address())
            made.fill(group)
            _descriptors.append(made)
            _numbers[group] = number  # last, because Ctrl-C may interrupt the lines above
        return _descriptors[number].address


def take_error() -> BaseException | None:
    """Return and forget the exception for which the C entry point has returned RAISED to this thread."""
    return _errors.pop(threading.get_ident(), None)


class _Again:
    """An object whose truth test raises this thread's error, if it is no Exception.

    A KeyboardInterrupt is such an error. `except Exception` in compiled code may have suppressed it, although in Python
    it would not have. An error is raised once, here or by the caller of `take_error`, whichever is first.
    """

    def __bool__(self) -> bool:
        if isinstance(_errors.get(threading.get_ident(), Exception()), Exception):
            return False
        raise _errors.pop(threading.get_ident())


_again = _Again()


# ---- calls in Python --------------------------------------------------------------------------------------


class _CallWords(NamedTuple):
    """The arguments of the C entry point, and the status of the native call (LATER: none has begun)."""

    descriptor: int
    op: int
    data: int
    out: int
    nbytes: int
    call: int
    peer: int
    code: int


def _memory(address: int, nbytes: int, dtype: np.dtype[Any]) -> Array:
    if nbytes <= 0:
        return np.empty(0, dtype)
    return np.frombuffer(memoryview((ctypes.c_char * nbytes).from_address(address)), dtype)


class _DecodedCall:
    """The arguments of a call, decoded from its words."""

    def __init__(self, words: _CallWords, group: ProcessGroup) -> None:
        self._words, self._size = words, group.size
        self.is_root = words.peer == group.rank
        self.peer, self.nbytes, self.call = words.peer, words.nbytes, words.call
        self.reduces = words.op < d.SEND and words.call >> signature.OP_SHIFT & 0xFFFF != 0

    @property
    def dtype(self) -> np.dtype[Any]:
        q = self._words
        code = q.call & _DTYPE_MASK if q.op >= d.SEND else _dtype_in(q.call)
        if code not in _dtypes:
            raise UsageError("this process cannot find the dtype of the compiled code; compile it again")
        return _dtypes[code]

    def _array(self, address: int, blocks: int) -> Array:
        return _memory(address, blocks * self._words.nbytes, self.dtype)

    @property
    def x(self) -> Array:
        return self._array(self._words.data, 1)

    @property
    def held(self) -> Array:
        """Return a message's array; when it is freed, its owner is released."""
        q = self._words
        return handles.memory(q.data, q.nbytes, q.out).view(self.dtype)

    @property
    def blocks(self) -> Array:
        return self._array(self._words.data, self._size)

    @property
    def out(self) -> Array:
        return self._array(self._words.out, 1)

    @property
    def outs(self) -> Array:
        return self._array(self._words.out, self._size)

    @property
    def split(self) -> tuple[list[Array], list[Array]]:
        """The blocks that an all_to_all writes, and those that it reads."""
        q, n = self._words, self._size
        sizes = list((ctypes.c_int64 * (2 * n)).from_address(q.nbytes))
        return self._blocks(q.out, sizes[n:]), self._blocks(q.data, sizes[:n])

    @property
    def reduce_scatter_split(self) -> tuple[Array, list[Array]]:
        """The output of a reduce_scatter, and the blocks that it reads."""
        q, n = self._words, self._size
        *sizes, own = (ctypes.c_int64 * (n + 1)).from_address(q.nbytes)
        return _memory(q.out, own, self.dtype), self._blocks(q.data, sizes)

    def _blocks(self, address: int, sizes: list[int]) -> list[Array]:
        starts = accumulate(sizes, initial=address)
        return [_memory(start, size, self.dtype) for start, size in zip(starts, sizes, strict=False)]

    @property
    def op(self) -> ReduceOp:
        return _op_in(self._words.call)

    @property
    def tag(self) -> int:
        tag = self._words.call >> DTYPE_BITS
        if tag == INVALID_TAG:
            raise UsageError("the tag is out of range; tags are integers from 0 to 2**31 - 1")
        return tag

    @property
    def is_apart(self) -> bool:
        """Whether the tag is one of the library's own, above those of users."""
        return self.tag > LARGEST_TAG

    @property
    def source(self) -> int | None:
        return None if self.peer == ANY else self.peer


def _collective(method: str) -> Callable[[ProcessGroup, _DecodedCall], Any]:
    """Return a function that calls this method of a group; the blocks of all ranks are one array."""
    kind = KINDS[METHODS[method]]

    def call(group: ProcessGroup, decoded: _DecodedCall) -> Any:
        if kind.form == NO_ARRAY:
            return call_method(group, method, None, None, None, None)
        op = decoded.op if kind.reduces else None
        if not kind.has_blocks:
            return call_method(group, method, decoded.x, None, decoded.peer, op)
        here = decoded.is_root or not kind.root  # if the operation has a root, only the root has blocks
        out = decoded.out if not kind.takes_blocks else decoded.outs if here else None
        given = decoded.x if not kind.gives_blocks else decoded.blocks if here else None
        return call_method(group, method, out, given, decoded.peer, op)

    return call


_METHODS: dict[int, tuple[str, Callable[[ProcessGroup, _DecodedCall], Any]]] = {
    0: ("", lambda g, a: None),
    d.SPLIT: ("all_to_all", lambda g, a: g.fast.all_to_all(*a.split)),
    d.REDUCE_SCATTER_SPLIT: (
        "reduce_scatter",
        lambda g, a: g.fast.reduce_scatter(*a.reduce_scatter_split, a.op),
    ),
    d.SEND: ("send", lambda g, a: (g.p2p.send_apart if a.is_apart else g.fast.send)(a.x, a.peer, a.tag)),
    d.RECV: ("recv", lambda g, a: (g.p2p.recv_apart if a.is_apart else g.fast.recv)(a.x, a.source, a.tag)),
    d.POST_SEND: ("isend", lambda g, a: handles.post(g.fast.isend(a.held, a.peer, a.tag))),
    d.POST_RECV: ("irecv", lambda g, a: _post_receive(g, a)),
} | {
    signature.code_of(name): (name, _collective(method))
    for method, name in METHODS.items()
    if name in NATIVE and (method != name or not KINDS[name].has_blocks)
}
"""For each operation its name, and a function that calls the group's method."""


def _post_receive(group: ProcessGroup, decoded: _DecodedCall) -> int:
    if group.backend.native_calls is not None:
        group.backend.native_calls.stay_awake()
    return handles.post(
        group.fast.irecv(decoded.held, None if decoded.peer == ANY else decoded.peer, decoded.tag)
    )


def _refuse(group: ProcessGroup, decoded: _DecodedCall) -> None:
    """Refuse an operation whose second array or split sizes do not fit; the peers get an error too."""
    name = OPERATIONS[decoded.call & 0xFF]
    with group.preparing(name):
        if decoded.call & SPLITS:
            raise UsageError(
                f"{name} inside compiled code: split sizes must be {group.size} numbers >= 0 that add up to the "
                f"{decoded.peer} rows of their array; they add up to {decoded.nbytes}"
            )
        raise UsageError(
            f"{name} inside compiled code: the array with a block for each rank has {decoded.nbytes} elements; "
            f"expected {decoded.peer}, in {group.size} blocks"
        )


_METHODS[signature.REFUSED] = "", _refuse

_ROOTS = {name: kind.root for name, kind in KINDS.items()} | {
    "send": "dst", "recv": "src", "isend": "dst", "irecv": "src",
}  # fmt: skip


def _group_of(words: _CallWords, number: int) -> ProcessGroup | None:
    """Return the group of a call.

    For the world's descriptor this is the current world or, if a native call has begun, the world in which it began.
    """
    return groups.world if number == WORLD and words.code == LATER else _descriptors[number].group()


def _call_in_python(address: int) -> int:
    """Carry out the call whose words are at an address; return the C entry point's result."""
    words = _CallWords(*(ctypes.c_int64 * d.QUESTION_WORDS).from_address(address))
    number = ctypes.c_int64.from_address(words.descriptor + 8 * d.NUMBER).value
    if words.op in _OF_REQUESTS:
        _open(_descriptors[number].group(), number, words, None, None)
        return _OF_REQUESTS[words.op](words)
    name, method = _METHODS[words.op]
    if number == NOBODY:
        member_of(_NON_MEMBER, name)
        handles.release(words.out if words.op > d.RECV else 0)
        return 0
    group = _group_of(words, number)
    if group is None:
        raise NotInitializedError(f"{name or 'get_rank'}: the group was destroyed; make a new one")
    if words.peer >= FOREIGN // 2:  # group_rank raises, as the rank is not in the group
        group_rank(group, _ROOTS[name], words.peer - FOREIGN, None)
    decoded, native_calls = _DecodedCall(words, group), group.backend.native_calls
    if words.code != LATER and native_calls is not None:
        return native_calls.go_on(words.code, words.op, words[2:7], lambda: decoded.x)
    result = method(group, decoded) or 0
    with _lock:
        if number == WORLD:
            _descriptors[WORLD].fill(group)
    if name:
        dtype, op = None if name == "barrier" else decoded.dtype, decoded.op if decoded.reduces else None
        _open(group, number, words, dtype, op)
    return result


def _open(
    group: ProcessGroup | None,
    number: int,
    words: _CallWords,
    dtype: np.dtype[Any] | None,
    op: ReduceOp | None,
) -> None:
    """Install the native call of an operation, if there is one, so that later calls need no Python."""
    if group is None or group.backend.native_calls is None:
        return
    native_call = group.backend.native_calls.open(words.op, words.call, dtype, op)  # may compile it
    with _lock:
        if _descriptors[number].group() is group:
            _descriptors[number].open(words.op, native_call)


# ---- requests ---------------------------------------------------------------------------------------------


def _work_of(descriptor: int, number: int) -> Work | None:
    """Return a request's Work, or None if the request was waited for already.

    A request that only native code knows so far is first handed over to the message engine.
    """
    work = handles.find(number)
    group = _descriptors[ctypes.c_int64.from_address(descriptor + 8 * d.NUMBER).value].group()
    if work is None and number < handles.OWN and group is not None and group.backend.native_calls is not None:
        group.backend.native_calls.take_over()
        work = handles.find(number)
    return work


def _wait(words: _CallWords) -> int:
    work = _work_of(words.descriptor, words.data)
    return handles.source_of(words.data) if work is None else handles.end(words.data, work)


def _test(words: _CallWords) -> int:
    work = _work_of(words.descriptor, words.data)
    if work is not None:
        if not work.is_completed():
            return 0
        handles.end(words.data, work)
    return 1


def _wait_any(words: _CallWords) -> int:
    count = words.nbytes
    table = (ctypes.c_int64 * (2 * count)).from_address(words.data)
    works = [_work_of(table[count + index], table[index]) for index in range(count)]
    found = works.index(None) if None in works else waitany([work for work in works if work is not None])
    if (work := works[found]) is not None:
        handles.end(table[found], work)
    return found


_OF_REQUESTS = {d.WAIT: _wait, d.TEST: _test, d.WAIT_ANY: _wait_any}


_NON_MEMBER = NonMember()


def _torn(address: int) -> None:
    """Fail a native call that may be half done, after `_call_in_python` has raised.

    The exception is in `_errors`.
    """
    words = _CallWords(*(ctypes.c_int64 * d.QUESTION_WORDS).from_address(address))
    number = ctypes.c_int64.from_address(words.descriptor + 8 * d.NUMBER).value
    group = _group_of(words, number)
    if words.code != LATER and group is not None and group.backend.native_calls is not None:
        group.backend.native_calls.torn(words.op, _errors[threading.get_ident()])


for _name in NUMPY:
    _dtypes[signature.dtype_code(np.dtype(_name))] = np.dtype(_name)
