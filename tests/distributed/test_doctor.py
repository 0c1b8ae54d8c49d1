"""hvps doctor here, and hosts with which something is wrong: named by doctor and by launch."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching import BIN, ROOT, job_environment

TIMEOUT = 120


def run(arguments: list[str], cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(BIN / "hvps"), *arguments],
        cwd=cwd,
        env=job_environment(env),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


@pytest.mark.timeout(2 * TIMEOUT)
def test_this_machine(tmp_path: Path) -> None:
    done = run(["doctor", "--json"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ok"] is True
    rows = {row["what"]: row["found"] for row in found["rows"]}
    assert "MB/s" in rows["allreduce, 2 ranks"]
    assert "MB/s" in rows["parameter server"]
    assert "TensorFlow servers" in rows["parameter server"]
    assert not list(tmp_path.iterdir())


Other = Callable[[str], str]


@pytest.fixture
def other(tmp_path: Path) -> Other:
    """`other(script)` is a folder with an ssh that runs commands for host "other" by `script`."""

    def make(script: str) -> str:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "ssh").write_text(f"#!/bin/sh\nfor command; do :; done\n{script}\n")
        (folder / "ssh").chmod(0o755)
        return f"{folder}{os.pathsep}{os.environ['PATH']}"

    return make


def check(path: str, cwd: Path, *says: str) -> None:
    """Both commands name it, and end."""
    for command in (
        ["doctor", "-H", "localhost:2,other:2"],
        ["launch", "--dry-run", "-H", "localhost:2,other:2", "backend.kind=allreduce"],
        ["launch", "--dry-run", "-H", "localhost:2,other:2", "backend.kind=ps"],
    ):
        done = run(command, cwd, PATH=path)
        output = " ".join((done.stdout + done.stderr).split())
        assert done.returncode == (1 if command[0] == "doctor" else 2), output
        for text in says:
            assert text in output


@pytest.mark.timeout(4 * TIMEOUT)
def test_no_ssh(other: Other, tmp_path: Path) -> None:
    path = other("echo 'ssh: connect to host other port 22: Connection refused' >&2; exit 255")
    check(path, tmp_path, "other does not answer", "Connection refused")


@pytest.mark.timeout(4 * TIMEOUT)
def test_a_python_without_tensorflow(other: Other, tmp_path: Path) -> None:
    python = shlex.quote(sys.executable)
    script = f'exec sh -c "$(echo "$command" | sed "s#{python} #{python} -S #")"'
    check(other(script), tmp_path, "other lacks tensorflow, keras, numpy")


@pytest.mark.timeout(4 * TIMEOUT)
def test_another_version(other: Other, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(ROOT / "hvps", copy / "hvps", ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "hvps" / "step.py").open("a") as file:
        file.write("# changed\n")
    own, changed = (f"PYTHONPATH={shlex.quote(str(folder))}" for folder in (ROOT, copy))
    script = f'exec sh -c "$(echo "$command" | sed "s#{own} #{changed} #")"'
    check(other(script), tmp_path, "other has another hvps than localhost")
