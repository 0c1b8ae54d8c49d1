"""One run: its folder, its model and optimizer, what is printed first and last."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from socket import gethostname
from typing import Any

import keras

from hvps.backends import Backend
from hvps.batches import Feed
from hvps.cli import render_config
from hvps.cluster import Cluster
from hvps.config import Config
from hvps.data import make_feed
from hvps.errors import ConfigError
from hvps.evaluation import Evaluator
from hvps.log import log_to_file, logger, start_logging
from hvps.metrics import Writers, open_writers
from hvps.optimizer import make_optimizer
from hvps.overrides import LoadedConfig
from hvps.progress import make_progress
from hvps.run_directory import (
    RunDirectory,
    create_run_directory,
    launch_record,
    versions,
    weights_sha256,
)
from hvps.runtime import seed_rank
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
    started: float

    @classmethod
    def open(cls, loaded: LoadedConfig, cluster: Cluster, backend: Backend) -> Session:
        """Rank 0 makes the run's folder and tells the others where it is."""
        started = time.monotonic()
        config = loaded.config
        start_logging(config.log.level, cluster.is_root)
        folder = None
        if cluster.is_root:
            folder = create_run_directory(config.run.dir, config.run.name, loaded.name)
            folder.write_text("config.yaml", render_config(config.model_dump(), loaded.origins))
            folder.write_json("run.json", launch_record(cluster, backend))
        folder = backend.broadcast(folder)
        log_to_file(folder.log(cluster.name))
        logger.debug(
            "%s of %d, pid %d on %s", cluster.name, cluster.size, os.getpid(), gethostname()
        )
        return cls(config, cluster, backend, folder, started)

    def trainer(self, task: Task, devices: str, signals: StopSignals) -> Trainer:
        """Build model, optimizer, data and loop from the task, alike on every rank."""
        config, cluster, backend = self.config, self.cluster, self.backend
        train_feed, eval_feed = self._feeds(task)
        model = _built(task.build_model())
        seed_rank(model, config.run.seed, cluster.rank)
        optimizer, base_rate = make_optimizer(config, task)
        optimizer.build(model.trainable_variables)
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
            evaluator = Evaluator(
                model=model,
                loss=task.loss,
                metrics=list(task.metrics()),
                feed=eval_feed,
                backend=backend,
            )
        self._print_banner(model, devices, schedule, train_feed, steps)
        return Trainer(
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
        )

    def _feeds(self, task: Task) -> tuple[Feed, Feed | None]:
        config, backend = self.config, self.backend
        common: dict[str, Any] = {
            "global_batch": config.train.global_batch,
            "prefetch": config.train.prefetch,
        }
        rank, ranks = backend.train_share
        train_feed = make_feed(
            task.train_data(),
            what="train_data",
            rank=rank,
            ranks=ranks,
            reading_share=backend.reading_share,
            accumulate=config.train.accumulate,
            seed=config.run.seed,
            shuffle=config.train.shuffle,
            agree=backend.agree,
            **common,
        )
        if train_feed.endless and config.train.steps is None:
            raise ConfigError(
                "train.steps: needed, for the data never ends",
                rule="an endless dataset has no epochs to count",
                received="a dataset of infinite cardinality, and no train.steps",
                do="set train.steps",
            )
        if backend.eval_share is None:
            return train_feed, None
        held_out = task.eval_data()
        if held_out is None:
            return train_feed, None
        rank, ranks = backend.eval_share
        eval_feed = make_feed(held_out, what="eval_data", rank=rank, ranks=ranks, **common)
        if eval_feed.endless:
            raise ConfigError(
                "task: eval_data() never ends",
                rule="an evaluation reads each held-out example once",
                received="a dataset of infinite cardinality",
                do="take away .repeat(), or use .take(n)",
            )
        return train_feed, eval_feed

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
        local = train.global_batch // (parts * train.accumulate)
        samples = f"{feed.samples:,}" if feed.samples else "unknown number of"
        lines = [
            f"backend {self.backend.name} ({self.backend.engine}), {cluster.name} of"
            f" {cluster.size} ({cluster.source}), {devices}, {train.precision}",
            f"global batch {train.global_batch} = {ranks} × {local} local"
            f" × {train.accumulate} accumulation, learning rate {schedule.explanation}",
            f"model {model.name}: {model.count_params():,} parameters; {samples} examples,"
            f" {steps if steps is not None else 'unknown number of'} steps; run {self.folder.path}",
        ]
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
            "weights_sha256": weights_sha256(model.weights),
        }


def _built(model: Any) -> keras.Model:
    if not isinstance(model, keras.Model):
        raise ConfigError(
            "task: build_model() did not return a model",
            rule="a keras.Model",
            received=type(model).__name__,
            do="return the model",
        )
    if not model.built or not model.weights:
        raise ConfigError(
            "task: build_model() returned a model without weights",
            rule="a built model: the ranks start from equal weights",
            received=f"{model.name}, which was never built",
            do="begin with keras.Input, or call model.build(shape) before returning it",
        )
    return model


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
