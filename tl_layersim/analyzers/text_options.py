"""Options of analyzers written as text, such as `cka.minibatch=128` on the command line."""

from __future__ import annotations

import ast
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from ..core.errors import LayersimError
from .base import Analyzer


def with_options(analyzers: Mapping[str, Analyzer], settings: Sequence[str]) -> dict[str, Analyzer]:
    """The analyzers with some of their options set from text.

    Args:
        analyzers: by name.
        settings: each `name.option=value`; the value is written as in Python or JSON, text needs no quotation marks.

    Raises:
        LayersimError: a setting has another form, names an analyzer or option that does not exist, or sets one twice.

    Examples:
        >>> from .cka import CKA
        >>> with_options({"cka": CKA()}, ["cka.minibatch=128"])["cka"].minibatch
        128
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in analyzers}
    for setting in settings:
        match = re.fullmatch(r"(\w+)\.(\w+)=(.*)", setting, re.DOTALL)
        if match is None:
            raise LayersimError(
                "`--option` must have the form name.option=value.",
                given=f"--option {setting}",
                expected="the name of an analyzer, a dot, the name of its option, =, and a value",
                do="--option cka.minibatch=128",
            )
        name, option, text = match.groups()
        _refuse_unknown(
            name,
            list(analyzers),
            setting,
            "an analyzer that is not part of this run",
            f"--analyzers {','.join([*analyzers, name])}",
        )
        known = [field.name for field in fields(analyzers[name])]  # type: ignore[arg-type]  # analyzers are dataclasses
        _refuse_unknown(
            option,
            known,
            setting,
            f"an option that {name} does not have",
            f"help(tl_layersim.{type(analyzers[name]).__name__}) in Python",
        )
        if option in values[name]:
            raise LayersimError(
                "`--option` sets the same option twice.",
                given=", ".join(f"--option {one}" for one in settings if one.startswith(f"{name}.{option}=")),
                expected="one value for each option",
                do="leave out all but one of them",
            )
        values[name][option] = _value(text)
    return {name: replace(analyzer, **values[name]) for name, analyzer in analyzers.items()}  # type: ignore[type-var]


def as_settings(analyzer: Analyzer) -> list[str]:
    """The options of an analyzer as text, from which `with_options` makes the same analyzer.

    Args:
        analyzer: whose options text can hold; any other option, such as heads that were read from a file, is left out.

    Examples:
        >>> from .cosine import Cosine
        >>> as_settings(Cosine(center="none"))[0]
        'cosine.center=none'
    """
    options = {field.name: getattr(analyzer, field.name) for field in fields(analyzer)}  # type: ignore[arg-type]  # dataclasses
    texts = {name: value if isinstance(value, str) else repr(value) for name, value in options.items()}
    return [f"{analyzer.name}.{name}={text}" for name, text in texts.items() if _is(_value(text), options[name])]


def _is(parsed: Any, value: Any) -> bool:
    """Whether a parsed value is that of an option, of the same type."""
    return (
        type(parsed) is type(value) and isinstance(value, (str, int, float, bool, tuple, list, type(None))) and parsed == value
    )


def _value(text: str) -> Any:
    """Parse a value written as in JSON or Python; return any other text unchanged."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(text)
    return text


def _refuse_unknown(name: str, known: list[str], setting: str, what: str, do: str) -> None:
    if name in known:
        return
    near = difflib.get_close_matches(name, known, n=1)
    raise LayersimError(
        f"`--option` names {what}.",
        given=f"--option {setting}",
        expected=f"one of {', '.join(sorted(known))}" if known else "an analyzer that has options",
        do=f"--option {setting.replace(name, near[0], 1)}" if near else do,
    )
