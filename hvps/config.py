"""The configuration: one typed, frozen tree. What each key means and allows stands here, once.

`hvps.overrides` fills the tree from a YAML file and the command line; `hvps.preflight` checks
it against the machine (ranks, folders, the task's code, the installed Keras).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from hvps.config_base import INT_MAX, FieldError, Section, ignored, section_type
from hvps.task_cluster import read_jobs


class RunConfig(Section):
    dir: str = Field(
        default="runs", min_length=1, description="folder that holds the runs' folders"
    )
    name: str | None = Field(
        default=None, description="the run's folder in it; null: config name and time"
    )
    seed: int = Field(
        default=0, ge=0, le=INT_MAX, description="of initial weights, order and dropout"
    )
    deterministic: bool = Field(
        default=False,
        description="the same weights each time, bit by bit, with as many ranks and threads:"
        " TensorFlow's deterministic operations, and Horovod without fusion; slower",
    )
    resume: str = Field(
        default="auto",
        min_length=1,
        description="auto: go on where a run of this name was; never; or the folder of a run or of"
        " a checkpoint to begin from",
    )

    @field_validator("dir")
    @classmethod
    def _expand_home(cls, value: str) -> str:
        # The shell does not expand run.dir=~/runs; a folder named "~" is never what was meant.
        return os.path.expanduser(value)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str | None) -> str | None:
        if value is None:
            return value
        rule = "letters, digits, '.', '_' and '-', not beginning with '.' or '-', up to 200"
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}", value):
            raise FieldError("", "not a plain folder name", rule=rule)
        if value == "latest":
            raise FieldError("", "reserved: 'latest' is the link to the newest run", rule=rule)
        return value

    @field_validator("resume")
    @classmethod
    def _expand_path(cls, value: str) -> str:
        return os.path.expanduser(value)

    @property
    def resume_path(self) -> str | None:
        """The folder that `resume` names, if it names one."""
        return None if self.resume in ("auto", "never") else self.resume


class BackendConfig(Section):
    # The keys from `update` on are of kind ps; other kinds leave them alone, so that a file trains
    # in every way when only its `kind` is changed.
    kind: Literal["local", "allreduce", "ps"] = Field(
        default="allreduce",
        description="local: one process; allreduce: gradients averaged over ranks; ps: parameter"
        " servers",
    )
    engine: Literal["auto", "horovod", "mpi"] = Field(
        default="auto",
        description="what carries the allreduce; auto: Horovod where installed, else MPI",
    )
    stall_timeout: float = Field(
        default=120.0,
        gt=0,
        description="seconds a rank waits for a missing one before the job is stopped",
    )
    restarts: int = Field(
        default=0,
        ge=0,
        description="how often a task that lost another one begins anew from the last checkpoint,"
        " and waits for the other's return; `hvps launch --max-restarts` sets it",
    )
    update: Literal["async", "sync", "bounded"] = Field(
        default="async",
        description="async: a gradient is applied when it comes; sync: their average over the"
        " workers; bounded: async within max_staleness",
    )
    replication: Literal["between_graph", "in_graph"] = Field(
        default="between_graph",
        description="between_graph: each worker runs its own graph; in_graph: one drives all",
    )
    cluster: dict[str, list[str]] | None = Field(
        default=None, description="addresses 'host:port' by job: {ps: [...], worker: [...]}"
    )
    num_ps: int = Field(
        default=1,
        ge=1,
        description="parameter servers that `hvps launch` starts, and the first ranks under mpirun",
    )
    num_workers: int = Field(default=2, ge=1, description="workers that `hvps launch` starts")
    backup_workers: int = Field(
        default=0, ge=0, description="workers that a sync update does not wait for"
    )
    max_staleness: int = Field(
        default=1, ge=0, description="bounded: steps that a worker may be ahead of the slowest"
    )
    worker_steps: list[int] | None = Field(
        default=None, description="steps of each worker; null: shared out as they come"
    )
    devices: list[str] = Field(
        default_factory=list,
        description="towers of each worker, like [cpu:0, gpu:0]; empty: one, where TensorFlow"
        " puts it",
    )
    log_placement: bool = Field(default=False, description="log the device of each operation")
    pipeline: int = Field(
        default=1,
        ge=1,
        le=8,
        description="async: steps in flight per worker; 2 overlaps the pull of one with the push"
        " of another",
    )
    congestion_control: str = Field(
        default="auto",
        min_length=1,
        max_length=15,
        description="TCP congestion control by which processes send: system, a name that the kernel"
        " knows, or auto: the system's, but not BBR where Cubic or Reno can be had",
    )

    @field_validator("cluster", mode="before")
    @classmethod
    def _addresses(cls, value: Any) -> Any:
        if not value and (value is None or isinstance(value, dict)):
            return None  # all jobs were dropped with backend.cluster=null
        read_jobs(value)
        return value

    @field_validator("worker_steps")
    @classmethod
    def _some_steps(cls, value: list[int] | None) -> list[int] | None:
        if value is not None and (not value or min(value) < 1):
            raise FieldError("", "a worker without a step", rule="integers >= 1, one per worker")
        return value

    @field_validator("devices")
    @classmethod
    def _device_names(cls, value: list[str]) -> list[str]:
        rule = "cpu:N or gpu:N, each once"
        for name in value:
            if not re.fullmatch(r"(cpu|gpu):(0|[1-9][0-9]{0,2})", name):
                raise FieldError("", f"{name} is not a device", rule=rule)
            if value.count(name) > 1:
                raise FieldError("", f"{name} is there twice", rule=rule)
        return value

    @model_validator(mode="after")
    def _all_used(self) -> BackendConfig:
        if self.kind == "local" and self._differs("engine"):
            raise ignored("engine", "backend.kind is local, which needs no engine")
        if self.kind != "ps":
            return self
        in_graph = self.replication == "in_graph"
        if in_graph and self.update == "bounded":
            raise FieldError(
                "update",
                "bounded is not supported in_graph",
                rule="the bound holds between workers that each run their own graph",
                do="use backend.replication=between_graph, or backend.update=async",
            )
        update = f"backend.update is {self.update}"
        needed = {
            "backup_workers": (self.update == "sync", update),
            "max_staleness": (self.update == "bounded", update),
            "pipeline": (self.update == "async", update),
        }
        if in_graph:
            reason = "backend.replication is in_graph: one process drives all workers"
            unused = ("backup_workers", "pipeline", "worker_steps")
            needed |= dict.fromkeys(unused, (False, reason))
        for name, (used, why) in needed.items():
            if not used and self._differs(name):
                raise ignored(name, why)
        return self


class EarlyStopConfig(Section):
    monitor: str = Field(
        default="loss", min_length=1, description="evaluation metric that is watched"
    )
    mode: Literal["min", "max", "auto"] = Field(
        default="auto", description="whether less or more is better; auto: by the metric's name"
    )
    patience: int = Field(default=0, ge=0, description="evaluations without improvement; 0: off")
    min_delta: float = Field(
        default=0.0, ge=0, description="smallest change that is an improvement"
    )

    @model_validator(mode="after")
    def _is_used(self) -> EarlyStopConfig:
        for name in ("monitor", "mode", "min_delta"):
            if self.patience == 0 and self._differs(name):
                raise ignored(name, "early stopping is off (train.early_stop.patience is 0)")
        return self


class TrainConfig(Section):
    epochs: int = Field(default=30, ge=1, description="passes over the training data")
    steps: int | None = Field(
        default=None, ge=1, description="stop after so many updates, not by epochs"
    )
    global_batch: int = Field(default=64, ge=1, description="samples per update, over all ranks")
    accumulate: int = Field(
        default=1, ge=1, description="parts of a rank's share, computed one by one"
    )
    uneven_batch: bool = Field(
        default=False, description="ranks' shares of a batch may differ by one example"
    )
    precision: Literal["float32", "mixed_float16", "mixed_bfloat16"] = Field(
        default="float32", description="what the model computes in"
    )
    clip_norm: float | None = Field(
        default=None, gt=0, description="largest global norm of the averaged gradient"
    )
    eval_every: int | Literal["epoch"] = Field(
        default="epoch", description="steps between evaluations; 0: only at the end"
    )
    check_every: int = Field(
        default=500, ge=0, description="steps between comparing weights over ranks; 0: never"
    )
    shuffle: bool = Field(
        default=True, description="new order in each epoch; a tf.data.Dataset keeps its own"
    )
    prefetch: int = Field(default=2, ge=1, description="batches prepared ahead")
    early_stop: EarlyStopConfig = Field(default_factory=EarlyStopConfig)

    @field_validator("eval_every", mode="before")
    @classmethod
    def _steps_or_epoch(cls, value: Any) -> Any:
        if value == "epoch" or isinstance(value, bool):  # true is refused for all integers
            return value
        try:  # here and not in the union, which would report each of its branches
            steps = int(value)
        except (TypeError, ValueError, OverflowError):
            steps = -1
        if steps < 0 or (isinstance(value, float) and steps != value):
            raise FieldError("", "not a number of steps", rule="an integer >= 0, or 'epoch'")
        return steps

    @model_validator(mode="after")
    def _can_stop_early(self) -> TrainConfig:
        if self.early_stop.patience and self.eval_every == 0:
            raise ignored(
                "early_stop.patience", "the model is evaluated only once (train.eval_every is 0)"
            )
        return self


class CheckpointConfig(Section):
    every_steps: int = Field(default=0, ge=0, description="steps between saves; 0: by time alone")
    every_minutes: float = Field(
        default=10.0, ge=0, description="minutes between saves; 0: by steps alone"
    )
    keep: int = Field(
        default=3, ge=0, description="newest checkpoints that are kept; 0: none is ever written"
    )
    keep_best: int = Field(
        default=0, ge=0, description="further ones that are kept: those of the best evaluations"
    )
    monitor: str = Field(
        default="loss", min_length=1, description="evaluation metric that says which are best"
    )
    mode: Literal["min", "max", "auto"] = Field(
        default="auto", description="whether less or more is better; auto: by the metric's name"
    )

    @model_validator(mode="after")
    def _all_used(self) -> CheckpointConfig:
        for name in ("every_steps", "every_minutes", "keep_best"):
            if self.keep == 0 and self._differs(name):
                raise ignored(name, "no checkpoint is written (checkpoint.keep is 0)")
        for name in ("monitor", "mode"):
            if self.keep_best == 0 and self._differs(name):
                raise ignored(name, "checkpoint.keep_best is 0")
        return self


class OptimizerConfig(Section):
    # Further keys are arguments of the Keras optimizer; hvps.optimizer_check knows them.
    model_config = ConfigDict(extra="allow")

    name: str = Field(default="adam", min_length=1, description="a Keras 3 optimizer, in any case")
    learning_rate: float = Field(
        default=1e-3, gt=0, description="peak rate, before schedule.scaling"
    )

    def arguments(self) -> dict[str, Any]:
        """The optimizer's further arguments, by name."""
        return dict(self.model_extra or {})

    @property
    def is_default(self) -> bool:
        """True if nothing was asked for: a task may then build its own optimizer."""
        return self.model_dump() == OptimizerConfig().model_dump()


class ScheduleConfig(Section):
    scaling: Literal["none", "linear", "sqrt"] = Field(
        default="none", description="rate grows with global_batch / base_batch"
    )
    base_batch: int | None = Field(
        default=None,
        ge=1,
        description="global batch the rate was tuned for; null: one rank's share",
    )
    warmup_steps: int = Field(default=0, ge=0, description="updates until the peak rate; 0: none")
    warmup_from: float = Field(
        default=0.0, ge=0, le=1, description="fraction of the peak to start at"
    )
    decay: Literal["none", "linear", "cosine", "exponential", "step"] = Field(
        default="none", description="how the rate falls after the warm-up"
    )
    decay_steps: int | None = Field(
        default=None, ge=1, description="updates that it takes; null: to the end of training"
    )
    final: float = Field(
        default=0.0, ge=0, le=1, description="fraction of the peak that linear and cosine end at"
    )
    rate: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="factor per decay_steps (exponential) or boundary (step)",
    )
    boundaries: list[int] = Field(
        default_factory=list, description="ascending steps at which decay 'step' applies rate"
    )

    @field_validator("boundaries")
    @classmethod
    def _ascending(cls, value: list[int]) -> list[int]:
        if any(step < 1 for step in value) or sorted(set(value)) != value:
            raise FieldError("", "not ascending", rule="ascending steps >= 1, each once")
        return value

    @model_validator(mode="after")
    def _all_used(self) -> ScheduleConfig:
        needed = {
            "base_batch": (self.scaling != "none", "schedule.scaling is none"),
            "warmup_from": (self.warmup_steps > 0, "schedule.warmup_steps is 0"),
            "decay_steps": (self.decay not in ("none", "step"), f"schedule.decay is {self.decay}"),
            "final": (self.decay in ("linear", "cosine"), f"schedule.decay is {self.decay}"),
            "rate": (self.decay in ("exponential", "step"), f"schedule.decay is {self.decay}"),
            "boundaries": (self.decay == "step", f"schedule.decay is {self.decay}"),
        }
        for name, (used, reason) in needed.items():
            if not used and self._differs(name):
                raise ignored(name, reason)
        if self.decay == "step" and not self.boundaries:
            raise FieldError(
                "boundaries",
                "missing",
                rule="schedule.decay=step needs the steps at which the rate falls",
                do="give them, for example schedule.boundaries=[1000,2000]",
            )
        if self.decay == "exponential" and self.decay_steps is None:
            raise FieldError(
                "decay_steps",
                "missing",
                rule="schedule.decay=exponential multiplies by rate once per decay_steps",
                do="give it, for example schedule.decay_steps=1000",
            )
        return self


class LogConfig(Section):
    every: int = Field(default=20, ge=1, description="steps between lines and records")
    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="least important text that is logged"
    )
    progress: Literal["auto", "bar", "lines", "off"] = Field(
        default="auto", description="on the console; auto: a bar on a terminal, else lines"
    )
    tensorboard: bool = Field(default=True, description="write TensorBoard event files")
    csv: bool = Field(default=True, description="write metrics.csv")


class Config(Section):
    """The whole configuration of one run."""

    run: RunConfig = Field(default_factory=RunConfig)
    task: str = Field(
        default="hvps.tasks.digits:Digits",
        description="the model and its data, 'package.module:Class'",
    )
    task_args: dict[str, Any] = Field(
        default_factory=dict, description="arguments of that class, by name"
    )
    backend: BackendConfig = Field(default_factory=BackendConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    log: LogConfig = Field(default_factory=LogConfig)

    @model_validator(mode="after")
    def _scales_in_one_place(self) -> Config:
        if self.backend.kind == "ps" and self.train.precision == "mixed_float16":
            raise FieldError(
                "train.precision",
                "mixed_float16 is not for parameter servers",
                rule="its loss scaling needs all gradients in one place",
                do="use train.precision=mixed_bfloat16",
            )
        return self

    @model_validator(mode="after")
    def _can_be_deterministic(self) -> Config:
        backend = self.backend
        if not self.run.deterministic or backend.kind != "ps":
            return self
        if backend.update != "sync":
            raise FieldError(
                "run.deterministic",
                f"backend.update={backend.update} never is",
                rule="asynchronous gradients are applied in the order in which they come",
                do="use backend.update=sync",
            )
        if backend.backup_workers or backend.replication == "between_graph":
            raise FieldError(
                "run.deterministic",
                "workers' gradients are added up in the order in which they come",
                rule="in_graph, without backup workers, the order is always the same",
                do="use backend.replication=in_graph",
            )
        return self

    @field_validator("task")
    @classmethod
    def _module_and_class(cls, value: str) -> str:
        module, colon, name = value.partition(":")
        if not colon or not all(part.isidentifier() for part in [*module.split("."), name]):
            raise FieldError(
                "",
                "not the name of a class in a module",
                rule="'package.module:Class'",
                do="for a class MyTask in mytask.py in the current folder: task=mytask:MyTask",
            )
        return value


def leaf_fields(
    section: type[Section] = Config, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """All (dotted key, field) of the tree that hold a value, in the order of declaration."""
    for name, field in section.model_fields.items():
        inner = section_type(field)
        if inner is not None:
            yield from leaf_fields(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field
