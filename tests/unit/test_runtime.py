"""What is set before and after TensorFlow is imported: threads, GPU, Keras.

The machines that these tests are written on have no GPU: a small fake of `tf.config` stands for
one. What needs a process that has not imported Keras yet is tried in one.
"""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvps import runtime
from hvps.cluster import Cluster
from hvps.errors import ConfigError
from hvps.overrides import load_config
from hvps.runtime import pin_gpu, prepare_environment, threads_per_rank

ROOT = Path(__file__).resolve().parents[2]
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def cluster(local_rank: int, local_size: int, hosts: int = 2) -> Cluster:
    """A process on the last of several hosts: its rank is not its local rank."""
    rank = (hosts - 1) * local_size + local_rank
    return Cluster(rank, hosts * local_size, local_rank, local_size, "test")


class FakeTfConfig:
    """The three functions of tf.config that pinning needs, on a host with `gpus` GPUs."""

    def __init__(self, gpus: int) -> None:
        self.gpus = [f"/physical_device:GPU:{i}" for i in range(gpus)]
        self.visible: object = self.gpus
        self.calls: list[tuple[object, ...]] = []
        self.experimental = SimpleNamespace(set_memory_growth=self._set_memory_growth)

    def list_physical_devices(self, kind: str) -> list[str]:
        return self.gpus if kind == "GPU" else ["/physical_device:CPU:0"]

    def set_visible_devices(self, devices: object, kind: str) -> None:
        self.calls.append(("visible", devices, kind))

    def _set_memory_growth(self, device: object, enable: bool) -> None:
        self.calls.append(("growth", device, enable))


@pytest.mark.parametrize("local_rank", [0, 1, 3])
def test_each_local_rank_gets_its_gpu(local_rank: int) -> None:
    fake = FakeTfConfig(4)
    words = pin_gpu(fake, cluster(local_rank, 4))
    mine = f"/physical_device:GPU:{local_rank}"
    assert sorted(fake.calls) == [("growth", mine, True), ("visible", mine, "GPU")]
    assert words == f"GPU {local_rank} of 4 per host"


def test_fewer_ranks_than_gpus_are_fine() -> None:
    fake = FakeTfConfig(4)
    pin_gpu(fake, cluster(0, 1))
    assert ("visible", "/physical_device:GPU:0", "GPU") in fake.calls


@pytest.mark.parametrize("local_rank", [0, 1, 2])
def test_more_ranks_than_gpus_are_refused_on_every_rank(local_rank: int) -> None:
    """Also on those that would have found one: all ranks must come to the same end."""
    fake = FakeTfConfig(2)
    with pytest.raises(ConfigError, match="more ranks on this host than GPUs") as caught:
        pin_gpu(fake, cluster(local_rank, 3))
    assert fake.calls == []
    assert caught.value.rule
    assert caught.value.received == "3 ranks, 2 GPUs"
    assert caught.value.do is not None
    assert "at most 2 ranks per host" in caught.value.do


def test_a_host_without_gpus_is_left_alone() -> None:
    fake = FakeTfConfig(0)
    assert pin_gpu(fake, cluster(1, 3)) is None
    assert fake.calls == []


@pytest.mark.parametrize(
    ("cores", "bound_to", "local_size", "expected"),
    [
        (16, 16, 1, 16),
        (16, 16, 4, 4),
        (16, 16, 5, 3),
        (16, 16, 32, 1),
        # mpirun has bound the rank to two cores.
        (16, 2, 4, 2),
        # Four ranks share the same eight.
        (8, 8, 4, 2),
    ],
)
def test_ranks_share_the_cores_of_their_host(
    monkeypatch: pytest.MonkeyPatch, cores: int, bound_to: int, local_size: int, expected: int
) -> None:
    monkeypatch.setattr(runtime, "available_cores", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(bound_to)))
    assert threads_per_rank(cluster(0, local_size)) == expected


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("200000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8), ("", 8)],
)
def test_a_containers_quota_counts(
    monkeypatch: pytest.MonkeyPatch, quota: str, expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(runtime, "open", lambda path: io.StringIO(quota), raising=False)
    assert runtime.available_cores() == expected


def test_without_cgroups_there_is_no_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: str) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(runtime, "open", missing, raising=False)
    assert runtime.available_cores() == 8


def pretend_keras(monkeypatch: pytest.MonkeyPatch, backend: str | None) -> None:
    if backend is None:
        monkeypatch.delitem(sys.modules, "keras", raising=False)
    else:
        keras = SimpleNamespace(config=SimpleNamespace(backend=lambda: backend))
        monkeypatch.setitem(sys.modules, "keras", keras)


def test_the_environment_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_keras(monkeypatch, None)
    monkeypatch.setattr(runtime, "threads_per_rank", lambda cluster: 3)
    monkeypatch.setenv("KERAS_BACKEND", "jax")
    for key in (*THREADS, "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.delenv(key, raising=False)
    prepare_environment(cluster(0, 2))
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "2"
    assert {os.environ[key] for key in THREADS} == {"3"}


def test_what_the_user_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_keras(monkeypatch, "tensorflow")
    for key in (*THREADS, "TF_CPP_MIN_LOG_LEVEL"):
        monkeypatch.setenv(key, "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("KERAS_BACKEND", "")
    prepare_environment(cluster(0, 2))
    assert [os.environ[key] for key in THREADS] == ["7", "1", "1"]
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "1"


def test_another_backend_that_was_imported_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_keras(monkeypatch, "torch")
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    with pytest.raises(ConfigError, match="keras: already imported") as caught:
        prepare_environment(cluster(0, 1))
    assert caught.value.received == "the torch backend"
    assert caught.value.rule
    assert caught.value.do
    assert os.environ["KERAS_BACKEND"] == "torch"


def in_a_process_of_its_own(code: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("KERAS_", "TF_"))}
    environment.update(HOME=str(home), PYTHONPATH=str(ROOT), **env)
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=home,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )


CONFIGURED = """
import os, random, sys
from hvps import runtime
from hvps.cluster import detect_cluster
from hvps.overrides import load_config

class Shouting:
    # A library that says something while TensorFlow is imported.
    def find_spec(self, name, path=None, target=None):
        if name == "keras":
            print("python: a deprecation", file=sys.stderr)
            os.write(2, b"c++: your driver is old\\n")

sys.meta_path.insert(0, Shouting())
config = load_config(None, ["run.seed=5", "train.precision=mixed_bfloat16"]).config
cluster = detect_cluster({})
runtime.prepare_environment(cluster)
assert "tensorflow" not in sys.modules and "keras" not in sys.modules
devices = runtime.configure_tensorflow(config, cluster)
os.write(2, b"after\\n")

import json, keras, numpy, tensorflow as tf
first = [random.random(), numpy.random.rand(), float(tf.random.uniform([])),
         float(keras.random.uniform([]))]
runtime.prepare_environment(cluster)  # Keras is there by now, with the right backend
runtime.reset_keras(config)
second = [random.random(), numpy.random.rand(), float(tf.random.uniform([])),
          float(keras.random.uniform([]))]
layer = keras.layers.Dense(1)
layer.build((None, 2))
print(json.dumps({
    "layer_precision": [layer.dtype_policy.name, layer.compute_dtype, layer.kernel.dtype],
    "backend": keras.backend.backend(),
    "floatx": keras.config.floatx(),
    "format": keras.config.image_data_format(),
    "policy": keras.config.dtype_policy().name,
    "threads": tf.config.threading.get_intra_op_parallelism_threads(),
    "other_threads": tf.config.threading.get_inter_op_parallelism_threads(),
    "expected_threads": runtime.threads_per_rank(cluster),
    "devices": devices,
    "gpus": len(tf.config.list_physical_devices("GPU")),
    "repeats": first == second,
    "layer": [layer.name, keras.layers.Dense(1).name],
    "sklearn_hidden": sys.modules.get("sklearn", "absent") is None,
    "sklearn_loaded": "sklearn" in sys.modules,
}))
"""


def test_keras_is_what_hvps_needs_whatever_the_user_has_set(tmp_path: Path) -> None:
    (tmp_path / ".keras").mkdir()
    for_others = {"backend": "jax", "floatx": "float16", "image_data_format": "channels_first"}
    (tmp_path / ".keras" / "keras.json").write_text(json.dumps(for_others))
    done = in_a_process_of_its_own(CONFIGURED, tmp_path, KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["backend"] == "tensorflow"
    assert found["floatx"] == "float32"
    assert found["format"] == "channels_last"
    assert found["policy"] == "mixed_bfloat16"
    assert found["layer_precision"] == ["mixed_bfloat16", "bfloat16", "float32"]
    assert found["threads"] == found["expected_threads"]
    assert found["other_threads"] == max(2, found["threads"])
    if not found["gpus"]:
        assert found["devices"].startswith(f"CPU, {found['threads']} thread")
    # Seeds and counters of names begin anew with every run of a process.
    assert found["repeats"]
    assert found["layer"] == ["dense", "dense_1"]
    assert not found["sklearn_hidden"]
    assert not found["sklearn_loaded"]
    # What TensorFlow says about itself is kept from the user, what others say is not.
    assert done.stderr.splitlines() == ["python: a deprecation", "c++: your driver is old", "after"]


@pytest.fixture
def keras_as_before() -> Iterator[None]:
    import keras

    policy = keras.config.dtype_policy()
    yield
    keras.config.set_dtype_policy(policy)


@pytest.mark.usefixtures("keras_as_before")
@pytest.mark.parametrize(
    ("precision", "computed_in"),
    [("mixed_bfloat16", "bfloat16"), ("mixed_float16", "float16"), ("float32", "float32")],
)
def test_the_precision_reaches_the_layers(precision: str, computed_in: str) -> None:
    """Clearing Keras's session also takes its dtype policy back."""
    import keras

    keras.config.set_dtype_policy("mixed_float16")  # what an earlier run of the process had
    runtime.reset_keras(load_config(None, [f"train.precision={precision}"]).config)
    assert keras.config.dtype_policy().name == precision
    layer = keras.layers.Dense(1)
    layer.build((None, 2))
    assert layer.dtype_policy.name == precision
    assert layer.compute_dtype == computed_in
    assert layer.kernel.dtype == "float32"


NOISE = b"""\
WARNING: All log messages before absl::InitializeLog() is called are written to STDERR
I0000 00:00:1 1 port.cc:153] oneDNN custom operations are on. You may see slightly different
I0000 00:00:1 1 cpu_feature_guard.cc:227] This TensorFlow binary is optimized to use
To enable the following instructions: AVX2 AVX512F FMA, in other operations, rebuild
E0000 00:00:1 1 cuda_dnn.cc:8310] Unable to register cuDNN factory: Attempting to register
"""


def test_known_noise_is_held_back(capfd: pytest.CaptureFixture[str]) -> None:
    with runtime._without_import_noise():
        os.write(2, b"first\n" + NOISE + b"second\n")
        os.write(2, b"no end of line")
    os.write(2, b"\nafter: oneDNN custom operations are on\n")
    assert capfd.readouterr().err == (
        "first\nsecond\nno end of line\nafter: oneDNN custom operations are on\n"
    )


def test_a_failing_import_is_not_silenced(capfd: pytest.CaptureFixture[str]) -> None:
    def load() -> None:
        os.write(2, NOISE + b"libcuda.so: wrong version\n")
        raise ImportError("no TensorFlow")

    with pytest.raises(ImportError, match="no TensorFlow"), runtime._without_import_noise():
        load()
    assert capfd.readouterr().err == "libcuda.so: wrong version\n"


def test_no_file_descriptor_is_left_open() -> None:
    gc.collect()  # what other tests left to be closed must not be closed in between
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with runtime._without_import_noise():
            pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_sklearn_is_hidden_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "sklearn", raising=False)
    with runtime._without_sklearn(), pytest.raises(ImportError):
        __import__("sklearn")
    assert "sklearn" not in sys.modules
    loaded = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "sklearn", loaded)
    with runtime._without_sklearn():
        assert sys.modules["sklearn"] is loaded
    assert sys.modules["sklearn"] is loaded
