"""Reads Python modules without importing them: where a module is, what a class has and takes.

Importing a task would import TensorFlow, which takes seconds on each of many processes. So the
sources are parsed. Where the sources do not say (C extensions, generated code, decorators), the
answer is "unknown", and unknown is accepted.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder

_MAX_BASES = 40  # bases followed before giving up, against cycles


@dataclass
class Module:
    """A module's source, parsed.

    Attributes:
        name: its dotted name.
        file: its source file.
        tree: the parsed source.
        is_package: True for an __init__.py.
    """

    name: str
    file: str
    tree: ast.Module
    is_package: bool
    names: dict[str, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.names = dict(_bound_names(self.tree.body))

    @property
    def is_open(self) -> bool:
        """True if the module may have names that its source does not show."""
        return "*" in self.names or "__getattr__" in self.names


@dataclass(frozen=True)
class ClassSource:
    """A class and the module that it stands in."""

    module: Module
    node: ast.ClassDef


@dataclass
class Signature:
    """The arguments a class takes by name.

    Attributes:
        defaults: for each argument its default, a source expression; None if it has no default.
        takes_any: True if there is a `**kwargs`.
        annotations: the annotations that are there, as source text.
    """

    defaults: dict[str, ast.expr | None]
    takes_any: bool = False
    annotations: dict[str, str] = field(default_factory=dict)

    @property
    def required(self) -> list[str]:
        return [name for name, default in self.defaults.items() if default is None]


class SourceReader:
    """Finds and parses modules, each once.

    Args:
        path: the folders to search, like sys.path.
    """

    def __init__(self, path: Sequence[str]) -> None:
        self._path = list(path)
        self._modules: dict[str, Module | None] = {}
        self._specs: dict[str, ModuleSpec | None] = {}

    def find(self, name: str) -> ModuleSpec | None:
        """Where a module is, None if there is none; no parent package is executed."""
        if name not in self._specs:
            self._specs[name] = self._find(name)
        return self._specs[name]

    def _find(self, name: str) -> ModuleSpec | None:
        parent, _, _ = name.rpartition(".")
        if not parent:
            spec = PathFinder.find_spec(name, self._path)
            if spec is not None:
                return spec
            # The finders of editable installs and of built-in modules; they import nothing.
            for finder in sys.meta_path:
                find_spec = getattr(finder, "find_spec", None)
                if finder is not PathFinder and find_spec is not None:
                    spec = find_spec(name, None, None)
                    if isinstance(spec, ModuleSpec):
                        return spec
            return None
        outer = self.find(parent)
        if outer is None or outer.submodule_search_locations is None:
            return None
        return PathFinder.find_spec(name, list(outer.submodule_search_locations))

    def read(self, name: str) -> Module | None:
        """Parse a module; None if it does not exist or has no Python source.

        Raises:
            SyntaxError: the source is not Python.
        """
        if name not in self._modules:
            self._modules[name] = None  # if parsing fails, it is reported once
            spec = self.find(name)
            if spec is not None:
                self._modules[name] = _parse(name, spec)
        return self._modules[name]

    def lookup(self, module: Module, name: str, depth: int = 0) -> ClassSource | ast.AST | None:
        """What a name of a module is, followed through imports.

        Returns:
            a ClassSource; or the statement that binds the name, where it is not (known to be) a
            class; or None if the module has no such name.
        """
        node = module.names.get(name)
        if isinstance(node, ast.ClassDef):
            return ClassSource(module, node)
        if isinstance(node, ast.ImportFrom) and depth < _MAX_BASES:
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            source = self._read_quietly(absolute_name(module, node))
            if source is not None:
                found = self.lookup(source, alias.name, depth + 1)
                return found if isinstance(found, ClassSource) else node
            return node
        if node is None and module.is_open:
            return module.names.get("*") or module.names.get("__getattr__")
        return node

    def _read_quietly(self, name: str) -> Module | None:
        try:
            return self.read(name)
        except SyntaxError:
            return None

    def base_of(self, source: ClassSource, base: ast.expr) -> ClassSource | None:
        """The class that a base expression means, None if that is not known."""
        if isinstance(base, ast.Subscript):  # Generic[T]
            base = base.value
        parts = dotted(base).split(".")
        if not parts[0]:
            return None
        module: Module | None = source.module
        for part in parts[:-1]:
            module = self._module_named(module, part) if module else None
        found = self.lookup(module, parts[-1]) if module else None
        return found if isinstance(found, ClassSource) and found.node is not source.node else None

    def _module_named(self, module: Module, name: str) -> Module | None:
        """The module that a name of this module stands for."""
        node = module.names.get(name)
        if isinstance(node, ast.Import):
            alias = next(a for a in node.names if (a.asname or a.name.split(".")[0]) == name)
            return self._read_quietly(alias.name if alias.asname else name)
        if isinstance(node, ast.ImportFrom):
            alias = next(a for a in node.names if (a.asname or a.name) == name)
            return self._read_quietly(f"{absolute_name(module, node)}.{alias.name}")
        if node is None and module.is_package:  # import a.b makes b a name of a
            return self._read_quietly(f"{module.name}.{name}")
        return None

    def _bases(self, source: ClassSource) -> tuple[list[ClassSource], bool]:
        """The bases that are known, and whether those are all."""
        expressions = [
            base
            for base in source.node.bases
            if dotted(base).rpartition(".")[2] not in ("object", "Protocol", "ABC")
            and not dotted(getattr(base, "value", base)).endswith(("Generic", "Protocol"))
        ]
        found = [self.base_of(source, base) for base in expressions]
        known = [base for base in found if base is not None]
        return known, len(known) == len(found)

    def lineage(self, source: ClassSource) -> tuple[list[ClassSource], bool]:
        """The class and its bases, nearest first, and whether that is all of them."""
        found, waiting, complete = [source], [source], True
        while waiting and len(found) < _MAX_BASES:
            known, all_known = self._bases(waiting.pop(0))
            complete = complete and all_known
            for base in known:
                if all(base.node is not other.node for other in found):
                    found.append(base)
                    waiting.append(base)
        return found, complete and not waiting

    def signature(self, source: ClassSource) -> Signature | None:
        """What the class takes by name, None if that is not known."""
        for current in self.lineage(source)[0]:
            init = _method(current.node, "__init__")
            if init is not None:
                return None if init.decorator_list else _signature_of(init)
            if {"__init__", "__new__"} & {name for name, _ in _bound_names(current.node.body)}:
                return None
            if current.node.decorator_list:
                return self._dataclass_signature(current)
            if not self._bases(current)[1]:
                return None
        return Signature({})

    def _dataclass_signature(self, source: ClassSource) -> Signature | None:
        lineage, complete = self.lineage(source)
        if not complete or not all(_is_dataclass(current.node) for current in lineage[:1]):
            return None
        defaults: dict[str, ast.expr | None] = {}
        for current in reversed(lineage):
            if _is_dataclass(current.node):
                defaults.update(_dataclass_fields(current.node))
        return Signature(defaults)


def _parse(name: str, spec: ModuleSpec) -> Module | None:
    get_source = getattr(spec.loader, "get_source", None)
    file = spec.origin or name
    try:
        source = get_source(name) if get_source is not None else None
        tree = ast.parse(source, file) if source is not None else None
    except (ImportError, OSError, ValueError, RecursionError, SyntaxError) as err:
        if isinstance(err, SyntaxError) and err.filename is not None:
            raise
        # Not UTF-8, a null byte, endless nesting: Python does not say where.
        raise SyntaxError(f"cannot be read: {err}", (file, 1, 0, "")) from None
    if tree is None:
        return None
    return Module(name, file, tree, spec.submodule_search_locations is not None)


def dotted(node: ast.AST) -> str:
    """`a.b.c` for such an expression, "" for any other."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        inner = dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return ""


def absolute_name(module: Module, node: ast.ImportFrom) -> str:
    """The dotted name of the module that a `from ... import` in this module reads."""
    if not node.level:
        return node.module or ""
    parts = module.name.split(".")
    keep = len(parts) - node.level + (1 if module.is_package else 0)
    return ".".join([*parts[: max(keep, 0)], *([node.module] if node.module else [])])


def _bound_names(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """The names that the body of a module or class binds, also inside of if, try and with."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, node
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                for inner in ast.walk(target):
                    if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                        yield inner.id, node
        else:
            for part in ("body", "orelse", "finalbody", "handlers"):
                for inner in getattr(node, part, []):
                    blocks = inner.body if isinstance(inner, ast.ExceptHandler) else [inner]
                    yield from _bound_names(blocks)


def _method(node: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef) and inner.name == name:
            return inner
    return None


def _signature_of(init: ast.FunctionDef) -> Signature:
    positional = [*init.args.posonlyargs, *init.args.args][1:]  # without self
    missing: list[ast.expr | None] = [None] * (len(positional) - len(init.args.defaults))
    defaults: dict[str, ast.expr | None] = {}
    for argument, default in zip(positional, [*missing, *init.args.defaults], strict=False):
        defaults[argument.arg] = default
    for argument, default in zip(init.args.kwonlyargs, init.args.kw_defaults, strict=True):
        defaults[argument.arg] = default
    annotations = {
        argument.arg: ast.unparse(argument.annotation)
        for argument in [*positional, *init.args.kwonlyargs]
        if argument.annotation is not None
    }
    return Signature(defaults, init.args.kwarg is not None, annotations)


def _is_dataclass(node: ast.ClassDef) -> bool:
    if len(node.decorator_list) != 1:
        return False
    decorator = node.decorator_list[0]
    call = decorator if isinstance(decorator, ast.Call) else None
    if call is not None and any(word.arg == "init" for word in call.keywords):
        return False
    return dotted(call.func if call else decorator).rpartition(".")[2] == "dataclass"


def _dataclass_fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    for inner in node.body:
        if not isinstance(inner, ast.AnnAssign) or not isinstance(inner.target, ast.Name):
            continue
        if "ClassVar" in ast.unparse(inner.annotation) or "KW_ONLY" in ast.unparse(
            inner.annotation
        ):
            continue
        value = inner.value
        if isinstance(value, ast.Call) and dotted(value.func).rpartition(".")[2] == "field":
            words = {word.arg: word.value for word in value.keywords}
            flag = words.get("init")
            if isinstance(flag, ast.Constant) and flag.value is False:
                continue
            value = words.get("default") or words.get("default_factory")
        yield inner.target.id, value
