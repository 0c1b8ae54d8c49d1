"""A SLURM of this machine alone, for the tests: real daemons, with files and ports of their own."""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from hvps.ports import free_ports
from tests.launching import Job, job_environment, start

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "squeue")
_CPUS = 4  # per node, whatever this machine has


def unavailable() -> str | None:
    """Why SLURM cannot be started here, or None."""
    missing = [name for name in _PROGRAMS if not shutil.which(name, path=_path())]
    if missing:
        return f"SLURM and munge are not installed: no {', '.join(missing)}"
    return None


def _path() -> str:
    """The daemons are not on everybody's PATH."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])


class Slurm:
    """It runs while the context lasts.

    Partitions: "reachable", this host under its own name; "named", two nodes whose names only
    SLURM knows, so that nothing but srun starts a process on them.
    """

    def __enter__(self) -> Slurm:
        self._stack = ExitStack()
        self._jobs: list[Job] = []
        # Short: the path of a socket may have 107 characters.
        self.folder = Path(tempfile.mkdtemp(prefix="hvps-slurm-"))
        self.folder.chmod(0o711)  # munge's clients may be other users
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self._stack.callback(self._end)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def _start(self) -> None:
        host = socket.gethostname()
        nodes = [host, "hvps0", "hvps1"]  # Debian's has one daemon per name of a host
        control, *ports = free_ports(1 + len(nodes))
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        (munge / "key").write_bytes(os.urandom(128))
        (munge / "key").chmod(0o600)
        lines = [
            "ClusterName=hvps",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={control}",
            f"SlurmUser={getpass.getuser()}",
            f"SlurmdUser={getpass.getuser()}",
            "AuthType=auth/munge",
            # A requeued job waits until its old credential has expired: 120 s by default.
            f"AuthInfo=socket={munge}/socket,cred_expire=5",
            f"StateSaveLocation={self.folder}/state",
            f"SlurmdSpoolDir={self.folder}/spool-%n",
            f"SlurmctldPidFile={self.folder}/slurmctld.pid",
            f"SlurmdPidFile={self.folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "JobAcctGatherType=jobacct_gather/none",
            "AccountingStorageType=accounting_storage/none",
            "MpiDefault=none",
            "ReturnToService=2",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",
            "SchedulerParameters=sched_interval=1,bf_interval=1",
            "MailProg=/bin/true",
            *(
                f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs={_CPUS}"
                for name, port in zip(nodes, ports, strict=True)
            ),
            f"PartitionName=reachable Nodes={host} Default=YES State=UP",
            "PartitionName=named Nodes=hvps[0-1] State=UP",
        ]
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text("\n".join([*lines, ""]))
        self._daemon("munged", *_munge_options(munge))
        self._wait(lambda: (munge / "socket").exists(), "munged")
        self._daemon("slurmctld", "-D")
        for name in nodes:
            (self.folder / f"spool-{name}").mkdir()
            self._daemon("slurmd", "-D", "-N", name, label=f"slurmd-{name}")
        idle = ["idle"] * len(nodes)
        self._wait(lambda: self._tool("sinfo", "-h", "-N", "-o", "%t") == idle, "idle nodes")

    def _daemon(self, program: str, *options: str, label: str | None = None) -> None:
        found = shutil.which(program, path=_path())
        assert found
        self._jobs.append(start([found, *options], self.folder, self.settings, label or program))

    @property
    def settings(self) -> dict[str, str]:
        """What the environment of SLURM's programs has beside the usual."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def submit(
        self, script: Path, arguments: Sequence[str], options: Sequence[str], cwd: Path, **env: str
    ) -> str:
        """sbatch in `cwd`; the output is in job.out there. Returns the job's number."""
        done = subprocess.run(
            ["sbatch", "--parsable", "--output=job.out", *options, str(script), *arguments],
            cwd=cwd,
            env=job_environment({**self.settings, **env}),
            capture_output=True,
            text=True,
            timeout=30,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def signal(self, job: str, name: str) -> None:
        """Send it to the batch script alone, as --signal=B: does."""
        self._tool("scancel", "--batch", f"--signal={name}", job)

    def state(self, job: str) -> str:
        found = re.search(r"JobState=(\w+)", "\n".join(self._tool("scontrol", "show", "job", job)))
        return found[1] if found else "UNKNOWN"

    def _tool(self, *command: str) -> list[str]:
        done = subprocess.run(
            command, env=job_environment(self.settings), capture_output=True, text=True, timeout=60
        )
        return done.stdout.splitlines()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            dead = any(job.process.poll() is not None for job in self._jobs)
            if dead or time.monotonic() > deadline:
                logs = "\n".join(f"--- {job.output_path.name}\n{job.output}" for job in self._jobs)
                raise AssertionError(f"no {what}:\n{logs}")
            time.sleep(0.1)

    def _end(self) -> None:
        if len(self._jobs) > 1:
            self._tool("scancel", "--partition=reachable")
            self._tool("scancel", "--partition=named")
            self._wait(lambda: not self._tool("squeue", "-h"), "end of the jobs")
        for job in reversed(self._jobs):
            if job.process.poll() is None:
                job.process.terminate()
                job.wait(30)
            job.end()  # what a daemon has left carries its mark

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._stack.close()


def _munge_options(folder: Path) -> list[str]:
    files = {"key-file": "key", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
    files["socket"] = "socket"
    named = [f"--{option}={folder / name}" for option, name in files.items()]
    return ["--foreground", "--force", *named]
