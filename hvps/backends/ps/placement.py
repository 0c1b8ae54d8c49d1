"""Which parameter server holds what: by size, largest first to the least loaded.

Pure arithmetic, so that every task comes to the same answer by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

SMALL_BYTES = 64 << 10  # variables up to this size travel together
PART_BYTES = 1 << 20  # larger ones are split into parts of about this size
MAX_PARTS = 32  # of one variable


@dataclass(frozen=True)
class Slot:
    """A variable as placement sees it.

    Attributes:
        name: for messages.
        shape: of the whole variable.
        itemsize: bytes of one element.
        dtype: its name; only variables of one dtype travel together.
        splittable: the optimizer treats each element by itself, so rows may be apart.
        sparse: an embedding table, of which only touched rows travel.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int
    dtype: str
    splittable: bool = True
    sparse: bool = False

    @property
    def bytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Part:
    """Entries [start, stop) of variable `index` along one axis; a scalar is one entry.

    Attributes:
        whole: the part is the variable.
        axis: 0, rows, wherever there are enough of them.
    """

    index: int
    start: int
    stop: int
    whole: bool
    axis: int = 0

    @property
    def key(self) -> tuple[slice, ...]:
        """What selects the part from an array or a tensor."""
        return (*[slice(None)] * self.axis, slice(self.start, self.stop))


@dataclass(frozen=True)
class Shard:
    """What one ps updates at once, under one lock: a part, or several small variables.

    Attributes:
        ps: index of the ps task.
        sparse: a part of an embedding table.
    """

    ps: int
    parts: tuple[Part, ...]
    sparse: bool = False


@dataclass(frozen=True)
class Placement:
    """All shards, and how many bytes each ps holds."""

    shards: tuple[Shard, ...]
    bytes_by_ps: tuple[int, ...]

    def describe(self) -> str:
        """One line: the share of each ps."""
        total = sum(self.bytes_by_ps) or 1
        shares = ", ".join(
            f"ps {i} {_in_units(size)} ({100 * size / total:.0f} %)"
            for i, size in enumerate(self.bytes_by_ps)
        )
        parts = sum(len(shard.parts) for shard in self.shards)
        return f"variables on {shares}; {parts} parts in {len(self.shards)} shards"


def place(variables: Sequence[Slot], num_ps: int) -> Placement:
    """Assign variables, whole or in parts, to `num_ps` servers.

    The largest piece goes first to the server that holds least (Graham's longest processing time
    rule, 1969), ties to the lower index.
    """
    pieces = [
        (_piece_bytes(variables[part.index], part), part)
        for index, variable in enumerate(variables)
        for part in _parts(index, variable, num_ps)
    ]
    pieces.sort(key=lambda piece: (-piece[0], piece[1].index, piece[1].start))
    load = [0] * num_ps
    alone: list[Shard] = []
    together: dict[tuple[int, str], list[Part]] = {}
    for size, part in pieces:
        ps = min(range(num_ps), key=lambda i: (load[i], i))
        load[ps] += size
        variable = variables[part.index]
        if variable.sparse or size > SMALL_BYTES:
            alone.append(Shard(ps, (part,), variable.sparse))
        else:
            together.setdefault((ps, variable.dtype), []).append(part)
    packs = [
        Shard(ps, tuple(sorted(parts, key=lambda part: (part.index, part.start))))
        for (ps, _), parts in sorted(together.items())
    ]
    # The backward pass ends with the first variables: these are needed first and ready last.
    alone.sort(key=lambda shard: (shard.parts[0].index, shard.parts[0].start))
    return Placement((*packs, *alone), tuple(load))


def _parts(index: int, variable: Slot, num_ps: int) -> Iterable[Part]:
    shape = variable.shape or (1,)
    count = _part_count(variable, num_ps)
    # By rows; a convolution's kernel has few of them.
    axis = next((a for a, n in enumerate(shape) if n >= count), shape.index(max(shape)))
    length, axis = (shape[0], 0) if variable.sparse else (shape[axis], axis)
    count = max(1, min(count, length))
    for i in range(count):
        yield Part(index, length * i // count, length * (i + 1) // count, count == 1, axis)


def _part_count(variable: Slot, num_ps: int) -> int:
    if not variable.splittable or variable.bytes <= SMALL_BYTES:
        return 1
    if variable.sparse:
        return num_ps
    if variable.bytes < 2 * PART_BYTES:
        return num_ps if variable.bytes >= PART_BYTES else 1
    count = min(-(-variable.bytes // PART_BYTES), max(MAX_PARTS, num_ps))
    return -(-count // num_ps) * num_ps  # as many on each ps


def _piece_bytes(variable: Slot, part: Part) -> int:
    if part.whole:
        return variable.bytes
    return variable.bytes // variable.shape[part.axis] * (part.stop - part.start)


def _in_units(size: int) -> str:
    value = float(size)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
