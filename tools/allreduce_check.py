"""Run by mpirun at the end of the installation: is the sum over the ranks the sum?

Every rank contributes (rank + 1) x [0, 1, 2, ...], through Horovod and through mpi4py.
"""

import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the check is about MPI; TensorFlow would take all memory

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from mpi4py import MPI


def main() -> int:
    hvd.init()
    size = hvd.size()
    numbers = np.arange(1000, dtype=np.float32)
    expected = numbers * (size * (size + 1) / 2)
    mine = numbers * (hvd.rank() + 1)
    results = {
        "Horovod": hvd.allreduce(tf.constant(mine), op=hvd.Sum).numpy(),
        "mpi4py": np.empty_like(mine),
    }
    MPI.COMM_WORLD.Allreduce(mine, results["mpi4py"])
    problems = [
        f"rank {hvd.rank()}: {name}'s sum is wrong by up to {np.abs(got - expected).max()}"
        for name, got in results.items()
        if not np.array_equal(got, expected)
    ]
    if size != int(sys.argv[1]):
        problems.append(f"{sys.argv[1]} processes were started, Horovod counts {size}")
    if not (hvd.mpi_built() and hvd.gloo_built()):
        problems.append("Horovod was built without MPI or without Gloo")
    for problem in problems:
        print(problem)
    if not problems and hvd.rank() == 0:
        print(f"allreduce over {size} ranks: right")
    hvd.shutdown()
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
