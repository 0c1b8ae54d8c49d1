"""Checks of the configuration against the task's source, the installed Keras, ranks and folders."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvps.cluster import ALONE, Cluster
from hvps.errors import ConfigError, report_error
from hvps.optimizer_check import canonical_optimizer_name
from hvps.overrides import load_config
from hvps.ports import free_ports
from hvps.preflight import preflight
from hvps.problems import InvalidConfigError
from hvps.source_reader import ClassSource, SourceReader
from hvps.task_cluster import place_task

METHODS = "".join(
    f"    def {name}(self, *args): return 1\n"
    for name in ("build_model", "loss", "metrics", "train_data", "eval_data")
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder of its own; nothing in it may be imported."""
    monkeypatch.chdir(tmp_path)
    before = set(sys.modules)
    yield tmp_path
    ours = {file.stem for file in tmp_path.rglob("*.py")}
    assert not ours & (set(sys.modules) - before)


def write(name: str, text: str) -> None:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    # It would end the test if it were executed.
    file.write_text(f"{text}\nraise SystemExit('executed')\n")


def check(*overrides: str, size: int = 1, rank: int = 0) -> None:
    preflight(load_config(None, overrides), Cluster(rank, size, rank, size, "test"))


def problem(*overrides: str, size: int = 1, rank: int = 0) -> str:
    with pytest.raises(ConfigError) as caught:
        check(*overrides, size=size, rank=rank)
    return str(caught.value)


def test_defaults_pass() -> None:
    check()
    check(size=4)
    check("backend.kind=local")


def test_nothing_heavy_is_imported() -> None:
    import subprocess

    code = (
        "import sys\n"
        "from hvps.overrides import load_config\n"
        "from hvps.preflight import preflight\n"
        "from hvps.cluster import Cluster\n"
        "preflight(load_config(None, []), Cluster(0, 2, 0, 2, 'test'))\n"
        "heavy = {'tensorflow', 'keras', 'numpy', 'horovod', 'mpi4py', 'rich'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    repository = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=repository, timeout=60)


# The task


@pytest.mark.parametrize(
    "source",
    [
        f"class T:\n{METHODS}",
        f"class Base:\n{METHODS}\nclass T(Base):\n    pass",
        f"from hvps.task import Task\nclass T(Task):\n{METHODS}",
        f"from typing import Protocol, Generic\nclass T(Protocol):\n{METHODS}",
        f"try:\n    import no_such_module\nexcept ImportError:\n    pass\nclass T:\n{METHODS}",
        f"if True:\n    class T:\n{METHODS}".replace("    def", "        def"),
        "from other import Base\nclass T(Base):\n    pass",
        "import other\nclass T(other.Base):\n    pass",
        "import other as o\nclass T(o.Base):\n    pass",
        "from other import Base as T",
        "from other import *\nclass T(Base):\n    pass",
        "import keras\nclass T(keras.no.such.Thing):\n    pass",
        "def make(): return object\nclass T(make()):\n    pass",
        "T = type('T', (), {})",
        "class T:\n    build_model = loss = metrics = train_data = eval_data = print",
    ],
)
def test_task_accepted(source: str) -> None:
    write("mine.py", source)
    write("other.py", f"class Base:\n{METHODS}")
    check("task=mine:T")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (f"class U:\n{METHODS}", "mine.py has no class T"),
        ("def T(): pass", "T is a function"),
        ("class T:\n    def loss(self): return 1", "lacks build_model, metrics, train_data"),
        ("from other import Base\nclass T(Base): pass", "lacks eval_data"),
        ("from hvps.task import Task\nclass T(Task): pass", "lacks build_model, loss"),
        (f"class T:\n{METHODS.replace('return 1', '...')}", "lacks build_model, loss"),
        (f"import no_such_module.sub\nclass T:\n{METHODS}", "mine.py:1 imports no_such_module"),
        (f"from no_such_module import x\nclass T:\n{METHODS}", "install no_such_module"),
        ("class T(:\n", "mine.py:1"),
        ("x = '\0'", "mine.py"),
    ],
)
def test_task_refused(source: str, says: str) -> None:
    write("mine.py", source)
    write("other.py", f"class Base:\n{METHODS}".replace("def eval_data", "def _no"))
    text = problem("task=mine:T")
    assert text.startswith("task: ")
    assert says in text


def test_package_with_relative_imports() -> None:
    write("pack/__init__.py", "")
    write("pack/base.py", f"class Base:\n{METHODS}")
    write("pack/sub/__init__.py", "")
    write(
        "pack/sub/mine.py",
        "from ..base import Base\nclass T(Base):\n    def __init__(self, a): ...",
    )
    check("task=pack.sub.mine:T", "task_args.a=1")
    assert "task_args.a: missing" in problem("task=pack.sub.mine:T")
    assert "did you mean pack.sub.mine?" in problem("task=pack.sub.mien:T")
    assert "there is no module pack.sab" in problem("task=pack.sab.mine:T")


def test_helper_next_to_the_task_is_checked() -> None:
    write("mine.py", f"import helper\nclass T:\n{METHODS}")
    write("helper.py", "def f(:\n")
    assert "helper.py:1" in problem("task=mine:T")


def test_modules_that_import_each_other() -> None:
    write("mine.py", f"import helper\nfrom helper import U\nclass T(U):\n{METHODS}")
    write("helper.py", "from mine import U, T\nclass V(T): pass")
    check("task=mine:T")


INIT = "    def __init__(self, width, depth=2, *, rate=0.5): ...\n"


@pytest.mark.parametrize(
    ("head", "accepts", "refuses"),
    [
        (f"class T:\n{INIT}", ["width=1", "rate=1"], ["width=1", "widht=3"]),
        (f"class T:\n{INIT}", ["width=1"], ["depth=1"]),
        (f"class T:\n{INIT.replace('):', ', **kw):')}", ["width=1", "any=1"], ["any=1"]),
        ("class T:\n", [], ["width=1"]),
        (f"class B:\n{INIT}\nclass T(B):\n", ["width=1"], ["a=1"]),
        ("from dataclasses import dataclass\n@dataclass\nclass T:\n    a: int\n    b: int = 1\n",
         ["a=1", "b=2"], ["b=1"]),
        ("import dataclasses as d\nfrom typing import ClassVar\n"
         "@d.dataclass(frozen=True)\nclass T:\n    a: int = d.field(default=1)\n"
         "    c: ClassVar[int] = 1\n    i: int = d.field(init=False)\n", ["a=1"], ["c=1"]),
        ("from dataclasses import dataclass\n@dataclass\nclass B:\n    a: int\n"
         "@dataclass\nclass T(B):\n    b: int = 1\n", ["a=1", "b=2"], ["a=1", "c=1"]),
    ],
)  # fmt: skip
def test_task_args(head: str, accepts: list[str], refuses: list[str]) -> None:
    write("mine.py", head + METHODS)
    check("task=mine:T", *(f"task_args.{text}" for text in accepts))
    text = problem("task=mine:T", *(f"task_args.{text}" for text in refuses))
    assert text.startswith("task_args.")


@pytest.mark.parametrize(
    "head",
    [
        "@decorated\nclass T:\n",
        "class T(unknown()):\n",
        f"class B:\n{INIT}\nclass T(unknown(), B):\n",
        "class T:\n    __init__ = f\n",
    ],
)
def test_task_args_that_cannot_be_known_are_accepted(head: str) -> None:
    write("mine.py", head + METHODS)
    check("task=mine:T", "task_args.any=1")


def test_own_optimizer() -> None:
    write("mine.py", f"class T:\n{METHODS}    def build_optimizer(self): return 1\n")
    check("task=mine:T", "optimizer.learning_rate=0.001")  # the default: nothing was asked for
    assert "builds its own" in problem("task=mine:T", "optimizer.learning_rate=0.1")


# The optimizer


@pytest.mark.parametrize(
    ("name", "proper"),
    [("adam", "Adam"), ("ADAMW", "AdamW"), ("sgd", "SGD"), ("rmsprop", "RMSprop")],
)
def test_canonical_name(name: str, proper: str) -> None:
    assert canonical_optimizer_name(name) == proper


@pytest.mark.parametrize(
    "name", ["Optimizer", "MultiOptimizer", "schedules", "get", "adan", "", "7"]
)
def test_no_such_optimizer(name: str) -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.name"):
        canonical_optimizer_name(name)


def test_every_optimizer_and_its_defaults_are_accepted() -> None:
    """What is read from the sources is what Keras itself says."""
    keras = pytest.importorskip("keras")
    import inspect

    for name in ("Adam", "AdamW", "SGD", "RMSprop", "Adafactor", "Ftrl", "Lion", "Muon", "Nadam"):
        parameters = inspect.signature(getattr(keras.optimizers, name)).parameters
        skipped = {"learning_rate", "name", "kwargs", "ema_momentum"}
        given = [
            f"optimizer.{key}={'null' if value.default is None else value.default}".lower()
            for key, value in parameters.items()
            if key not in skipped
        ]
        check(f"optimizer.name={name}", *given)


@pytest.mark.parametrize(
    "arguments",
    [
        "{name: adam, beta_1: 0, epsilon: 1e-3, amsgrad: true, weight_decay: 0.1}",
        "{name: sgd, momentum: 0.9, nesterov: true}",
        "{name: adamw, use_ema: true, ema_momentum: 0.9, ema_overwrite_frequency: 5}",
        "{name: adafactor, beta_2_decay: -0.7, relative_step: false}",
        "{name: muon, exclude_layers: [head], adam_lr_ratio: 0.5, ns_steps: 3}",
        "{name: adam, clipvalue: 1}",
        "{name: adam, gradient_accumulation_steps: null}",
    ],
)
def test_optimizer_arguments(arguments: str) -> None:
    check(f"optimizer={arguments}")


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("{momentum: 0.9}", "momentum"),
        ("{name: sgd, momentum: 1}", "momentum"),
        ("{name: sgd, momentum: true}", "momentum"),
        ("{epsilon: null}", "epsilon"),
        ("{weight_decay: x}", "weight_decay"),
        ("{weight_decay: .inf}", "weight_decay"),
        ("{weight_decay: false}", "weight_decay"),
        ("{clipnorm: 0}", "clipnorm"),
        ("{ema_momentum: 0.9}", "ema_momentum"),
        ("{use_ema: true, ema_overwrite_frequency: 0.5}", "ema_overwrite_frequency"),
        ("{name: muon, exclude_layers: head}", "exclude_layers"),
        ("{name: muon, ns_steps: 2.5}", "ns_steps"),
        ("{gradient_accumulation_steps: 2}", "gradient_accumulation_steps"),
    ],
)
def test_wrong_optimizer_arguments(arguments: str, key: str) -> None:
    assert problem(f"optimizer={arguments}").startswith(f"optimizer.{key}: ")


def test_keras_is_not_installed(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    reader = SourceReader([str(folder)])
    with pytest.raises(ConfigError, match="make install"):
        canonical_optimizer_name("adam", reader)


# Ranks, engines, folders


@pytest.mark.parametrize(
    ("batch", "accumulate", "size", "nearest"),
    [(50, 1, 4, "48 or 52"), (3, 1, 4, "4"), (8, 3, 1, "6 or 9"), (64, 3, 2, "60 or 66")],
)
def test_batch(batch: int, accumulate: int, size: int, nearest: str) -> None:
    given = (f"train.global_batch={batch}", f"train.accumulate={accumulate}")
    text = problem(*given, size=size)
    assert text.startswith("train.global_batch: ")
    assert f"{size} x {accumulate} = {size * accumulate}" in text
    assert text.endswith(f"use train.global_batch={nearest}")


def test_engine_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SourceReader.find

    def without(*missing: str) -> None:
        monkeypatch.setattr(
            SourceReader, "find", lambda self, name: None if name in missing else real(self, name)
        )

    without("horovod")
    assert "horovod is not installed" in problem("backend.engine=horovod")
    without("horovod", "mpi4py")
    check()  # one process needs none
    text = problem(size=2)
    assert text.startswith("backend.engine: neither horovod nor mpi4py")
    assert "make install" in text


def test_local_with_many_processes() -> None:
    assert problem("backend.kind=local", size=2).startswith("backend.kind: local is one process")


# Parameter servers


def placed(*overrides: str, role: str = "worker", index: int = 0) -> None:
    loaded = load_config(None, ["backend.kind=ps", *overrides])
    preflight(loaded, place_task(loaded, Cluster(0, 1, 0, 1, ALONE), role, index, env={}))


def local_cluster() -> str:
    ps, *workers = (f"127.0.0.1:{port}" for port in free_ports(3))
    return f"backend.cluster={{ps: [{ps}], worker: [{', '.join(workers)}]}}"


@pytest.mark.parametrize(
    ("options", "wrong", "rule"),
    [
        ("{update: async}", "64, accumulate: 3", "devices x train.accumulate = 1 x 3 = 3"),
        ("{devices: [cpu:0, cpu:1]}", "63", "devices x train.accumulate = 2 x 1 = 2"),
        ("{update: bounded, devices: [cpu:0, cpu:1]}", "63", "2 x 1 = 2"),
        ("{update: sync}", "63", "workers x devices x train.accumulate = 2 x 1 x 1 = 2"),
        ("{update: sync, replication: in_graph}", "63", "2 x 1 x 1 = 2"),
        ("{update: sync, devices: [cpu:0, cpu:1, cpu:2]}", "64, accumulate: 2", "2 x 3 x 2 = 12"),
    ],
)
def test_batch_with_parameter_servers(options: str, wrong: str, rule: str) -> None:
    cluster = local_cluster()
    placed(cluster, f"backend={options}", "train.global_batch=60")
    for role in ("worker", "ps"):
        with pytest.raises(ConfigError) as caught:
            placed(cluster, f"backend={options}", f"train={{global_batch: {wrong}}}", role=role)
        assert rule in str(caught.value.rule)


def test_an_async_worker_computes_whole_batches() -> None:
    placed(local_cluster(), "train.global_batch=63")


def test_own_port_in_use() -> None:
    cluster = local_cluster()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        mine = [cluster, f"backend.cluster.ps=[127.0.0.1:{port}]"]
        with pytest.raises(ConfigError, match=f"ps 0: port {port} is in use by pid {os.getpid()}"):
            placed(*mine, role="ps")
        placed(*mine)  # to a worker it is the other's, which may run already


def test_hosts_without_an_address() -> None:
    cluster = "backend.cluster={ps: [127.0.0.1:1, no-such.invalid:1], worker: [no-such.invalid:2]}"
    with pytest.raises(InvalidConfigError) as caught:
        placed(cluster)
    assert [found.what for found in caught.value.problems] == [
        "ps 1: the host no-such.invalid has no address",
        "worker 0: the host no-such.invalid has no address",
    ]


def test_mpi4py_must_be_installed_under_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SourceReader.find
    monkeypatch.setattr(
        SourceReader, "find", lambda self, name: None if name == "mpi4py" else real(self, name)
    )
    loaded = load_config(None, ["backend.kind=ps"])
    cluster = place_task(loaded, Cluster(0, 3, 0, 3, "OMPI_COMM_WORLD_*"), None, None, env={})
    with pytest.raises(ConfigError, match=r"backend\.kind: mpi4py is not installed"):
        preflight(loaded, cluster)
    placed(local_cluster())


def test_only_the_chief_looks_at_the_run_folder(folder: Path) -> None:
    (folder / "runs/full").mkdir(parents=True)
    (folder / "runs/full/x").write_text("")
    cluster = local_cluster()
    placed(cluster, "run.name=full", role="ps")
    placed(cluster, "run.name=full", index=1)
    with pytest.raises(ConfigError, match=r"run\.name"):
        placed(cluster, "run.name=full")


def test_run_folder(folder: Path) -> None:
    (folder / "file").write_text("")
    (folder / "runs/full").mkdir(parents=True)
    (folder / "runs/full/x").write_text("")
    (folder / "runs/empty").mkdir()
    check("run.name=empty")
    check("run.name=new")
    check("run.dir=not/there/yet")
    assert problem("run.dir=file/below").startswith("run.dir: ")
    assert problem("run.name=full").startswith("run.name: runs/full exists already")
    check("run.name=full", size=2, rank=1)  # only rank 0 writes
    assert not (folder / "not").exists()


def test_schedule_within_training() -> None:
    check("train.steps=10", "schedule.warmup_steps=9")
    check("schedule.warmup_steps=100000")
    text = problem("train.steps=10", "schedule.warmup_steps=10")
    assert text.startswith("schedule.warmup_steps: ")


def test_all_problems_in_one_message() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        check("optimizer.lr=1", "task=nothing:T", "train.global_batch=3", size=2)
    keys = [found.what.split(":")[0] for found in caught.value.problems]
    assert keys == ["train.global_batch", "optimizer.lr", "task"]


def test_report_error(capsys: pytest.CaptureFixture[str]) -> None:
    err = ConfigError("a.b: wrong", do="mend it")
    assert report_error(err) == 2
    assert report_error(err, Cluster(1, 2, 1, 2, "test")) == 2
    text = "hvps: error: a.b: wrong\n  do:       mend it\n"
    assert capsys.readouterr().err == f"{text}[rank 1] {text}"


def test_a_class_imported_from_elsewhere_is_found(folder: Path) -> None:
    write("one.py", "from two import A as B")
    write("two.py", "class A: pass")
    reader = SourceReader([str(folder)])
    module = reader.read("one")
    assert module is not None
    found = reader.lookup(module, "B")
    assert isinstance(found, ClassSource)
    assert found.module.name == "two"
