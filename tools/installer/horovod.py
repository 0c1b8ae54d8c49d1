"""Horovod 0.28.1 from its source, made to build against TensorFlow 2.21 and the chosen MPI."""

from __future__ import annotations

import re
import shutil
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path

from installer.cuda import Cuda, stage_nccl
from installer.machine import build_jobs
from installer.settings import HOROVOD, Settings
from installer.shell import InstallError, clean_environment, run, tail

# From horovod/tensorflow/mpi_lib*.so in site-packages to the environment's lib/ with libmpi, to
# TensorFlow's libraries, and to NCCL's. Relative, since the wheel serves environments elsewhere.
RUNPATH = ("$ORIGIN/../../../..", "$ORIGIN/../../tensorflow", "$ORIGIN/../../nvidia/nccl/lib")

# Without debugging symbols: a fifth of the size, and less memory and time to compile. And with
# the very MPI that was chosen: CMake looks for one next to the real path of mpiexec first.
CMAKE_PATCH = """
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "{runpath}")
set(CMAKE_INSTALL_RPATH_USE_LINK_PATH {absolute})
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")
set(MPI_CXX_COMPILER "$ENV{{HVPS_MPICXX}}")
set(MPI_C_COMPILER "$ENV{{HVPS_MPICC}}")
"""

# For GPUs alone: TensorFlow moved a header, and no longer exports a function that Horovod calls.
XLA = '#include "xla/'
GPU_STREAM = """
namespace stream_executor {
namespace gpu {
inline GpuStreamHandle AsGpuStreamValue(Stream* stream) {
  return static_cast<GpuStreamHandle>(stream->platform_specific_handle().stream);
}
} // namespace gpu
} // namespace stream_executor
"""


def build_wheel(
    settings: Settings, venv: Path, compiler: str, cuda: Cuda | None, scratch: Path, into: Path
) -> Path:
    """Fetches, patches and builds; returns the wheel, which lies in `into`."""
    # CMake, mpicxx and Horovod's scripts do not quote paths: they see no path of the project's,
    # which may hold spaces, but `scratch`, which holds none.
    alias = scratch / "venv"
    alias.symlink_to(venv)
    env = build_environment(settings, alias, compiler, cuda)
    if not settings.system_mpi:
        env.update(stage_mpicxx(alias, scratch))
    if cuda is not None:
        env.update(stage_nccl(alias, scratch / "nccl"))
    source = unpack(fetch(alias, scratch, env), scratch)
    patch(source, system_mpi=settings.system_mpi)
    log = venv / "horovod-build.log"
    (scratch / "wheels").mkdir()
    options = ["--no-build-isolation", "--no-deps", "-v", "--wheel-dir", str(scratch / "wheels")]
    command = [str(alias / "bin/python"), "-m", "pip", "wheel", *options, str(source)]
    status, output = run(command, env=env, log=log)
    built = sorted((scratch / "wheels").glob("horovod-*.whl"))
    if status != 0 or not built:
        raise InstallError(
            "Horovod could not be built",
            received=f"exit status {status}; the errors, or the last lines:\n{errors_in(output)}",
            do=f"read {log}; `make install` again starts with this step",
        )
    return Path(shutil.move(built[0], into / built[0].name))  # maybe to another file system


def build_environment(
    settings: Settings, venv: Path, compiler: str, cuda: Cuda | None
) -> dict[str, str]:
    env = clean_environment()
    for name in [name for name in env if name.startswith(("HOROVOD_", "CMAKE_"))]:
        del env[name]
    env.update(
        PATH=f"{venv / 'bin'}:{env.get('PATH', '')}",
        CXX=compiler,
        OMPI_CXX=compiler,
        MAKEFLAGS=f"-j{build_jobs()}",
        TF_CPP_MIN_LOG_LEVEL="2",
        HOROVOD_WITH_TENSORFLOW="1",
        HOROVOD_WITHOUT_PYTORCH="1",
        HOROVOD_WITHOUT_MXNET="1",
        HOROVOD_WITH_MPI="1",
        HOROVOD_WITH_GLOO="1",
    )
    if settings.system_mpi:
        env.update(HVPS_MPICXX=settings.mpi, HVPS_MPICC=shutil.which("mpicc") or "mpicc")
    if cuda is not None:
        env.update(
            HOROVOD_GPU_OPERATIONS="NCCL",
            HOROVOD_CUDA_HOME=str(cuda.home),
            CUDACXX=str(cuda.nvcc),
            PATH=f"{venv / 'bin'}:{cuda.home / 'bin'}:{env['PATH']}",
        )
        if cuda.architectures:
            env["HOROVOD_BUILD_CUDA_CC_LIST"] = ",".join(cuda.architectures)
    else:
        env["HOROVOD_WITHOUT_NVTX"] = "1"
    return env


def stage_mpicxx(venv: Path, folder: Path) -> dict[str, str]:
    """PyPI's compiler wrappers, told where to find themselves.

    The wheel's own ones set the prefix to their real path, which may hold a space, and then
    run this program: under the name of the language that is wanted.
    """
    for name in ("mpicc", "mpicxx"):
        (folder / name).symlink_to(venv / "bin/opal_wrapper")
    return {
        "OPAL_PREFIX": str(venv),
        "HVPS_MPICC": str(folder / "mpicc"),
        "HVPS_MPICXX": str(folder / "mpicxx"),
    }


def fetch(venv: Path, scratch: Path, env: Mapping[str, str]) -> Path:
    """The source archive, by pip, from wherever the user's pip looks."""
    options = ["-q", "--no-deps", "--no-binary", "horovod", "--no-build-isolation"]
    options += ["--dest", str(scratch / "sdist"), f"horovod=={HOROVOD}"]
    status, output = run([venv / "bin/python", "-m", "pip", "download", *options], env=env)
    archives = sorted((scratch / "sdist").glob("horovod-*.tar.gz"))
    if status != 0 or not archives:
        raise InstallError(
            f"pip could not fetch the source of Horovod {HOROVOD}",
            received=f"exit status {status}\n{tail(output)}",
            do="check the network and pip's configuration, then `make install` again",
        )
    return archives[0]


def unpack(archive: Path, scratch: Path) -> Path:
    with tarfile.open(archive) as tar:
        if hasattr(tarfile, "data_filter"):
            tar.extractall(scratch / "source", filter="data")
        else:
            tar.extractall(scratch / "source")
    return next((scratch / "source").iterdir())


def patch(source: Path, *, system_mpi: bool) -> None:
    """Makes the source build against today's TensorFlow, and the result findable anywhere."""
    absolute = "ON" if system_mpi else "OFF"  # a cluster's MPI stays where it is
    runpath = ";".join(entry.replace("$", "\\$") for entry in RUNPATH)
    addition = CMAKE_PATCH.format(runpath=runpath, absolute=absolute)
    edit(source / "CMakeLists.txt", r"^project\(horovod CXX\)\n", lambda line: line + addition)
    # The XLA kernels include headers that TensorFlow moved in 2.16; nothing else needs them.
    edit(source / "horovod/tensorflow/CMakeLists.txt", r"^.*xla_mpi_ops\.cc.*\n", lambda _: "")
    operations = source / "horovod/tensorflow/mpi_ops.cc"
    edit(operations, r'^#include "tensorflow/compiler/xla/(?=stream_executor)', lambda _: XLA)
    edit(operations, r"^namespace stream_executor \{\nnamespace gpu \{\nGpuStr[^#]*", lambda _: "")
    edit(operations, r"^#endif // HAVE_GPU\n(?=\n// Undef LOG)", lambda line: GPU_STREAM + line)


def edit(path: Path, pattern: str, replacement: Callable[[str], str]) -> None:
    text, count = re.subn(
        pattern,
        lambda found: replacement(found.group()),
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    if count != 1:
        raise InstallError(
            "Horovod's source is not what this installer was written for",
            rule=f"one line like {pattern!r} in {path.name}",
            received=f"{count} of them",
            do="remove pip's cached copy (pip cache purge), then `make install` again",
        )
    path.write_text(text, encoding="utf-8")


def errors_in(output: str) -> str:
    """The compiler's first errors, which stand far above the last lines; else the last lines."""
    pattern = re.compile(r"(error:|CMake Error|undefined reference|Killed|No space left)")
    lines = output.splitlines()
    for number, line in enumerate(lines):
        if pattern.search(line):
            return tail("\n".join(lines[number : number + 12]))
    return tail(output)
