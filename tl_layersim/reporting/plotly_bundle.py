"""Partial bundle of plotly.js: the script that plotly ships, without the trace types that a page does not draw.

plotly.js is built by esbuild as one function whose statements are modules, `var name = wrapper((exports, module) => {...});`,
and one of them registers the trace types. The bundle keeps the statements that the remaining trace types can reach by name. A
name in use is never taken for unused: every identifier in a kept statement counts as a reference, also if it names a local
variable.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache

BUNDLE = re.compile(r"var Plotly\s*=\s*\(\(\)\s*=>\s*\{")
REGISTER = re.compile(r"\.register\(\[((?:[\w$]+\(\),?)+)\]\)")
NAME_OF_TRACE = re.compile(r'moduleType:"trace",name:"(\w+)"')
RE_EXPORT = re.compile(r"\.exports=([\w$]+)\(\)\}\);\s*$")
# Identifiers, and not properties such as `.name`.
IDENTIFIER = re.compile(r"(?:(?<=\.\.\.)|(?<![.\w$]))[A-Za-z_$][\w$]*")
# `call(name, ...);` at the top level adds exports to what `name` declares.
CALLED = re.compile(r"\s*[\w$]+\(([\w$]+),")
DECLARATIONS = ("var", "let", "const", "function", "async", "class")
OPENING = {")": "(", "]": "[", "}": "{"}
# What a scan for brackets must skip as a whole (strings, templates, comments, regular expressions), then words and punctuation.
TOKEN = re.compile(
    r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`(?:[^`\\$]|\\.|\$(?!\{)|\$\{(?:[^{}`]|`[^`]*`|\{[^{}]*\})*\})*`"""
    r"|//[^\n]*|/\*.*?\*/"
    r"|(?:(?<=[=(,:;!&|?{}\[+\n>~^-])|(?<=return)|(?<=case )|(?<=typeof ))/(?![*/])(?:[^/\\\[\n]|\\.|\[(?:[^\]\\\n]|\\.)*\])+/"
    r"|[(){}\[\];,]|[\w$]+",
    re.DOTALL,
)


class UnknownStructure(ValueError):
    """The script is not built as this module expects."""


@dataclass(frozen=True)
class Statement:
    """A statement at the top level of the bundle.

    Attributes:
        text: with its semicolon.
        keyword: `var`, `function` or another first word.
        names: that it declares.
    """

    text: str
    keyword: str
    names: frozenset[str]


@cache
def plotly_bundle(types: frozenset[str]) -> str:
    """plotly.js with the given trace types; all of plotly.js where a later version is built in another way.

    Args:
        types: of traces, such as `heatmap`; `scatter` is always part of plotly.js.
    """
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    try:
        return without_other_types(script, types - {"scatter"})
    except UnknownStructure:
        return script


def without_other_types(script: str, types: frozenset[str]) -> str:
    """The script without trace types other than the given ones.

    Args:
        script: plotly.min.js.
        types: of traces, without `scatter`.

    Raises:
        UnknownStructure: the script has another structure, or lacks a type.
    """
    head, statements, tail = split_statements(script)
    declared: dict[str, list[int]] = defaultdict(list)
    for number, statement in enumerate(statements):
        for name in statement.names:
            declared[name].append(number)
    entry, registered = _registration(statements)
    calls = registered.group(1)
    names = {call: _trace_type(call, statements, declared) for call in calls.replace("()", "").split(",")}
    kept = [call for call, name in names.items() if name in types]
    if len(kept) != len(types):
        raise UnknownStructure(f"it registers {sorted(map(str, names.values()))}")
    texts = [statement.text for statement in statements]
    texts[entry] = texts[entry].replace(calls, ",".join(f"{call}()" for call in kept))
    used = _reachable(texts, statements, declared, entry)
    return head + "".join(texts[number] for number in sorted(used)) + tail


def split_statements(script: str) -> tuple[str, list[Statement], str]:
    """The text before the statements of the bundle, these statements, and the text after them.

    Args:
        script: plotly.min.js.

    Raises:
        UnknownStructure: there is no such bundle, or its brackets do not match.
    """
    start = BUNDLE.search(script)
    if start is None:
        raise UnknownStructure("it does not define Plotly")
    statements: list[Statement] = []
    begin, keyword, last, names, brackets = start.end(), "", "", set[str](), list[str]()
    for match in TOKEN.finditer(script, begin):
        token = match.group()
        if token in ("(", "[", "{"):
            brackets.append(token)
        elif token in OPENING:
            if not brackets:
                if script[begin : match.start()].strip():
                    raise UnknownStructure("its last statement does not end")
                return script[: start.end()], statements, script[match.start() :]
            if brackets.pop() != OPENING[token]:
                raise UnknownStructure(f"brackets do not match at {match.start()}")
        elif not brackets and token[0] not in "\"'`/;,":
            keyword = keyword or token
            if last in (",", *DECLARATIONS):
                names.add(token)
        # Within brackets a comma separates no declarations.
        last = "" if brackets else token
        if not brackets and (token == ";" or (token == "}" and keyword in ("function", "async", "class"))):
            statements.append(Statement(script[begin : match.end()], keyword, frozenset(names)))
            begin, keyword, last, names = match.end(), "", "", set()
    raise UnknownStructure("it does not end")


def _registration(statements: list[Statement]) -> tuple[int, re.Match[str]]:
    """The statement that registers trace types, and the longest such call in it."""
    found = [(number, match) for number, one in enumerate(statements) for match in REGISTER.finditer(one.text)]
    if not found:
        raise UnknownStructure("it registers no trace types")
    return max(found, key=lambda pair: len(pair[1].group()))


def _trace_type(call: str, statements: list[Statement], declared: dict[str, list[int]]) -> str | None:
    """The trace type that a module defines or re-exports; None for another kind of module."""
    if len(declared[call]) != 1:
        raise UnknownStructure(f"{call} is declared {len(declared[call])} times")
    text = statements[declared[call][0]].text
    own, other = NAME_OF_TRACE.search(text), RE_EXPORT.search(text)
    if own is not None:
        return own.group(1)
    return None if other is None or other.group(1) == call else _trace_type(other.group(1), statements, declared)


def _reachable(texts: list[str], statements: list[Statement], declared: dict[str, list[int]], entry: int) -> set[int]:
    """The statements that the entry and the statements without declarations reach by name."""
    additions: dict[int, list[int]] = defaultdict(list)
    others = [number for number, statement in enumerate(statements) if statement.keyword not in DECLARATIONS]
    for number in tuple(others):
        call = CALLED.match(texts[number])
        if call is not None and call.group(1) in declared:
            others.remove(number)
            for owner in declared[call.group(1)]:
                additions[owner].append(number)
    used: set[int] = set()
    waiting = [entry, *others]
    while waiting:
        number = waiting.pop()
        if number not in used:
            used.add(number)
            waiting += additions[number]
            for name in set(IDENTIFIER.findall(texts[number])) & declared.keys():
                waiting += declared[name]
    return used
