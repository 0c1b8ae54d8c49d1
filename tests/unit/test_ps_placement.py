"""Which parameter server holds what."""

from __future__ import annotations

import numpy as np
import pytest

from hvps.backends.ps.placement import SMALL_BYTES, Placement, Slot, place


def slot(*shape: int, splittable: bool = True, sparse: bool = False) -> Slot:
    return Slot("v", shape, 4, "float32", splittable, sparse)


def covered(placement: Placement, slots: list[Slot]) -> None:
    """Each element of each variable lies in one part, once."""
    seen = [np.zeros(s.shape or (1,), int) for s in slots]
    for shard in placement.shards:
        for part in shard.parts:
            seen[part.index][part.key] += 1
    assert all((array == 1).all() for array in seen)


@pytest.mark.parametrize("num_ps", [1, 2, 3, 5])
def test_everything_lies_somewhere_once(num_ps: int) -> None:
    slots = [slot(), slot(7), slot(1000, 300), slot(3, 3, 512, 512), slot(1, 2_000_000)]
    slots += [slot(50_000, 16, sparse=True), slot(2000, 2000, splittable=False)]
    placement = place(slots, num_ps)
    covered(placement, slots)
    assert sum(placement.bytes_by_ps) == sum(s.bytes for s in slots)
    assert {shard.ps for shard in placement.shards} == set(range(num_ps))


def test_one_large_variable_is_shared_evenly() -> None:
    for shape in [(4096, 1024), (3, 3, 512, 512), (1, 4 << 20)]:
        placement = place([slot(*shape)], 2)
        assert placement.bytes_by_ps[0] == placement.bytes_by_ps[1]
        assert len(placement.shards) > 2


def test_small_ones_of_a_ps_travel_together() -> None:
    placement = place([slot(10, 10) for _ in range(20)], 2)
    assert len(placement.shards) == 2
    assert placement.bytes_by_ps == (4000, 4000)
    assert max(SMALL_BYTES, 400) == SMALL_BYTES


def test_dtypes_do_not_travel_together() -> None:
    half = Slot("h", (10,), 2, "bfloat16")
    assert len(place([slot(10), half], 1).shards) == 2


def test_the_largest_goes_first_to_the_least_loaded() -> None:
    sizes = [100_000, 90_000, 50_000, 40_000, 30_000]
    placement = place([slot(n, splittable=False) for n in sizes], 2)
    assert sorted(placement.bytes_by_ps) == [4 * 140_000, 4 * 170_000]


def test_what_may_not_be_split_is_whole() -> None:
    placement = place([slot(4096, 1024, splittable=False)], 4)
    ((part,),) = (shard.parts for shard in placement.shards)
    assert part.whole


def test_tables_are_split_by_rows_once_per_ps() -> None:
    placement = place([slot(1_000_001, 16, sparse=True)], 3)
    parts = sorted(shard.parts[0].start for shard in placement.shards)
    assert parts == [0, 333_333, 666_667]
    assert all(shard.sparse and shard.parts[0].axis == 0 for shard in placement.shards)


def test_the_description_names_every_ps() -> None:
    text = place([slot(1 << 20), slot(100)], 2).describe()
    assert "ps 0 2.0 MiB (50 %)" in text
    assert "ps 1 2.0 MiB (50 %)" in text
