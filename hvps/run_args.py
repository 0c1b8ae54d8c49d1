"""The command line of the commands that look at a run: `RUN [options] [key=value ...]`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hvps.errors import ConfigError
from hvps.run_directory import is_run


@dataclass(frozen=True)
class RunArguments:
    """A command line taken apart.

    Attributes:
        run: the run's folder.
        checkpoint: the step of one of its checkpoints; None: the last one.
        json: print JSON, not a table.
        overrides: `section.key=value`, in their order.
    """

    run: Path
    checkpoint: int | None
    json: bool
    overrides: list[str]


def split_run_args(
    argv: Sequence[str], prog: str, usage: str, *, evaluates: bool = False
) -> RunArguments:
    """Take a command line apart; `--help` prints `usage` and exits.

    Args:
        evaluates: the command also takes `--checkpoint N` and overrides.

    Raises:
        ConfigError: an option is unknown or incomplete, or there is not one folder of a run.
    """
    folders: list[str] = []
    overrides: list[str] = []
    checkpoint, json = None, False
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if argument in ("-h", "--help"):
            print(usage, end="")
            raise SystemExit(0)
        if argument == "--json":
            json = True
        elif evaluates and name == "--checkpoint":
            checkpoint = _step(value if equals else next(rest, ""))
        elif Path(argument).is_dir() or not (equals or argument.startswith("-")):
            folders.append(argument)
        elif evaluates and not argument.startswith("-"):
            overrides.append(argument)
        else:
            raise ConfigError(
                f"{argument}: unknown option",
                rule="RUN, --json" + (", --checkpoint N, section.key=value" if evaluates else ""),
                received=f"{argument} (command line)",
                do=f"see {prog} --help",
            )
    if len(folders) != 1:
        raise ConfigError(
            f"RUN: {len(folders) or 'no'} folder{'s' * (len(folders) != 1)}",
            rule="the folder of one run",
            received=" ".join(folders) or "nothing",
            do=f"for example: {prog} runs/latest",
        )
    return RunArguments(_run(folders[0]), checkpoint, json, overrides)


def _step(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 12:
        return int(text)
    raise ConfigError(
        "--checkpoint: not a step",
        rule="an integer >= 0: the step of a checkpoint",
        received=f"--checkpoint {text}".strip() + " (command line)",
        do="see the steps with `hvps checkpoints RUN`",
    )


def _run(given: str) -> Path:
    path = Path(given)
    if is_run(path):
        return path
    if is_run(Path("runs") / given):
        do = f"did you mean {Path('runs') / given}?"
    elif is_run(path / "latest"):
        do = f"name one of its runs, for example {path / 'latest'}"
    elif (path / "checkpoint.json").is_file():
        do = f"name the run, {path.parent.parent}; --checkpoint N chooses a checkpoint"
    else:
        do = "correct the path"
    raise ConfigError(
        f"RUN: {path} is {'no run' if path.is_dir() else 'not there'}",
        rule="the folder of a run, with its config.yaml",
        received=str(path.absolute()),
        do=do,
    )
