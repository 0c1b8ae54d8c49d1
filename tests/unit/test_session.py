"""What a run refuses before its first step, and how a wrong task ends the program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

from hvps.backends.local import LocalBackend
from hvps.cluster import Cluster
from hvps.errors import EXIT_CONFIG, ConfigError
from hvps.overrides import load_config
from hvps.resume import Beginning
from hvps.run_directory import RunDirectory
from hvps.session import Session
from hvps.signals import StopSignals
from tests.launching import job_environment
from tests.tasks import Regression

ALONE = Cluster(0, 1, 0, 1, "test")


class OnDatasets(Regression):
    """Regression on datasets, which may be endless."""

    def __init__(self, *, train_endless: bool = False, eval_endless: bool = False) -> None:
        super().__init__(examples=20)
        self._train_endless, self._eval_endless = train_endless, eval_endless

    def train_data(self) -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(super().train_data())
        return dataset.repeat() if self._train_endless else dataset

    def eval_data(self) -> Any:
        dataset = tf.data.Dataset.from_tensor_slices(super().train_data())
        return dataset.repeat() if self._eval_endless else dataset

    def build_model(self) -> Any:
        raise NotImplementedError("the data was accepted")


def prepare(folder: Path, task: Any, *overrides: str) -> None:
    """Go as far as a trainer that is ready to run."""
    config = load_config(None, ["backend.kind=local", *overrides]).config
    backend = LocalBackend(ALONE, accumulate=1)
    session = Session(config, ALONE, backend, RunDirectory(folder), Beginning(), 0.0)
    session.trainer(task, "CPU", StopSignals())


def test_endless_evaluation_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^task: eval_data\(\) never ends") as caught:
        prepare(tmp_path, OnDatasets(eval_endless=True))
    assert caught.value.rule
    assert caught.value.received == "a dataset of infinite cardinality"
    assert caught.value.do
    # Nor does it help that training has its own end.
    with pytest.raises(ConfigError, match=r"^task: eval_data\(\) never ends"):
        prepare(tmp_path, OnDatasets(train_endless=True, eval_endless=True), "train.steps=3")


def test_endless_training_data_needs_a_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^train\.steps: needed") as caught:
        prepare(tmp_path, OnDatasets(train_endless=True))
    assert caught.value.do == "set train.steps"
    with pytest.raises(NotImplementedError, match="accepted"):
        prepare(tmp_path, OnDatasets(train_endless=True), "train.steps=3")


def test_data_that_ends_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="accepted"):
        prepare(tmp_path, OnDatasets())


TASK = """
import keras
import numpy as np

class Task:
    def build_model(self):
        inputs = keras.Input((2,))
        return keras.Model(inputs, keras.layers.Dense(1)(inputs))

    def loss(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred[:, 0]) ** 2)

    def metrics(self):
        return []

    def train_data(self):
        return np.ones((8, 2), np.float32), np.ones(8, np.float32)

    def eval_data(self):
        return None
"""


def test_a_scalar_loss_ends_the_program_with_an_explanation(tmp_path: Path) -> None:
    """It is known when the step is traced, far below what the user wrote."""
    (tmp_path / "scalar_task.py").write_text(TASK)
    arguments = ["backend.kind=local", "task=scalar_task:Task", "train.steps=2"]
    done = subprocess.run(
        [sys.executable, "-m", "hvps.train", *arguments],
        cwd=tmp_path,
        env=job_environment(),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == EXIT_CONFIG, done.stderr
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    assert "hvps: error: task: loss() returned a single number\n  rule:" in output
    assert not (tmp_path / "runs" / "latest" / "model.keras").exists()
