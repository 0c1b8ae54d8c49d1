"""Where a run begins: afresh or at a checkpoint, whose state goes into model and optimizer."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from hvps.backends.whole_state import seed_variables, whole_state
from hvps.checkpoint import Checkpoint, latest_checkpoint, read_meta
from hvps.errors import ConfigError
from hvps.log import logger
from hvps.position import START, Position

if TYPE_CHECKING:
    from hvps.config import Config

CHECKPOINTS = "checkpoints"
# What the order of the examples depends on: with other values a position means other examples.
_ORDER = ("train.global_batch", "train.shuffle", "run.seed")
# Not part of what is learned.
_FREE = ("run.", "backend.", "log.", "checkpoint.")


@dataclass(frozen=True)
class Beginning:
    """Where this run begins.

    Attributes:
        position: in its work.
        loop: what the checkpoint says of the loop.
        path: the checkpoint, or None.
        samples: examples of its data in an epoch, None where that was not known.
        state: all its arrays by name, on the root alone.
    """

    position: Position = START
    loop: Mapping[str, Any] | None = None
    path: Path | None = None
    samples: int | None = None
    state: Mapping[str, np.ndarray] | None = None

    def for_others(self) -> Beginning:
        """What the other processes need; their weights come from the root."""
        return replace(self, state=None)


def find_beginning(config: Config, folder: Path, existed: bool) -> Beginning:
    """Find the checkpoint that a run goes on from; called by the root.

    Args:
        folder: of the run.
        existed: it is an earlier run's.

    Raises:
        ConfigError: the checkpoint that was named is damaged or missing, or does not fit.
    """
    checkpoint = None
    if config.run.resume_path is not None and not _has_own(folder, existed):
        checkpoint = checkpoint_at(Path(config.run.resume_path))
    elif existed and config.run.resume != "never":
        checkpoint = _latest(folder / CHECKPOINTS)
        if checkpoint is None:
            logger.info("run %s has no checkpoint yet: training begins anew", folder)
    if checkpoint is None:
        return Beginning()
    _check_config(checkpoint, config)
    return Beginning(
        position=Position.from_json(checkpoint.meta["position"]),
        loop=checkpoint.meta["loop"],
        path=checkpoint.path,
        samples=checkpoint.meta["samples"],
        state=checkpoint.arrays(),
    )


def _has_own(folder: Path, existed: bool) -> bool:
    """A run that began from another one's checkpoint and was broken off goes on from its own."""
    return existed and latest_checkpoint(folder / CHECKPOINTS)[0] is not None


def checkpoint_at(path: Path, step: int | None = None) -> Checkpoint:
    """The checkpoint that a path names: itself, or the last one of a run.

    Raises:
        ConfigError: there is none, or none that can be read.
    """
    if (path / "checkpoint.json").exists():
        found = read_meta(path)
        found.verify()
        return found
    found_or_none = _latest(path / CHECKPOINTS, step)
    if found_or_none is None:
        which = "" if step is None else f" of step {step}"
        raise ConfigError(
            f"checkpoint: {path} has none{which}",
            rule="the folder of a run, or of one of its checkpoints",
            received=str(path),
            do=f"see `hvps checkpoints {path}`" if path.is_dir() else "correct the path",
        )
    return found_or_none


def _latest(folder: Path, step: int | None = None) -> Checkpoint | None:
    found, passed = latest_checkpoint(folder, step)
    for damaged in passed:
        logger.warning("%s and is passed over: %s", damaged.what, damaged.received)
    return found


def config_sha256(config: Mapping[str, Any]) -> str:
    """Of all that what is learned depends on."""
    flat = {k: v for k, v in _flat(config).items() if k in _ORDER or not k.startswith(_FREE)}
    return hashlib.sha256(json.dumps(flat, sort_keys=True).encode()).hexdigest()


def _check_config(checkpoint: Checkpoint, config: Config) -> None:
    """Compare the configuration with that of the checkpoint."""
    then, now = _flat(checkpoint.meta["config"]), _flat(json.loads(config.model_dump_json()))
    changed = sorted(k for k in then.keys() | now.keys() if then.get(k) != now.get(k))
    moved = [key for key in changed if key in _ORDER]
    if moved:
        raise ConfigError(
            f"{moved[0]}: {now.get(moved[0])} does not fit the checkpoint",
            rule=f"a run goes on at the next example; {', '.join(_ORDER)} say which that is",
            received=f"{moved[0]}={then.get(moved[0])} in {checkpoint.path}",
            do=f"use {moved[0]}={then.get(moved[0])}, or another run.name to begin anew",
        )
    told = [key for key in changed if not key.startswith(_FREE)]
    if told:
        words = ", ".join(f"{k} {then.get(k)} -> {now.get(k)}" for k in told)
        logger.warning("the run goes on with another configuration: %s", words)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def restore(
    beginning: Beginning,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    broadcast: Callable[[Any], Any],
) -> None:
    """Bring the state of a checkpoint into a model and its optimizer, both built.

    The root gets everything. The others get their weights from the root later; what is their own
    are random numbers: each process keeps its seed, and has drawn as often as the root.

    Args:
        broadcast: gives everyone the root's value.

    Raises:
        ConfigError: the model is not the one that was saved; shows the difference.
    """
    if beginning.path is None:
        return
    seeds = seed_variables(model)
    if beginning.state is not None:
        variables = whole_state(model, optimizer)
        _check_layout(variables, beginning.state, beginning.path)
        for name, variable in variables.items():
            variable.assign(beginning.state[name])
    saved = broadcast({name: np.asarray(v) for name, v in seeds.items()})
    if beginning.state is None:
        for name, variable in seeds.items():
            own = np.asarray(variable).copy()
            own.reshape(-1)[1:] = saved[name].reshape(-1)[1:]
            variable.assign(own)


def _check_layout(
    variables: Mapping[str, keras.Variable], state: Mapping[str, np.ndarray], path: Path | None
) -> None:
    here = {name: f"{v.dtype} {tuple(v.shape)}" for name, v in variables.items()}
    there = {name: f"{array.dtype} {array.shape}" for name, array in state.items()}
    names = [n for n in sorted({*here, *there}) if here.get(n) != there.get(n)]
    if names:
        shown = [
            f"{n}: {there.get(n, 'not there')} saved, {here.get(n, 'not there')} now"
            for n in names[:8]
        ]
        if len(names) > 8:
            shown.append(f"and {len(names) - 8} more")
        raise ConfigError(
            f"checkpoint: {path} is of another model or optimizer",
            rule="the same names, shapes and types as when it was saved",
            received="; ".join(shown),
            do="train with what was saved, or begin anew under another run.name",
        )
