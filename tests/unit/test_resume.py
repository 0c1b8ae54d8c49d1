"""Where a run begins, and that it has the state it had there."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from hvps.backends.whole_state import seed_variables, whole_state
from hvps.checkpoint import Checkpoint, DamagedCheckpointError, write_checkpoint
from hvps.config import Config
from hvps.errors import EXIT_CONFIG, ConfigError
from hvps.overrides import load_config
from hvps.position import START, Position
from hvps.resume import Beginning, checkpoint_at, config_sha256, find_beginning, restore
from hvps.runtime import seed_rank

State = dict[str, np.ndarray]


@pytest.fixture
def warnings(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], list[str]]:
    """Messages of warnings and worse so far."""
    monkeypatch.setattr(logging.getLogger("hvps"), "propagate", True)
    caplog.set_level(logging.INFO, "hvps")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def config_of(*overrides: str) -> Config:
    return load_config(None, ["backend.kind=local", *overrides]).config


def saved(run: Path, step: int, *overrides: str, state: State | None = None) -> Checkpoint:
    """A checkpoint of `run`, which was configured so."""
    position = Position(step, 2, step % 5, step * 10)
    meta = {
        "step": step,
        "position": position.as_json(),
        "loop": {"epoch": 2, "early_stop": [None, 0], "evaluation": {"loss": 0.5}},
        "config": json.loads(config_of(*overrides).model_dump_json()),
        "samples": 64,
    }
    arrays = {"model/w": np.full(3, step, np.float32)} if state is None else state
    return write_checkpoint(run / "checkpoints", arrays, meta)


def damage(checkpoint: Checkpoint, name: str = "state.npz") -> None:
    with open(checkpoint.path / name, "r+b") as file:
        file.seek(60)
        byte = file.read(1)
        file.seek(60)
        file.write(bytes([byte[0] ^ 4]))


def step_of(beginning: Beginning) -> int:
    """Of a beginning whose parts all belong to one checkpoint; 0: afresh."""
    if beginning.path is None:
        assert beginning == Beginning()
        assert beginning.position == START
        return 0
    assert beginning.state is not None
    step = int(beginning.state["model/w"][0])
    assert beginning.position == Position(step, 2, step % 5, step * 10)
    assert beginning.loop is not None
    assert beginning.loop["epoch"] == 2
    assert beginning.samples == 64
    assert f"step-{step:012d}" in beginning.path.name
    return step


# --- where ---


def test_a_new_run_begins_afresh(tmp_path: Path) -> None:
    assert step_of(find_beginning(config_of(), tmp_path, existed=False)) == 0


def test_an_earlier_run_goes_on_at_its_last_checkpoint(tmp_path: Path) -> None:
    for step in (20, 30, 10):
        saved(tmp_path, step)
    assert step_of(find_beginning(config_of(), tmp_path, existed=True)) == 30


def test_an_earlier_run_without_checkpoints_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, warnings: Callable[[], list[str]]
) -> None:
    assert step_of(find_beginning(config_of(), tmp_path, existed=True)) == 0
    assert "no checkpoint yet" in caplog.text
    assert warnings() == []


def test_never_means_never(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    config = config_of("run.resume=never")
    assert step_of(find_beginning(config, tmp_path, existed=True)) == 0


def test_a_run_begins_at_another_ones_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20):
        saved(tmp_path / "other", step)
    for path, expected in (
        ("other", 20),
        ("other/checkpoints/step-000000000010", 10),
        ("other/checkpoints/step-000000000020", 20),
    ):
        config = config_of(f"run.resume={tmp_path / path}")
        for existed in (False, True):
            (tmp_path / "mine").mkdir(exist_ok=True)
            assert step_of(find_beginning(config, tmp_path / "mine", existed)) == expected


def test_after_that_it_goes_on_at_its_own(tmp_path: Path) -> None:
    """With the same command, as a launcher that starts it again gives it."""
    saved(tmp_path / "other", 20)
    config = config_of(f"run.resume={tmp_path / 'other'}")
    assert step_of(find_beginning(config, tmp_path / "mine", existed=True)) == 20
    own = saved(tmp_path / "mine", 25)
    assert step_of(find_beginning(config, tmp_path / "mine", existed=True)) == 25
    damage(own)
    assert step_of(find_beginning(config, tmp_path / "mine", existed=True)) == 20


def test_other_processes_get_all_but_the_weights(tmp_path: Path) -> None:
    saved(tmp_path, 10)
    beginning = find_beginning(config_of(), tmp_path, existed=True)
    others = beginning.for_others()
    assert others.state is None
    assert (others.position, others.loop, others.path, others.samples) == (
        beginning.position,
        beginning.loop,
        beginning.path,
        beginning.samples,
    )


# --- damaged or missing ---


@pytest.mark.parametrize("name", ["state.npz", "checkpoint.json"])
def test_damaged_ones_are_passed_over_with_a_warning(
    tmp_path: Path, warnings: Callable[[], list[str]], name: str
) -> None:
    for step in (10, 20, 30):
        checkpoint = saved(tmp_path, step)
        if step > 10:
            damage(checkpoint, name)
    assert step_of(find_beginning(config_of(), tmp_path, existed=True)) == 10
    assert len(warnings()) == 2
    for message, step in zip(warnings(), (30, 20), strict=True):
        assert f"step-{step:012d} is damaged and is passed over" in message


def test_when_all_are_damaged_training_begins_anew(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    damage(saved(tmp_path, 10))
    assert step_of(find_beginning(config_of(), tmp_path, existed=True)) == 0
    assert len(warnings()) == 1


def test_a_damaged_one_that_was_named_is_refused(tmp_path: Path) -> None:
    """Another one is not what was asked for."""
    saved(tmp_path / "other", 10)
    last = saved(tmp_path / "other", 20)
    damage(last)
    config = config_of(f"run.resume={last.path}")
    with pytest.raises(DamagedCheckpointError, match="step-000000000020 is damaged") as caught:
        find_beginning(config, tmp_path / "mine", existed=False)
    assert caught.value.exit_code == EXIT_CONFIG
    assert caught.value.do


def test_a_path_without_checkpoints_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other" / "checkpoints").mkdir(parents=True)
    for path, do in ((tmp_path / "other", "hvps checkpoints"), (tmp_path / "missing", "correct")):
        with pytest.raises(ConfigError, match=r"^checkpoint: .* has none\n") as caught:
            find_beginning(config_of(f"run.resume={path}"), tmp_path / "mine", existed=False)
        assert do in str(caught.value.do)
        assert caught.value.received == str(path)
    saved(tmp_path / "other", 10)
    assert checkpoint_at(tmp_path / "other", 10).step == 10
    with pytest.raises(ConfigError, match=r"has none of step 11\n"):
        checkpoint_at(tmp_path / "other", 11)


# --- another configuration ---


@pytest.mark.parametrize("changed", ["train.global_batch=48", "train.shuffle=false", "run.seed=1"])
@pytest.mark.parametrize("how", ["auto", "path"])
def test_another_order_of_examples_is_refused(tmp_path: Path, changed: str, how: str) -> None:
    saved(tmp_path / "run", 10)
    key = changed.split("=")[0]
    resume = "auto" if how == "auto" else tmp_path / "run"
    config = config_of(changed, f"run.resume={resume}")
    folder = tmp_path / ("run" if how == "auto" else "mine")
    with pytest.raises(ConfigError, match=rf"^{key}: .* does not fit") as caught:
        find_beginning(config, folder, existed=how == "auto")
    assert key in str(caught.value.received)
    assert "step-000000000010" in str(caught.value.received)
    assert caught.value.rule
    assert caught.value.do


def test_other_changes_are_told(tmp_path: Path, warnings: Callable[[], list[str]]) -> None:
    saved(tmp_path, 10, "optimizer.learning_rate=0.5", "task_args={width: 3}")
    config = config_of("optimizer.learning_rate=0.25", "train.epochs=7", "task_args.depth=2")
    assert step_of(find_beginning(config, tmp_path, existed=True)) == 10
    (message,) = warnings()
    for change in (
        "optimizer.learning_rate 0.5 -> 0.25",
        "train.epochs 30 -> 7",
        "task_args.width 3 -> None",
        "task_args.depth None -> 2",
    ):
        assert change in message


@pytest.mark.parametrize(
    "changed",
    [
        ("run.name=other", "run.dir=elsewhere", "run.resume=never"),
        ("log.every=7", "log.tensorboard=false"),
        ("checkpoint.keep=9", "checkpoint.every_steps=3"),
        ("backend.stall_timeout=5",),
        (),
    ],
)
def test_where_and_how_a_run_is_made_is_free(
    tmp_path: Path, warnings: Callable[[], list[str]], changed: tuple[str, ...]
) -> None:
    saved(tmp_path, 10)
    config = config_of(*changed, "run.resume=auto")
    assert step_of(find_beginning(config, tmp_path, existed=True)) == 10
    assert warnings() == []


def test_the_configurations_checksum_is_of_what_is_learned() -> None:
    def checksum(*overrides: str) -> str:
        return config_sha256(json.loads(config_of(*overrides).model_dump_json()))

    assert checksum() == checksum("run.name=a", "log.every=3", "checkpoint.keep=1")
    different = [
        checksum(),
        checksum("run.seed=1"),
        checksum("train.global_batch=48"),
        checksum("train.epochs=9"),
        checksum("optimizer.learning_rate=0.5"),
        checksum("optimizer.name=sgd"),
        checksum("task_args={width: 3}"),
    ]
    assert len(set(different)) == len(different)


# --- the state ---


@pytest.fixture(autouse=True)
def float32_again() -> Iterator[None]:
    yield
    keras.config.set_dtype_policy("float32")


def network(seed: int = 0, width: int = 5, *, dropout: float = 0.5) -> keras.Model:
    policy = keras.config.dtype_policy()
    keras.utils.clear_session()
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((4,))
    x = keras.layers.Dense(width, activation="tanh")(inputs)
    x = keras.layers.BatchNormalization()(x)
    if dropout:
        x = keras.layers.Dropout(dropout)(x)
    return keras.Model(inputs, keras.layers.Dense(1)(x), name="network")


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True),
}


def built(optimizer: Any, model: keras.Model) -> Any:
    optimizer.build(model.trainable_variables)
    return optimizer


def values(model: keras.Model, optimizer: Any) -> State:
    return {name: np.asarray(v).copy() for name, v in whole_state(model, optimizer).items()}


def assert_same(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def beginning_of(folder: Path, state: State) -> Beginning:
    """Read from the disk again."""
    saved(folder, 10, state=state)
    return find_beginning(config_of(), folder, existed=True)


def alone(value: Any) -> Any:
    return value


def numbered(model: keras.Model, optimizer: Any) -> State:
    """A state in which no two variables are alike, of the types and shapes of the model's."""
    return {
        name: (np.arange(array.size).reshape(array.shape) + 10 * i + 1).astype(array.dtype)
        for i, (name, array) in enumerate(values(model, optimizer).items())
    }


@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_root_gets_the_whole_state(tmp_path: Path, name: str, policy: str) -> None:
    keras.config.set_dtype_policy(policy)
    model = network()
    optimizer = built(OPTIMIZERS[name](), model)
    state = numbered(model, optimizer)
    if policy == "bfloat16":
        assert "bfloat16" in {str(array.dtype) for array in state.values()}
    restore(beginning_of(tmp_path, state), model, optimizer, alone)
    assert_same(values(model, optimizer), state)


def test_without_a_checkpoint_nothing_changes() -> None:
    def unexpected(value: Any) -> Any:
        raise AssertionError("nobody waits for a broadcast")

    model = network()
    optimizer = built(keras.optimizers.Adam(), model)
    before = values(model, optimizer)
    restore(Beginning(), model, optimizer, unexpected)
    assert_same(values(model, optimizer), before)


def test_the_others_draw_their_own_numbers_as_often_as_the_root(tmp_path: Path) -> None:
    said: list[Any] = []

    def told(value: Any) -> Any:
        said.append(value)
        return said[0]

    root = network()
    optimizer = built(keras.optimizers.Adam(), root)
    for _ in range(3):  # the count moves on
        root(np.ones((2, 4), np.float32), training=True)
    state = values(root, optimizer)
    beginning = beginning_of(tmp_path, state)

    models = []
    for rank in range(3):
        model = network(seed=rank)
        seed_rank(model, 0, rank)
        optimizer = built(keras.optimizers.Adam(), model)
        before = values(model, optimizer)
        restore(beginning if rank == 0 else beginning.for_others(), model, optimizer, told)
        found = values(model, optimizer)
        (name,) = seed_variables(model)
        assert found[name][0] == before[name][0]
        assert found[name][1:].tolist() == state[name][1:].tolist() != before[name][1:].tolist()
        if rank:  # their weights come with the backend's
            assert_same({**found, name: before[name]}, before)
        models.append(model)
    masks = [m.get_layer("dropout")(np.ones((1, 64), np.float32), training=True) for m in models]
    assert len({np.asarray(mask).tobytes() for mask in masks}) == 3


def test_a_model_without_random_numbers(tmp_path: Path) -> None:
    model = network(dropout=0)
    optimizer = built(keras.optimizers.SGD(), model)
    state = numbered(model, optimizer)
    restore(beginning_of(tmp_path, state), model, optimizer, alone)
    assert_same(values(model, optimizer), state)


def refused(folder: Path, state: State, model: keras.Model, optimizer: Any) -> str:
    """What is said of the difference; nothing may have changed."""
    before = values(model, optimizer)
    with pytest.raises(ConfigError, match="of another model or optimizer") as caught:
        restore(beginning_of(folder, state), model, optimizer, alone)
    assert_same(values(model, optimizer), before)
    assert caught.value.rule
    assert caught.value.do
    assert "step-000000000010" in caught.value.what
    return str(caught.value.received)


def test_another_model_is_refused_with_the_difference(tmp_path: Path) -> None:
    model = network()
    optimizer = built(keras.optimizers.SGD(0.1), model)
    state = numbered(model, optimizer)
    last = list(state)[-1]

    wider = {**state, "model/dense/kernel": np.zeros((4, 6), np.float32)}
    assert refused(tmp_path / "shape", wider, model, optimizer) == (
        "model/dense/kernel: float32 (4, 6) saved, float32 (4, 5) now"
    )
    half = {**state, "model/dense/bias": state["model/dense/bias"].astype(np.float16)}
    assert refused(tmp_path / "type", half, model, optimizer) == (
        "model/dense/bias: float16 (5,) saved, float32 (5,) now"
    )
    surplus = {**state, "model/surplus": np.zeros(1, np.float32)}
    assert refused(tmp_path / "surplus", surplus, model, optimizer) == (
        "model/surplus: float32 (1,) saved, not there now"
    )
    less = {name: array for name, array in state.items() if name != last}
    found = refused(tmp_path / "less", less, model, optimizer)
    assert found.startswith(f"{last}: not there saved, ")
    renamed = {name.replace("dense_1", "head"): array for name, array in state.items()}
    found = refused(tmp_path / "names", renamed, model, optimizer)
    assert "model/dense_1/kernel: not there saved, float32 (5, 1) now" in found
    assert "model/head/kernel: float32 (5, 1) saved, not there now" in found


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model = network()
    state = numbered(model, built(keras.optimizers.Adam(0.1), model))
    found = refused(tmp_path, state, model, built(keras.optimizers.SGD(0.1), model))
    assert (
        "optimizer/adam/batch_normalization_beta_momentum: float32 (5,) saved, not there now"
        in found
    )
    assert found.endswith(" more")
    assert found.count(";") == 8


def test_a_beginning_does_not_need_its_folder_any_longer(tmp_path: Path) -> None:
    """It may be among those that are removed soon."""
    model = network()
    optimizer = built(keras.optimizers.Adam(), model)
    state = numbered(model, optimizer)
    beginning = beginning_of(tmp_path, state)
    shutil.rmtree(tmp_path / "checkpoints")
    restore(beginning, model, optimizer, alone)
    assert_same(values(model, optimizer), state)
