"""Load machine code, an object file of one or more functions, into memory; on x86-64 without LLVM.

compiling.py lets LLVM write the file. It is an ELF file of position-independent code for the small code model, so its
sections are put into one mapping, one after the other. Functions of CPython and libc may be further away than a call
instruction reaches. So the mapping has for each symbol a *slot*, which holds the symbol's address, and a *stub*, which
jumps to that address. The loader knows the relocations that LLVM writes for such code, and rejects all others. The
process that compiles notices a rejection at once, because it loads the new code from the same bytes. llvmlite's linker
supports all processors, but importing llvmlite takes 30 ms, so it is used only on processors other than x86-64.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, NamedTuple

from ..errors import UnavailableError
from .executable import fill, reserve
from .processor import IS_X86

SYMBOL = "fastcoll.code"
"""The names of an object file's functions are this and their number: fastcoll.code0, fastcoll.code1, ..."""

OWN_SYMBOLS: dict[str, int] = {}
"""Addresses of this package's objects, by the names under which code refers to them."""

_process = ctypes.CDLL(None)

# ELF section types and flags (System V ABI).
_PROGBITS, _SYMTAB, _RELA = 1, 2, 4
_WRITE, _ALLOC = 1, 2


class _Section(NamedTuple):
    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    entry_size: int


class _Symbol(NamedTuple):
    name: str
    section: int  # section of the symbol; 0: a symbol of the process
    value: int


class _Object:
    """An object file's contents and their layout in memory.

    The layout has the sections, then a slot and a stub for each symbol.
    """

    def __init__(self, file: bytes) -> None:
        self.file = file
        (start,), (count,) = struct.unpack_from("<Q", file, 40), struct.unpack_from("<H", file, 60)
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", file, start + 64 * k)) for k in range(count)
        ]
        self.symbols: list[_Symbol] = []
        for section in self.sections:
            if section.type == _SYMTAB:
                names = self.sections[section.link].offset
                for at in range(section.offset, section.offset + section.size, 24):
                    name, _, _, of, value = struct.unpack_from("<IBBHQ", file, at)
                    self.symbols.append(_Symbol(self._text(names + name), of, value))
        self.offsets: dict[int, int] = {}
        self.size = 0
        for number, section in enumerate(self.sections):
            if section.flags & _ALLOC and section.type == _PROGBITS and self._is_wanted(section):
                self.size = -(-self.size // section.align) * section.align
                self.offsets[number] = self.size
                self.size += section.size
        self.slots = self.size = -(-self.size // 16) * 16
        self.size += 16 * len(self.symbols)

    def _is_wanted(self, section: _Section) -> bool:
        (names,) = struct.unpack_from("<H", self.file, 62)
        name = self._text(self.sections[names].offset + section.name)
        # Writable sections are left out, because kernels have no variables. .eh_frame is left out too, so a stack
        # unwinder stops at this code.
        return name.startswith(".data.rel.ro") or (not section.flags & _WRITE and name != ".eh_frame")

    def functions(self) -> list[_Symbol]:
        """Return the symbols of the file's functions, in their order."""
        found = (symbol for symbol in self.symbols if symbol.name.startswith(SYMBOL))
        return sorted(found, key=lambda symbol: int(symbol.name.removeprefix(SYMBOL)))

    def _text(self, at: int) -> str:
        return self.file[at : self.file.index(b"\0", at)].decode()

    def relocations(self) -> Iterator[tuple[int, int, _Symbol, int, int]]:
        """Yield the relocations of mapped sections: offset, kind, symbol, the symbol's number, addend."""
        for section in self.sections:
            if section.type == _RELA and section.info in self.offsets:
                for at in range(section.offset, section.offset + section.size, 24):
                    offset, info, addend = struct.unpack_from("<QQq", self.file, at)
                    number = info >> 32
                    position = self.offsets[section.info] + offset
                    yield position, info & 0xFFFFFFFF, self.symbols[number], number, addend


def load(file: bytes) -> list[int]:
    """Map the code of an object file; return the addresses of its functions."""
    return _link(_Object(file)) if IS_X86 else load_by_llvm(file)


def load_by_llvm(file: bytes) -> list[int]:
    """Map the code of an object file with LLVM's linker; return the addresses of its functions."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine()
    for name, own in OWN_SYMBOLS.items():
        llvm.add_symbol(name, own)
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(file))
    engine.finalize_object()
    _engines.append(engine)
    return [engine.get_function_address(symbol.name) for symbol in _Object(file).functions()]


_engines: list[Any] = []  # their code stays mapped


def _link(found: _Object) -> list[int]:
    image = bytearray(found.size)
    base = reserve(found.size)
    for number, position in found.offsets.items():
        section = found.sections[number]
        image[position : position + section.size] = found.file[section.offset : section.offset + section.size]

    def address_of(symbol: _Symbol) -> int:
        if symbol.section == 0:
            return OWN_SYMBOLS.get(symbol.name) or _symbol_address(symbol.name)
        if symbol.section not in found.offsets:
            raise UnavailableError(f"unsupported machine code: {symbol.name!r} is a variable")
        return base + found.offsets[symbol.section] + symbol.value

    for position, kind, symbol, number, addend in found.relocations():
        target, slot = address_of(symbol), found.slots + 16 * number
        struct.pack_into("<Q", image, slot, target)
        struct.pack_into("<Hi", image, slot + 8, 0x25FF, -14)  # jmp *slot(%rip)
        relocate = _RELOCATIONS.get(kind)
        if relocate is None:
            raise UnavailableError(f"unsupported machine code: relocation {kind}")
        call_target = base + slot + 8 if symbol.section == 0 else target
        relocate(image, position, _Addresses(base + position, target, call_target, base + slot), addend)
    fill(base, bytes(image))
    return [address_of(symbol) for symbol in found.functions()]


class _Addresses(NamedTuple):
    """The addresses that a relocation uses.

    They are the addresses of the bytes to relocate, of the symbol, of the target of calls to the symbol, and of the
    symbol's slot.
    """

    relocated: int
    target: int
    call: int
    slot: int


def _relative(which: str) -> Callable[[bytearray, int, _Addresses, int], None]:
    def relocate(image: bytearray, at: int, addresses: _Addresses, addend: int) -> None:
        struct.pack_into("<i", image, at, getattr(addresses, which) + addend - addresses.relocated)

    return relocate


def _absolute(image: bytearray, at: int, addresses: _Addresses, addend: int) -> None:
    struct.pack_into("<q", image, at, addresses.target + addend)


_RELOCATIONS = {
    1: _absolute,  # R_X86_64_64
    2: _relative("target"),  # R_X86_64_PC32
    4: _relative("call"),  # R_X86_64_PLT32
    9: _relative("slot"),  # R_X86_64_GOTPCREL
    41: _relative("slot"),  # R_X86_64_GOTPCRELX
    42: _relative("slot"),  # R_X86_64_REX_GOTPCRELX
}


@cache
def _symbol_address(name: str) -> int:
    try:
        address = ctypes.cast(getattr(_process, name), ctypes.c_void_p).value
    except AttributeError:
        raise UnavailableError(f"compiled code needs {name!r}, which this process does not have") from None
    assert address is not None
    return address


# ---- builtins of Python ----------------------------------------------------------------------------------

_METH_FASTCALL = 0x80


class _MethodDef(ctypes.Structure):
    """PyMethodDef (cpython/methodobject.h)."""

    _fields_ = (
        ("name", ctypes.c_char_p), ("function", ctypes.c_void_p), ("flags", ctypes.c_int), ("doc", ctypes.c_char_p),
    )  # fmt: skip


_new = ctypes.pythonapi.PyCFunction_NewEx
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p] * 3


def python_function(address: int, name: str, doc: str) -> Callable[..., Any]:
    """Return a Python builtin that calls a function in machine code.

    The function's type is `PyObject *(PyObject *self, PyObject *const *args, Py_ssize_t count)`.
    """
    method = _MethodDef(name.encode(), address, _METH_FASTCALL, doc.encode())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(method))  # never freed, like the code
    made: Callable[..., Any] = _new(ctypes.addressof(method), None, None)
    return made
