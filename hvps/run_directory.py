"""The folder that a run leaves behind: what was asked, what happened, what came out."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import platform
import shlex
import socket
import sys
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import hvps
from hvps.errors import ConfigError

_BEFORE_A_RUN = {"logs", ".lock", "restarts.jsonl", ".config.yaml.tmp"}
_LOCK_TIMEOUT_S = 20.0


class RunDirectory:
    """`run.dir/run.name`, written by rank 0 except for the ranks' own logs.

    Holds config.yaml, run.json (command, versions, launch), logs/rank-N.log, metrics.jsonl,
    metrics.csv, tensorboard/, checkpoints/, model.keras and result.json.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def lock(self) -> None:
        """Keep others from training in this folder while this process lives.

        Raises:
            ConfigError: somebody else does, and does not end.
        """
        file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + _LOCK_TIMEOUT_S  # one that was killed may not be gone yet
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.1)
                    continue
                owner = os.read(file, 200).decode(errors="replace").strip()
                os.close(file)
                raise ConfigError(
                    "run.name: another process is training in this folder",
                    rule="one job at a time writes a run",
                    received=f"{self.path}: {owner}",
                    do="wait for its end, or choose another run.name",
                ) from None
            except OSError:  # a file system without locks
                break
        os.ftruncate(file, 0)
        os.write(file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        # Not closed: the lock lasts as long as the process.

    @property
    def model(self) -> Path:
        return self.path / "model.keras"

    def restarts(self) -> list[dict[str, Any]]:
        """What a launcher notes when it starts something again: when, what and why."""
        try:
            text = (self.path / "restarts.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [json.loads(line) for line in text.splitlines() if line.strip()]

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


def open_run_directory(
    parent: str, name: str | None, stem: str, *, resume: bool
) -> tuple[RunDirectory, bool]:
    """Make the folder of a run, or take that of an earlier one, and point `latest` to it; called
    by rank 0.

    Args:
        parent: `run.dir`, relative to the current folder.
        name: `run.name`; without one, `stem` and the time.
        resume: an earlier run of this name may go on.

    Returns:
        The folder, and whether it is an earlier run's.

    Raises:
        ConfigError: the folder cannot be made, belongs to an earlier run that may not go on, or to
            one that another process is just now training.
    """
    base = Path(parent).absolute()
    try:
        base.mkdir(parents=True, exist_ok=True)
        latest = base / "latest"
        if latest.exists() and not latest.is_symlink():
            raise FileExistsError(errno.EEXIST, "latest is not the link that hvps makes", latest)
        path, existed = _claim(base, name, stem, resume)
        (path / "logs").mkdir(exist_ok=True)
        folder = RunDirectory(path)
        folder.lock()
        if not existed and is_run(path):  # another process has made it one in the meantime
            if not resume:
                raise _taken(path, resume)
            existed = True
        _point_latest(base, path.name)
    except OSError as err:
        raise ConfigError(
            "run.dir: cannot be written",
            rule="a folder that exists or can be made",
            received=f"{base}: {err.strerror}",
            do="choose another run.dir",
        ) from err
    if existed:  # what it says was true of an earlier end
        (path / "result.json").unlink(missing_ok=True)
    return folder, existed


def is_run(path: Path) -> bool:
    """Whether a folder is that of a run."""
    return (path / "config.yaml").is_file() or (path / "run.json").is_file()


def may_hold_run(path: Path, *, resume: bool) -> bool:
    """Whether a run may be written there: a new one, or an earlier one that goes on."""
    if not path.exists():
        return True
    if not path.is_dir():
        return False
    if is_run(path):
        return resume
    # What a process that was killed, or a launcher, leaves before there is a run.
    return {entry.name for entry in path.iterdir()} <= _BEFORE_A_RUN


def _claim(base: Path, name: str | None, stem: str, resume: bool) -> tuple[Path, bool]:
    """Make a folder that nobody else has made: two runs may start in the same second."""
    if name is not None:
        path = base / name
        if not may_hold_run(path, resume=resume):
            raise _taken(path, resume)
        path.mkdir(exist_ok=True)
        return path, is_run(path)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    for attempt in range(1000):
        path = base / (f"{stem}-{now}" if attempt == 0 else f"{stem}-{now}-{attempt + 1}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path, False
    raise OSError(0, "a thousand runs in one second")


def _taken(path: Path, resume: bool) -> ConfigError:
    return ConfigError(
        f"run.name: {path.name} belongs to an earlier run",
        rule="a run never writes over another",
        received=str(path),
        do="choose another run.name, or delete that folder"
        + ("" if resume else "; run.resume=auto goes on with it"),
    )


def _point_latest(base: Path, name: str) -> None:
    # Named after the run, whose folder is ours alone: containers may share the disk and have the
    # same process ids.
    aside = base / f".latest-{name}"
    aside.unlink(missing_ok=True)  # an earlier life of the run may have been killed here
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


def launch_record(cluster: Any, backend: Any, begins_at: Path | None) -> dict[str, Any]:
    """Content of run.json.

    Args:
        begins_at: the checkpoint that the run goes on from.
    """
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        "cwd": os.getcwd(),
        "host": socket.gethostname(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "backend": backend.name,
        "engine": backend.engine,
        "ranks": cluster.size,
        "rank_source": cluster.source,
        "resumed_from": None if begins_at is None else str(begins_at),
        "versions": versions(),
    }


def weights_sha256(variables: Iterable[Any]) -> str:
    """SHA-256 over the weights in the order of their names: name, dtype, shape and bytes."""
    import numpy as np  # not needed for looking at a folder

    digest = hashlib.sha256()
    for variable in sorted(variables, key=lambda v: v.path):
        array = np.ascontiguousarray(np.asarray(variable))
        digest.update(f"{variable.path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
