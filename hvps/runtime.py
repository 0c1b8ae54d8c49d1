"""What must be set before and just after TensorFlow is imported: threads, GPU, Keras, seeds."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hvps.cluster import Cluster
from hvps.errors import ConfigError

if TYPE_CHECKING:
    from hvps.config import Config


def available_cores() -> int:
    """Logical CPUs that this host gives the job: its own, less a container's quota."""
    cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2: no quota to read
    return cores


def threads_per_rank(cluster: Cluster) -> int:
    """This rank's share of the host's cores.

    mpirun may have bound the rank to a part of them, and several ranks to the same part.
    """
    share = max(1, available_cores() // cluster.local_size)
    return min(share, len(os.sched_getaffinity(0)))


def prepare_environment(cluster: Cluster) -> None:
    """Set what TensorFlow and Keras read when they are imported. What the user set wins, except
    for the choice of Keras's backend: only TensorFlow can train here.

    Raises:
        ConfigError: Keras was already imported with another backend.
    """
    keras = sys.modules.get("keras")
    if keras is not None and keras.config.backend() != "tensorflow":
        raise ConfigError(
            "keras: already imported with another backend",
            rule="hvps trains with Keras on TensorFlow",
            received=f"the {keras.config.backend()} backend",
            do="import hvps before keras, or set KERAS_BACKEND=tensorflow",
        )
    if cluster.role == "ps":
        os.environ["CUDA_VISIBLE_DEVICES"] = "-1"  # it would take the memory of one otherwise
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    threads = str(threads_per_rank(cluster))
    for key in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(key, threads)


def configure_tensorflow(config: Config, cluster: Cluster) -> str:
    """Give this rank its threads and its GPU, and Keras its precision. Nothing may run before.

    Returns:
        The devices in words, for the banner.

    Raises:
        ConfigError: there are more ranks on this host than GPUs.
    """
    with _without_import_noise(), _without_sklearn():
        import keras  # noqa: F401 (now, for what it says while it is loaded)
        import tensorflow as tf

    threads = threads_per_rank(cluster)
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    # Two at least: a collective that blocks must not keep the backward pass from going on.
    tf.config.threading.set_inter_op_parallelism_threads(max(2, threads))
    words = f"CPU, {threads} thread{'s' * (threads > 1)} per rank"
    if config.backend.kind == "ps":
        devices = share_gpus(tf.config) or words
    else:
        devices = pin_gpu(tf.config, cluster) or words
    reset_keras(config)
    if config.run.deterministic:
        tf.config.experimental.enable_op_determinism()
        # Which gradients Horovod sends together depends on timing, and with it the order of sums.
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", "0")
    return devices


def reset_keras(config: Config) -> None:
    """Bring Keras into the state that every run begins with: precision, seed, counters of names.

    ~/.keras/keras.json may say otherwise for other programs.
    """
    import keras

    keras.utils.clear_session()  # first: it also takes the dtype policy back
    keras.config.set_floatx("float32")
    keras.config.set_image_data_format("channels_last")
    keras.config.set_dtype_policy(config.train.precision)
    keras.utils.set_random_seed(config.run.seed)


# What TensorFlow's libraries say while they are loaded, before any log level is looked at.
_NOISE = re.compile(
    rb"All log messages before absl::InitializeLog|oneDNN custom operations are on"
    rb"|This TensorFlow binary is optimized|To enable the following instructions"
    rb"|Unable to register cu\w+ factory"
)


@contextmanager
def _without_import_noise() -> Iterator[None]:
    """Hold standard error back, on the level of the file descriptor, and let only news through."""
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not _NOISE.search(line):
                    os.write(2, line)


@contextmanager
def _without_sklearn() -> Iterator[None]:
    """Keep Keras from importing scikit-learn, and SciPy with it, for wrappers nobody uses here: a
    fifth of the time that TensorFlow takes to load. Afterwards it can be imported as ever."""
    hidden = "sklearn" not in sys.modules
    if hidden:
        sys.modules["sklearn"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        if hidden:
            del sys.modules["sklearn"]


def pin_gpu(tf_config: Any, cluster: Cluster) -> str | None:
    """Make the GPU of this local rank the only one that TensorFlow sees, with memory growth.

    Args:
        tf_config: the `tf.config` module.

    Returns:
        The GPU in words, None on a host without.

    Raises:
        ConfigError: there are more ranks on this host than GPUs.
    """
    gpus: Sequence[Any] = tf_config.list_physical_devices("GPU")
    if not gpus:
        return None
    if cluster.local_size > len(gpus):
        raise ConfigError(
            f"launch: more ranks on this host than GPUs (local rank {cluster.local_rank})",
            rule="one rank per GPU",
            received=f"{cluster.local_size} ranks, {len(gpus)} GPUs",
            do=f"start at most {len(gpus)} ranks per host, or hide them: CUDA_VISIBLE_DEVICES=",
        )
    mine = gpus[cluster.local_rank]
    tf_config.set_visible_devices(mine, "GPU")
    tf_config.experimental.set_memory_growth(mine, True)
    return f"GPU {cluster.local_rank} of {len(gpus)} per host"


def share_gpus(tf_config: Any) -> str | None:
    """Let a worker of a parameter-server cluster see all GPUs of its host, taking memory as needed;
    `backend.devices` says which it computes on.

    Returns:
        The GPUs in words, None on a host without.
    """
    gpus: Sequence[Any] = tf_config.list_physical_devices("GPU")
    for gpu in gpus:
        tf_config.experimental.set_memory_growth(gpu, True)
    return f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}" if gpus else None


def seed_rank(model: Any, seed: int, rank: int) -> None:
    """Give this rank random numbers of its own after the model was built alike everywhere.

    Rank 0 keeps the run's seed, so that one rank alone draws what `backend.kind=local` draws.

    Args:
        model: a Keras model; its seed generators (dropout, augmentation) are moved to a stream of
            this rank.
    """
    if rank == 0:
        return
    import keras
    import numpy as np

    keras.utils.set_random_seed((seed + 1_000_003 * rank) % 2**32)
    weights = {id(v) for v in model.weights}
    for variable in model.variables:
        if id(variable) not in weights and tuple(variable.shape) == (2,):
            state = np.asarray(variable)
            start = (int(state[0]) + 0x9E3779B9 * rank) % 2**32
            variable.assign(np.array([start, state[1]], state.dtype))
