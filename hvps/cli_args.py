"""The command line that all commands share: `[CONFIG] [section.key=value ...]`, and its help.

The programs that train also take `--role ROLE --index N`: which task of a cluster they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hvps.errors import ConfigError
from hvps.hosts import Host, parse_hosts, read_hostfile

_EXAMPLES = """\
examples:
{examples}
values are YAML: 1e-3, true, null, text, [1, 2], {{a: 1}}. The later of two overrides wins.
section=null drops what the file says in that section.
"""
_ANY = """\
  {prog} configs/local.yaml
  {prog} configs/allreduce.yaml train.epochs=3 optimizer.learning_rate=3e-4
  {prog} task=mytask:MyTask task_args.width=64   # a class in ./mytask.py
"""
_TRAIN = """\
  horovodrun -np 4 {prog} configs/allreduce.yaml
  mpirun -np 4 {prog} configs/allreduce.yaml
  hvps launch configs/ps.yaml   # parameter servers and workers on this machine
  {prog} configs/ps.yaml backend.cluster='{{ps: [a:3333], worker: [b:3333]}}' --role ps --index 0
"""
_LAUNCH = """\
  {prog} -np 4 configs/allreduce.yaml   # mpirun, with what it needs here
  {prog} -np 4 --max-restarts 3 configs/allreduce.yaml run.name=long
  {prog} configs/ps.yaml
  {prog} configs/ps.yaml backend.num_workers=3 backend.update=sync train.global_batch=96
  {prog} -H node1:4,node2:4 configs/allreduce.yaml   # the same on several hosts
  {prog} --hostfile hosts.txt --network 10.0.0.0/8 configs/ps.yaml
"""
_TASK_HELP = """\
  --role ROLE        this process's task of a parameter-server cluster: ps, worker, chief or
                     evaluator; without it the launcher or TF_CONFIG says so
  --index N          which task of the role, 0 for the first
"""
_LAUNCH_HELP = """\
  -np N              ranks of backend.kind=allreduce (2, or all slots of the hosts); parameter
                     servers and workers are counted by backend.num_ps and backend.num_workers
  -H HOST:SLOTS,...  the hosts to run on, and how many processes each takes (1); they are reached
                     by ssh without a password, and have the same Python, packages and folder
  --hostfile FILE    the same, one host per line: NAME slots=N
  --network NET      the network between the hosts: an interface, like eth0, or a CIDR, like
                     10.0.0.0/8; by default one by which all hosts reach each other
  --gloo             allreduce: by horovodrun and Gloo, without MPI
  --max-restarts K   start again what dies, from the last checkpoint, at most K times in all (0)
  --elastic MIN:MAX  allreduce: start with MAX ranks, and after each death with one less, down to
                     MIN; the global batch stays, its shares may differ by one example
  --dry-run          only print what would be started
"""


@dataclass(frozen=True)
class Arguments:
    """A command line taken apart.

    Attributes:
        config: the configuration file, if one was given.
        overrides: `section.key=value`, in their order.
        role, index: this process's task; both None if they were not given.
        ranks, max_restarts, elastic, hosts, network, gloo, dry_run: of `hvps launch`; see its
            help.
    """

    config: str | None
    overrides: list[str]
    role: str | None = None
    index: int | None = None
    ranks: int | None = None
    max_restarts: int = 0
    elastic: tuple[int, int] | None = None
    hosts: tuple[Host, ...] = ()
    network: str | None = None
    gloo: bool = False
    dry_run: bool = False

    def with_overrides(self, further: Sequence[str]) -> Arguments:
        return replace(self, overrides=[*self.overrides, *further])

    def for_training(self) -> list[str]:
        """What the program that trains is given."""
        return [*([self.config] if self.config else []), *self.overrides]


def split_args(
    argv: Sequence[str], prog: str, description: str = "Train a Keras 3 model."
) -> Arguments:
    """Take a command line apart.

    `--help` prints the help and exits.

    Raises:
        ConfigError: an unknown or incomplete option, or more than one file.
    """
    files: list[str] = []
    overrides: list[str] = []
    options: dict[str, str] = {}
    rest = iter(argv)
    for argument in rest:
        if argument in ("-h", "--help"):
            print(help_text(prog, description), end="")
            raise SystemExit(0)
        name, equals, value = argument.partition("=")
        if name in _options_of(prog):
            options[name] = value if equals else next(rest, "")
        elif argument in _flags_of(prog):
            options[argument] = ""
        elif argument.startswith("-"):
            raise _unknown_option(argument, prog)
        elif equals:
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
    config = files[0] if files else None
    if _launches(prog):
        return _for_launch(config, overrides, options)
    return Arguments(config, overrides, *_task_of(options))


def _trains(prog: str) -> bool:
    return "train" in prog


def _launches(prog: str) -> bool:
    return "launch" in prog


def _options_of(prog: str) -> tuple[str, ...]:
    """Options that take a value."""
    if _launches(prog):
        return ("-np", "-H", "--hostfile", "--network", "--max-restarts", "--elastic")
    return ("--role", "--index") if _trains(prog) else ()


def _flags_of(prog: str) -> tuple[str, ...]:
    """Options without a value."""
    return ("--gloo", "--dry-run") if _launches(prog) else ()


def _for_launch(config: str | None, overrides: list[str], options: dict[str, str]) -> Arguments:
    ranks = restarts = None
    if "-np" in options:
        ranks = _number("-np", options["-np"], 1)
    if "--max-restarts" in options:
        restarts = _number("--max-restarts", options["--max-restarts"], 0)
    elastic = None
    if "--elastic" in options:
        low, _, high = options["--elastic"].partition(":")
        elastic = _number("--elastic", low, 1), _number("--elastic", high, 1)
        if elastic[0] > elastic[1]:
            raise _wrong_number("--elastic", options["--elastic"], "MIN:MAX with MIN <= MAX")
    return Arguments(
        config,
        overrides,
        ranks=ranks,
        max_restarts=restarts or 0,
        elastic=elastic,
        hosts=tuple(_hosts(options)),
        network=_network(options),
        gloo="--gloo" in options,
        dry_run="--dry-run" in options,
    )


def hosts_and_network(argv: Sequence[str], prog: str) -> tuple[list[Host], str | None]:
    """Of a command that takes `-H`, `--hostfile` and `--network` only.

    Raises:
        ConfigError: something else is there, or they are wrong.
    """
    options: dict[str, str] = {}
    rest = iter(argv)
    for argument in rest:
        name, equals, value = argument.partition("=")
        if name not in ("-H", "--hostfile", "--network"):
            raise ConfigError(
                f"{argument}: unknown argument",
                rule="-H, --hostfile, --network, --json and --help",
                received=f"{argument} (command line)",
                do=f"see {prog} --help",
            )
        options[name] = value if equals else next(rest, "")
    return _hosts(options), _network(options)


def _hosts(options: dict[str, str]) -> list[Host]:
    if "-H" in options and "--hostfile" in options:
        raise ConfigError(
            "--hostfile: the hosts are named twice",
            rule="-H or --hostfile",
            received=f"-H {options['-H']} --hostfile {options['--hostfile']} (command line)",
            do="leave one out",
        )
    if "-H" in options:
        return parse_hosts(options["-H"])
    return read_hostfile(options["--hostfile"]) if "--hostfile" in options else []


def _network(options: dict[str, str]) -> str | None:
    network = options.get("--network")
    if network is not None and ("-H" not in options and "--hostfile" not in options):
        raise ConfigError(
            "--network: has no effect here",
            rule="it says by which network hosts reach each other, and there is this one only",
            received=f"--network {network} (command line)",
            do="remove it, or name the hosts with -H",
        )
    if network is not None and not re.fullmatch(r"[A-Za-z0-9._:@-]+(/[0-9]{1,2})?", network):
        raise ConfigError(
            "--network: no network",
            rule="the name of an interface, or a CIDR",
            received=f"--network {network} (command line)",
            do="for example --network eth0, or --network 10.0.0.0/8",
        )
    return network


def _number(option: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 7 and int(text) >= least):
        rule = "MIN:MAX, integers >= 1" if option == "--elastic" else f"an integer >= {least}"
        raise _wrong_number(option, text, rule)
    return int(text)


def _wrong_number(option: str, text: str, rule: str) -> ConfigError:
    examples = {"-np": "-np 4", "--max-restarts": "--max-restarts 3", "--elastic": "--elastic 2:4"}
    return ConfigError(
        f"{option}: {'missing' if not text else 'not such a number'}",
        rule=rule,
        received=f"{option} {text}".strip() + " (command line)",
        do=f"for example {examples[option]}",
    )


def _task_of(options: dict[str, str]) -> tuple[str | None, int | None]:
    """Role and index; there is one chief, which needs no index."""
    if not options:
        return None, None
    from hvps.problems import did_you_mean
    from hvps.task_cluster import ROLES

    role, index = options.get("--role"), options.get("--index")
    received = " ".join(f"{name} {value}".strip() for name, value in options.items())
    received = f"{received} (command line)"
    if role == "chief" and index is None:
        index = "0"
    if role is None or index is None:
        raise ConfigError(
            f"{'--role' if role is None else '--index'}: missing",
            rule="--role and --index together say which task this process is",
            received=received,
            do="for example --role worker --index 0",
        )
    if role not in ROLES:
        raise ConfigError(
            "--role: no such role",
            rule=f"one of {', '.join(ROLES)}",
            received=received,
            do=did_you_mean(role, ROLES) or "for example --role worker",
        )
    if not (index.isascii() and index.isdigit() and len(index) < 10):
        raise ConfigError(
            "--index: not an index",
            rule="an integer >= 0: the task's place among those of its role",
            received=received,
            do=f"for example --role {role} --index 0",
        )
    return role, int(index)


def _command(prog: str) -> str:
    """`hvps config` as it is; `hvps.train` as the user types it."""
    return f"python -m {prog}" if "." in prog and " " not in prog else prog


def _unknown_option(argument: str, prog: str) -> ConfigError:
    name = argument.lstrip("-")
    do = f"see {_command(prog)} --help"
    key, equals, value = name.partition("=")
    if key in ("role", "index"):
        do = "leave it out: only the programs that train are one task of a cluster"
    elif key:
        from hvps.config_validate import find_key

        known = find_key(key.replace("-", "_"))
        if known:
            do = f"write {known}={value if equals else '...'}"
    known_options = [*_options_of(prog), *_flags_of(prog), "--help"]
    listed = ", ".join(known_options[:-1]) + " and " if len(known_options) > 1 else ""
    return ConfigError(
        f"{argument}: unknown option",
        rule="values are given as section.key=value, without dashes; the only option"
        + (f"s are {listed}--help" if listed else " is --help"),
        received=f"{argument} (command line)",
        do=do,
    )


def help_text(prog: str, description: str) -> str:
    """Usage, examples, and every key with its default and meaning."""
    command, trains = _command(prog), _trains(prog)
    examples = _LAUNCH if "launch" in prog else _ANY + (_TRAIN if trains else "")
    usage = "[CONFIG] [section.key=value ...]" + (" [--role ROLE --index N]" if trains else "")
    if _launches(prog):
        usage = f"[-np N] [-H HOST:SLOTS,...] [options] {usage}"
    return "\n".join(
        [
            f"usage: {command} {usage}\n",
            f"{description}\n",
            "  CONFIG             a YAML file; without it the defaults below",
            "  section.key=value  replaces one value of it",
            _TASK_HELP if trains else _LAUNCH_HELP if _launches(prog) else "",
            _EXAMPLES.format(examples=examples.format(prog=command)),
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
