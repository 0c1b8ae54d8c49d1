"""What is started again must find its run: its name is fixed before the first start, and each
restart is noted where the run's result is made of it."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from hvps.cli_args import Arguments
from hvps.errors import ConfigError
from hvps.overrides import LoadedConfig, load_config
from hvps.supervisor import Restart

_LONGEST_STEM = 150  # of the 200 characters of a run.name


@contextmanager
def can_come_back(arguments: Arguments) -> Iterator[Arguments]:
    """The arguments with all that restarts need; inside, the job is planned.

    If that fails nothing is left behind.

    Raises:
        ConfigError: the run may not go on.
    """
    if not arguments.max_restarts:
        yield arguments
        return
    loaded = load_config(arguments.config, arguments.overrides)
    run = loaded.config.run
    if run.resume == "never" or loaded.config.checkpoint.keep == 0:
        key, value = ("run.resume", run.resume) if run.resume == "never" else ("checkpoint.keep", 0)
        raise ConfigError(
            f"--max-restarts: {key} forbids it",
            rule="what is started again goes on from the last checkpoint",
            received=loaded.received(key, value),
            do=f"remove {key}, or --max-restarts",
        )
    further = [f"backend.restarts={arguments.max_restarts}"]
    if run.name is not None:
        yield arguments.with_overrides(further)
        return
    folder, made = _new_folder(loaded, claim=not arguments.dry_run)
    try:
        yield arguments.with_overrides([*further, f"run.name={folder.name}"])
    except BaseException:
        for path in made:
            with suppress(OSError):  # somebody else uses it already
                path.rmdir()
        raise


def _new_folder(loaded: LoadedConfig, *, claim: bool) -> tuple[Path, list[Path]]:
    """A folder that no other run has, and the folders that were made for it, innermost first.

    It is made at once: two launches may begin in the same second, and the second would go on with
    the run of the first.
    """
    base = Path(loaded.config.run.dir)
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", loaded.name)[:_LONGEST_STEM].lstrip(".-") or "run"
    name = f"{stem}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    try:
        missing = [path for path in (base, *base.parents) if not path.exists()]
        for number in range(1, 1000):
            folder = base / (name if number == 1 else f"{name}-{number}")
            if not claim:
                if not folder.exists():
                    return folder, []
                continue
            with suppress(FileExistsError):
                folder.mkdir(parents=True)
                return folder, [folder, *missing]
    except (OSError, ValueError):  # whoever checks the configuration says what is wrong
        pass
    return base / name, []


def note_restart(loaded: LoadedConfig, restart: Restart) -> None:
    """For result.json: what was started again, and why."""
    folder = Path(loaded.config.run.dir) / str(loaded.config.run.name)
    entry = {
        "time": datetime.now().astimezone().isoformat(timespec="seconds"),
        "task": restart.task,
        "reason": restart.reason,
        "restart": restart.number,
        "of": restart.limit,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / "restarts.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as err:  # a full disk, say: the job matters more than the note
        print(f"hvps: warning: restarts.jsonl: {err}", file=sys.stderr, flush=True)
