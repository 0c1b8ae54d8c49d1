"""The order of samples: a pure function of seed, epoch and position, for any number of ranks.

Position p of an epoch is a sample index through a keyed permutation of [0, n): a Feistel network on
just enough bits, walked along its cycle until the value is below n (Black and Rogaway 2002,
"Ciphers with arbitrary finite domains"). It needs no memory, any position can be reached at once,
and it does not depend on the version of a library.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_ROUNDS = 6
_MASK64 = (1 << 64) - 1


def permuted(positions: np.ndarray, n: int, seed: int, epoch: int) -> np.ndarray:
    """Sample indices at `positions` of an epoch's order.

    Args:
        positions: int array of any shape, values in [0, n).
        n: number of samples.
        seed: the run's seed.
        epoch: 0-based; every epoch has an order of its own.

    Returns:
        int64 array of the same shape; over all positions a permutation of [0, n).
    """
    if n <= 1:
        return np.zeros(np.shape(positions), np.int64)
    bits = max(2, (n - 1).bit_length())
    low_bits = np.uint64(bits // 2)
    high_bits = np.uint64(bits - bits // 2)
    keys = _round_keys(seed, epoch)
    values = np.asarray(positions, np.uint64).copy()
    pending = np.ones(values.shape, bool)
    while pending.any():
        walked = _feistel(values[pending], low_bits, high_bits, keys)
        values[pending] = walked
        pending[pending] = walked >= n
    return values.astype(np.int64)


def _feistel(
    values: np.ndarray, low_bits: np.uint64, high_bits: np.uint64, keys: np.ndarray
) -> np.ndarray:
    """One pass of an unbalanced Feistel network: a bijection on low_bits + high_bits bits."""
    one = np.uint64(1)
    low_mask, high_mask = (one << low_bits) - one, (one << high_bits) - one
    high, low = values >> low_bits, values & low_mask
    for index, key in enumerate(keys):
        if index % 2 == 0:
            high = (high ^ _mix(low + key)) & high_mask
        else:
            low = (low ^ _mix(high + key)) & low_mask
    return (high << low_bits) | low


def _mix(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea, Flood 2014); wraps modulo 2**64 on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> np.ndarray:
    # The seed is mixed before the epoch is added, and both before the round is: neighbouring seeds
    # or epochs would otherwise share round keys, and with them parts of their order.
    state = _mix(np.array([(seed + 0x2545F4914F6CDD1D) & _MASK64], np.uint64))
    state = _mix(state + np.uint64((epoch * 0xD1B54A32D192ED03) & _MASK64))
    rounds = np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(state + rounds)


@dataclass(frozen=True)
class Share:
    """The positions of an epoch that one micro-batch of one rank holds.

    Attributes:
        start: first position in the epoch's order.
        stop: one past the last; equal to `start` when nothing is left for this rank.
    """

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Plan:
    """How the samples of an epoch are dealt to steps, micro-batches and ranks.

    Step s holds positions [s·B, (s+1)·B) of the epoch, B the global batch; the last step holds what
    is left. A step's positions are cut into accumulate × ranks contiguous shares that differ by
    one at most, so that every sample is used exactly once for any number of ranks.
    """

    samples: int
    global_batch: int
    ranks: int = 1
    accumulate: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    def step_size(self, step: int) -> int:
        """Number of samples in step `step` of an epoch, over all ranks."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def share(self, step: int, micro: int, rank: int) -> Share:
        """Positions of micro-batch `micro` of `rank` in step `step` of an epoch."""
        first, size = step * self.global_batch, self.step_size(step)
        shares = self.accumulate * self.ranks
        index = micro * self.ranks + rank
        return Share(first + size * index // shares, first + size * (index + 1) // shares)

    def eval_share(self, rank: int) -> Share:
        """Positions of all samples that `rank` evaluates: one contiguous piece."""
        return Share(
            self.samples * rank // self.ranks,
            self.samples * (rank + 1) // self.ranks,
        )
