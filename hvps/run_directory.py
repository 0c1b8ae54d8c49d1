"""The folder that a run leaves behind: what was asked, what happened, what came out."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

import hvps
from hvps.errors import ConfigError


class RunDirectory:
    """`run.dir/run.name`, written by rank 0 except for the ranks' own logs.

    Holds config.yaml, run.json (command, versions, launch), logs/rank-N.log, metrics.jsonl,
    metrics.csv, tensorboard/, model.keras and result.json.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> Path:
        return self.path / "model.keras"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name.replace(' ', '-')}.log"

    def write_text(self, name: str, text: str) -> None:
        """Write a file so that it is there as a whole or not at all."""
        aside = self.path / f".{name}.tmp"
        with open(aside, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self.path / name)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        self.write_text(name, json.dumps(value, indent=2, allow_nan=True) + "\n")

    def save_model(self, model: Any) -> None:
        """The model as a plain .keras file, which loads without hvps."""
        aside = self.path / ".model.tmp.keras"
        model.save(aside)
        os.replace(aside, self.model)


def create_run_directory(parent: str, name: str | None, stem: str) -> RunDirectory:
    """Make the folder of a new run and point `latest` to it; called by rank 0.

    Args:
        parent: `run.dir`, relative to the current folder.
        name: `run.name`; without one, `stem` and the time.

    Raises:
        ConfigError: the folder cannot be made, or belongs to an earlier run.
    """
    base = Path(parent).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        latest = base / "latest"
        if latest.exists() and not latest.is_symlink():
            raise FileExistsError(errno.EEXIST, "latest is not the link that hvps makes", latest)
        path = _claim(base, name, stem)
        (path / "logs").mkdir(exist_ok=True)
        _point_latest(base, path.name)
    except OSError as err:
        raise ConfigError(
            "run.dir: cannot be written",
            rule="a folder that exists or can be made",
            received=f"{base}: {err.strerror}",
            do="choose another run.dir",
        ) from err
    return RunDirectory(path)


def _claim(base: Path, name: str | None, stem: str) -> Path:
    """Make a folder that nobody else has made: two runs may start in the same second."""
    if name is not None:
        path = base / name
        if path.is_dir() and not any(path.iterdir()):
            return path
        try:
            path.mkdir()
        except FileExistsError:
            raise ConfigError(
                f"run.name: {name} belongs to an earlier run",
                rule="a run never writes over another",
                received=str(path),
                do="choose another run.name, or delete that folder",
            ) from None
        return path
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = base / (f"{stem}-{now}" if attempt == 0 else f"{stem}-{now}-{attempt + 1}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise OSError(0, "a thousand runs in one second")


def _point_latest(base: Path, name: str) -> None:
    # Named after the run, whose folder is ours alone: containers may share the disk and have the
    # same process ids.
    aside = base / f".latest-{name}"
    aside.symlink_to(name)
    try:
        os.replace(aside, base / "latest")
    except OSError:
        aside.unlink()
        raise


def versions() -> dict[str, str]:
    """Versions of what a run's result depends on."""
    found = {"hvps": hvps.__version__, "python": platform.python_version()}
    for key, names in {
        "tensorflow": ("tensorflow", "tensorflow-cpu"),
        "keras": ("keras",),
        "numpy": ("numpy",),
        "horovod": ("horovod",),
        "mpi4py": ("mpi4py",),
    }.items():
        for name in names:
            try:
                found[key] = metadata.version(name)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def launch_record(cluster: Any, backend: Any) -> dict[str, Any]:
    """Content of run.json."""
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": backend.name,
        "engine": backend.engine,
        "ranks": cluster.size,
        "rank_source": cluster.source,
        "versions": versions(),
    }


def weights_sha256(variables: Iterable[Any]) -> str:
    """SHA-256 over the weights in the order of their names: name, dtype, shape and bytes."""
    digest = hashlib.sha256()
    for variable in sorted(variables, key=lambda v: v.path):
        array = np.ascontiguousarray(np.asarray(variable))
        digest.update(f"{variable.path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
