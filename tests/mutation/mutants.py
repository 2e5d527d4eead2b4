"""Mutants of a source file: one node of its syntax tree changed at a time, as a piece of text that replaces another."""

from __future__ import annotations

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.MatMult: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


@dataclass(frozen=True)
class Mutant:
    """One change of one file.

    Attributes:
        path: of the file.
        kind: what was changed: comparison, arithmetic, boolean, not, constant, branch or deletion.
        line: where, from 1.
        function: qualified name of the innermost function around it, "" at the level of the module or of a class.
        source: the whole changed file.
        diff: unified, without context.
    """

    path: Path
    kind: str
    line: int
    function: str
    source: str
    diff: str

    @property
    def key(self) -> str:
        """The lines before and after, which stay when the code around them moves."""
        changed = self.diff.splitlines()[3:]
        return "\n".join(line[0] + " " + " ".join(line[1:].split()) for line in changed)


def mutants_of(path: Path, name: str) -> list[Mutant]:
    """All mutants of a file, in the order of its text; those that give the same text once.

    Args:
        path: the file.
        name: what diffs call it.
    """
    text = path.read_text()
    lines = text.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    raw = text.encode()
    found: dict[str, Mutant] = {}
    for kind, node, function, new in _changes(ast.parse(text), ""):
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        source = (raw[:begin] + new.encode() + raw[end:]).decode()
        diff = "\n".join(difflib.unified_diff(text.splitlines(), source.splitlines(), name, name, lineterm="", n=0))
        if diff:
            found.setdefault(source, Mutant(path, kind, node.lineno, function, source, diff))
    return list(found.values())


def _changes(node: ast.AST, function: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str, str]]:
    """Kind, node, function around it and new text of every change below a node."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        inside = f"{function}.{node.name}" if function else node.name
        names = inside if isinstance(node, ast.ClassDef) else f"{inside}.<locals>"
        # Decorators and annotations are left alone.
        for default in [] if isinstance(node, ast.ClassDef) else [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            yield from _changes(default, names)
        for child in node.body:
            yield from _changes(child, names)
        return
    # The position of what is inside an f-string is not known; what is raised is a message.
    if isinstance(node, ast.JoinedStr):
        return
    if isinstance(node, ast.Raise):
        yield "deletion", node, function, "pass"
        return
    if isinstance(node, ast.Expr):
        if isinstance(node.value, ast.Constant):
            return
        if isinstance(node.value, ast.Call):
            yield "deletion", node, function, "pass"
    if isinstance(node, ast.AugAssign) or (
        isinstance(node, ast.Assign) and all(isinstance(target, ast.Subscript) for target in node.targets)
    ):
        yield "deletion", node, function, "pass"
    if isinstance(node, ast.AnnAssign):
        if node.value is not None:
            yield from _changes(node.value, function)
        return
    if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
        return
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield "branch", node.test, function, f"(not ({ast.unparse(node.test)}))"
    if isinstance(node, ast.comprehension):
        for test in node.ifs:
            yield "branch", test, function, f"(not ({ast.unparse(test)}))"
    if isinstance(node, ast.expr | ast.stmt):
        for kind, changed in _variants(node):
            text = ast.unparse(changed)
            yield kind, node, function, f"({text})" if isinstance(node, ast.expr) else text
    for child in ast.iter_child_nodes(node):
        yield from _changes(child, function)


def _variants(node: ast.expr | ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    """Copies of a node with an operator or a constant of its own changed."""
    match node:
        case ast.Compare():
            for place, op in enumerate(node.ops):
                for other in COMPARISONS[type(op)]:
                    changed = copy.deepcopy(node)
                    changed.ops[place] = other()
                    yield "comparison", changed
        case ast.BinOp() | ast.AugAssign() if type(node.op) in ARITHMETIC:
            changed_op = copy.deepcopy(node)
            changed_op.op = ARITHMETIC[type(node.op)]()
            yield "arithmetic", changed_op
        case ast.BoolOp():
            changed_bool = copy.deepcopy(node)
            changed_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            yield "boolean", changed_bool
        case ast.UnaryOp():
            yield "not" if isinstance(node.op, ast.Not) else "arithmetic", node.operand
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            for value in dict.fromkeys((node.value + 1, node.value - 1, 0)):
                if value != node.value:
                    yield "constant", ast.Constant(value)
