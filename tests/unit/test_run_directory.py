"""A run's folder: never shared, never half-written."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

import hvps
from hvps import run_directory
from hvps.errors import ConfigError
from hvps.run_directory import (
    RunDirectory,
    is_run,
    may_hold_run,
    open_run_directory,
    versions,
    weights_sha256,
)
from tests.launching import job_environment


def create_run_directory(parent: str, name: str | None, stem: str) -> RunDirectory:
    """A folder for a run that does not go on with another."""
    folder, existed = open_run_directory(parent, name, stem, resume=False)
    assert not existed
    return folder


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock that names are made of."""

    class Frozen(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2024, 5, 6, 7, 8, 9)

    monkeypatch.setattr(run_directory, "datetime", Frozen)


@pytest.mark.usefixtures("one_second")
def test_runs_of_the_same_second_get_folders_of_their_own(tmp_path: Path) -> None:
    folders = [create_run_directory(str(tmp_path), None, "digits").path for _ in range(3)]
    assert [folder.name for folder in folders] == [
        "digits-20240506-070809",
        "digits-20240506-070809-2",
        "digits-20240506-070809-3",
    ]
    for folder in folders:
        assert (folder / "logs").is_dir()


def test_a_name_is_used_as_it_is(tmp_path: Path) -> None:
    run = create_run_directory(str(tmp_path / "a" / "b"), "mine", "digits")
    assert run.path == tmp_path / "a" / "b" / "mine"
    assert run.path.is_dir()


def test_a_relative_parent_survives_a_change_of_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert create_run_directory("runs", "mine", "x").path == tmp_path / "runs" / "mine"


def test_an_empty_folder_may_be_taken_but_no_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    run = create_run_directory(str(tmp_path), "mine", "x")
    run.write_text("result.json", "{}")
    with pytest.raises(ConfigError, match=r"run.name: mine") as caught:
        create_run_directory(str(tmp_path), "mine", "x")
    assert caught.value.received == str(tmp_path / "mine")
    assert caught.value.rule
    assert caught.value.do
    assert (tmp_path / "mine" / "result.json").read_text() == "{}"


def test_a_name_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    with pytest.raises(ConfigError, match=r"run\.name"):
        create_run_directory(str(tmp_path), "mine", "x")
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_parent_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run.dir: cannot be written") as caught:
        create_run_directory(str(tmp_path / "file" / "runs"), None, "x")
    assert str(tmp_path / "file" / "runs") in str(caught.value.received)
    assert caught.value.do


@pytest.mark.parametrize("name", ["mine", None])
def test_a_parent_that_is_a_file_is_told_from_a_taken_name(
    tmp_path: Path, name: str | None
) -> None:
    (tmp_path / "runs").write_text("precious")
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot be written") as caught:
        create_run_directory(str(tmp_path / "runs"), name, "x")
    assert str(tmp_path / "runs") in str(caught.value.received)
    assert caught.value.do == "choose another run.dir"
    assert (tmp_path / "runs").read_text() == "precious"


def test_latest_that_is_a_folder_is_explained(tmp_path: Path) -> None:
    (tmp_path / "latest").mkdir()
    (tmp_path / "latest" / "note").write_text("precious")
    with pytest.raises(ConfigError, match=r"^run\.dir: cannot be written") as caught:
        create_run_directory(str(tmp_path), "mine", "x")
    assert str(tmp_path) in str(caught.value.received)
    assert (tmp_path / "latest" / "note").read_text() == "precious"
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_latest_is_a_relative_link_to_the_newest(tmp_path: Path) -> None:
    for name in ("first", "second"):
        create_run_directory(str(tmp_path), name, "x")
        assert os.readlink(tmp_path / "latest") == name
    assert sorted(os.listdir(tmp_path)) == ["first", "latest", "second"]


def test_latest_stays_when_a_run_is_refused(tmp_path: Path) -> None:
    create_run_directory(str(tmp_path), "first", "x").write_text("a", "")
    create_run_directory(str(tmp_path), "second", "x")
    with pytest.raises(ConfigError):
        create_run_directory(str(tmp_path), "first", "x")
    assert os.readlink(tmp_path / "latest") == "second"


def test_latest_is_never_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is made aside and renamed over the old one; whoever looks finds one of them."""
    create_run_directory(str(tmp_path), "first", "x")
    seen = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(os.readlink(tmp_path / "latest"))
        replace(source, target)
        seen.append(os.readlink(tmp_path / "latest"))

    monkeypatch.setattr(os, "replace", watched)
    create_run_directory(str(tmp_path), "second", "x")
    assert seen == ["first", "second"]


# --- an earlier run ---


def earlier_run(parent: Path, name: str) -> Path:
    """A folder as a run leaves it."""
    path = parent / name
    (path / "logs").mkdir(parents=True)
    (path / "config.yaml").write_text("run: {}\n")
    (path / "run.json").write_text("{}\n")
    (path / "result.json").write_text("{}\n")
    (path / ".lock").write_text("pid 1 on somewhere\n")
    return path


def test_an_earlier_run_goes_on(tmp_path: Path) -> None:
    path = earlier_run(tmp_path, "mine")
    folder, existed = open_run_directory(str(tmp_path), "mine", "x", resume=True)
    assert existed
    assert folder.path == path
    # What it says was true of an earlier end; what was asked for is still known.
    assert not (path / "result.json").exists()
    assert (path / "config.yaml").exists()
    assert os.readlink(tmp_path / "latest") == "mine"


def test_an_earlier_run_is_left_alone_if_it_may_not_go_on(tmp_path: Path) -> None:
    path = earlier_run(tmp_path, "mine")
    with pytest.raises(ConfigError, match=r"run\.name: mine") as caught:
        open_run_directory(str(tmp_path), "mine", "x", resume=False)
    assert "run.resume=auto" in str(caught.value.do)
    assert (path / "result.json").exists()
    assert not (tmp_path / "latest").exists()


def test_a_new_folder_is_no_earlier_run(tmp_path: Path) -> None:
    for name in ("mine", None):
        _, existed = open_run_directory(str(tmp_path), name, "x", resume=True)
        assert not existed


def test_what_may_hold_a_run(tmp_path: Path) -> None:
    def both(path: Path) -> tuple[bool, bool]:
        return may_hold_run(path, resume=False), may_hold_run(path, resume=True)

    assert both(tmp_path / "missing") == (True, True)
    (tmp_path / "file").write_text("precious")
    assert both(tmp_path / "file") == (False, False)
    assert both(earlier_run(tmp_path, "run")) == (False, True)
    other = tmp_path / "other"
    other.mkdir()
    assert both(other) == (True, True)
    # What is there before there is a run, if that was as far as it came.
    (other / "logs").mkdir()
    for name in (".lock", "restarts.jsonl", ".config.yaml.tmp"):
        (other / name).write_text("")
    assert both(other) == (True, True)
    assert not is_run(other)
    (other / "thesis.tex").write_text("precious")
    assert both(other) == (False, False)


def test_a_run_that_was_killed_anywhere_before_its_first_step_may_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each change on disk is the last one of an earlier life."""

    class Killed(BaseException):
        pass

    def dies(real: Callable[..., object], *, after: bool) -> Callable[..., object]:
        def call(*arguments: object, **keywords: object) -> None:
            if after:
                real(*arguments, **keywords)
            raise Killed

        return call

    def begin(resume: bool) -> bool:
        folder, existed = open_run_directory(str(tmp_path), name, "x", resume=resume)
        folder.write_text("config.yaml", "run: {}\n")
        return existed

    deaths = [(f, after) for f in ("symlink", "replace", "fsync", "mkdir") for after in (0, 1)]
    for function, after in deaths:
        name = f"{function}-{after}"
        with monkeypatch.context() as patch:
            patch.setattr(os, function, dies(getattr(os, function), after=bool(after)))
            patch.setattr(RunDirectory, "lock", lambda _self: None)  # it ends with the process
            with pytest.raises(Killed):
                begin(resume=True)
        with monkeypatch.context() as patch:
            patch.setattr(RunDirectory, "lock", lambda _self: None)
            assert begin(resume=True) is False
            assert begin(resume=True) is True
        assert os.readlink(tmp_path / "latest") == name


# --- one process at a time ---

HOLDING = """
import sys
from hvps.run_directory import open_run_directory
folder, existed = open_run_directory(sys.argv[1], "mine", "x", resume=True)
print("holds", existed, flush=True)
if sys.stdin.readline():
    folder.write_text("config.yaml", "run: {}")
    print("has begun", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that trains in tmp_path/mine until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDING, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=job_environment(),
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "holds False\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stdin.close()


@pytest.mark.timeout(60)
def test_two_processes_do_not_train_in_one_folder(
    tmp_path: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_directory, "_LOCK_TIMEOUT_S", 0.3)
    create_run_directory(str(tmp_path), "other", "x")
    with pytest.raises(ConfigError, match="another process is training") as caught:
        open_run_directory(str(tmp_path), "mine", "x", resume=True)
    assert f"pid {holder.pid} on " in str(caught.value.received)
    assert str(tmp_path / "mine") in str(caught.value.received)
    assert caught.value.do
    assert os.readlink(tmp_path / "latest") == "other"
    # The lock does not outlive its owner, however that ended.
    holder.kill()
    holder.wait()
    _, existed = open_run_directory(str(tmp_path), "mine", "x", resume=True)
    assert not existed
    assert f"pid {os.getpid()} on " in (tmp_path / "mine" / ".lock").read_text()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("resume", [True, False])
def test_a_run_that_came_to_be_while_one_waited(
    tmp_path: Path,
    holder: subprocess.Popen[str],
    monkeypatch: pytest.MonkeyPatch,
    resume: bool,
) -> None:
    assert holder.stdin is not None
    assert holder.stdout is not None

    def waits(seconds: float) -> None:
        if holder.poll() is None:  # until now the folder was empty
            assert holder.stdin is not None
            assert holder.stdout is not None
            holder.stdin.write("begin\n")
            holder.stdin.flush()
            assert holder.stdout.readline() == "has begun\n"
            holder.kill()
            holder.wait()

    monkeypatch.setattr(run_directory.time, "sleep", waits)
    if resume:
        assert open_run_directory(str(tmp_path), "mine", "x", resume=True)[1]
    else:
        with pytest.raises(ConfigError, match=r"run\.name: mine"):
            open_run_directory(str(tmp_path), "mine", "x", resume=False)


def test_text_is_there_as_a_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.write_text("note", "first\n")
    run.write_text("note", "zweite Größe\n")
    assert (tmp_path / "note").read_text(encoding="utf-8") == "zweite Größe\n"
    assert os.listdir(tmp_path) == ["note"]


def test_a_write_that_fails_leaves_the_old_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    run.write_text("note", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        run.write_text("note", "new")
    with pytest.raises(OSError, match="No space"):
        run.write_text("fresh", "new")
    assert (tmp_path / "note").read_text() == "old"
    assert not (tmp_path / "fresh").exists()


def test_text_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(descriptor: int) -> None:
        calls.append(("fsync", os.fstat(descriptor).st_size))
        fsync(descriptor)

    def seen_replace(source: Path, target: Path) -> None:
        calls.append(("replace", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    RunDirectory(tmp_path).write_text("note", "12345")
    assert calls[:2] == [("fsync", 5), ("replace", "note")]


def test_json(tmp_path: Path) -> None:
    RunDirectory(tmp_path).write_json("result.json", {"loss": 0.5, "eval": {"a": 1}})
    text = (tmp_path / "result.json").read_text()
    assert json.loads(text) == {"loss": 0.5, "eval": {"a": 1}}
    assert text.endswith("}\n")


def test_the_model_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.model.write_text("old")

    class Model:
        def save(self, path: Path) -> None:
            assert path.suffix == ".keras"  # Keras goes by it
            path.write_text("half")
            assert run.model.read_text() == "old"
            path.write_text("whole")

    run.save_model(Model())
    assert run.model.read_text() == "whole"
    assert os.listdir(tmp_path) == ["model.keras"]


def test_other_ranks_are_told_where_it_is(tmp_path: Path) -> None:
    """It travels to them by pickle."""
    run = pickle.loads(pickle.dumps(RunDirectory(tmp_path)))
    assert run.log("rank 3") == tmp_path / "logs" / "rank-3.log"


def test_versions_of_what_matters() -> None:
    found = versions()
    assert found["hvps"] == hvps.__version__
    assert found["numpy"] == np.__version__
    assert {"python", "tensorflow", "keras"} <= found.keys()


class Variable:
    """What weights_sha256 needs of a Keras variable."""

    def __init__(self, path: str, value: np.ndarray) -> None:
        self.path, self._value = path, value

    def __array__(self, dtype: object = None, copy: bool | None = None) -> np.ndarray:
        return self._value


KERNEL = np.arange(6, dtype=np.float32).reshape(2, 3)
BIAS = np.zeros(3, np.float32)


def digest(**arrays: np.ndarray) -> str:
    return weights_sha256([Variable(path, value) for path, value in arrays.items()])


def test_the_checksum_does_not_depend_on_the_order_of_variables() -> None:
    assert digest(kernel=KERNEL, bias=BIAS) == digest(bias=BIAS, kernel=KERNEL)
    assert digest(kernel=KERNEL) == digest(kernel=np.asfortranarray(KERNEL))
    assert len(digest(kernel=KERNEL)) == 64


def test_the_checksum_never_changes_between_versions() -> None:
    assert digest(kernel=KERNEL, bias=BIAS) == (
        "e024970c887057164fc68d036c202319f91324a66211a9516c0d61d30e5ca1e5"
    )


def test_the_checksum_sees_values_names_shapes_and_types() -> None:
    nudged = KERNEL.copy()
    nudged[1, 2] = np.nextafter(nudged[1, 2], np.float32(99))
    different = [
        digest(kernel=KERNEL),
        digest(kernel=nudged),
        digest(kernels=KERNEL),
        digest(kernel=KERNEL.reshape(3, 2)),
        digest(kernel=KERNEL.astype(np.float64)),
        digest(kernel=KERNEL.view(np.int32)),
        digest(kernel=KERNEL, bias=BIAS),
        digest(kernel=-np.zeros(3, np.float32)),
        digest(kernel=np.zeros(3, np.float32)),
        digest(),
    ]
    assert len(set(different)) == len(different)
