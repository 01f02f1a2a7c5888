"""The Python side of the XLA handler: errors, and the calls that the handler cannot make itself.

The handler (kernels/call_frames.py) is the compiled function that XLA runs for each call of a program. An exception
becomes an XLA error that has the exception's text and a code for its class; JAX raises it where the caller waits for
the program's results. After Python has carried out a call once, it writes a *line*: the arguments with which the
handler from then on calls the group's C entry point directly. XLA passes the arguments of each call in a *call frame*.
`ready` runs a program on known arrays, and compares its call frame with the layout that this file assumes.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import suppress
from functools import cache, partial
from typing import Any

import jax
import jaxlib
import numpy as np

from ..callers.descriptors import call_word, group_descriptor, message_word, take_error
from ..core import signature
from ..core.group import ProcessGroup
from ..core.operands import ANY_TAG
from ..errors import (
    AbortedError,
    CollectiveTimeoutError,
    GroupError,
    NotInitializedError,
    UnavailableError,
    UsageError,
)
from ..kernels import call_frames as f
from ..kernels.c_entries import RECV, SEND
from ..kernels.shared_words import publish_in
from ..p2p.pipe import ANY
from . import own_groups
from .sites import Array, Site, own_tag, site_of

TARGET = "fastcoll"
"""The handler's name in programs; its one attribute is `site`, the number of the call."""
PROBE = -1
"""The number of the call in the program that `ready` runs; it involves no group."""

# Offsets in bytes in XLA's structs: in an extension of the frame, in the metadata and in the API.
_EXTENSION_TYPE, _NEXT, _METADATA = 8, 16, 24
_VERSION, _TRAITS = 24, 32  # in the metadata
_API_MINOR, _ERROR_CREATE = 36, 48  # in the API
_IS_METADATA, _EXECUTE = 1, 3

_CODES: dict[type[BaseException], int] = {
    KeyboardInterrupt: 1,  # CANCELLED
    UsageError: 3,  # INVALID_ARGUMENT
    CollectiveTimeoutError: 4,  # DEADLINE_EXCEEDED
    NotInitializedError: 9,  # FAILED_PRECONDITION
    AbortedError: 10,  # ABORTED
    GroupError: 14,  # UNAVAILABLE
    BaseException: 13,  # INTERNAL
}


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


def _half(address: int) -> int:
    return ctypes.c_int32.from_address(address).value


def _call_in_python(frame: int) -> int:
    """Carry out a call that the handler cannot make; return 0, or the address of an error."""
    try:
        if _is_query(frame):
            return 0
        number = _word(_word(_word(_word(frame + f.ATTRS + f.VALUES)) + f.SCALAR))
        if number == PROBE:
            _frame_read[:] = _read_frame(frame)
            return 0
        site, dtypes = site_of(number)
        arguments, results = _word(frame + f.ARGS + f.POINTERS), _word(frame + f.RETS + f.POINTERS)
        ins = [_array(_word(arguments + 8 * k), dtype) for k, dtype in enumerate(dtypes)]
        # The output has the dtype of the last input that is not a token.
        out = _array(_word(results), dtypes[-1 - site.token]) if site.traits.shape else None
        group = own_groups.group_for(site.group, site.traits.is_message)
        if group.size != site.size:
            raise UsageError(
                f"{site} was traced in a world of {site.size} ranks, and this one has {group.size}; call "
                "jax.clear_caches() when the world has changed, so that JAX traces its functions again"
            )
        carry_out(group, site, ins, out)
        with suppress(UsageError):  # Python keeps carrying out the calls that no call word can express
            _write_line(number, group, site, dtypes)
        return 0
    except BaseException as error:
        return _failed(frame, error)


def _error_of_c_entry(frame: int) -> int:
    """Return the address of an XLA error for the exception that the C entry point has kept."""
    error = take_error()
    assert error is not None
    return _failed(frame, error)


_errors: dict[int, BaseException] = {}


def _error_of_exception(frame: int) -> int:
    """Return the address of an XLA error for an exception that left a function of this file, as a signal may cause."""
    return _failed(frame, _errors.pop(threading.get_ident()))


_HANDLER = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)


def _write_line(number: int, group: ProcessGroup, site: Site, dtypes: tuple[Any, ...]) -> None:
    """Let the handler make this call directly from now on, until the group ends."""
    form = site.traits.form
    in_python = form is None or site.status is not None or site.recv_tag == ANY_TAG
    if in_python or number >= f.MOST or group.gate.closed:
        return
    line, messages = f.LINES[1 + number], {"send": SEND, "recv": RECV}
    if site.kind in messages:
        tag = own_tag(site.recv_tag if site.kind == "recv" else site.tag)
        line[f.OP], line[f.CALL] = messages[site.kind], message_word(tag, dtypes[0])
    else:
        line[f.OP] = signature.code_of(site.kind)
        barrier = form == f.NO_ARRAY
        line[f.CALL] = signature.encode(site.kind) if barrier else call_word(site.kind, dtypes[0], site.op)
    peer = site.src if site.kind in ("recv", "broadcast", "scatter") else site.dst
    line[f.PEER] = ANY if peer is None else peer
    line[f.ITEM] = dtypes[0].itemsize if dtypes else 0
    line[f.BLOCKS] = group.size if site.traits.rows[0] else 1
    line[f.FORM] = form
    # If another thread closes the group now, it either finds this callback, or has set `closed` before the check below.
    group.at_the_end.append(partial(line.__setitem__, f.DESCRIPTOR, 0))
    publish_in(line, f.DESCRIPTOR, group_descriptor(group))  # last, because it makes the line valid
    if group.gate.closed:
        line[f.DESCRIPTOR] = 0


def carry_out(group: ProcessGroup, site: Site, ins: list[Array], out: Array | None) -> None:
    """Make the call of a site; for a call in place, first copy the input to the output."""
    kind = site.traits
    if kind.form == f.IN_PLACE and out is not None and out.ctypes.data != ins[0].ctypes.data:
        np.copyto(out, ins[0])
    kind.run(group, site, ins, out)


def _shape(buffer: int) -> tuple[int, ...]:
    dims = _word(buffer + f.DIMS)
    return tuple(_word(dims + 8 * k) for k in range(_word(buffer + f.NDIM)))


def _array(buffer: int, dtype: Any) -> Array:
    """Return a buffer as an array, which is valid until the handler returns."""
    shape = _shape(buffer)
    room = (ctypes.c_char * max(1, int(np.prod(shape)) * dtype.itemsize)).from_address(_word(buffer + f.DATA))
    return np.ndarray(shape, dtype, room)


def _is_query(frame: int) -> bool:
    """Return whether XLA asks which version of its interface the handler implements; if so, answer with XLA's own.

    This is safe, because the handler uses only parts of the interface that all versions have.
    """
    extension, api = _word(frame + f.EXTENSION), _word(frame + f.API)
    while extension:
        if _half(extension + _EXTENSION_TYPE) == _IS_METADATA:
            metadata = _word(extension + _METADATA)
            ctypes.c_int32.from_address(metadata + _VERSION).value = 0
            ctypes.c_int32.from_address(metadata + _VERSION + 4).value = _half(api + _API_MINOR)
            ctypes.c_int32.from_address(metadata + _TRAITS).value = 0
            return True
        extension = _word(extension + _NEXT)
    return False


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("size", ctypes.c_size_t),
        ("extension", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("code", ctypes.c_int32),
    )


def _failed(frame: int, error: BaseException) -> int:
    """Make an XLA error from an exception; return the error's address."""
    code = next(_CODES[kind] for kind in type(error).__mro__ if kind in _CODES)
    text = f"{type(error).__module__}.{type(error).__name__}: {error}".encode()
    arguments = _ErrorArguments(28, None, text, code)
    create = _HANDLER(_word(_word(frame + f.API) + _ERROR_CREATE))
    made: int = create(ctypes.addressof(arguments))
    return made


# ---- the self-test ------------------------------------------------------------------------------------------

_frame_read: list[Any] = []
_PROBED = np.arange(6, dtype=np.int16).reshape(2, 3)
_EXPECTED = [168, 40, 40, 48, 48, 48, _EXECUTE, 1, 1, 1, b"site", 3, 1, (2, 3), (5, 7, 1), [0, 1, 2, 3, 4, 5]]


def _read_frame(frame: int) -> list[Any]:
    """Return the sizes, counts, types and values in the call frame of the program that `ready` runs."""
    args, rets, attrs = (frame + place for place in (f.ARGS, f.RETS, f.ATTRS))
    x, y = _word(_word(args + f.POINTERS)), _word(_word(rets + f.POINTERS))
    sizes = [_word(part) for part in (frame, args, rets, attrs, x, y)]
    counts = [_word(part + f.COUNT) for part in (args, rets, attrs)]
    name = _word(_word(attrs + f.NAMES))
    called = ctypes.string_at(_word(name), _word(name + 8))
    dtypes = [_half(x + f.DTYPE), _half(y + f.DTYPE)]
    content = _array(x, np.dtype(np.int16)).ravel().tolist()
    return [*sizes, _half(frame + f.STAGE), *counts, called, *dtypes, _shape(x), _shape(y), content]


_preparing = threading.Lock()


def ready() -> None:
    """Register the handler with XLA, once in a process, and check the layout of call frames.

    Raises:
        UnavailableError: this jaxlib has another layout of call frames.
    """
    with _preparing:  # two threads may trace their first calls at the same time
        _prepare()


@cache
def _prepare() -> None:
    f.LINES[0, : f.ERRORS + 1] = (
        id(_call_in_python),
        id(_error_of_c_entry),
        id(_error_of_exception),
        id(_errors),
    )
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(_HANDLER(f.handler_address())), platform="cpu")
    cpu = jax.devices("cpu")[0]
    probe = jax.ffi.ffi_call(TARGET, jax.ShapeDtypeStruct((5, 7, 1), np.bool_), has_side_effect=True)
    program = jax.jit(lambda x: probe(x, site=np.int64(PROBE)))

    def look() -> None:
        program(jax.device_put(_PROBED, cpu)).block_until_ready()

    own_groups.settle_by(look)
    thread = threading.Thread(target=look)  # on another thread, because this thread may be tracing
    thread.start()
    thread.join()
    if _frame_read != _EXPECTED:
        raise UnavailableError(
            f"jaxlib {jaxlib.__version__} does not lay out call frames as fastcoll.jax expects: {_frame_read}, and not "
            f"{_EXPECTED}; use jaxlib from PyPI or conda-forge"
        )
