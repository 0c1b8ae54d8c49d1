"""A run's folder: never shared, never half-written."""

from __future__ import annotations

import json
import os
import pickle
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

import hvps
from hvps import run_directory
from hvps.errors import ConfigError
from hvps.run_directory import RunDirectory, create_run_directory, versions, weights_sha256


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
