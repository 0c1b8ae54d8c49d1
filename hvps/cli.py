"""hvps train | launch | doctor | eval | checkpoints | config: the command line program."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hvps.cli_args import split_args
from hvps.errors import ConfigError, report_error

_USAGE = """\
usage: hvps COMMAND [CONFIG or RUN] [section.key=value ...]

One trainer for Keras 3 models on one process or many.

commands:
  train        train a model; the same as python -m hvps.train
  launch       train in several processes, on this machine or many, watched and brought back
  doctor       find out whether training can run here or on several hosts, and if not, why
  eval         evaluate a checkpoint of a run; the same as python -m hvps.evaluate
  checkpoints  list the checkpoints of a run, and whether they are whole
  config       print the configuration that would be used, and where each value comes from

options:
  --help     this text; hvps COMMAND --help lists all keys
  --version  the version
"""
_COMMANDS = ("train", "launch", "doctor", "eval", "checkpoints", "config")
_MAX_COLUMN = 44


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 done, 2 wrong usage or configuration, else that of training.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = arguments[0] if arguments else "--help"
    if command in ("-h", "--help", "help"):
        print(_USAGE, end="")
        return 0
    if command == "--version":
        from hvps import __version__

        print(f"hvps {__version__}")
        return 0
    if command == "train":
        from hvps import train

        return train.main(arguments[1:])
    if command == "eval":
        from hvps import evaluate

        return evaluate.main(arguments[1:])
    try:
        if command == "checkpoints":
            from hvps import checkpoints_command

            return checkpoints_command.main(arguments[1:])
        if command == "launch":
            from hvps.launcher import launch

            return launch(arguments[1:])
        if command == "doctor":
            from hvps import doctor

            return doctor.main(arguments[1:])
        if command == "config":
            return _print_config(arguments[1:])
        raise _unknown_command(command)
    except ConfigError as err:
        return report_error(err)


def _unknown_command(command: str) -> ConfigError:
    from hvps.problems import did_you_mean

    near = did_you_mean(command, _COMMANDS)
    if near is None and (command.endswith((".yaml", ".yml")) or "=" in command):
        near = f"write hvps train {command}"
    return ConfigError(
        f"{command}: unknown command",
        rule=f"{', '.join(_COMMANDS[:-1])} or {_COMMANDS[-1]}",
        received=f"{command} (command line)",
        do=near or "see hvps --help",
    )


def _print_config(argv: Sequence[str]) -> int:
    from hvps.overrides import load_config

    arguments = split_args(
        argv, "hvps config", "Print the configuration that would be used, as YAML."
    )
    loaded = load_config(arguments.config, arguments.overrides)
    print(render_config(loaded.config.model_dump(), loaded.origins), end="")
    return 0


def render_config(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """The tree as YAML, with the origin of each value in a comment beside it."""
    lines = list(_lines(values, origins, "", 0))
    column = max((len(text) for text, _ in lines if len(text) <= _MAX_COLUMN), default=0)
    rendered = [
        f"{text:<{column}}  # {origin}" if origin is not None else text for text, origin in lines
    ]
    return "\n".join(rendered) + "\n"


def _lines(
    values: Mapping[Any, Any], origins: Mapping[str, str], prefix: str, depth: int
) -> Iterator[tuple[str, str | None]]:
    from hvps.problems import nearest_origin
    from hvps.yaml_text import write_flow

    for name, value in values.items():
        key = f"{prefix}{name}"
        head = f"{'  ' * depth}{write_flow(name)}:"
        if isinstance(value, dict) and value:
            yield head, None
            yield from _lines(value, origins, key + ".", depth + 1)
        else:
            yield f"{head} {write_flow(value)}", nearest_origin(origins, key)


if __name__ == "__main__":
    sys.exit(main())
