"""The command line that all commands share: `[CONFIG] [section.key=value ...]`, and its help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvps.errors import ConfigError

_EXAMPLES = """\
examples:
  {prog} configs/local.yaml
  {prog} configs/allreduce.yaml train.epochs=3 optimizer.learning_rate=3e-4
  {prog} task=mytask:MyTask task_args.width=64   # a class in ./mytask.py
{launch}
values are YAML: 1e-3, true, null, text, [1, 2], {{a: 1}}. The later of two overrides wins.
section=null drops what the file says in that section.
"""
_LAUNCH = """\
  horovodrun -np 4 {prog} configs/allreduce.yaml
  mpirun -np 4 {prog} configs/allreduce.yaml
"""


def split_args(
    argv: Sequence[str], prog: str, description: str = "Train a Keras 3 model."
) -> tuple[str | None, list[str]]:
    """Take a command line apart: the configuration file, if any, and the overrides.

    `--help` prints the help and exits.

    Raises:
        ConfigError: an unknown option, or more than one file.
    """
    files: list[str] = []
    overrides: list[str] = []
    for argument in argv:
        if argument in ("-h", "--help"):
            print(help_text(prog, description), end="")
            raise SystemExit(0)
        if argument.startswith("-"):
            raise _unknown_option(argument, prog)
        if "=" in argument:
            overrides.append(argument)
        else:
            files.append(argument)
    if len(files) > 1:
        raise ConfigError(
            f"CONFIG: {len(files)} configuration files",
            rule="at most one argument without '='; overrides are key=value without spaces",
            received=" ".join(files),
            do=f"for example: {_command(prog)} {files[0]} train.epochs=3",
        )
    return (files[0] if files else None), overrides


def _command(prog: str) -> str:
    """`hvps config` as it is; `hvps.train` as the user types it."""
    return f"python -m {prog}" if "." in prog and " " not in prog else prog


def _unknown_option(argument: str, prog: str) -> ConfigError:
    name = argument.lstrip("-")
    do = f"see {_command(prog)} --help"
    key, equals, value = name.partition("=")
    if key:
        from hvps.config_validate import find_key

        known = find_key(key.replace("-", "_"))
        if known:
            do = f"write {known}={value if equals else '...'}"
    return ConfigError(
        f"{argument}: unknown option",
        rule="values are given as section.key=value, without dashes; the only option is --help",
        received=f"{argument} (command line)",
        do=do,
    )


def help_text(prog: str, description: str) -> str:
    """Usage, examples, and every key with its default and meaning."""
    command = _command(prog)
    launch = _LAUNCH.format(prog=command) if "train" in prog else ""
    return "\n".join(
        [
            f"usage: {command} [CONFIG] [section.key=value ...]\n",
            f"{description}\n",
            "  CONFIG             a YAML file; without it the defaults below",
            "  section.key=value  replaces one value of it\n",
            _EXAMPLES.format(prog=command, launch=launch),
            "keys and defaults:",
            *_key_lines(),
            "",
        ]
    )


def _key_lines() -> Iterator[str]:
    from hvps.config import leaf_fields
    from hvps.config_base import rule_of
    from hvps.yaml_text import write_flow

    for key, field in leaf_fields():
        default = write_flow(field.get_default(call_default_factory=True))
        yield f"  {f'{key}={default}':<36} {field.description}"
        rule = rule_of(field)
        if rule.startswith("one of"):
            yield f"  {'':<36}   ({rule})"
    yield f"  {'optimizer.ARGUMENT=...':<36} any other argument of that Keras optimizer"
    yield f"  {'task_args.ARGUMENT=...':<36} any argument of the task's class"
