"""Malformed configurations, each given to the real program.

Every one must end with exit code 2 and one message that names the key, without a traceback and
before TensorFlow, Keras or NumPy are imported: a module on the path refuses those imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCHERS = ("HOROVOD_", "OMPI_", "PMI_", "MPI_", "SLURM_", "TF_CONFIG")

# The first test waits for all of the processes.
pytestmark = pytest.mark.timeout(600)

GUARD = """
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("tensorflow", "keras", "numpy"):
            raise RuntimeError(f"{name} was imported")


sys.meta_path.insert(0, Refuse())
"""

TASKS = {
    "toy.py": """
import tensorflow as tf
import keras
import numpy as np


class Toy:
    def __init__(self, width: int = 8, *, depth: int = 2) -> None: ...
    def build_model(self): return keras.Model()
    def loss(self, y_true, y_pred): return y_pred
    def metrics(self): return []
    def train_data(self): return np.zeros(1)
    def eval_data(self): return None


class Demanding(Toy):
    def __init__(self, folder): ...


class OwnOptimizer(Toy):
    def build_optimizer(self): return keras.optimizers.SGD()


def make_toy(): return Toy()
""",
    "incomplete.py": """
import tensorflow as tf
from hvps.task import Task


class Incomplete(Task):
    def build_model(self): return 1
    def loss(self, y_true, y_pred): return 1
    def train_data(self): return 1
""",
    "broken.py": "class Broken:\n    def build_model(self:\n        pass\n",
    "helper_broken.py": "import broken\n\n\nclass A:\n    pass\n",
    "needs.py": "import tensorflow\nimport no_such_package_anywhere\n\n\nclass A:\n    pass\n",
    "pack/__init__.py": "",
    "pack/inner.py": "from .missing import x\n\n\nclass A:\n    pass\n",
    "a_file": "not a folder",
    "results/used/result.json": "{}",
    "configs/allreduce.yaml": "train: {epochs: 1}\n",
    "configs/notes.txt": "",
}


@dataclass(frozen=True)
class Case:
    """One wrong configuration.

    Attributes:
        key: what the message begins with.
        overrides: on the command line.
        yaml: text of the file, bytes where it is not text; None for no file.
        env: variables of a launcher.
        says: further text in the message.
    """

    key: str
    overrides: tuple[str, ...] = ()
    yaml: str | bytes | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    says: str = ""


def over(key: str, *overrides: str, says: str = "", env: Mapping[str, str] | None = None) -> Case:
    return Case(key, overrides, None, env or {}, says)


def text(key: str, yaml: str | bytes, *overrides: str, says: str = "") -> Case:
    return Case(key, overrides, yaml, {}, says)


def ranks(size: int, rank: int = 0) -> dict[str, str]:
    return {"OMPI_COMM_WORLD_SIZE": str(size), "OMPI_COMM_WORLD_RANK": str(rank)}


PS, SYNC, IN_GRAPH = "backend.kind=ps", "backend.update=sync", "backend.replication=in_graph"
CHIEF = ("--role=worker", "--index=0")
HERE = "backend.cluster={ps: [127.0.0.1:33331], worker: [127.0.0.1:33333, 127.0.0.1:33334]}"
CLUSTER_FILE = """\
backend:
  cluster:
    ps:
      - a:3333
    work:
      - b:3333
      - c:70000
"""

CASES = (
    # the file itself
    text("x.yaml", "- 1\n- 2\n", says="a list"),
    text("x.yaml", "just text", says="not a mapping"),
    text("x.yaml:2", "train:\n\tepochs: 3\n", says="not valid YAML"),
    text("x.yaml:3", "train:\n  epochs: 3\n  epochs: 4\n", says="train.epochs is there twice"),
    text("x.yaml:4", "train:\n  epochs: 3\nlog: {}\ntrain: {}\n", says="train is there twice"),
    text("x.yaml", "train: [1, 2", says="not valid YAML"),
    text("x.yaml", "a: 1\n---\nb: 2\n", says="not valid YAML"),
    text("x.yaml:1", "task_args: {a: !!python/object:os.system x}\n", says="not allowed"),
    text("x.yaml", "train: *nothing\n", says="not valid YAML"),
    text("x.yaml", "task_args: &a {b: *a}\n", says="alias"),
    text("x.yaml", b"train:\n  \xff\xfe: 1\n", says="not UTF-8"),
    text("x.yaml", "task_args: {a: " + "[" * 3000 + "]" * 3000 + "}\n", says="deep"),
    over("CONFIG", "alreduce", says="did you mean configs/allreduce.yaml?"),
    over("CONFIG", "configs/alreduce.yaml", says="did you mean configs/allreduce.yaml?"),
    over("CONFIG", "allreduce", says="did you mean configs/allreduce.yaml?"),
    over("CONFIG", "configs", says="cannot read"),
    over("CONFIG", "configs/allreduce.yaml", "train.epochs", "3", says="without spaces"),
    # keys
    text("train.epoch", "train:\n  epoch: 3\n", says="x.yaml:2"),
    text("trian.epochs", "trian:\n  epochs: 3\n", says="did you mean train.epochs?"),
    text("train.epochs", "train.epochs: 3\n", says="nested"),
    text("7", "7: 3\n", says="unknown key"),
    text("train.early_stop.patiense", "train: {early_stop: {patiense: 3}}\n", says="patience?"),
    over("epochs", "epochs=3", says="did you mean train.epochs?"),
    over("batch_size", "batch_size=3", says="did you mean train.global_batch?"),
    over("train.globalbatch", "train.globalbatch=3", says="did you mean train.global_batch?"),
    over("train.epochs.x", "train.epochs.x=3", says="a value, not a section"),
    over("train", "train=5", says="a section, not a value"),
    text("train", "train: 5\n", says="a section, not a value"),
    text("train", "train: 5\n", "train.epochs=3", says="x.yaml:1"),
    text("backend", "backend: allreduce\n", says="a section, not a value"),
    over("train.epochs", "train.epochs=", says="null"),
    over("override", "=3", says="not a dotted key"),
    over("a..b", "a..b=3", says="not a dotted key"),
    over("train.epochs", "train.epochs=[1,", says="not valid YAML"),
    over("--epochs", "--epochs=3", says="train.epochs=3"),
    over("--frobnicate", "--frobnicate", says="--help"),
    over("-v", "-v", says="unknown option"),
    # values
    text("train.epochs", "train:\n  epochs: many\n", says="x.yaml:2"),
    over("train.epochs", "train.epochs=0", says=">= 1"),
    over("train.epochs", "train.epochs=-3", says=">= 1"),
    over("train.epochs", "train.epochs=3.7", says="not an integer"),
    text("train.epochs", 'train: {epochs: "3.7"}\n', says="not an integer"),
    over("train.epochs", "train.epochs=true", says="not an integer"),
    over("train.epochs", "train.epochs=null", says="default"),
    over("train.epochs", "train.epochs=1e300", says="too large"),
    over("train.epochs", "train.epochs=99999999999", says="too large"),
    over("train.epochs", "train.epochs=.inf", says="finite"),
    over("train.epochs", "train.epochs=[3]", says="not an integer"),
    over("train.steps", "train.steps=0"),
    over("train.global_batch", "train.global_batch=sixty-four"),
    over("train.global_batch", "train.global_batch=0"),
    over("train.accumulate", "train.accumulate=0"),
    over("train.precision", "train.precision=float16", says="mixed_float16"),
    over("train.clip_norm", "train.clip_norm=0", says="> 0"),
    over("train.clip_norm", "train.clip_norm=true", says="not a number"),
    over("train.eval_every", "train.eval_every=epochs", says="'epoch'"),
    over("train.eval_every", "train.eval_every=-1"),
    over("train.eval_every", "train.eval_every=true"),
    over("train.check_every", "train.check_every=-1"),
    over("train.shuffle", "train.shuffle=maybe", says="true or false"),
    over("train.shuffle", "train.shuffle=2", says="true or false"),
    over("train.prefetch", "train.prefetch=0"),
    over("train.early_stop.mode", "train.early_stop={patience: 1, mode: low}"),
    over("train.early_stop.patience", "train.early_stop.patience=-1"),
    over("run.seed", "run.seed=-1"),
    over("run.seed", "run.seed=2147483648"),
    over("run.name", "run.name=a/b", says="folder name"),
    over("run.name", "run.name=latest", says="reserved"),
    over("run.name", "run.name=.."),
    over("run.dir", "run.dir=''", says="empty"),
    over("run.resume", "run.resume=runs/old", says="no checkpoint in runs/old"),
    over("run.resume", "run.resume=atuo", says="no checkpoint in atuo"),
    over("run.resume", "run.resume=results/used", says="no checkpoint in results/used"),
    over("run.resume", "run.resume=''", says="empty"),
    over("checkpoint.keep", "checkpoint.keep=-1"),
    over("checkpoint.every_minutes", "checkpoint.every_minutes=-1"),
    over("checkpoint.every_steps", "checkpoint={every_steps: 5, keep: 0}", says="keep is 0"),
    over("checkpoint.monitor", "checkpoint.monitor=accuracy", says="keep_best is 0"),
    over("checkpoint.mode", "checkpoint={keep_best: 1, mode: most}"),
    over("backend.kind", "backend.kind=horovod", says="one of local, allreduce, ps"),
    over("backend.engine", "backend.engine=nccl"),
    over("backend.stall_timeout", "backend.stall_timeout=0"),
    over("optimizer.learning_rate", "optimizer.learning_rate=.nan", says="finite"),
    over("optimizer.learning_rate", "optimizer.learning_rate=-1e-3"),
    over("optimizer.learning_rate", "optimizer.learning_rate=1e-400", says="> 0"),
    over("optimizer.learning_rate", "optimizer.learning_rate=1,5", says="not a number"),
    over("log.level", "log.level=warn", says="did you mean log.level=warning?"),
    over("log.every", "log.every=0"),
    over("log.progress", "log.progress=on"),
    over("schedule.scaling", "schedule.scaling=liner", says="linear"),
    over("schedule.final", "schedule={decay: cosine, final: 1.5}"),
    over("task_args", "task_args=[1]", says="not a mapping"),
    over("task_args.augment", "task_args.augment=no", says="false"),
    over("task_args.a-b", "task_args.a-b=1"),
    # options that contradict each other, or would have no effect
    over("schedule.base_batch", "schedule.base_batch=32", says="schedule.scaling is none"),
    over("schedule.warmup_from", "schedule.warmup_from=0.1", says="warmup_steps"),
    over("schedule.rate", "schedule.rate=0.5", says="schedule.decay is none"),
    over("schedule.final", "schedule.final=0.5", says="schedule.decay is none"),
    over("schedule.decay_steps", "schedule.decay_steps=5", says="schedule.decay is none"),
    over("schedule.decay_steps", "schedule.decay=exponential", says="missing"),
    over("schedule.boundaries", "schedule.decay=step", says="missing"),
    over("schedule.boundaries", "schedule.boundaries=[5]", says="schedule.decay is none"),
    over("schedule.boundaries", "schedule={decay: step, boundaries: [5, 3]}", says="ascending"),
    over("schedule.boundaries", "schedule={decay: step, boundaries: [true]}"),
    over("schedule.boundaries", "schedule={decay: step, boundaries: 5}", says="list"),
    over("schedule.boundaries", "train.steps=9", "schedule={decay: step, boundaries: [9]}"),
    over("schedule.warmup_steps", "train.steps=10", "schedule.warmup_steps=10"),
    over("train.early_stop.min_delta", "train.early_stop.min_delta=0.1", says="patience is 0"),
    over("train.early_stop.patience", "train={eval_every: 0, early_stop: {patience: 2}}"),
    over("backend.engine", "backend={kind: local, engine: mpi}", says="ignored"),
    # parameter servers
    over("backend.kind", "backend.kind=ps", says="hvps launch CONFIG"),
    over("backend.kind", "backend.kind=pss", says="did you mean backend.kind=ps?"),
    over("backend.update", "backend.update=asynch", says="did you mean backend.update=async?"),
    over("backend.num_ps", "backend.num_ps=0", says=">= 1"),
    over("backend.num_workers", "backend.num_workers=0", says=">= 1"),
    over("backend.worker_steps", "backend.worker_steps=[5, 0]", says="one per worker"),
    over("backend.worker_steps", "backend.worker_steps=[5, true]", says="a list of integers"),
    over("backend.worker_steps", "backend.worker_steps=5", says="a list of integers"),
    over("backend.devices", "backend.devices=[gpu]", says="gpu is not a device"),
    over("backend.devices", "backend.devices=[cpu:0, cpu:0]", says="twice"),
    over("backend.devices", "backend.devices=cpu:0", says="not a list"),
    over("backend.pipeline", "backend.pipeline=9", says="<= 8"),
    over("run.deterministic", PS, "run.deterministic=true", says="asynchronous gradients"),
    over("run.deterministic", PS, "run.deterministic=true", "backend.update=sync", says="in_graph"),
    over("backend.congestion_control", "backend.congestion_control=''", says="empty"),
    over("backend.backup_workers", PS, "backend.backup_workers=1", says="update is async"),
    over("backend.max_staleness", PS, "backend.max_staleness=3", says="update is async"),
    over("backend.pipeline", PS, "backend={update: sync, pipeline: 2}", says="update is sync"),
    over("backend.pipeline", PS, IN_GRAPH, "backend.pipeline=2", says="in_graph"),
    over("backend.worker_steps", PS, IN_GRAPH, "backend.worker_steps=[1, 1]", says="in_graph"),
    over("backend.update", PS, IN_GRAPH, "backend.update=bounded", says="between_graph"),
    over("train.precision", PS, "train.precision=mixed_float16", says="mixed_bfloat16"),
    over("backend.cluster", "backend.cluster=here", says="not a mapping"),
    over("backend.cluster", "backend.cluster={worker: [a:1]}", says="no ps"),
    over("backend.cluster.worker", "backend.cluster={ps: [a:1], worker: []}", says="no worker"),
    over("backend.cluster.ps", "backend.cluster={ps: a:1, worker: [b:1]}", says="ps: [a:1]"),
    over("backend.cluster.ps[0]", "backend.cluster.ps=[33331]", says="127.0.0.1:33331"),
    text("backend.cluster.work[1]", CLUSTER_FILE, says="x.yaml:7"),
    over("backend.cluster", PS, "backend.cluster={ps: [a:1], worker: [b]}", says="worker[0]: not"),
    over("--role", "--role", "ps", "--index", "0", says="backend.kind=ps"),
    over("--role", "--role=pss", "--index=0", says="did you mean ps?"),
    over("--role", "--index=0", says="missing"),
    over("--index", "--role", "ps", says="missing"),
    over("--index", "--role", "ps", "--index", "one", says="an integer"),
    over("--index", "--role", "ps", "--index", "-1", says="an integer"),
    over("backend.cluster", PS, "--role=ps", "--index=0", says="missing"),
    over("backend.cluster", PS, HERE, "--role=ps", "--index=1", says="there is no ps 1"),
    over(
        "backend.worker_steps", PS, HERE, "--role=worker", "--index=0", "backend.worker_steps=[1]"
    ),
    over("--role", PS, HERE, "--role=worker", "--index=0", "--role", says="no such role"),
    over("TF_CONFIG", PS, env={"TF_CONFIG": "{"}, says="not JSON"),
    over("TF_CONFIG", PS, env={"TF_CONFIG": "[]"}, says="not an object"),
    over("TF_CONFIG.cluster", PS, env={"TF_CONFIG": "{}"}, says="not a mapping"),
    over("backend.num_ps", PS, env=ranks(1), says="at least 2 ranks"),
    over("train.global_batch", PS, SYNC, "train.global_batch=7", env=ranks(3, 1), says="2 workers"),
    # the optimizer, by the installed Keras
    over("optimizer.name", "optimizer.name=adan", says="did you mean Adam?"),
    over("optimizer.name", "optimizer.name=LossScaleOptimizer", says="train.precision"),
    over("optimizer.name", "optimizer.name=null"),
    over("optimizer.lr", "optimizer.lr=1", says="did you mean optimizer.learning_rate?"),
    over("optimizer.beta1", "optimizer.beta1=0.9", says="optimizer.beta_1?"),
    text("optimizer.beta_1", "optimizer: {beta_1: 0.9}\n", "optimizer.name=sgd", says="x.yaml:1"),
    over("optimizer.beta_1", "optimizer.beta_1=1", says="< 1"),
    over("optimizer.beta_1", "optimizer.beta_1='0.9'", says="a number"),
    over("optimizer.epsilon", "optimizer.epsilon=0"),
    over("optimizer.amsgrad", "optimizer.amsgrad=1", says="true or false"),
    over("optimizer.amsgrad", "optimizer.amsgrad=no", says="write false"),
    over("optimizer.weight_decay", "optimizer.weight_decay=-1"),
    over("optimizer.clipnorm", "optimizer={clipnorm: 1, clipvalue: 1}", says="clipvalue"),
    over("optimizer.global_clipnorm", "optimizer.global_clipnorm=1", "train.clip_norm=1"),
    over("optimizer.gradient_accumulation_steps", "optimizer.gradient_accumulation_steps=2"),
    over("optimizer.loss_scale_factor", "optimizer.loss_scale_factor=8", says="train.precision"),
    over("optimizer.nesterov", "optimizer={name: sgd, nesterov: true}", says="momentum"),
    # the task, by its source
    over("task", "task=toy", says="package.module:Class"),
    over("task", "task=toy.py:Toy", says="there is no module"),
    over("task", "task=toi:Toy", says="did you mean toy?"),
    over("task", "task=pack.iner:A", says="did you mean pack.inner?"),
    over("task", "task=pack.inner:A", says="pack.missing"),
    over("task", "task=toy:Toi", says="did you mean Toy?"),
    over("task", "task=toy:make_toy", says="a function"),
    over("task", "task=incomplete:Incomplete", says="lacks metrics, eval_data"),
    over("task", "task=broken:Broken", says="broken.py:2"),
    over("task", "task=helper_broken:A", says="broken.py:2"),
    over("task", "task=needs:A", says="no_such_package_anywhere"),
    over("task_args.widht", "task_args.widht=3", says="did you mean width?"),
    over("task_args.width", "task_args.width=wide", says="an integer"),
    over("task_args.folder", "task=toy:Demanding", says="missing"),
    over("optimizer", "task=toy:OwnOptimizer", "optimizer.name=sgd", says="builds its own"),
    # ranks, engines and folders
    over("train.global_batch", "train.global_batch=50", env=ranks(4), says="48 or 52"),
    over("train.global_batch", "train.global_batch=3", env=ranks(4), says="=4"),
    over("train.global_batch", "train={global_batch: 8, accumulate: 3}", says="6 or 9"),
    over("backend.kind", "backend.kind=local", env=ranks(2), says="allreduce"),
    over("OMPI_COMM_WORLD_*", env=ranks(2, 2), says="rank 2 of 2"),
    over("OMPI_COMM_WORLD_SIZE", env=ranks(2) | {"OMPI_COMM_WORLD_SIZE": "two"}),
    over("HOROVOD_SIZE", env={"HOROVOD_RANK": "0", "HOROVOD_SIZE": ""}),
    over("run.dir", "run.dir=a_file", says="is a file"),
    over("run.dir", "run.dir=a_file/below", says="is a file"),
    over("run.name", "run.dir=results", "run.name=used", says="exists already"),
)


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


def run_hvps(folder: Path, arguments: list[str], env: Mapping[str, str]) -> Outcome:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    # The guard is a sitecustomize: Python imports it before anything of ours.
    clean["PYTHONPATH"] = os.pathsep.join([str(folder / "guard"), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-m", "hvps.train", *arguments],
        cwd=folder,
        env=clean | dict(env),
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("malformed")
    for name, content in {**TASKS, "guard/sitecustomize.py": GUARD}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content)
    return folder


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> list[Outcome]:
    """All cases, two processes at a time."""

    def run(number: int) -> Outcome:
        case = CASES[number]
        arguments = list(case.overrides)
        if not any(argument.startswith("task=") for argument in arguments):
            arguments.append("task=toy:Toy")
        if case.yaml is not None:
            file = folder / f"case{number}" / "x.yaml"
            file.parent.mkdir()
            content = case.yaml if isinstance(case.yaml, bytes) else case.yaml.encode()
            file.write_bytes(content)
            arguments.insert(0, str(file.relative_to(folder)))
        return run_hvps(folder, arguments, case.env)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, range(len(CASES))))


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.key}-{c.says}" for c in CASES])
def test_malformed(number: int, outcomes: list[Outcome], folder: Path) -> None:
    case, outcome = CASES[number], outcomes[number]
    assert outcome.code == 2, outcome
    assert "Traceback" not in outcome.err
    assert outcome.err.count("hvps: error: ") == 1
    assert outcome.out == ""
    first = outcome.err.splitlines()[0].removeprefix("hvps: error: ")
    subject = case.key if not case.key.startswith("x.yaml") else f"case{number}/{case.key}"
    assert first.startswith(subject), outcome.err
    assert not first[len(subject) :][:1].isidentifier(), outcome.err  # the whole key
    assert case.says in outcome.err, outcome.err


def test_the_guard_refuses(folder: Path) -> None:
    """The proof above rests on it: the imports that are refused do fail."""
    env = os.environ | {"PYTHONPATH": str(folder / "guard")}
    for name in ("tensorflow", "keras", "numpy"):
        done = subprocess.run(
            [sys.executable, "-c", f"import {name}"], env=env, capture_output=True
        )
        assert f"{name} was imported".encode() in done.stderr


def test_another_rank_says_which_it_is(folder: Path) -> None:
    outcome = run_hvps(folder, ["train.epochs=0"], ranks(2, 1))
    assert outcome.code == 2
    assert outcome.err.startswith("[rank 1] hvps: error: train.epochs: too small")


def test_all_problems_are_named(folder: Path) -> None:
    names = ["a", "b", "c", "d", "e", "f", "g"]
    outcome = run_hvps(folder, [f"{name}=1" for name in names] + ["train.epochs=0"], {})
    lines = outcome.err.splitlines()
    assert lines[0] == "hvps: error: a: unknown key"
    assert sum(line.startswith("  also:") for line in lines) == 6
    assert lines[-1].split() == ["also:", "2", "more"]


def test_help_imports_nothing_heavy(folder: Path) -> None:
    outcome = run_hvps(folder, ["--help"], {})
    assert outcome.code == 0
    assert outcome.err == ""
    for words in (
        "horovodrun -np",
        "mpirun -np",
        "train.global_batch=64",
        "schedule.warmup_steps=0",
    ):
        assert words in outcome.out
