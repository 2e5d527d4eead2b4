"""Measures of the package's structure: imports, cycles, names used twice."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "tl_layersim"
# A package imports only from packages listed before it.
ORDER = (
    "core",
    "data",
    "architectures",
    "activations",
    "sources",
    "lens",
    "jacobians",
    "analyzers",
    "remote",
    "engine",
    "user_loops",
    "many",
    "prompts",
    "costs",
    "vision",
    "stitching",
    "early_exit",
    "training",
    "reporting",
    "demo",
    "commands",
)
# Results draw themselves: a method may import `reporting` when it is called.
DRAWING = "reporting"
# Commands call the public functions of the package.
CALLER = "commands"


@dataclass(frozen=True)
class Import:
    """One import of a module of this package by another.

    Attributes:
        module: the importing module, dotted, without the package's name.
        target: the imported module, in the same form.
        name: the name taken from it, "" for the module itself.
        in_function: whether the import stands inside a function.
    """

    module: str
    target: str
    name: str
    in_function: bool

    def __str__(self) -> str:
        return f"{self.module} imports {self.target}.{self.name}".rstrip(".")


def files() -> list[Path]:
    """Every module of the package."""
    return sorted(PACKAGE.rglob("*.py"))


def dotted(path: Path) -> str:
    """The dotted name of a module: `activations/view.py` is `activations.view`."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a module."""
    return ast.parse(path.read_text())


@functools.cache
def imports() -> list[Import]:
    """Every import inside the package, those in functions and for type checkers included."""
    known, found = {dotted(path) for path in files()}, []
    for path in files():
        tree = parsed(path)
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        inside = {id(node) for function in functions for node in ast.walk(function)}
        parts = path.relative_to(PACKAGE).parts
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            target = ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{target}.{alias.name}".lstrip(".")
                is_module = submodule in known
                place = (submodule, "") if is_module else (target, alias.name)
                found.append(Import(dotted(path), *place, id(node) in inside))
    return found


def package_of(module: str) -> str:
    """The top-level package of a dotted module."""
    return module.split(".")[0]


def _draws(item: Import) -> bool:
    return package_of(item.target) == DRAWING and item.in_function


def wrong_way() -> list[str]:
    """Imports against the order of packages."""
    found = set()
    for item in imports():
        here, there = package_of(item.module), package_of(item.target)
        if here == there or here in ("", "__init__", "cli") or _draws(item):
            continue
        if here == CALLER and there == "":
            continue
        if there not in ORDER or ORDER.index(there) >= ORDER.index(here):
            found.add(str(item))
    return sorted(found)


def cycles() -> list[str]:
    """Groups of modules that import one another (strongly connected components, by Tarjan's algorithm)."""
    graph: dict[str, set[str]] = defaultdict(set)
    for item in imports():
        if not _draws(item) and item.module not in ("", "__init__"):
            graph[item.module].add(item.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[str] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            group: list[str] = []
            while not group or group[-1] != node:
                group.append(stack.pop())
            if len(group) > 1 or node in graph[node]:
                found.append(" <-> ".join(sorted(group)))

    for node in list(graph):
        if node not in index:
            visit(node)
    return found


def private_imports() -> list[str]:
    """Names that begin with an underscore and are imported from another module, or from a private module of another package."""
    found = set()
    for item in imports():
        foreign = package_of(item.module) != package_of(item.target)
        if item.name.startswith("_") or (foreign and "._" in item.target):
            found.add(str(item))
    return sorted(found)


def files_with(pattern: str) -> list[str]:
    """Modules whose text contains a regular expression."""
    return [dotted(path) for path in files() if re.search(pattern, path.read_text())]


def exceptions_in(modules: list[str]) -> list[str]:
    """Exception classes that these modules define."""
    found = []
    for path in files():
        for node in parsed(path).body if dotted(path) in modules else ():
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            if isinstance(node, ast.ClassDef) and any(base.endswith(("Exception", "Error")) for base in bases):
                found.append(f"{dotted(path)}.{node.name}")
    return found


def _is_type_variable(value: ast.expr) -> bool:
    return isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "TypeVar"


def two_meanings() -> list[str]:
    """Public classes, functions and constants that two modules define under one name; type variables are no such names."""
    homes: dict[str, set[str]] = defaultdict(set)
    for path in files():
        for node in parsed(path).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            if isinstance(node, ast.Assign) and not _is_type_variable(node.value):
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            for name in names:
                if not name.startswith("_"):
                    homes[name].add(dotted(path))
    return [f"{name}: {', '.join(sorted(where))}" for name, where in sorted(homes.items()) if len(where) > 1]


def top_level() -> tuple[list[str], list[str]]:
    """Packages of the top level, and modules beside them."""
    packages = sorted(path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file())
    return packages, sorted(path.name for path in PACKAGE.glob("*.py"))
