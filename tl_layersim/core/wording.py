"""Wording of values, numbers, p-values and counts in messages and printed results."""

from __future__ import annotations

import difflib
import math
import os
import sys
from collections.abc import Iterable, Sequence

from .errors import excerpt, printable, without_secrets

# Numbers whose margin begins at a later decimal place are written with four digits.
MOST_DECIMALS = 6
# Smaller p-values are printed as "< 0.0001": t tests with 16 blocks say nothing about them.
SMALLEST_P = 1e-4
MEANING_OF_MARGINS = "± is half of the 95 % interval"
WHY_NOT_FINITE = "Either weights are broken, or float16 overflows: load the model in float32 or bfloat16."


def brief(value: object) -> str:
    """A value as a short text: its `repr` if this is short, else its type and size.

    Examples:
        >>> brief([1, 2]), brief(["a long text"] * 40)
        ('[1, 2]', 'a list of 40 str')
    """
    # The first help of the command line does not load torch, and without torch no value is a tensor.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.nn.Module):
        return type(value).__name__
    if torch is not None and isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, str):
        # Secrets are removed before the text is cut: half a login is not recognised.
        text = without_secrets(value)
        return repr(text) if len(text) <= 40 else f"{text[:30]!r}... ({len(text)} characters)"
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    kind = with_article(type(value).__name__)
    if isinstance(value, list | tuple | dict | set | frozenset):
        is_flat = all(item is None or isinstance(item, bool | int | float | str) for item in value)
        if is_flat and len(value) <= 8 and len(repr(value)) <= 60 and not isinstance(value, dict):
            return repr(value)
        kinds_of_items = sorted({type(item).__name__ for item in list(value)[:100]})
        items = f" {' and '.join(kinds_of_items[:3])}" if kinds_of_items else ""
        return f"{kind} of {len(value)}{items}"
    text = repr(value)
    # An address in memory differs from run to run.
    is_readable = len(text) <= 60 and " at 0x" not in text and "\n" not in text
    return text if is_readable else kind


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """A question that proposes the known name nearest to a misspelt one; empty if none is near.

    Args:
        name: the name as it was written.
        names: the names that exist.

    Examples:
        >>> did_you_mean("max_token", ["max_tokens", "seq_len"])
        ' Did you mean max_tokens?'
    """
    nearest = difflib.get_close_matches(name, list(names), n=1)
    return f" Did you mean {nearest[0]}?" if nearest else ""


def number_text(value: float) -> str:
    """A number as text with four digits; with six if four would round it to 1 or -1.

    Examples:
        >>> number_text(0.123456), number_text(0.99999), number_text(1.0)
        ('0.1235', '0.99999', '1')
    """
    short = f"{value:.4g}"
    return f"{value:.6g}" if short in ("1", "-1") else short


def p_value_text(p: float) -> str:
    """A p-value with two digits; "< 0.0001" for one below 1/10,000.

    Examples:
        >>> p_value_text(0.03861), p_value_text(5e-10)
        ('0.039', '< 0.0001')
    """
    return f"< {SMALLEST_P}" if p < SMALLEST_P else f"{p:.2g}"


def equation(name: str, text: str) -> str:
    """A name with its value, such as "p = 0.039" or "p < 0.0001".

    Examples:
        >>> equation("p", p_value_text(0.03861)), equation("p", p_value_text(5e-10))
        ('p = 0.039', 'p < 0.0001')
    """
    return f"{name} {text}" if text.startswith("<") else f"{name} = {text}"


def headed(title: str, lines: Sequence[str]) -> str:
    """A title with lines of numbers below it, as one text. The title explains ± if a line contains it.

    Args:
        title: first line of the text.
        lines: one line for each number.

    Examples:
        >>> print(headed("Report(cka)", ["  cka: similarity = 0.638 ± 0.019"]))
        Report(cka); ± is half of the 95 % interval
          cka: similarity = 0.638 ± 0.019
    """
    margins = f"; {MEANING_OF_MARGINS}" if any(" ± " in line for line in lines) else ""
    # Names of models and sites may come from a file.
    return printable("\n".join([title + margins, *lines]))


def rounded_to_margin(value: float, margin: float) -> tuple[str, str]:
    """A number and its margin as text. The margin has two digits, and the number ends at the same decimal place.

    Args:
        value: the number.
        margin: half the width of its interval, finite and above 0.

    Examples:
        >>> rounded_to_margin(0.018193, 0.0524), rounded_to_margin(51.234, 6.31), rounded_to_margin(1234.5, 130.2)
        (('0.018', '0.052'), ('51.2', '6.3'), ('1234', '130'))
    """
    decimals = max(1 - math.floor(math.log10(margin)), 0)
    if decimals > MOST_DECIMALS:
        return number_text(value), f"{margin:.2g}"
    # Two digits of 0.0998 are 0.10, not 0.1.
    return f"{value:.{decimals}f}", f"{margin:.{decimals}f}"


def amount(number: int, noun: str, plural: str = "") -> str:
    """A count with its noun, such as "4,000 queries".

    Args:
        number: how many.
        noun: the noun in the singular.
        plural: plural of the noun; the default adds an s.

    Examples:
        >>> amount(1, "image"), amount(4000, "query", "queries")
        ('1 image', '4,000 queries')
    """
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"


def with_article(noun: str) -> str:
    """A noun with its indefinite article."""
    article = "an" if noun[0].lower() in "aeiou" else "a"
    return f"{article} {noun}"


def duration_in_words(seconds: float) -> str:
    """A duration in seconds, minutes or hours.

    Examples:
        >>> duration_in_words(35.2), duration_in_words(600), duration_in_words(9000)
        ('35 seconds', '10 minutes', '2.5 hours')
    """
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def first_line(error: BaseException) -> str:
    r"""First line of an exception's text; the class name if there is no text. The full stop is left out.

    Examples:
        >>> first_line(RuntimeError("out of memory.\nTraceback")), first_line(ValueError())
        ('out of memory', 'ValueError')
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return excerpt(lines[0], 200).rstrip(".")
