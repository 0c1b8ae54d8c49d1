"""Checks the user's task by its source: that it exists, is complete and takes its arguments."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

from hvps.overrides import LoadedConfig
from hvps.problems import Problem, did_you_mean
from hvps.source_reader import ClassSource, Module, SourceReader, absolute_name, dotted
from hvps.task import REQUIRED_METHODS

# Annotations that say what a YAML value must be, and that in words.
_PLAIN: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "str": ((str,), "text"),
}


def check_task(loaded: LoadedConfig, reader: SourceReader) -> Iterator[Problem]:
    """What is wrong with `task` and `task_args`."""
    module_name, _, class_name = loaded.config.task.partition(":")
    received = loaded.received("task", loaded.config.task)
    parts = module_name.split(".")
    for count in range(1, len(parts) + 1):
        name = ".".join(parts[:count])
        if reader.find(name) is None:
            yield _no_module(reader, name, received)
            return
    broken = list(_import_problems(reader, module_name, received))
    if broken:
        yield from broken
        return
    module = reader.read(module_name)
    if module is None:
        spec = reader.find(module_name)
        if spec is not None and spec.loader is not None and spec.origin is not None:
            return  # compiled: nothing to read
        yield Problem(
            f"task: {module_name} is a folder without an __init__.py",
            "'package.module:Class', where module is a Python file",
            received,
        )
        return
    found = reader.lookup(module, class_name)
    if isinstance(found, ClassSource):
        yield from _check_methods(loaded, reader, found)
        yield from _check_arguments(loaded, reader, found)
    elif found is None or (isinstance(found, ast.FunctionDef) and class_name in module.names):
        yield _no_class(reader, module, class_name, received, found)


def _no_module(reader: SourceReader, name: str, received: str) -> Problem:
    parent, _, last = name.rpartition(".")
    spec = reader.find(parent) if parent else None
    if spec is not None and spec.submodule_search_locations is None:
        return Problem(
            f"task: there is no module {name}",
            "'package.module:Class'",
            received,
            f"{parent} is a file, not a folder with modules",
        )
    folders = spec.submodule_search_locations if spec else [os.getcwd()]
    names = [entry.stem for folder in folders or [] for entry in _python_entries(Path(folder))]
    near = did_you_mean(last, names)
    if near and parent:
        near = near.replace("did you mean ", f"did you mean {parent}.")
    return Problem(
        f"task: there is no module {name}",
        "'package.module:Class', in the current folder or on Python's path",
        received,
        near or f"start from the folder that holds {name.split('.')[0]}, or set PYTHONPATH",
    )


def _python_entries(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        for entry in sorted(folder.iterdir()):
            if entry.suffix == ".py" or (entry / "__init__.py").is_file():
                yield entry


def _no_class(
    reader: SourceReader, module: Module, name: str, received: str, found: object
) -> Problem:
    what = f"task: {name} is a function" if found else f"task: {module.file} has no class {name}"
    classes = [
        known
        for known in module.names
        if known != "*" and isinstance(reader.lookup(module, known), ClassSource)
    ]
    do = did_you_mean(name, classes) if found is None else None
    if do is None:
        do = f"its classes: {', '.join(classes)}" if classes else "define the class there"
    return Problem(what, "'package.module:Class', a class of that module", received, do)


def _import_problems(
    reader: SourceReader, name: str, received: str, seen: set[str] | None = None
) -> Iterator[Problem]:
    """Syntax errors and missing imports of the module, its packages, and the files next to it."""
    seen = set() if seen is None else seen
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        inner = ".".join(parts[:count])
        if inner in seen:
            continue
        seen.add(inner)
        try:
            module = reader.read(inner)
        except SyntaxError as err:
            yield Problem(
                f"task: {err.filename}:{err.lineno}: {err.msg}",
                "the task's module is a Python file that can be imported",
                received,
                "correct that line",
            )
            continue
        # Our own modules and installed packages import what they have; the user's are checked.
        if module is not None and parts[0] != "hvps" and "site-packages" not in module.file:
            yield from _imports_of(reader, module, received, seen)


def _imports_of(
    reader: SourceReader, module: Module, received: str, seen: set[str]
) -> Iterator[Problem]:
    for node in module.tree.body:  # not those inside of try, if or a function
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [absolute_name(module, node)]
        else:
            continue
        for name in names:
            relative = isinstance(node, ast.ImportFrom) and node.level > 0
            wanted = name if relative else name.split(".")[0]
            spec = reader.find(wanted) if wanted else None
            if wanted and spec is None:
                yield Problem(
                    f"task: {module.file}:{node.lineno} imports {name}, which is not installed",
                    "the task's module can be imported",
                    received,
                    f"install {wanted}, or correct the import",
                )
            elif spec is not None and spec.origin and _is_near(module.file, spec.origin):
                yield from _import_problems(reader, name, received, seen)


def _is_near(file: str, other: str) -> bool:
    return Path(file).parent in Path(other).parents


def _check_methods(
    loaded: LoadedConfig, reader: SourceReader, source: ClassSource
) -> Iterator[Problem]:
    lineage, complete = reader.lineage(source)
    present = {name for current in lineage for name in _methods(current.node)}
    if "build_optimizer" in present and not loaded.config.optimizer.is_default:
        yield Problem(
            "optimizer: the task builds its own",
            "it comes from the configuration or from the task's build_optimizer(), not from both",
            f"{source.node.name}.build_optimizer, and an optimizer section "
            f"({loaded.origin('optimizer')})",
            "remove the section, or drop it with optimizer=null",
        )
    missing = [name for name in REQUIRED_METHODS if name not in present]
    if missing and complete:
        yield Problem(
            f"task: {source.node.name} lacks {', '.join(missing)}",
            f"a task has the methods {', '.join(REQUIRED_METHODS)}",
            f"{loaded.received('task', loaded.config.task)}, "
            f"{source.module.file}:{source.node.lineno}",
            "add what is missing; hvps/task.py says what each returns",
        )


def _methods(node: ast.ClassDef) -> Iterator[str]:
    """The names that a class body binds, without methods that only declare."""
    for inner in node.body:
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            if not _is_stub(inner):
                yield inner.name
        elif isinstance(inner, ast.Assign):
            yield from (target.id for target in inner.targets if isinstance(target, ast.Name))
        elif isinstance(inner, ast.AnnAssign) and inner.value is not None:
            yield dotted(inner.target)


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    for inner in node.body:
        if isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant):
            continue  # a docstring, or `...`
        if isinstance(inner, ast.Raise) and inner.exc is not None:
            raised = inner.exc.func if isinstance(inner.exc, ast.Call) else inner.exc
            return dotted(raised) == "NotImplementedError"
        return False
    return True


def _check_arguments(
    loaded: LoadedConfig, reader: SourceReader, source: ClassSource
) -> Iterator[Problem]:
    signature = reader.signature(source)
    if signature is None:
        return
    given = loaded.config.task_args
    allowed = ", ".join(signature.defaults) or "none"
    rule = f"the arguments of {source.node.name}: {allowed}"
    for name, value in given.items():
        key = f"task_args.{name}"
        if name in signature.defaults or signature.takes_any:
            wanted = _unfit(value, signature.annotations.get(name, ""))
            if wanted is not None:
                declared = f"{source.node.name} declares {name}: {signature.annotations[name]}"
                what = f"{key}: not {wanted}"
                yield Problem(what, declared, loaded.received(key, value))
            continue
        do = did_you_mean(name, signature.defaults) or loaded.remove(key, "task_args")
        yield Problem(f"{key}: unknown argument", rule, loaded.received(key, value), do)
    for name in signature.required:
        if name not in given:
            yield Problem(
                f"task_args.{name}: missing",
                f"{source.node.name} has no default for it; {rule}",
                f"task_args with {', '.join(given) or 'nothing'}",
                f"give it: task_args.{name}=...",
            )


def _unfit(value: object, annotation: str) -> str | None:
    """What a value should be by its annotation; None if it is, or if that is not plain."""
    kinds = [kind.strip() for kind in annotation.strip("\"'").split("|")]
    if not set(kinds) <= {*_PLAIN, "None"}:
        return None
    for kind in kinds:
        if kind == "None" and value is None:
            return None
        types = _PLAIN.get(kind, ((), ""))[0]
        if isinstance(value, types) and (kind == "bool" or not isinstance(value, bool)):
            return None
    return " or ".join(_PLAIN[kind][1] if kind != "None" else "null" for kind in kinds)
