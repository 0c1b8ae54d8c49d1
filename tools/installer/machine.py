"""What this machine has: compiler, venv, MPI, GPU, disk, memory. Says plainly what it lacks."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from installer.shell import InstallError, run, tail

GIB = 2**30
BUILD_JOB_MEMORY = 2 * GIB  # what one g++ takes on Horovod's TensorFlow sources, with some room
PROBE = "#include <optional>\nint main() { return std::optional<int>{0}.value(); }\n"


def find_compiler() -> str | None:
    """The C++ compiler: $CXX, else the usual names."""
    named = os.environ.get("CXX")
    for name in [named] if named else ["c++", "g++", "clang++"]:
        found = shutil.which(name)
        if found:
            return found
    return None


def require_compiler(scratch: Path) -> str:
    """A C++ compiler that has been seen to compile C++17."""
    compiler = find_compiler()
    if compiler is None:
        raise InstallError(
            "no C++ compiler was found",
            rule="Horovod is built from source, which takes g++ 9 or later (or clang++)",
            received=os.environ.get("CXX") or "no c++, g++ or clang++ on PATH",
            do="install g++ (Debian, Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), "
            "or name one: CXX=/path/to/g++ make install",
        )
    source = scratch / "probe.cc"
    source.write_text(PROBE, encoding="utf-8")
    status, output = run([compiler, "-std=c++17", source, "-o", scratch / "probe"])
    if status != 0:
        raise InstallError(
            "the C++ compiler does not compile a C++17 program",
            rule="g++ 9 or later, or clang++, with its standard library",
            received=f"{compiler}, exit status {status}\n{tail(output)}",
            do="install a complete g++, or name one: CXX=/path/to/g++ make install",
        )
    return compiler


def require_venv(python: str) -> None:
    """Debian's python3 comes without the parts that make an environment with pip."""
    status, output = run([python, "-c", "import venv, ensurepip"])
    if status != 0:
        minor = ".".join(platform.python_version_tuple()[:2])
        raise InstallError(
            "this Python cannot make virtual environments",
            rule="the modules venv and ensurepip belong to it",
            received=f"{python}\n{tail(output, 3)}",
            do=f"install them (Debian, Ubuntu: apt-get install python{minor}-venv), "
            "or use another Python: make install PYTHON=/path/to/python3",
        )


def require_disk(folder: Path, gib: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < gib * GIB:
        raise InstallError(
            "there is not enough disk space",
            rule=f"about {gib} GiB for .venv and the build",
            received=f"{free / GIB:.1f} GiB free at {folder}",
            do="make room there, or put the project on another disk",
        )


def require_mpi() -> str:
    """The path of the system's mpicxx, which has an mpirun and a C compiler with it.

    Not the real path: behind it there may be one program for all languages, that goes by its name.
    """
    missing = [name for name in ("mpicxx", "mpicc", "mpirun") if not shutil.which(name)]
    found = shutil.which("mpicxx")
    if missing or found is None:
        raise InstallError(
            f"MPI=system, but {' and '.join(missing)} cannot be found",
            rule="mpicxx, mpicc and mpirun of one MPI on PATH",
            received=os.environ.get("PATH", ""),
            do="load the cluster's MPI (for instance: module load openmpi), or install without "
            "it: make install MPI=pypi",
        )
    require_python_headers()
    return os.path.abspath(found)


def require_python_headers() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise InstallError(
            "Python's headers are missing",
            rule="with MPI=system, mpi4py is built from source against Python.h",
            received=f"{header} does not exist",
            do="install them (Debian, Ubuntu: apt-get install python3-dev), or use a Python that "
            "has them: make install MPI=system PYTHON=/path/to/python3",
        )


def mpi_version() -> str:
    """What the mpirun on PATH calls itself, such as "mpirun (Open MPI) 4.1.4"."""
    _, output = run(["mpirun", "--version"])
    return next((line.strip() for line in output.splitlines() if line.strip()), "unknown MPI")


def mpi_name(version: str) -> str:
    """Short for people: "Open MPI 4.1.4"."""
    number = re.search(r"\d+(\.\d+)+", version)
    if "Open MPI" in version or "Open RTE" in version:
        return f"Open MPI {number.group() if number else '?'}"
    return version


def has_gpu() -> bool:
    """Whether an NVIDIA GPU can be used; quick where there is none."""
    if not shutil.which("nvidia-smi"):
        return False
    status, output = run(["nvidia-smi", "-L"], timeout=30)
    return status == 0 and "GPU 0" in output


def build_jobs() -> int:
    """As many compilers at once as there are cores, and memory, to use."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min(cores, int(available_memory() // BUILD_JOB_MEMORY)))


def available_memory() -> float:
    try:
        meminfo = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return 8 * GIB
    found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo, re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 8 * GIB
