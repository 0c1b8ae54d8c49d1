"""What is started again finds its run: its name, its folder, the notes of restarts."""

from __future__ import annotations

import json
import re
from datetime import datetime
from pathlib import Path

import pytest

import hvps.returning
from hvps.cli_args import split_args
from hvps.errors import ConfigError
from hvps.overrides import load_config
from hvps.returning import can_come_back, note_restart
from hvps.run_directory import may_hold_run
from hvps.supervisor import Restart


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """All happens in the same one."""

    class Clock(datetime):
        @classmethod
        def now(cls, tz: object = None) -> datetime:  # type: ignore[override]
            return datetime(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(hvps.returning, "datetime", Clock)


def name_of(*argv: str) -> str | None:
    with can_come_back(split_args(argv, "hvps launch")) as arguments:
        return load_config(arguments.config, arguments.overrides).config.run.name


def test_without_restarts_nothing_is_changed(here: Path) -> None:
    arguments = split_args(["train.steps=3"], "hvps launch")
    with can_come_back(arguments) as given:
        assert given == arguments
    assert list(here.iterdir()) == []


def test_a_name_that_was_given_stays(here: Path) -> None:
    assert name_of("--max-restarts", "1", "run.name=mine") == "mine"
    assert not (here / "runs").exists()


def test_the_name_of_a_run_is_like_that_of_others(here: Path) -> None:
    name = name_of("--max-restarts", "1")
    assert name is not None
    assert re.fullmatch(r"default-[0-9]{8}-[0-9]{6}", name)
    assert may_hold_run(here / "runs" / name, resume=False)  # a new run may begin there


def test_two_launches_in_one_second(one_second: None) -> None:
    names = [name_of("--max-restarts", "1") for _ in range(3)]
    assert names == [f"default-20260102-030405{end}" for end in ("", "-2", "-3")]


@pytest.mark.parametrize(
    ("file", "stem"),
    [("my config.yaml", "my-config"), (".hidden.yaml", "hidden"), ("größe.yaml", "gr-e"),
     ("-.yaml", "run"), ("x" * 240 + ".yaml", "x" * 150)],
)  # fmt: skip
def test_any_name_of_a_file_will_do(here: Path, one_second: None, file: str, stem: str) -> None:
    (here / file).write_text("train: {steps: 3}\n")
    assert name_of(f"./{file}", "--max-restarts", "1") == f"{stem}-20260102-030405"


def test_a_dry_run_makes_no_folder_but_sees_them(here: Path, one_second: None) -> None:
    (here / "runs" / "default-20260102-030405").mkdir(parents=True)
    given = ["--max-restarts", "1", "--dry-run"]
    assert name_of(*given) == name_of(*given) == "default-20260102-030405-2"
    assert len(list((here / "runs").iterdir())) == 1


@pytest.mark.parametrize("others", [False, True])
def test_nothing_is_left_of_a_job_that_cannot_be(here: Path, others: bool) -> None:
    if others:
        (here / "runs").mkdir()
    arguments = split_args(["--max-restarts", "1", "run.dir=runs/deep"], "hvps launch")
    with pytest.raises(ConfigError), can_come_back(arguments):  # noqa: PT012
        assert len(list((here / "runs" / "deep").iterdir())) == 1
        raise ConfigError("it cannot be")
    assert [path.name for path in here.iterdir()] == (["runs"] if others else [])


@pytest.mark.parametrize("link", [False, True])
def test_where_no_folder_can_be_made_others_say_so(here: Path, link: bool) -> None:
    if link:
        (here / "runs").symlink_to("nowhere")
    else:
        (here / "runs").write_text("a file")
    assert str(name_of("--max-restarts", "1")).startswith("default-")


def test_restarts_are_noted(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loaded = load_config(None, ["run.name=it"])
    note_restart(loaded, Restart("ps 1", "was killed by SIGKILL", 1, 3))
    note_restart(loaded, Restart("the job", "ended with exit code 1", 2, 3))
    first, second = map(json.loads, (here / "runs/it/restarts.jsonl").read_text().splitlines())
    assert datetime.fromisoformat(first.pop("time")).tzinfo is not None
    assert first == {"task": "ps 1", "reason": "was killed by SIGKILL", "restart": 1, "of": 3}
    assert (second["task"], second["restart"]) == ("the job", 2)
    assert may_hold_run(here / "runs" / "it", resume=False)  # notes are not a run
    assert capfd.readouterr().err == ""


def test_a_note_that_cannot_be_written_ends_nothing(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "runs").write_text("a file")
    note_restart(load_config(None, ["run.name=it"]), Restart("ps 1", "died", 1, 3))
    assert "hvps: warning: restarts.jsonl: " in capfd.readouterr().err
