"""Checkpoints on disk: written to the side, flushed, renamed, checksummed, found again.

A checkpoint is a folder `checkpoints/step-000000000123` of the run with two files: `state.npz`
holds arrays by name, which `numpy.load` reads without pickle; `checkpoint.json` holds what is no
array (step, position in the data, configuration, …) and the checksums of both files. Names hold no
layout: neither ranks nor parts of variables. The folder has its name only when all of it is on
the disk, so one with that name is complete, or was damaged later, which the checksums tell.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvps.errors import ConfigError

FORMAT = 1
_NAME = re.compile(r"step-(\d{12})(?:\.(\d+))?")
_ASIDE, _DOOMED = ".writing-", ".removing-"
_STATE, _META = "state.npz", "checkpoint.json"
_CHUNK = 1 << 22
# What reading gives of bytes that are not those that were written.
_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    RecursionError,
    NotImplementedError,
    zipfile.BadZipFile,
)


class DamagedCheckpointError(ConfigError):
    """A checkpoint cannot be read, or its bytes are not those that were written."""


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint on disk.

    Attributes:
        path: its folder.
        meta: content of checkpoint.json.
    """

    path: Path
    meta: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.meta["step"])

    @property
    def size(self) -> int:
        """Bytes of its arrays' file."""
        return int(self.meta["state_bytes"])

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name.

        Raises:
            DamagedCheckpointError: the file cannot be read.
        """
        try:
            with np.load(self.path / _STATE, allow_pickle=False) as file:
                dtypes = self.meta["dtypes"]
                return {name: _of_dtype(file[name], dtypes[name]) for name in file.files}
        except _UNREADABLE as err:
            raise _damaged(self.path, err) from err

    def verify(self) -> None:
        """Compare the file with its checksum.

        Raises:
            DamagedCheckpointError: they differ, or it cannot be read.
        """
        try:
            digest = hashlib.sha256()
            with open(self.path / _STATE, "rb") as file:
                while chunk := file.read(_CHUNK):
                    digest.update(chunk)
        except OSError as err:
            raise _damaged(self.path, err) from err
        if digest.hexdigest() != self.meta["state_sha256"]:
            raise _damaged(self.path, f"the checksum of {_STATE} is another one")


def write_checkpoint(
    folder: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> Checkpoint:
    """Write a checkpoint into `folder`; then remove one of the same step that was there.

    Args:
        folder: `checkpoints` of a run; made if it is missing.
        arrays: by name; of numpy's types or bfloat16.
        meta: what is no array, as JSON takes it; `step` is needed.

    Raises:
        OSError: the disk is full or fails; what was there before is as it was.
    """
    step = int(meta["step"])
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"{_ASIDE}{step}-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir()
        size, digest = _write_arrays(aside / _STATE, arrays)
        full = {
            **meta,
            "format": FORMAT,
            "dtypes": {name: str(array.dtype) for name, array in arrays.items()},
            "state_bytes": size,
            "state_sha256": digest,
        }
        _write_meta(aside / _META, full)
        _flush_folder(aside)
        before = [path for path, number, _ in _named(folder) if number == step]
        target = _free_name(folder, step)
        os.rename(aside, target)
        _flush_folder(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    for path in before:
        remove_checkpoint(path)
    return Checkpoint(target, full)


def _free_name(folder: Path, step: int) -> Path:
    """A folder cannot take the place of another at once: a second one of a step is numbered."""
    versions = [version for _, number, version in _named(folder) if number == step]
    name = f"step-{step:012d}"
    return folder / (f"{name}.{max(versions) + 1}" if versions else name)


def _write_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> tuple[int, str]:
    """Returns the file's size and SHA-256."""
    with open(path, "wb", buffering=0) as file:
        target = _Hashed(file)
        # Not compressed: weights hardly get smaller, and it would take ten times as long.
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for name, array in arrays.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, _plain(array), allow_pickle=False)
        os.fsync(file.fileno())
    return target.size, target.digest.hexdigest()


class _Hashed(io.RawIOBase):
    """A file that can only be appended to, whose checksum is known at once."""

    def __init__(self, file: io.RawIOBase | io.FileIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        rest = view
        while rest:  # a full disk may take a part before it refuses
            rest = rest[self._file.write(rest) or 0 :]
        self.digest.update(view)
        self.size += len(view)
        return len(view)

    def writable(self) -> bool:
        return True


def _plain(array: np.ndarray) -> np.ndarray:
    """bfloat16 and its like are no types of numpy's own; their bits are kept as integers."""
    array = np.asarray(array)
    if array.dtype.kind != "V":
        return array
    return array.view(f"u{array.dtype.itemsize}")


def _of_dtype(array: np.ndarray, name: str) -> np.ndarray:
    if str(array.dtype) == name:
        return array
    import ml_dtypes  # where numpy gets these types from, wherever TensorFlow is

    return array.view(np.dtype(getattr(ml_dtypes, name)))


def _write_meta(path: Path, meta: Mapping[str, Any]) -> None:
    text = json.dumps({**meta, "meta_sha256": _meta_sum(meta)}, indent=1)
    with open(path, "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _meta_sum(meta: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(meta, sort_keys=True).encode()).hexdigest()


def note_in_checkpoint(checkpoint: Checkpoint, further: Mapping[str, Any]) -> Checkpoint:
    """Add to what checkpoint.json says; its arrays stay as they are.

    Raises:
        OSError: the disk is full or fails; it says what it said before.
    """
    kept = {key: value for key, value in checkpoint.meta.items() if key != "meta_sha256"}
    full = {**kept, **further}
    aside = checkpoint.path / f".{_META}.tmp"
    _write_meta(aside, full)
    os.replace(aside, checkpoint.path / _META)
    _flush_folder(checkpoint.path)
    return Checkpoint(checkpoint.path, full)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; while that lasts, or if it is broken off, it is none any more."""
    doomed = path.with_name(f"{_DOOMED}{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_remains(folder: Path) -> None:
    """Remove what saves and removals that were broken off have left."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.startswith((_ASIDE, _DOOMED)):
                shutil.rmtree(path, ignore_errors=True)


def read_meta(path: Path) -> Checkpoint:
    """A checkpoint's description; its arrays are not looked at.

    Raises:
        DamagedCheckpointError: it cannot be read, or is not as it was written.
    """
    try:
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
        wanted = meta.pop("meta_sha256")
        if _meta_sum(meta) != wanted:
            raise ValueError(f"the checksum of {_META} is another one")
    except _UNREADABLE as err:
        raise _damaged(path, err) from err
    if meta["format"] != FORMAT:
        raise ConfigError(
            f"checkpoint: {path} is of another version of hvps",
            rule=f"format {FORMAT}",
            received=f"format {meta['format']}",
            do="resume it with the version of hvps that wrote it",
        )
    return Checkpoint(path, meta)


def list_checkpoints(folder: Path) -> Iterator[Checkpoint | DamagedCheckpointError]:
    """All checkpoints of a run, the latest first, by their descriptions alone."""
    for path, _, _ in sorted(_named(folder), key=lambda entry: entry[1:], reverse=True):
        try:
            yield read_meta(path)
        except DamagedCheckpointError as err:
            yield err


def latest_checkpoint(
    folder: Path, step: int | None = None
) -> tuple[Checkpoint | None, list[DamagedCheckpointError]]:
    """The newest checkpoint whose bytes are those that were written, and the newer ones that were
    passed over.

    Args:
        step: only one of this step.
    """
    passed: list[DamagedCheckpointError] = []
    for found in list_checkpoints(folder):
        if isinstance(found, DamagedCheckpointError):
            passed.append(found)
            continue
        if step is not None and found.step != step:
            continue
        try:
            found.verify()
        except DamagedCheckpointError as err:
            passed.append(err)
            continue
        return found, passed
    return None, passed


def _named(folder: Path) -> list[tuple[Path, int, int]]:
    """(path, step, version) of what has a checkpoint's name."""
    if not folder.is_dir():
        return []
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if match:
            found.append((path, int(match[1]), int(match[2] or 0)))
    return found


def _damaged(path: Path, reason: object) -> DamagedCheckpointError:
    if isinstance(reason, OSError):
        reason = reason.strerror or reason
    return DamagedCheckpointError(
        f"checkpoint: {path} is damaged",
        rule="it is as it was written",
        received=reason,
        do="resume from another one; this one may be deleted",
    )


def _flush_folder(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as err:
        if err.errno != errno.EINVAL:  # a file system that does not know it
            raise
    finally:
        os.close(number)
