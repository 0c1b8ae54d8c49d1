"""One run: its folder, its model and optimizer, what is printed first and last."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from socket import gethostname
from typing import Any

import keras
import numpy as np

from hvps.backends import Backend
from hvps.backends.whole_state import whole_state
from hvps.batches import Feed
from hvps.building import build_eval_feed, build_evaluator, build_model, build_train_feed
from hvps.callbacks import Monitor
from hvps.cli import render_config
from hvps.cluster import Cluster
from hvps.config import Config
from hvps.errors import ConfigError
from hvps.evaluation import Evaluator
from hvps.log import log_to_file, logger, start_logging
from hvps.metrics import Writers, forget_after, open_writers
from hvps.overrides import LoadedConfig
from hvps.progress import make_progress
from hvps.resume import Beginning, config_sha256, find_beginning, restore
from hvps.run_directory import (
    RunDirectory,
    launch_record,
    open_run_directory,
    versions,
    weights_sha256,
)
from hvps.saver import Saver, check_room
from hvps.schedule import Schedule, make_schedule
from hvps.signals import StopSignals
from hvps.task import Task
from hvps.trainer import Trainer, TrainingResult, total_steps


@dataclass(frozen=True)
class Session:
    """What all steps of a run share on this rank."""

    config: Config
    cluster: Cluster
    backend: Backend
    folder: RunDirectory
    beginning: Beginning
    started: float

    @classmethod
    def open(cls, loaded: LoadedConfig, cluster: Cluster, backend: Backend) -> Session:
        """Rank 0 makes the run's folder, or finds where an earlier run was broken off, and tells
        the others.

        Raises:
            ConfigError: the folder cannot be had, or its checkpoint does not fit.
        """
        started = time.monotonic()
        config = loaded.config
        start_logging(config.log.level, cluster.is_root)
        found, beginning = None, Beginning()
        if cluster.is_root:
            resume = config.run.resume != "never"
            folder, existed = open_run_directory(
                config.run.dir, config.run.name, loaded.name, resume=resume
            )
            beginning = find_beginning(config, folder.path, existed)
            if existed:
                forget_after(folder.path, beginning.position.step)
            folder.write_text("config.yaml", render_config(config.model_dump(), loaded.origins))
            folder.write_json("run.json", launch_record(cluster, backend, beginning.path))
            found = folder, beginning.for_others()
        folder, others = backend.broadcast(found)
        beginning = beginning if cluster.is_root else others
        log_to_file(folder.log(cluster.name))
        logger.debug(
            "%s of %d, pid %d on %s", cluster.name, cluster.size, os.getpid(), gethostname()
        )
        return cls(config, cluster, backend, folder, beginning, started)

    def trainer(self, task: Task, devices: str, signals: StopSignals) -> Trainer:
        """Build model, optimizer, data and loop from the task, alike on every rank."""
        config, cluster, backend = self.config, self.cluster, self.backend
        train_feed = build_train_feed(config, task, backend)
        eval_feed = build_eval_feed(config, task, backend)
        self._check_position(train_feed)
        model, optimizer, base_rate = build_model(config, task, cluster.rank)
        restore(self.beginning, model, optimizer, backend.broadcast)
        backend.setup(
            model=model,
            optimizer=optimizer,
            loss=task.loss,
            identity={**config.model_dump(), "versions": versions()},
            example=train_feed.example(),
        )
        steps = total_steps(config, train_feed)
        schedule = make_schedule(config, base_rate, backend.train_share[1], steps)
        evaluator = None
        if eval_feed is not None:
            evaluator = build_evaluator(task, model, eval_feed, backend)
        self._print_banner(model, devices, schedule, train_feed, steps)
        trainer = Trainer(
            config=config,
            model=model,
            backend=backend,
            feed=train_feed,
            schedule=schedule,
            evaluator=evaluator,
            writers=self._writers(evaluator),
            progress=make_progress(
                config.log.progress,
                is_root=cluster.is_root,
                launched=cluster.launched,
                total=steps,
            ),
            signals=signals,
            start=self.beginning.position,
            saver=self._saver(model, optimizer, evaluator, train_feed),
        )
        if self.beginning.loop is not None:
            trainer.restore(self.beginning.loop)
        return trainer

    def _saver(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        evaluator: Evaluator | None,
        feed: Feed,
    ) -> Saver | None:
        """Rank 0's, unless no checkpoints are wanted."""
        config = self.config.checkpoint
        if not self.cluster.is_root or config.keep == 0:
            return None
        monitor = None
        if config.keep_best:
            names = evaluator.names if evaluator else []
            monitor = Monitor("checkpoint.monitor", config.monitor, config.mode, names)
        variables = whole_state(model, optimizer).values()
        size = sum(int(np.prod(v.shape)) * v.value.dtype.size for v in variables)
        check_room(self.folder.checkpoints, config, size)
        whole = json.loads(self.config.model_dump_json())
        about = {
            "config": whole,
            "config_sha256": config_sha256(whole),
            "samples": feed.samples,
            "backend": self.backend.name,
            "ranks": self.cluster.size,
            "versions": versions(),
        }
        start = self.beginning.position.step
        return Saver(self.folder.checkpoints, config, about=about, start=start, monitor=monitor)

    def _check_position(self, feed: Feed) -> None:
        """Whether the checkpoint's position means the same examples here."""
        position = self.beginning.position
        if position.by_worker is not None and feed.in_order and not feed.divided_among_readers:
            raise ConfigError(
                "run.resume: data that is read in order was divided among asynchronous workers",
                rule="each of them goes on where it was in its part of the dataset",
                received=f"{self.beginning.path}, of {len(position.by_worker)} workers",
                do="resume with backend.update=async and as many workers, or give the data as"
                " arrays",
            )
        samples = self.beginning.samples
        if position.step and samples != feed.samples:
            raise ConfigError(
                "task: train_data() has another number of examples than before",
                rule="a run goes on at the next example of the same data",
                received=f"{feed.samples} now, {samples} in {self.beginning.path}",
                do="give the same data, or begin anew under another run.name",
            )

    def _writers(self, evaluator: Evaluator | None) -> Writers:
        if not self.cluster.is_root:
            return Writers([])
        names = evaluator.names if evaluator else []
        columns = ["loss", "learning_rate", "examples_per_second", "skipped"]
        columns += [name for name in names if name not in columns]
        log = self.config.log
        return open_writers(
            self.folder.path, columns, csv_file=log.csv, tensorboard=log.tensorboard
        )

    def _print_banner(
        self, model: keras.Model, devices: str, schedule: Schedule, feed: Feed, steps: int | None
    ) -> None:
        config, cluster, train = self.config, self.cluster, self.config.train
        ranks, parts = self.backend.batch_parts
        each, more = divmod(train.global_batch, parts * train.accumulate)
        local = f"{each} to {each + 1}" if more else f"{each}"
        samples = f"{feed.samples:,}" if feed.samples else "unknown number of"
        lines = [
            f"backend {self.backend.name} ({self.backend.engine}), {cluster.name} of"
            f" {cluster.size} ({cluster.source}), {devices}, {train.precision}",
            f"global batch {train.global_batch} = {ranks} × {local} local"
            f" × {train.accumulate} accumulation, learning rate {schedule.explanation}",
            f"model {model.name}: {model.count_params():,} parameters; {samples} examples,"
            f" {steps if steps is not None else 'unknown number of'} steps; run {self.folder.path}",
        ]
        if self.beginning.path is not None:
            at = self.beginning.position
            lines.append(f"goes on after step {at.step}, epoch {at.epoch}: {self.beginning.path}")
        for line in lines:
            logger.info(line)
        logger.debug("task %s, seed %d", config.task, config.run.seed)

    def finish(self, model: keras.Model, result: TrainingResult) -> None:
        """Rank 0 saves the model and the result; the others wait until they are on disk."""
        if self.cluster.is_root:
            self.folder.save_model(model)
            record = self._result_record(model, result)
            self.folder.write_json("result.json", record)
            _print_table(record, self.folder)
        self.backend.barrier()

    def _result_record(self, model: keras.Model, result: TrainingResult) -> dict[str, Any]:
        return {
            "backend": self.backend.name,
            "engine": self.backend.engine,
            "ranks": self.cluster.size,
            "steps": result.steps,
            "examples": result.examples,
            "eval": result.evaluation,
            "seconds": round(time.monotonic() - self.started, 3),
            "train_seconds": round(result.train_seconds, 3),
            "examples_per_second": round(result.examples_per_second, 1),
            "skipped_steps": result.skipped_steps,
            "stopped_by": result.stopped_by,
            **self.backend.report(),
            "restarts": self.folder.restarts(),
            "weights_sha256": weights_sha256(model.weights),
        }


def _print_table(record: dict[str, Any], folder: RunDirectory) -> None:
    """The short table at the end, and where everything lies."""
    rows = {f"eval {name}": f"{value:.4f}" for name, value in record["eval"].items()}
    rows["steps"] = f"{record['steps']:,} ({record['examples']:,} examples)"
    rows["examples/s"] = f"{record['examples_per_second']:,.0f}"
    rows["seconds"] = f"{record['seconds']:.1f}"
    if record["skipped_steps"]:
        rows["skipped steps"] = str(record["skipped_steps"])
    if record["stopped_by"]:
        rows["stopped by"] = record["stopped_by"]
    rows["run"] = str(folder.path)
    width = max(map(len, rows))
    logger.info("")
    for name, text in rows.items():
        logger.info("  %s  %s", name.ljust(width), text)
