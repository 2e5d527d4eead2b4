"""`Command`: a command whose errors name its options, where the function that it calls names arguments of Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from typer.core import TyperCommand

from ..core.errors import LayersimError
from .run_file import refuse_from_file

# A value as errors write it after `name=`: a list, a tuple, a quoted text, or a word.
VALUE = r"(\[[^\]]*\]|\([^)]*\)|\"[^\"]*\"|'[^']*'|[^\s,;)\]]+)?"
# A call in Python, whose arguments stay as they are.
CALL = re.compile(r"\w\([^()]*\w=")


class Command(TyperCommand):
    """A command of the command line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            refuse_from_file(ctx)
            return super().invoke(ctx)
        except LayersimError as error:
            flags = {
                str(parameter.name): next(name for name in parameter.opts if name.startswith("--"))
                for parameter in self.params
                if any(name.startswith("--") for name in parameter.opts)
            }
            raise in_options(error, flags) from error


def in_options(error: LayersimError, flags: Mapping[str, str]) -> LayersimError:
    """An error with options of the command line in place of the arguments of Python.

    Args:
        error: of a function.
        flags: option of each argument, such as "--seq-len" of "seq_len".
    """
    what, given, expected, do = (_in_options(text, flags) for text in (error.what, str(error.given), error.expected, error.do))
    if (what, given, expected, do) == (error.what, error.given, error.expected, error.do):
        return error
    return type(error)(what, given=given, expected=expected, do=do)


def _in_options(text: str, flags: Mapping[str, str]) -> str:
    """A text with options in place of arguments.

    Examples:
        >>> _in_options("`seq_len` is too long: seq_len=64", {"seq_len": "--seq-len"})
        '`--seq-len` is too long: --seq-len 64'
    """
    if not flags or CALL.search(text):
        return text
    names = "|".join(sorted(map(re.escape, flags), key=len, reverse=True))

    def option(match: re.Match[str]) -> str:
        name, value = match[1], match[2] or ""
        if value == "True":
            return flags[name]
        if value in ("False", "None"):
            return f"no {flags[name]}"
        if value.startswith("("):
            # The number of a shard and the number of shards; a stitch point; a pair of columns.
            value = {"shard": "/", "at": ":"}.get(name, ",").join(part.strip(" '\"") for part in value[1:-1].split(","))
        return f"{flags[name]} {value.strip(chr(34) + chr(39))}".rstrip()

    text = re.sub(rf"(?<![\w.-])({names})={VALUE}", option, text)
    text = re.sub(rf"`({names})`", lambda match: f"`{flags[match[1]]}`", text)
    # A name with an underscore is no English word.
    unmistakable = "|".join(name for name in flags if "_" in name)
    return re.sub(rf"(?<![\w./-])({unmistakable})(?![\w./-])", lambda match: flags[match[1]], text) if unmistakable else text
