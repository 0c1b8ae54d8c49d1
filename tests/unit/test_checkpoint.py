"""Checkpoints on disk: what is listed is whole, whatever happens while another one is written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from hvps import checkpoint as module
from hvps.checkpoint import (
    FORMAT,
    Checkpoint,
    DamagedCheckpointError,
    latest_checkpoint,
    list_checkpoints,
    note_in_checkpoint,
    read_meta,
    remove_checkpoint,
    remove_remains,
    write_checkpoint,
)
from hvps.errors import ConfigError
from tests.launching import job_environment

State = dict[str, np.ndarray]


def state_of(number: int, size: int = 300) -> State:
    """Arrays that tell which save they are of."""
    return {
        "model/dense/kernel": np.full((size, 4), number, np.float32),
        "optimizer/adam/iteration": np.asarray(number, np.int64),
    }


def save(folder: Path, step: int, number: int | None = None, **more: Any) -> Checkpoint:
    return write_checkpoint(folder, state_of(step if number is None else number), {"step": step})


def assert_same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        assert found[name].shape == array.shape, name
        # Bit by bit: NaN equals itself, and -0.0 is not 0.0.
        assert found[name].tobytes() == array.tobytes(), name


def whole(found: Checkpoint | DamagedCheckpointError) -> Checkpoint:
    """It is what was written."""
    assert isinstance(found, Checkpoint), found
    found.verify()
    return found


def number_in(found: Checkpoint | None) -> int:
    """Of the save that the checkpoint's arrays are of."""
    assert found is not None
    arrays = whole(found).arrays()
    number = int(arrays["optimizer/adam/iteration"])
    assert_same(arrays, state_of(number))
    return number


# --- what is written is read again ---

AWKWARD: State = {
    "model/block/dense#2/kernel": np.arange(12, dtype=np.float32).reshape(3, 4),
    "special": np.array([np.nan, -np.nan, np.inf, -0.0, 5e-324], np.float64),
    "counter": np.asarray(2**62 + 1, np.int64),
    "seed state": np.array([7, 2**32 - 1], np.uint32),
    "flags": np.array([True, False]),
    "half": np.array([1.5, -2.0], np.float16),
    "bits": np.arange(-3, 4).astype(ml_dtypes.bfloat16),
    "bits 0-d": np.asarray(0.5, ml_dtypes.bfloat16),
    "bits every other": np.arange(10).astype(ml_dtypes.bfloat16)[::2],
    "eight bits": np.array([0.5, -448.0], ml_dtypes.float8_e4m3fn),
    "empty": np.zeros((0, 5), np.float32),
    "empty bits": np.zeros((3, 0), ml_dtypes.bfloat16),
    "transposed": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    "backwards": np.arange(12)[::-3],
    "Größe/µ": np.ones(1, np.float32),
}


def test_arrays_of_all_kinds_come_back(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path / "checkpoints", AWKWARD, {"step": 3})
    assert_same(written.arrays(), AWKWARD)
    (found,) = map(whole, list_checkpoints(tmp_path / "checkpoints"))
    assert found == written
    assert_same(found.arrays(), AWKWARD)
    assert found.size == (found.path / "state.npz").stat().st_size


def test_numpys_own_scalars_are_arrays(tmp_path: Path) -> None:
    """A variable without axes gives one when it is read."""
    written = write_checkpoint(tmp_path, {"count": np.int64(5)}, {"step": 1})  # type: ignore[dict-item]
    assert_same(written.arrays(), {"count": np.asarray(5, np.int64)})


def test_numpy_alone_can_read_it(tmp_path: Path) -> None:
    """Without hvps, pickle or the module that bfloat16 comes from."""
    path = write_checkpoint(tmp_path, AWKWARD, {"step": 3}).path / "state.npz"
    program = (
        "import sys, numpy\n"
        "file = numpy.load(sys.argv[1], allow_pickle=False)\n"
        "print(sorted((n, str(file[n].dtype), file[n].shape) for n in file.files))\n"
        "print(file['model/block/dense#2/kernel'].tolist(), file['bits'].tolist())\n"
        "assert 'ml_dtypes' not in sys.modules\n"
    )
    command = [sys.executable, "-I", "-c", program, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    shown, values = done.stdout.splitlines()
    assert shown.count("(") == 2 * len(AWKWARD)
    assert "('model/block/dense#2/kernel', 'float32', (3, 4))" in shown
    assert "('bits', 'uint16', (7,))" in shown
    kernel, bits = AWKWARD["model/block/dense#2/kernel"], AWKWARD["bits"].view(np.uint16)
    assert values == f"{kernel.tolist()} {bits.tolist()}"


def test_what_is_no_array_comes_back(tmp_path: Path) -> None:
    meta = {
        "step": 7,
        "loop": {"epoch": 1, "early_stop": [None, 0], "evaluation": {"loss": 0.1, "f": -1e-300}},
        "text": "Größe\n",
        "samples": None,
    }
    write_checkpoint(tmp_path, state_of(1), meta)
    (found,) = map(whole, list_checkpoints(tmp_path))
    assert {name: found.meta[name] for name in meta} == meta
    assert found.step == 7
    assert found.meta["format"] == FORMAT


def test_an_evaluation_that_is_no_number_is_no_damage(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, state_of(1), {"step": 1, "loss": float("nan"), "pair": (1, 2)})
    (found,) = map(whole, list_checkpoints(tmp_path))
    assert found.meta["loss"] != found.meta["loss"]
    assert found.meta["pair"] == [1, 2]


def test_a_folder_has_its_name_when_all_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    fsync, rename = os.fsync, os.rename

    def seen_fsync(number: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
        fsync(number)

    def seen_rename(source: Path, target: Path) -> None:
        calls.append(("rename", {p.name for p in Path(source).iterdir()}, Path(target).name))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "rename", seen_rename)
    save(tmp_path / "checkpoints", 12)
    files = {"state.npz", "checkpoint.json"}
    assert set(calls[:2]) == files
    assert calls[2].startswith(".writing-12-")
    assert calls[3:] == [("rename", files, "step-000000000012"), "checkpoints"]


# --- which there are ---


def test_the_latest_comes_first(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        save(tmp_path, step)
    assert [whole(found).step for found in list_checkpoints(tmp_path)] == [100, 20, 9]
    found, passed = latest_checkpoint(tmp_path)
    assert number_in(found) == 100
    assert passed == []
    found, _ = latest_checkpoint(tmp_path, 20)
    assert number_in(found) == 20
    assert latest_checkpoint(tmp_path, 21) == (None, [])


def test_where_there_are_none(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "missing"):
        assert list(list_checkpoints(folder)) == []
        assert latest_checkpoint(folder) == (None, [])
        remove_remains(folder)


def test_other_things_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 5)
    others = ("step-5", "step-000000000006.old", "note", ".hidden")
    for name in others:
        (tmp_path / name).mkdir()
    assert [whole(found).step for found in list_checkpoints(tmp_path)] == [5]
    remove_remains(tmp_path)
    save(tmp_path, 5)
    assert set(others) < {path.name for path in tmp_path.iterdir()}


def test_a_second_one_of_a_step_takes_the_place_of_the_first(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        written = save(tmp_path, 7, number)
        assert written.step == 7
        assert [number_in(whole(found)) for found in list_checkpoints(tmp_path)] == [number]
        assert [path.name for path in tmp_path.iterdir()] == [written.path.name]


def test_of_two_of_a_step_the_second_counts(tmp_path: Path) -> None:
    """As one that is killed before it has removed the first leaves them."""
    first = save(tmp_path, 7, 1)
    kept = tmp_path / "kept"
    shutil.copytree(first.path, kept)
    save(tmp_path, 7, 2)
    kept.rename(first.path)
    assert [number_in(whole(found)) for found in list_checkpoints(tmp_path)] == [2, 1]
    assert number_in(latest_checkpoint(tmp_path)[0]) == 2
    save(tmp_path, 7, 3)
    assert [number_in(whole(found)) for found in list_checkpoints(tmp_path)] == [3]


def test_one_that_was_removed_is_gone(tmp_path: Path) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    remove_checkpoint(second.path)
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]
    with pytest.raises(FileNotFoundError):
        remove_checkpoint(second.path)


def test_a_removal_that_is_broken_off_leaves_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = save(tmp_path, 1), save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_args, **_keywords: None)
        remove_checkpoint(second.path)
    assert [whole(found).step for found in list_checkpoints(tmp_path)] == [1]
    assert len(list(tmp_path.iterdir())) == 2
    remove_remains(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [first.path.name]


def test_a_note_is_added(tmp_path: Path) -> None:
    written = write_checkpoint(tmp_path, state_of(4), {"step": 4, "loop": {"epoch": 0}})
    noted = note_in_checkpoint(written, {"best": {"loss": 0.5}, "loop": {"epoch": 1}})
    again = note_in_checkpoint(noted, {"last": True})
    (found,) = map(whole, list_checkpoints(tmp_path))
    assert found == again
    assert found.meta["best"] == {"loss": 0.5}
    assert found.meta["loop"] == {"epoch": 1}
    assert found.meta["last"] is True
    assert number_in(found) == 4
    assert {path.name for path in found.path.iterdir()} == {"state.npz", "checkpoint.json"}


# --- broken off ---


class BrokenOffError(Exception):
    """Stands for the end of the process."""


class Fault:
    """Raises `error` in the call of that number that changes something on disk."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, error: BaseException) -> None:
        self.count = 0
        self._at, self._error = at, error
        for name in ("fsync", "rename", "replace", "mkdir"):
            patch.setattr(os, name, self._counting(getattr(os, name)))
        patch.setattr(module, "open", self._counting(open), raising=False)
        patch.setattr(module._Hashed, "write", self._counting(module._Hashed.write))
        if isinstance(error, BrokenOffError):  # nobody is left who would clean up
            patch.setattr(shutil, "rmtree", lambda *_args, **_keywords: None)

    def _counting(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            if self.count == self._at:
                raise self._error
            return real(*arguments, **keywords)

        return call


@pytest.mark.parametrize("error", [BrokenOffError(), OSError(errno.ENOSPC, "full")], ids=repr)
@pytest.mark.parametrize("step", [2, 1], ids=["another step", "the same step"])
def test_a_save_that_is_broken_off_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, error: Exception
) -> None:
    for at in range(1, 200):
        folder = tmp_path / str(at)
        save(folder, 1, 10)
        with monkeypatch.context() as patch:
            fault = Fault(patch, at, error)
            try:
                save(folder, step, 20)
            except type(error):
                done = False
            else:
                done = True
        assert done or fault.count >= at
        numbers = [number_in(whole(found)) for found in list_checkpoints(folder)]
        assert numbers in ([10], [20, 10], [20])
        if step != 1:  # nobody touches another step's
            assert 10 in numbers
        latest, passed = latest_checkpoint(folder)
        assert number_in(latest) == numbers[0]
        assert passed == []
        # The next one finds no hindrance in what is left.
        remove_remains(folder)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
        save(folder, 3, 30)
        assert number_in(latest_checkpoint(folder)[0]) == 30
        if done:
            assert numbers == ([20, 10] if step == 2 else [20])
            if fault.count < at:
                break
    assert fault.count < at


@pytest.mark.parametrize("error", [BrokenOffError(), OSError(errno.ENOSPC, "full")], ids=repr)
def test_a_note_that_is_broken_off_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for at in range(1, 50):
        folder = tmp_path / str(at)
        written = save(folder, 1)
        with monkeypatch.context() as patch:
            fault = Fault(patch, at, error)
            try:
                note_in_checkpoint(written, {"best": {"loss": 1.0}})
            except type(error):
                pass
        (found,) = map(whole, list_checkpoints(folder))
        assert number_in(found) == 1
        assert found.meta.get("best") in (None, {"loss": 1.0})
        note_in_checkpoint(found, {"last": True})
        assert whole(read_meta(found.path)).meta["last"] is True
        if fault.count < at:
            assert found.meta["best"] == {"loss": 1.0}
            break
    assert at > 3


SAVING = """
import itertools, sys
from pathlib import Path
from tests.unit.test_checkpoint import state_of
from hvps.checkpoint import list_checkpoints, remove_checkpoint, remove_remains, write_checkpoint
folder = Path(sys.argv[1])
remove_remains(folder)
first = max((found.step for found in list_checkpoints(folder)), default=0)
print("begins", flush=True)
for step in itertools.count(first):  # the first one is the same step again
    write_checkpoint(folder, state_of(step, 20_000), {"step": step})
    print("has saved", step, flush=True)
    for found in list(list_checkpoints(folder))[2:]:
        remove_checkpoint(found.path)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_process_that_is_killed_while_it_saves(tmp_path: Path) -> None:
    folder, saved = tmp_path / "checkpoints", 0
    for life in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", SAVING, str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            env=job_environment({"OMP_NUM_THREADS": "1"}),
        )
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begins\n"
            process.stdout.readline()
            with pytest.raises(subprocess.TimeoutExpired):  # anywhere in the saves that follow
                process.wait(0.002 * life)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            rest = process.stdout.read()
            process.stdout.close()
            assert process.wait() == -signal.SIGKILL
        told = [int(line.split()[-1]) for line in rest.splitlines() if line.startswith("has")]
        saved = max([saved, *told])
        listed = [whole(found) for found in list_checkpoints(folder)]
        for found in listed:
            assert_same(found.arrays(), state_of(found.step, 20_000))
        # What it has told of is there, or a newer one.
        assert listed[0].step >= saved
    assert saved > 0


# --- damaged ---


def flipped(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def truncated(path: Path, _place: int) -> None:
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size // 2)


def emptied(path: Path, _place: int) -> None:
    path.write_bytes(b"")


def missing(path: Path, _place: int) -> None:
    path.unlink()


def a_folder(path: Path, _place: int) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("damage", [flipped, truncated, emptied, missing, a_folder])
@pytest.mark.parametrize("name", ["state.npz", "checkpoint.json"])
@pytest.mark.parametrize("place", [0, 100, -1])
def test_a_damaged_one_is_passed_over_and_named(
    tmp_path: Path, name: str, damage: Callable[[Path, int], None], place: int
) -> None:
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    if name == "checkpoint.json" and place == -1:
        place = -3  # the end of the line says nothing
    damage(newest.path / name, place)
    latest, (passed,) = latest_checkpoint(tmp_path)
    assert number_in(latest) == 1
    assert str(newest.path) in passed.what
    assert passed.rule
    assert passed.received
    assert passed.do
    remove_checkpoint(newest.path)  # as it tells
    assert latest_checkpoint(tmp_path)[1] == []


def test_no_byte_of_the_description_can_change_unseen(tmp_path: Path) -> None:
    written = save(tmp_path, 123)
    path = written.path / "checkpoint.json"
    content = path.read_bytes()
    for place in range(len(content)):
        for bit in (0, 3, 5):
            changed = bytearray(content)
            changed[place] ^= 1 << bit
            path.write_bytes(changed)
            try:
                found = read_meta(written.path)
            except DamagedCheckpointError:
                continue
            assert found.meta == written.meta, (place, bit)


@pytest.mark.parametrize("text", ["[]", "[1]", "3", "null", '"x"', "{}", "\x00", "[" * 5000])
def test_a_description_that_is_something_else(tmp_path: Path, text: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2).path / "checkpoint.json").write_text(text)
    latest, passed = latest_checkpoint(tmp_path)
    assert number_in(latest) == 1
    assert len(passed) == 1


def test_an_empty_folder_with_a_checkpoints_name(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (tmp_path / "step-000000000002").mkdir()
    (tmp_path / "step-000000000003").write_text("no folder")
    latest, passed = latest_checkpoint(tmp_path)
    assert number_in(latest) == 1
    assert [error.received for error in passed] == ["Not a directory", "No such file or directory"]


def test_when_all_are_damaged_there_is_none(tmp_path: Path) -> None:
    for step in (1, 2):
        flipped(save(tmp_path, step).path / "state.npz", 200)
    latest, passed = latest_checkpoint(tmp_path)
    assert latest is None
    assert ["step-000000000002" in error.what for error in passed] == [True, False]


def test_arrays_that_cannot_be_read_are_explained(tmp_path: Path) -> None:
    for step, damage in enumerate((truncated, emptied, missing)):
        written = save(tmp_path, step)
        damage(written.path / "state.npz", 0)
        with pytest.raises(DamagedCheckpointError, match=r"step-\d+ is damaged"):
            written.arrays()


def test_one_of_a_later_version_is_refused(tmp_path: Path) -> None:
    """It is whole, so an older one instead of it would be the wrong place to go on from."""
    save(tmp_path, 1)
    written = save(tmp_path, 2)
    path = written.path / "checkpoint.json"
    meta = json.loads(path.read_text())
    del meta["meta_sha256"]
    meta["format"] = FORMAT + 1
    path.write_text(json.dumps({**meta, "meta_sha256": module._meta_sum(meta)}))
    with pytest.raises(ConfigError, match="another version of hvps") as caught:
        latest_checkpoint(tmp_path)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert caught.value.received == f"format {FORMAT + 1}"
    assert caught.value.do


# --- a disk that is full ---


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True, timeout=30)


def test_a_full_disk_leaves_the_older_ones(small_disk: Path) -> None:
    folder = small_disk / "checkpoints"
    size = 25_000  # 400 kB
    for step in (1, 2):
        write_checkpoint(folder, state_of(step, size), {"step": step})
    for step in (3, 2):  # the same step again needs room for both, too
        with pytest.raises(OSError, match="No space left") as caught:
            write_checkpoint(folder, state_of(9, size), {"step": step})
        assert caught.value.errno == errno.ENOSPC
        listed = [whole(found) for found in list_checkpoints(folder)]
        assert [found.step for found in listed] == [2, 1]
        for found in listed:
            assert_same(found.arrays(), state_of(found.step, size))
    # Nothing is left of those that failed: with one less there is room again.
    remove_checkpoint(listed[-1].path)
    write_checkpoint(folder, state_of(3, size), {"step": 3})
    assert [whole(found).step for found in list_checkpoints(folder)] == [3, 2]


def test_a_note_on_a_full_disk_changes_nothing(small_disk: Path) -> None:
    written = save(small_disk / "checkpoints", 1)
    filler = small_disk / "filler"
    with open(filler, "wb", buffering=0) as file, suppress(OSError):
        for _ in range(1000):
            file.write(bytes(4096))
    with pytest.raises(OSError, match="No space left"):
        note_in_checkpoint(written, {"best": {"loss": 1.0}})
    (found,) = map(whole, list_checkpoints(small_disk / "checkpoints"))
    assert found == written
    filler.unlink()
    assert note_in_checkpoint(found, {"last": True}).meta["last"] is True


def test_the_file_is_a_plain_archive(tmp_path: Path) -> None:
    with zipfile.ZipFile(save(tmp_path, 1).path / "state.npz") as archive:
        assert archive.testzip() is None
        assert archive.namelist() == [f"{name}.npy" for name in state_of(1)]
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
