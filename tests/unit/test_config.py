"""The typed tree, the YAML reader, merging and origins, and `hvps config`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hvps.cli import main, render_config
from hvps.cli_args import Arguments, split_args
from hvps.config import Config, leaf_fields
from hvps.config_base import rule_of
from hvps.config_validate import suggest_key
from hvps.errors import ConfigError
from hvps.overrides import LoadedConfig, load_config
from hvps.yaml_text import YamlError, parse_yaml, write_flow

REPOSITORY = Path(__file__).parents[2]


def load(tmp_path: Path, yaml: str, *overrides: str) -> LoadedConfig:
    file = tmp_path / "my.yaml"
    file.write_text(yaml)
    return load_config(file, overrides)


def message(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(None, overrides)
    return str(caught.value)


def test_defaults() -> None:
    loaded = load_config(None, [])
    assert loaded.config == Config()
    assert set(loaded.origins.values()) == {"default"}
    assert set(loaded.origins) == {key for key, _ in leaf_fields()}
    assert (loaded.name, loaded.path) == ("default", None)
    config = loaded.config
    assert (config.run.dir, config.run.name, config.run.seed) == ("runs", None, 0)
    assert (config.train.global_batch, config.train.steps) == (64, None)
    assert (config.optimizer.name, config.optimizer.learning_rate) == ("adam", 1e-3)


def test_every_key_is_described() -> None:
    for key, field in leaf_fields():
        assert field.description, key
        assert rule_of(field), key


def test_the_tree_is_frozen() -> None:
    with pytest.raises(ValidationError):
        Config().train.epochs = 3  # type: ignore[misc]


def test_precedence_and_origins(tmp_path: Path) -> None:
    yaml = "train:\n  epochs: 3\n  global_batch: 8\n\ntask_args:\n  width: 4\n  depth: 2\n"
    loaded = load(tmp_path, yaml, "train.epochs=5", "task_args.width=6", "train.epochs=7")
    assert (loaded.config.train.epochs, loaded.config.train.global_batch) == (7, 8)
    assert loaded.config.task_args == {"width": 6, "depth": 2}
    file = tmp_path / "my.yaml"
    assert loaded.origin("train.epochs") == "command line"
    assert loaded.origin("train.global_batch") == f"{file}:3"
    assert loaded.origin("train.steps") == "default"
    assert loaded.origin("task_args.width") == "command line"
    assert loaded.origin("task_args.depth") == f"{file}:7"
    assert loaded.name == "my"


@pytest.mark.parametrize(
    "yaml", ["", "# nothing\n", "train:\n", "train:\n  early_stop:\n", "---\n"]
)
def test_nothing_is_all_defaults(tmp_path: Path, yaml: str) -> None:
    loaded = load(tmp_path, yaml)
    assert loaded.config == Config()
    assert loaded.origin("train.epochs") == "default"


def test_mappings_merge_and_lists_replace(tmp_path: Path) -> None:
    yaml = "schedule: {decay: step, boundaries: [1, 2], rate: 0.5}\ntask_args: {a: {b: 1, c: 2}}\n"
    loaded = load(
        tmp_path, yaml, "schedule={boundaries: [9]}", "task_args.a.c=3", "task_args.a.d=4"
    )
    assert loaded.config.schedule.boundaries == [9]
    assert loaded.config.schedule.rate == 0.5
    assert loaded.origin("schedule.boundaries") == "command line"
    assert loaded.origin("schedule.rate").endswith("my.yaml:1")
    assert loaded.config.task_args == {"a": {"b": 1, "c": 3, "d": 4}}


def test_null_drops_a_section(tmp_path: Path) -> None:
    yaml = "optimizer: {name: adamw, beta_1: 0.8}\ntask_args: {a: 1}\n"
    loaded = load(tmp_path, yaml, "optimizer=null", "optimizer.name=sgd", "task_args=null")
    assert loaded.config.optimizer.name == "sgd"
    assert loaded.config.optimizer.arguments() == {}
    assert loaded.config.task_args == {}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optimizer.learning_rate=1e-4", 1e-4),
        ("optimizer.learning_rate='1e-4'", 1e-4),
        ("optimizer.learning_rate=1", 1.0),
        ("train.epochs=1e1", 10),
        ("train.epochs='7'", 7),
        ("train.epochs=007", 7),
        ("train.steps=null", None),
        ("train.eval_every=100", 100),
        ("train.eval_every=epoch", "epoch"),
        ("train.shuffle=no", False),
        ("train.shuffle=off", False),
        ("log.csv=False", False),
        ("log.progress=off", "off"),
        ("run.name=007", "007"),
        ("run.name=1e3", "1e3"),
        ("run.name=true", "true"),
        ("run.name=2024-12-01", "2024-12-01"),
        ("run.name=null", None),
        ("run.dir=a=b", "a=b"),
    ],
)
def test_coercion(override: str, value: Any) -> None:
    found: Any = load_config(None, [override]).config
    for part in override.partition("=")[0].split("."):
        found = getattr(found, part)
    assert found == value
    assert type(found) is type(value)


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_config(None, ["run.dir=~/runs"]).config.run.dir == "/somewhere/runs"


def test_direct_construction_checks_too() -> None:
    for wrong in ({"train": {"epochs": True}}, {"train": {"x": 1}}, {"run": {"name": "a/b"}}):
        with pytest.raises(ValidationError):
            Config.model_validate(wrong)


def test_message_has_four_parts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, "log:\n  level: warn\n")
    assert str(caught.value).splitlines() == [
        "log.level: not one of the choices",
        "  rule:     one of debug, info, warning, error",
        f"  received: 'warn' ({tmp_path / 'my.yaml'}:2)",
        "  do:       did you mean log.level=warning?",
    ]


def test_further_problems_are_listed() -> None:
    lines = message("train.epochs=0", "train.steps=x", "lr=1").splitlines()
    assert lines[0] == "lr: unknown key"
    assert [line.split(":")[1].strip() for line in lines if "also" in line] == [
        "train.epochs",
        "train.steps",
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("train.global_bacth", "train.global_batch"),
        ("global_batch", "train.global_batch"),
        ("globalbatch", "train.global_batch"),
        ("trainer.epochs", "train.epochs"),
        ("train.patience", "train.early_stop.patience"),
        ("early_stop.patience", "train.early_stop.patience"),
        ("optimiser.learning_rate", "optimizer.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("train.lr", "optimizer.learning_rate"),
        ("schedule.warmup", "schedule.warmup_steps"),
        ("taskargs", "task_args"),
        ("optimiser", "optimizer"),
    ],
)
def test_suggestions(key: str, meant: str) -> None:
    assert suggest_key(key) == f"did you mean {meant}?"


def test_suggestion_without_anything_near() -> None:
    assert "--help" in (suggest_key("zzz") or "")
    assert "train has the keys epochs" in (suggest_key("train.zzz") or "")


# Parameter servers

CLUSTER = "{ps: [127.0.0.1:33331], worker: [h:80,h:81]}"


def test_a_cluster_in_a_file_and_on_the_command_line(tmp_path: Path) -> None:
    yaml = "backend:\n  cluster:\n    ps:\n      - 10.0.0.1:80\n    chief: [host-a.b:65535]\n"
    loaded = load(tmp_path, yaml)
    assert loaded.config.backend.cluster == {"ps": ["10.0.0.1:80"], "chief": ["host-a.b:65535"]}
    assert loaded.origin("backend.cluster.chief").endswith("my.yaml:5")
    merged = load(tmp_path, yaml, "backend.cluster.ps=['[::1]:1']")
    assert merged.config.backend.cluster == {"ps": ["[::1]:1"], "chief": ["host-a.b:65535"]}
    replaced = load(tmp_path, yaml, "backend.cluster=null", f"backend.cluster={CLUSTER}")
    assert replaced.config.backend.cluster == {
        "ps": ["127.0.0.1:33331"],
        "worker": ["h:80", "h:81"],
    }
    assert load(tmp_path, yaml, "backend.cluster=null").config.backend.cluster is None


def test_a_cluster_is_printed_so_that_it_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["backend.cluster={work: ['[::1]:2'], ps: [a:1]}", "backend.devices=[cpu:0, gpu:1]"]
    assert main(["config", *overrides]) == 0
    assert load(tmp_path, capsys.readouterr().out).config == load_config(None, overrides).config


def test_only_the_kind_has_to_be_changed() -> None:
    """What is said for parameter servers does not stand in the way of other backends."""
    sync = "backend={update: sync, backup_workers: 1, num_ps: 2, log_placement: true}"
    others = f"backend={{update: bounded, max_staleness: 3, worker_steps: [1], cluster: {CLUSTER}}}"
    for given in (sync, others, "backend={pipeline: 4, devices: [cpu:0]}"):
        for kind in ("local", "allreduce", "ps"):
            assert load_config(None, [given, f"backend.kind={kind}"]).config.backend.kind == kind
    for kind in ("local", "allreduce"):  # there, even what does not fit together
        load_config(None, [f"backend={{kind: {kind}, update: bounded, pipeline: 3}}"])
        load_config(None, [f"backend.kind={kind}", "train.precision=mixed_float16"])


def test_yaml_duplicates_and_lines() -> None:
    with pytest.raises(YamlError, match=r"a\.b is there twice, first in line 2") as caught:
        parse_yaml("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert caught.value.line == 4
    tree = parse_yaml("a:\n  b: 1\n  c:\n    - 1\n")
    assert {key: tree.lines[key] for key in ("a", "a.b", "a.c")} == {"a": 1, "a.b": 2, "a.c": 3}


def test_yaml_merge_keys() -> None:
    assert parse_yaml("a: &x {q: 1, r: 2}\nb: {<<: *x, q: 3}\n").value["b"] == {"q": 3, "r": 2}


def test_yaml_aliases_do_not_explode() -> None:
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    with pytest.raises(YamlError, match="too large"):
        parse_yaml("\n".join(lines))


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -2, 1e-5, 1e300, float("inf"), "", "off", "yes", "1e-3", "007", "true", "~",
        "a: b", "a #b", "- a", "x:y", "pkg.mod:Class", "it's", 'say "x"', "two\nlines\t", "é😀\x00",
        "null", "*a", "!t", "{", "k:", [1, "a,b", {"k: ": None, 1: [2.5]}], {}, [],
    ],
)  # fmt: skip
def test_written_values_read_the_same(value: Any) -> None:
    assert parse_yaml(write_flow(value)).value == value
    assert parse_yaml(f"k: {write_flow(value)}  # comment").value == {"k": value}


def test_config_command_round_trip(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = [
        "train={epochs: 3, eval_every: 7, clip_norm: 1e-7}",
        "optimizer={name: sgd, momentum: 0.9}",
        "schedule={decay: step, boundaries: [3, 9], scaling: sqrt, base_batch: 8}",
        "log.progress=off",
        'task_args={a: {b: [1, "no"], 2: x}, text: "1e-3 # \'", empty: {}}',
        "run.name=007",
    ]
    assert main(["config", *overrides]) == 0
    first = capsys.readouterr().out
    file = tmp_path / "printed.yaml"
    file.write_text(first)
    again = load_config(file, [])
    assert again.config == load_config(None, overrides).config
    assert again.origin("train.epochs") == f"{file}:" + str(
        1 + next(i for i, line in enumerate(first.splitlines()) if "epochs:" in line)
    )


def test_config_command_shows_origins(tmp_path: Path) -> None:
    loaded = load(tmp_path, "train:\n  epochs: 3\n", "train.steps=5")
    lines = render_config(loaded.config.model_dump(), loaded.origins).splitlines()
    by_name = {line.split(":")[0].strip(): line for line in lines}
    assert by_name["epochs"].endswith(f"  # {tmp_path / 'my.yaml'}:2")
    assert by_name["steps"].endswith("  # command line")
    assert by_name["global_batch"].endswith("  # default")
    assert len({line.index("#") for line in lines if "#" in line}) == 1


@pytest.mark.parametrize("file", sorted((REPOSITORY / "configs").glob("*.yaml")), ids=str)
def test_shipped_configurations_load(file: Path) -> None:
    assert load_config(file, []).name == file.stem


def test_split_args() -> None:
    assert split_args([], "hvps.train") == Arguments(None, [])
    found = split_args(["a=1", "x.yaml", "b=2"], "hvps.train")
    assert found == Arguments("x.yaml", ["a=1", "b=2"], None, None)
    for wrong in (["a", "b"], ["--x"], ["-n", "3"]):
        with pytest.raises(ConfigError):
            split_args(wrong, "hvps.train")


@pytest.mark.parametrize(
    "options",
    [["--role", "ps", "--index", "1"], ["--index=1", "--role=ps"], ["--role", "ps", "--index=1"]],
)
def test_role_and_index(options: list[str]) -> None:
    found = split_args(["x.yaml", *options, "a=1"], "hvps.train")
    assert found == Arguments("x.yaml", ["a=1"], "ps", 1)
    for other in ("hvps config", "hvps launch"):
        with pytest.raises(ConfigError, match="unknown option"):
            split_args(options, other)


def test_the_chief_needs_no_index() -> None:
    assert split_args(["--role=chief"], "hvps.train") == Arguments(None, [], "chief", 0)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--help"], 0, "commands:"),
        (["--version"], 0, "hvps 0."),
        ([], 0, "commands:"),
        (["config", "--help"], 0, "usage: hvps config"),
        (["confg"], 2, "did you mean config?"),
        (["lauch"], 2, "did you mean launch?"),
        (["launch", "--help"], 0, "usage: hvps launch [-np N] [-H HOST:SLOTS,...]"),
        (["launch", "--role=ps"], 2, "unknown option"),
        (["train", "--help"], 0, "[--role ROLE --index N]"),
        (["config", "--x"], 2, "unknown option"),
        (["config", "train.epochs=x"], 2, "train.epochs: not an integer"),
    ],
)
def test_program(arguments: list[str], code: int, says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvps", *arguments],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=60,
    )
    assert done.returncode == code, done
    assert says in (done.stderr if code else done.stdout)


def test_the_configs_that_come_with_hvps_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_config("configs/allreduce.yaml", [])
    assert loaded.config.train.epochs == 40
    assert loaded.origin("train.epochs").endswith("configs/allreduce.yaml:15")
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "allreduce.yaml").write_text("train: {epochs: 3}")
    assert load_config("configs/allreduce.yaml", []).config.train.epochs == 3
