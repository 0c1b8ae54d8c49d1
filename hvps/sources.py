"""Examples by index: from arrays in memory, or from the user's own code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvps.errors import ConfigError


@dataclass(frozen=True)
class Source:
    """Examples that can be fetched by index.

    Attributes:
        samples: how many there are.
        fetch: from int64 indices [rows] to (x, y), nests of tensors with the rows on axis 0.
        example_bytes: size of one example where all of them lie in memory; 0 where fetching one
            runs the user's code.
    """

    samples: int
    fetch: Callable[[np.ndarray], tuple[Any, Any]]
    example_bytes: int = 0


def indexed_source(data: Any, what: str) -> Source:
    """Wrap a pair of arrays (or nests of them) or an indexable of (x, y) pairs.

    Raises:
        ConfigError: the data is neither, is empty, or its parts differ in length.
    """
    if isinstance(data, tuple) and len(data) == 2:
        return _array_source(data, what)
    if hasattr(data, "__len__") and hasattr(data, "__getitem__") and len(data) > 0:

        def collate(indices: np.ndarray) -> Any:
            rows = [data[int(i)] for i in indices]
            return tf.nest.map_structure(
                lambda *leaves: tf.convert_to_tensor(_as_array(np.stack(leaves))), *rows
            )

        return Source(len(data), collate)
    raise ConfigError(
        f"task: {what}() gave something that cannot be fed",
        rule="a tuple (x, y) of arrays, an indexable of (x, y), or a tf.data.Dataset; not empty",
        received=f"{type(data).__name__}"
        + (f" of length {len(data)}" if isinstance(data, Sequence) else ""),
        do=f"mend {what}(); hvps/task.py says what it may return",
    )


def _array_source(data: tuple[Any, Any], what: str) -> Source:
    x, y = (tf.nest.map_structure(_as_array, _structure(part, what)) for part in data)
    arrays = tf.nest.flatten((x, y))
    lengths = {len(a) if a.ndim else 0 for a in arrays}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            f"task: {what}() gave arrays that do not fit together",
            rule="x and y hold the same number of examples on axis 0, at least one",
            received=f"lengths {sorted(lengths)}",
            do=f"mend {what}()",
        )

    def gather(indices: np.ndarray) -> tuple[Any, Any]:
        fetched = [tf.convert_to_tensor(array[indices]) for array in arrays]
        return tuple(tf.nest.pack_sequence_as((x, y), fetched))

    samples = lengths.pop()
    return Source(samples, gather, max(1, sum(a.nbytes for a in arrays) // samples))


def _structure(part: Any, what: str) -> Any:
    """x or y as TensorFlow is to see it. A list of arrays is several inputs, as in Keras; a list of
    numbers is meant as an array, though TensorFlow would take it for a structure too."""
    if not isinstance(part, list):
        return part
    if part and all(len(getattr(entry, "shape", ())) > 0 for entry in part):
        return part
    try:
        return np.asarray(part)
    except ValueError as err:
        raise ConfigError(
            f"task: {what}() gave a list that is no array",
            rule="examples of one shape, or one array for each of the model's inputs",
            received=str(err),
            do="pad the examples to one shape",
        ) from err


def _as_array(leaf: Any) -> np.ndarray:
    """A numpy array; float64 becomes float32, as Keras does with its inputs."""
    array = np.asarray(leaf)
    return array.astype(np.float32) if array.dtype == np.float64 else array
