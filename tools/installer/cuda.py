"""The CUDA toolkit and NCCL, for Horovod's GPU operations."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

from installer.shell import InstallError, run, tail

TENSORFLOW_CUDA = "12"  # what TensorFlow 2.21's wheel is built with


@dataclasses.dataclass(frozen=True)
class Cuda:
    home: Path
    version: str
    architectures: tuple[str, ...]  # "80", "90": of the GPUs here; empty is Horovod's own list

    @property
    def nvcc(self) -> Path:
        return self.home / "bin" / "nvcc"

    @property
    def name(self) -> str:
        archs = ",".join(self.architectures) or "default"
        return f"cuda{self.version} architectures {archs}"


def candidates() -> list[Path]:
    """Where a CUDA toolkit may be, the user's word first."""
    named = [os.environ.get(name) for name in ("HOROVOD_CUDA_HOME", "CUDA_HOME", "CUDA_PATH")]
    homes = [Path(value) for value in named if value]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(Path(nvcc).resolve().parents[1])
    versioned = Path("/usr/local").glob(f"cuda-{TENSORFLOW_CUDA}*")
    return [*homes, *sorted(versioned, reverse=True), Path("/usr/local/cuda"), Path("/opt/cuda")]


def require_cuda() -> Cuda:
    tried = candidates()
    for home in tried:
        headers = [home / "include/cuda_runtime.h", *home.glob("targets/*/include/cuda_runtime.h")]
        if (home / "bin/nvcc").exists() and any(header.exists() for header in headers):
            status, output = run([home / "bin/nvcc", "--version"])
            version = re.search(r"release (\d+\.\d+)", output)
            if status != 0 or version is None:
                raise InstallError(
                    "the CUDA compiler does not run",
                    received=f"{home / 'bin/nvcc'} --version, exit status {status}\n{tail(output)}",
                    do="repair the CUDA toolkit, or install without GPU: make install GPU=0",
                )
            return Cuda(home, version.group(1), find_architectures())
    raise InstallError(
        "the CUDA toolkit was not found",
        rule="Horovod's GPU operations are compiled with nvcc against cuda_runtime.h; "
        "the driver and TensorFlow's own CUDA libraries are not enough",
        received="no bin/nvcc with include/cuda_runtime.h in " + ", ".join(map(str, tried)),
        do="install the CUDA 12 toolkit, or name it: CUDA_HOME=/path make install GPU=1, "
        "or install without GPU: make install GPU=0",
    )


def find_architectures() -> tuple[str, ...]:
    status, output = run(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"])
    if status != 0:
        return ()
    found = set(re.findall(r"^\s*(\d+)\.(\d+)\s*$", output, re.MULTILINE))
    return tuple(sorted({major + minor for major, minor in found}, key=int))


def stage_nccl(venv: Path, folder: Path) -> dict[str, str]:
    """PyPI's NCCL, which TensorFlow loads, laid out as CMake looks for it: with a libnccl.so."""
    found = sorted(venv.glob("lib/python3.*/site-packages/nvidia/nccl/lib/libnccl.so.2"))
    if not found:
        raise InstallError(
            "NCCL is not in the environment",
            rule="tensorflow[and-cuda] brings nvidia-nccl-cu12 with libnccl.so.2 and nccl.h",
            received=f"no nvidia/nccl/lib/libnccl.so.2 under {venv.resolve()}",
            do="make clean, then make install GPU=1",
        )
    library = found[0]
    (folder / "lib").mkdir(parents=True)
    (folder / "lib/libnccl.so").symlink_to(library)
    (folder / "include").symlink_to(library.parents[1] / "include")
    return {
        "HOROVOD_NCCL_HOME": str(folder),
        "HOROVOD_NCCL_INCLUDE": str(folder / "include"),
        "HOROVOD_NCCL_LIB": str(folder / "lib"),
        "HOROVOD_NCCL_LINK": "SHARED",
    }
