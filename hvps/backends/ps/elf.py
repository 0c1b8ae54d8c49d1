"""Replace C functions that TensorFlow's libraries call (ELF, 64 bits).

A library keeps the addresses of the functions that it calls in others in slots, which the loader
has filled. Another address in a slot is another function, for that library alone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt


class SlotError(OSError):
    """The functions cannot be replaced here; says why."""


_GLOB_DAT_AND_JUMP_SLOT = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
_NULL, _PLTRELSZ, _STRTAB, _SYMTAB, _RELA, _RELASZ, _STRSZ, _JMPREL = 0, 2, 5, 6, 7, 8, 10, 23
_RELOCATION = np.dtype([("slot", "u8"), ("type", "u4"), ("symbol", "u4"), ("addend", "i8")])
_SYMBOL = np.dtype(
    [("name", "u4"), ("info", "u1"), ("other", "u1"), ("section", "u2"), ("rest", "u8", 2)]
)
_RTLD_DI_LINKMAP = 2


class _LinkMap(ctypes.Structure):
    """What <link.h> makes public of the loader's list of libraries."""


_LinkMap._fields_ = [
    ("addr", ctypes.c_size_t),
    ("name", ctypes.c_char_p),
    ("dynamic", ctypes.c_size_t),
    ("next", ctypes.POINTER(_LinkMap)),
]


def import_slots(names: Iterable[str]) -> dict[str, set[int]]:
    """Where the addresses of C functions are kept in all loaded libraries of TensorFlow.

    Raises:
        SlotError: nowhere, or not in a way that is known here.
    """
    slots: dict[str, set[int]] = {name: set() for name in names}
    types = _GLOB_DAT_AND_JUMP_SLOT.get(platform.machine(), ())
    if sys.platform == "linux" and types:
        for base, dynamic in _tensorflow_libraries():
            tables = _Tables(base, dynamic)
            for name, found in slots.items():
                found |= tables.slots_of(name, types)
    if not all(slots.values()):
        raise SlotError(
            f"no call of {' and '.join(slots)} in TensorFlow's libraries ({sys.platform},"
            f" {platform.machine()})"
        )
    return slots


def _tensorflow_libraries() -> Iterator[tuple[int, int]]:
    """Load address and dynamic section of each of its libraries."""
    import tensorflow as tf

    home = os.path.dirname(os.path.abspath(tf.__file__))
    homes = (home + os.sep, os.path.realpath(home) + os.sep)
    program = ctypes.PyDLL(None)
    link = ctypes.POINTER(_LinkMap)()
    program.dlinfo(ctypes.c_void_p(program._handle), _RTLD_DI_LINKMAP, ctypes.byref(link))
    while link:
        library = link.contents
        if os.path.normpath(os.fsdecode(library.name or b"")).startswith(homes):
            yield library.addr, library.dynamic
        link = library.next


class _Tables:
    """The tables by which the loader has bound a library to others."""

    def __init__(self, base: int, dynamic: int) -> None:
        self._base = base
        self._tags: dict[int, int] = {}
        while True:
            tag, value = (ctypes.c_size_t * 2).from_address(dynamic)
            if tag == _NULL:
                break
            self._tags[tag] = value
            dynamic += 16

    def slots_of(self, name: str, types: tuple[int, ...]) -> set[int]:
        """The places in memory that hold the address of the function `name`."""
        text = np.frombuffer(name.encode() + b"\0", np.uint8)
        found: set[int] = set()
        for table, size in ((_JMPREL, _PLTRELSZ), (_RELA, _RELASZ)):
            calls = self._array(table, self._tags.get(size, 0), _RELOCATION)
            calls = calls[np.isin(calls["type"], types)]
            if not len(calls):
                continue
            count = int(calls["symbol"].max()) + 1
            symbols = self._array(_SYMTAB, count * _SYMBOL.itemsize, _SYMBOL)[calls["symbol"]]
            strings = self._array(_STRTAB, self._tags[_STRSZ], np.dtype(np.uint8))
            letters = symbols["name"].astype(np.int64)[:, None] + np.arange(len(text))
            same = (strings[np.minimum(letters, len(strings) - 1)] == text).all(axis=1)
            found.update(self._base + int(slot) for slot in calls["slot"][same])
        return found

    def _array(self, tag: int, size: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """A table as it lies in memory. Most loaders have turned its offset into an address."""
        if tag not in self._tags:
            return np.empty(0, dtype)
        start = self._tags[tag]
        if start < self._base:
            start += self._base
        return np.frombuffer(memoryview((ctypes.c_char * size).from_address(start)), dtype)


@contextmanager
def replaced(slots: Mapping[str, Iterable[int]], functions: Mapping[str, Any]) -> Iterator[None]:
    """Put the address of other functions into the slots for a while.

    Raises:
        SlotError: the slots cannot be written.
    """
    read_only = _read_only({slot for places in slots.values() for slot in places})
    before: dict[int, int] = {}
    try:
        for name, places in slots.items():
            function = ctypes.cast(functions[name], ctypes.c_void_p).value
            assert function is not None
            for slot in places:
                before[slot] = ctypes.c_size_t.from_address(slot).value
                _write(slot, function, slot in read_only)
        yield
    finally:
        for slot, value in before.items():
            _write(slot, value, slot in read_only)


def _write(slot: int, value: int, read_only: bool) -> None:
    """Write a slot, whose page the loader may have made read-only (RELRO)."""
    page = slot - slot % mmap.PAGESIZE
    if read_only:
        _protect(page, mmap.PROT_READ | mmap.PROT_WRITE)
    ctypes.c_size_t.from_address(slot).value = value
    if read_only:
        _protect(page, mmap.PROT_READ)


def _protect(page: int, protection: int) -> None:
    libc = ctypes.PyDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(mmap.PAGESIZE), protection):
        raise SlotError(f"mprotect: {os.strerror(ctypes.get_errno())}")


def _read_only(slots: set[int]) -> set[int]:
    """Those that cannot be written as they are."""
    with open("/proc/self/maps") as file:
        maps = file.read()
    writable = [
        range(int(start, 16), int(end, 16))
        for start, end in re.findall(r"^([0-9a-f]+)-([0-9a-f]+) rw", maps, re.MULTILINE)
    ]
    return {slot for slot in slots if not any(slot in part for part in writable)}
