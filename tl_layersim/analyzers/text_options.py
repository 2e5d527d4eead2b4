"""Options of analyzers as text, such as `cka.minibatch=128` on the command line."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

from ..core.errors import LayersimError
from .analyzer import Analyzer


def with_options(analyzers: Mapping[str, Analyzer], settings: Sequence[str]) -> dict[str, Analyzer]:
    """The analyzers with some of their options set from text.

    Args:
        analyzers: the analyzers, by name.
        settings: settings of the form `name.option=value`. A value is written as in Python or JSON; text needs no quotation
            marks.

    Raises:
        LayersimError: a setting does not have this form, or names an analyzer or option that does not exist.

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
                f"`--option` is {setting!r}; it must have the form name.option=value, such as cka.minibatch=128."
            )
        name, option, text = match.groups()
        if name not in analyzers:
            raise LayersimError(f"`--option` is {setting!r}; the analyzers of this run are {', '.join(sorted(analyzers))}.")
        known = [field.name for field in fields(analyzers[name])]  # type: ignore[arg-type]  # analyzers are dataclasses
        if option not in known:
            raise LayersimError(f"`--option` is {setting!r}; the options of {name} are {', '.join(sorted(known))}.")
        values[name][option] = _value(text)
    return {name: replace(analyzer, **values[name]) for name, analyzer in analyzers.items()}  # type: ignore[type-var]


def as_settings(analyzer: Analyzer) -> list[str]:
    """The options of an analyzer as text, from which `with_options` makes the same analyzer.

    Args:
        analyzer: an analyzer. An option that text cannot hold, such as heads that were read from a file, is left out.

    Examples:
        >>> from .cosine import Cosine
        >>> as_settings(Cosine(center="none"))[0]
        'cosine.center=none'
    """
    options = {field.name: getattr(analyzer, field.name) for field in fields(analyzer)}  # type: ignore[arg-type]  # dataclasses
    texts = {name: value if isinstance(value, str) else repr(value) for name, value in options.items()}
    return [f"{analyzer.name}.{name}={text}" for name, text in texts.items() if repr(_value(text)) == repr(options[name])]


def _value(text: str) -> Any:
    """Parse a value written as in JSON or Python; return any other text unchanged."""
    for read in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError):
            return read(text)
    return text
