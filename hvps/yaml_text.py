"""YAML with line numbers, by the rules of YAML 1.2: `off` is a word, 1e-3 a number, 010 is ten.

PyYAML follows YAML 1.1, where `progress: off` is false and `1e-3` is text. Its parser is used and
its values are not: scalars are read here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

_TAG = "tag:yaml.org,2002:"
_MAX_NODES = 100_000  # aliases of aliases grow exponentially
_MAX_DEPTH = 50  # PyYAML takes seconds for thousands of open brackets
_RULES = (
    ("null", re.compile(r"~|null|Null|NULL|"), "~nN"),
    ("bool", re.compile(r"true|True|TRUE|false|False|FALSE"), "tTfF"),
    ("int", re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+"), "-+0123456789"),
    (
        "float",
        re.compile(
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
        ),
        "-+.0123456789",
    ),
    ("merge", re.compile(r"<<"), "<"),
)


class YamlError(ValueError):
    """Text that is not acceptable YAML; `line` is 1-based, None where it is unknown."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


class _Loader(yaml.SafeLoader):
    """Finds the nodes; used for composing only."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise YamlError("nested too deeply", self.peek_event().start_mark.line + 1)
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


_Loader.yaml_implicit_resolvers = {}  # its own, in place of those of YAML 1.1
for _name, _pattern, _first in _RULES:
    for _character in [*_first, ""] if _name == "null" else _first:
        _Loader.yaml_implicit_resolvers.setdefault(_character, []).append(
            (_TAG + _name, re.compile(f"(?:{_pattern.pattern})$"))
        )


@dataclass
class YamlTree:
    """A parsed text.

    Attributes:
        value: the plain Python value.
        lines: the line of each dotted key, 1-based.
        plain: the source text of each scalar written without quotes, by dotted key.
    """

    value: Any = None
    lines: dict[str, int] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)


def parse_yaml(text: str) -> YamlTree:
    """Read one YAML document.

    Raises:
        YamlError: it is not YAML, a key is there twice, or a tag asks for a Python object.
    """
    tree = YamlTree()
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            tree.value = _Reader(loader, tree).read(node, "")
    except yaml.MarkedYAMLError as err:
        mark = err.problem_mark or err.context_mark
        words = " ".join(part for part in (err.context, err.problem) if part)
        raise YamlError(words or "not YAML", mark.line + 1 if mark else None) from None
    except yaml.YAMLError as err:
        raise YamlError(str(err).splitlines()[0]) from None
    return tree


class _Reader:
    """Turns nodes into values, noting where each key stands."""

    def __init__(self, loader: _Loader, tree: YamlTree) -> None:
        self._loader = loader
        self._tree = tree
        self._count = 0
        self._open: list[yaml.Node] = []

    def read(self, node: yaml.Node, key: str) -> Any:
        self._count += 1
        line = node.start_mark.line + 1
        if self._count > _MAX_NODES:
            raise YamlError("too large: aliases multiply, or this is not a configuration", line)
        if any(node is outer for outer in self._open):
            raise YamlError("an alias inside of what it stands for", line)
        self._tree.lines.setdefault(key, line)
        if isinstance(node, yaml.ScalarNode):
            if node.style is None:
                self._tree.plain[key] = node.value
            return _scalar(node, line)
        self._open.append(node)
        try:
            if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                return [self.read(item, f"{key}[{i}]") for i, item in enumerate(node.value)]
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                return self._mapping(node, key)
        finally:
            self._open.pop()
        raise YamlError(f"the tag {node.tag} is not allowed", line)

    def _mapping(self, node: yaml.MappingNode, prefix: str) -> dict[Any, Any]:
        seen: dict[Any, int] = {}
        for name, name_node in self._names(node):
            line = name_node.start_mark.line + 1
            if name in seen:
                dotted = f"{prefix}.{name}" if prefix else str(name)
                raise YamlError(f"{dotted} is there twice, first in line {seen[name]}", line)
            seen[name] = line
        self._loader.flatten_mapping(node)  # "<<: *anchor": its pairs come first, ours win
        result: dict[Any, Any] = {}
        for (name, name_node), (_, value_node) in zip(self._names(node), node.value, strict=True):
            dotted = f"{prefix}.{name}" if prefix else str(name)
            self._tree.lines[dotted] = name_node.start_mark.line + 1
            self._tree.plain.pop(dotted, None)
            result[name] = self.read(value_node, dotted)
        return result

    @staticmethod
    def _names(node: yaml.MappingNode) -> Iterator[tuple[Any, yaml.Node]]:
        for name_node, _ in node.value:
            line = name_node.start_mark.line + 1
            if not isinstance(name_node, yaml.ScalarNode):
                raise YamlError("a key must be a word, not a list or a mapping", line)
            yield _scalar(name_node, line), name_node


def _scalar(node: yaml.ScalarNode, line: int) -> Any:
    kind, text = node.tag.removeprefix(_TAG), node.value
    if kind in ("str", "merge"):
        return text
    for name, pattern, _ in _RULES:
        if name == kind and not pattern.fullmatch(text):
            raise YamlError(f"{text!r} is not of the type of its tag !!{kind}", line)
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        if len(text) > 1000:
            raise YamlError("a number of more than 1000 digits", line)
        base = {"0o": 8, "0x": 16}.get(text[:2], 10)
        return int(text, base)
    if kind == "float":
        return float(re.sub(r"\.(?=[a-z])", "", text.lower()))  # Python writes inf, not .inf
    raise YamlError(f"the tag {node.tag} is not allowed", line)


def write_flow(value: Any) -> str:
    """A value on one line of YAML, such that `parse_yaml` reads the same value."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, float):
        text = repr(value)
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(text, text)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{write_flow(k)}: {write_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(write_flow(item) for item in value) + "]"
    text = str(value)
    if re.fullmatch(r"[A-Za-z0-9_./][A-Za-z0-9_./:-]*", text) and not text.endswith(":"):
        # A YAML 1.1 reader would take some words for booleans.
        if text.lower() not in ("yes", "no", "on", "off") and parse_yaml(text).value == text:
            return text
    return _quoted(text)


def _quoted(text: str) -> str:
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
    return (
        '"'
        + "".join(escapes.get(c, c if c.isprintable() else f"\\U{ord(c):08x}") for c in text)
        + '"'
    )
