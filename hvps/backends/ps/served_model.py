"""The eager model and optimizer, and the variables on the servers that stand for them.

Everything outside this package knows the whole model only: which parts it is in, and that its
optimizer's slots lie beside them, is undone here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvps.backends.ps.graph import PsGraph
from hvps.backends.ps.shards import Source
from hvps.backends.whole_state import whole_state

_TRANSFER_BYTES = 64 << 20  # of one run of the session, which holds a copy or two


class ServedModel:
    """Moves whole states between this process and the parameter servers.

    Args:
        graph: of the run; its graph is still open.
        session: on it.
    """

    def __init__(
        self,
        graph: PsGraph,
        session: Any,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
    ) -> None:
        self._graph, self._session = graph, session
        self._model, self._optimizer = model, optimizer
        parameters, state = graph.parameters, graph.state
        self._sources: list[Source] = []
        for shard in parameters.shards:
            self._sources += shard.sources(parameters.weights, optimizer)
        self._sources += [
            Source(variable, whole, None)
            for variable, whole in zip(state.values, graph.changing, strict=True)
        ]

    def assign(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        """Set graph variables to values."""
        with self._graph.graph.as_default():
            places = [
                tf.compat.v1.placeholder(v.dtype.base_dtype, v.shape.as_list()) for v, _ in pairs
            ]
            assigns = [v.assign(p).op for (v, _), p in zip(pairs, places, strict=True)]
        for part in _in_parts([variable for variable, _ in pairs]):
            feeds = {places[i]: np.asarray(pairs[i][1]) for i in part}
            self._session.run([assigns[i] for i in part], feeds)

    def push(self) -> None:
        """Set everything on the servers to what the eager model and optimizer hold."""
        self.assign(
            [
                (s.variable, np.asarray(s.whole) if s.key is None else np.asarray(s.whole)[s.key])
                for s in self._sources
            ]
        )

    def pull(self) -> None:
        """The other way round. Others may update meanwhile: each part is as it was at some time."""
        for whole, value in self._fetch().values():
            whole.assign(value)

    def snapshot(self) -> dict[str, np.ndarray]:
        """The same as arrays by name, with the eager model's values where nothing is served. The
        eager model is left alone."""
        fetched = self._fetch()
        return {
            name: fetched[id(v)][1] if id(v) in fetched else np.asarray(v.value.numpy())
            for name, v in whole_state(self._model, self._optimizer).items()
        }

    def _fetch(self) -> dict[int, tuple[keras.Variable, Any]]:
        """(variable, value) of all that is served, by the variable's identity."""
        wholes: dict[int, tuple[keras.Variable, Any]] = {}
        with self._graph.graph.as_default():
            for part in _in_parts([source.variable for source in self._sources]):
                values = self._session.run([self._sources[i].variable for i in part])
                for i, value in zip(part, values, strict=True):
                    _put(wholes, self._sources[i], value)
        return wholes


def _in_parts(variables: Sequence[Any]) -> Iterator[list[int]]:
    """Indices of variables, so many at a time as are moved at once."""
    part: list[int] = []
    size = 0
    for i, variable in enumerate(variables):
        part.append(i)
        size += int(np.prod(variable.shape.as_list())) * variable.dtype.size
        if size > _TRANSFER_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _put(wholes: dict[int, Any], source: Source, value: np.ndarray) -> None:
    """Collect the parts of a whole variable."""
    key = id(source.whole)
    if source.key is None:
        wholes[key] = (source.whole, value)
        return
    if key not in wholes:
        wholes[key] = (source.whole, np.empty(tuple(source.whole.shape), value.dtype))
    wholes[key][1][source.key] = value
