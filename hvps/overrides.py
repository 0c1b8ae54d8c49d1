"""From a YAML file and `a.b=c` overrides to a checked Config, remembering who set each value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hvps
from hvps.config import Config, leaf_fields
from hvps.config_validate import validate
from hvps.problems import (
    DEFAULT,
    Problem,
    did_you_mean,
    fail,
    nearest_origin,
    raise_problems,
    show,
)
from hvps.yaml_text import YamlError, YamlTree, parse_yaml

COMMAND_LINE = "command line"
_YAML_ENDINGS = ("", ".yaml", ".yml")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where it came from.

    Attributes:
        config: the values.
        origins: for each dotted key "default", "FILE:LINE" or "command line".
        path: the file, None if there was none.
    """

    config: Config
    origins: Mapping[str, str]
    path: Path | None

    @property
    def name(self) -> str:
        """Of the file, without its ending; "default" without a file. Runs are named after it."""
        return self.path.stem if self.path else "default"

    def origin(self, key: str) -> str:
        """Who set this key, or the nearest part of the tree around it."""
        return nearest_origin(self.origins, key)

    def received(self, key: str, value: object) -> str:
        """`'many' (configs/x.yaml:7)`: a value and its origin, for a message."""
        return f"{show(value)} ({self.origin(key)})"

    def remove(self, key: str, section: str) -> str:
        """What to do about a key that does not belong, in words."""
        origin = self.origin(key)
        if origin == COMMAND_LINE:
            return "remove it"
        return f"remove it ({origin}), or drop the whole section of the file with {section}=null"


@dataclass
class RawTree:
    """What the user wrote, before it is checked; filled source by source."""

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    clashes: list[Problem] = field(default_factory=list)

    def merge(
        self, key: str, value: Any, origin: Mapping[str, str], plain: Mapping[str, str]
    ) -> None:
        """Lay a value over the tree: mappings key by key, null empties one, others replace."""
        parts = key.split(".") if key else []
        parent: Any = self.values
        for count, part in enumerate(parts[:-1], 1):
            if not isinstance(parent.get(part), dict):
                if parent.get(part) is not None:
                    self._note_clash(".".join(parts[:count]), parent[part], key)
                parent[part] = {}
            parent = parent[part]
        if isinstance(value, dict) and (not parts or isinstance(parent.get(parts[-1]), dict)):
            for name, inner in value.items():
                if not isinstance(name, str) or "." in name:
                    # Cannot be a key of ours; kept as it is, for the check to name it.
                    (parent[parts[-1]] if parts else parent)[name] = inner
                    self._note(f"{key}.{name}".lstrip("."), origin, plain)
                else:
                    self.merge(f"{key}.{name}".lstrip("."), inner, origin, plain)
            if parts:
                self.origins.setdefault(key, nearest_origin(origin, key))
            return
        if not parts:
            return
        emptied = value is None and isinstance(parent.get(parts[-1]), dict)
        parent[parts[-1]] = {} if emptied else value
        self._note(key, origin, plain)

    def _note_clash(self, outer: str, value: Any, key: str) -> None:
        self.clashes.append(
            Problem(
                f"{outer}: a value, but {key} takes it for a section",
                "a key has either a value or keys of its own",
                f"{show(value)} ({nearest_origin(self.origins, outer)})",
                "remove one of the two",
            )
        )

    def _note(self, key: str, origin: Mapping[str, str], plain: Mapping[str, str]) -> None:
        def inside(name: str) -> bool:
            return name == key or name.startswith((key + ".", key + "["))

        new_origins = {name: text for name, text in origin.items() if inside(name)}
        new_origins.setdefault(key, nearest_origin(origin, key))
        new_plain = {name: text for name, text in plain.items() if inside(name)}
        for notes, new in ((self.origins, new_origins), (self.plain, new_plain)):
            for old in [name for name in notes if inside(name)]:
                del notes[old]
            notes.update(new)


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read the file, lay the overrides over it in their order, and check the result.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong; all problems are named.
    """
    tree = RawTree()
    file = _found(Path(path)) if path is not None else None
    if file is not None:
        _read_file(tree, file)
    problems: list[Problem] = []
    for text in overrides:
        try:
            _apply_override(tree, text)
        except _OverrideError as err:
            problems.append(err.problem)
    config, found = validate(tree.values, tree.origins, tree.plain)
    raise_problems([*problems, *tree.clashes, *found])
    assert config is not None  # there would have been problems
    origins = {
        key: DEFAULT if _is_unset(tree.values, key) else nearest_origin(tree.origins, key)
        for key, _ in leaf_fields()
    }
    origins.update(_free_origins(tree.origins, "optimizer", config.optimizer.arguments()))
    origins.update(_free_origins(tree.origins, "task_args", config.task_args))
    origins.update(_free_origins(tree.origins, "backend.cluster", config.backend.cluster or {}))
    return LoadedConfig(config, origins, file)


def _found(path: Path) -> Path:
    """The file itself, or from any other folder the one of that name that comes with hvps."""
    shipped = Path(hvps.__file__).parent.parent / path
    is_shipped = path.parts[:1] == ("configs",) and shipped.is_file()
    return shipped if is_shipped and not path.exists() else path


def _is_unset(values: Mapping[str, Any], key: str) -> bool:
    inner: Any = values
    for part in key.split("."):
        if not isinstance(inner, dict) or part not in inner:
            return True
        inner = inner[part]
    return False


def _free_origins(origins: Mapping[str, str], key: str, value: Mapping[Any, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, inner in value.items():
        dotted = f"{key}.{name}"
        found[dotted] = nearest_origin(origins, dotted)
        if isinstance(inner, dict):
            found.update(_free_origins(origins, dotted, inner))
    return found


def _read_file(tree: RawTree, path: Path) -> None:
    try:
        parsed = parse_yaml(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        fail(
            f"CONFIG: there is no file {path}",
            "the first argument without '=' is a YAML file",
            None,
            _near_files(path),
        )
    except OSError as err:
        fail(f"CONFIG: cannot read {path}: {err.strerror}", "a readable YAML file", None, None)
    except UnicodeDecodeError as err:
        fail(f"{path}: not UTF-8 text", "a YAML file in UTF-8", f"byte {err.start}", None)
    except YamlError as err:
        where = f"{path}:{err.line}" if err.line else str(path)
        fail(f"{where}: not valid YAML: {err}", "one YAML 1.2 mapping, each key once", None, None)
    if parsed.value is None:
        return  # an empty file: all defaults
    if not isinstance(parsed.value, dict):
        kind = "a list" if isinstance(parsed.value, list) else f"the value {parsed.value!r}"
        fail(
            f"{path}: not a mapping of keys at the top",
            "sections and keys, as `hvps config` prints them",
            f"{kind} ({path}:{parsed.lines.get('', 1)})",
            None,
        )
    tree.merge("", parsed.value, _file_origins(path, parsed), parsed.plain)


def _file_origins(path: Path, parsed: YamlTree) -> dict[str, str]:
    return {key: f"{path}:{line}" for key, line in parsed.lines.items() if key}


def _near_files(path: Path) -> str:
    """Names of YAML files that may have been meant, in the same folder and in configs/."""
    for folder in dict.fromkeys((path.parent, Path("configs"))):
        for ending in _YAML_ENDINGS:
            exact = folder / (path.name + ending)
            if exact.is_file():
                return f"did you mean {exact}?"
    found: dict[str, Path] = {}
    for folder in dict.fromkeys((path.parent, Path("configs"))):
        if folder.is_dir():
            for file in sorted(folder.iterdir()):
                if file.suffix in (".yaml", ".yml"):
                    found.setdefault(file.stem, file)
    near = did_you_mean(path.stem, found)
    if near:
        stem = near.removeprefix("did you mean ").removesuffix("?")
        return f"did you mean {found[stem]}?"
    names = ", ".join(str(file) for file in found.values())
    return f"there are: {names}" if names else "leave it out to use the defaults"


class _OverrideError(Exception):
    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.what)
        self.problem = problem


def _apply_override(tree: RawTree, text: str) -> None:
    key, equals, value_text = text.partition("=")
    rule = "section.key=value, for example train.epochs=3"
    received = f"{text!r} ({COMMAND_LINE})"
    if not equals:
        raise _OverrideError(Problem(f"{text}: an override without '='", rule, received))
    if not re.fullmatch(r"[A-Za-z_][\w-]*(\.[\w-]+)*", key):
        what = f"{key or 'override'}: not a dotted key"
        raise _OverrideError(Problem(what, rule, received))
    if not value_text.strip():
        do = f"to set no value write {key}=null; for an empty text {key}='\"\"'"
        raise _OverrideError(Problem(f"{key}: no value after '='", rule, received, do))
    try:
        parsed = parse_yaml(value_text)
    except YamlError as err:
        what = f"{key}: the value is not valid YAML: {err}"
        do = "put quotes around text with special characters: key='\"...\"'"
        raise _OverrideError(Problem(what, None, received, do)) from None
    plain = {f"{key}.{name}" if name else key: text for name, text in parsed.plain.items()}
    tree.merge(key, parsed.value, {"": COMMAND_LINE}, plain)
