"""Checks of the arguments of public calls: names, order, types and shapes (jaxtyping with beartype).

A check costs tens of microseconds per call. It belongs on public functions and on results, never inside a kernel:
kernels run on servers that have neither jaxtyping nor beartype.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from jaxtyping import TypeCheckError, jaxtyped

from .argument_names import bind, register
from .argument_order import ROLES, refuse_swapped
from .errors import LayersimError, LayersimTypeError
from .wording import brief, with_article


@contextmanager
def _without_mounted_save() -> Iterator[None]:
    """Remove nnsight's `.save` from `object` while the block runs.

    nnsight mounts `.save` on every Python object. beartype, while it is imported, hashes all attributes of `object`, and
    `.save` has no hash: the first `import beartype` after `import nnsight` would fail.
    """
    mounted = object.__dict__.get("save")
    if mounted is None or "nnsight" not in sys.modules:
        yield
        return
    from nnsight import save
    from nnsight._c import mount, unmount

    unmount("save")
    try:
        yield
    finally:
        mount(save, "save")


with _without_mounted_save():
    from beartype import beartype

# Arguments that hold a size of memory.
MEMORY = ("max_memory_gb", "memory_mb", "lens_memory_mb")

_checked = jaxtyped(typechecker=beartype)
_T = TypeVar("_T", bound=Callable[..., Any])


def typed(call: _T) -> _T:
    """Check the arguments of a function, or of a class when it is instantiated, against its signature and its annotations.

    Args:
        call: the function or class; the decorated one has the same signature.

    Raises:
        LayersimTypeError: names the argument, its value and the type expected. (jaxtyping's own error prints every argument,
            which for a model is pages.)
    """
    checked = _checked(call)
    target: Any = vars(checked)["__init__"] if isinstance(checked, type) else checked
    name, signature = register(call)
    numbers = [p for p, value in signature.parameters.items() if _is_number(value.annotation)]
    paths = [p for p, value in signature.parameters.items() if "PathLike" in str(value.annotation)]
    required = [p for p, value in signature.parameters.items() if value.default is value.empty]
    roles = {p: ROLES[p] for p in signature.parameters if p in ROLES} if not isinstance(call, type) else {}

    @functools.wraps(target)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if isinstance(call, type) else args
        bound = bind(name, signature, given, kwargs).arguments
        if len(roles) > 1:
            refuse_swapped(name, {p: bound[p] for p in roles if p in bound}, signature)
        for number in numbers:
            if number in bound:
                _refuse_number(name, number, bound[number], signature.parameters[number])
        for path in paths:
            # pathlib takes an empty text, such as the value of an unset variable, for the current folder.
            if isinstance(bound.get(path), str) and not bound[path].strip():
                raise LayersimTypeError(
                    f"`{path}` of {name} is an empty string.",
                    given=f"{path}={bound[path]!r}",
                    expected="a path",
                    do=f"a name of a file or folder{'' if path in required else f', or leave {path}= out'}",
                )
        try:
            return target(*args, **kwargs)
        except TypeCheckError as error:
            raise _translated(str(error), name, bound) from None

    if isinstance(checked, type):
        checked.__init__ = checked_call  # type: ignore[misc]  # wrapped, with the signature that it had
        return cast(_T, checked)
    return cast(_T, checked_call)


def named(call: _T) -> _T:
    """Check that the arguments of a function, or of a class when it is instantiated, are those of its signature.

    Types are not checked: for calls that validate their arguments themselves, and for classes that are instantiated often.

    Args:
        call: the function or class; the decorated one has the same signature.

    Raises:
        LayersimTypeError: an argument is missing or unknown; the message names the most similar arguments.
    """
    target: Any = call.__init__ if isinstance(call, type) else call  # type: ignore[misc]
    name, signature = register(call)

    @functools.wraps(target)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except TypeError:
            bind(name, signature, args[1:] if isinstance(call, type) else args, kwargs)
            raise

    if isinstance(call, type):
        call.__init__ = checked_call  # type: ignore[misc]
        return call
    return cast(_T, checked_call)


def _is_number(annotation: Any) -> bool:
    """Whether an annotation allows numbers and not bool."""
    parts = {part.strip() for part in _as_text(annotation).split("|")}
    return bool(parts & {"int", "float"}) and "bool" not in parts


def _as_text(annotation: Any) -> str:
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _refuse_number(name: str, parameter: str, value: Any, declared: inspect.Parameter) -> None:
    """Refuse True and whole numbers beyond int64, which Python takes for numbers and torch does not, and no memory."""
    beyond = ", at most 2**63 - 1" if isinstance(value, int) and abs(value) >= 2**63 else ""
    # A bool is an int in Python: batch_size=True would be 1.
    if isinstance(value, bool) or beyond:
        raise _wrong_type(name, parameter, value, f"{_as_text(declared.annotation)}{beyond}")
    if parameter in MEMORY and isinstance(value, int | float) and not 0 < value < math.inf:
        raise LayersimError(
            f"`{parameter}` must be a finite number above 0.",
            given=f"{parameter}={value}",
            expected="gigabytes" if parameter.endswith("gb") else "megabytes",
            do=f"{parameter}={declared.default}",
        )


def _wrong_type(name: str, parameter: str, value: object, expected: str) -> LayersimTypeError:
    """The error for an argument of the wrong type."""
    return LayersimTypeError(
        f"`{parameter}` of {name} cannot be {brief(value)}.",
        given=f"{parameter}={brief(value)}" + ("" if value is None else f", {with_article(type(value).__name__)}"),
        expected=expected.replace("typing.", ""),
        do=_correction(parameter, value, expected) or f"help({name}) explains each argument",
    )


def _correction(parameter: str, value: Any, expected: str) -> str:
    """A corrected argument for the error message, with the value in the expected type; "" if none is obvious."""
    numbers = re.search(r"\b(int|float)\b", expected)
    if isinstance(value, str):
        near = difflib.get_close_matches(value, re.findall(r"'([^']*)'", expected), n=1, cutoff=0.75)
        # "debiased" must not be corrected to "biased".
        if near and not value.endswith(near[0]):
            return f"did you mean {parameter}={near[0]!r}?"
        if "list[str]" in expected:
            return f"{parameter}=[{brief(value)}]"
        if numbers and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value):
            return f"{parameter}={value}"
    if isinstance(value, float) and value.is_integer() and numbers:
        return f"{parameter}={int(value)}"
    if isinstance(value, list) and "tuple[" in expected:
        return f"{parameter}={brief(tuple(value))}" if len(value) <= 8 else f"{parameter}=tuple({parameter})"
    if isinstance(value, tuple) and "list[" in expected:
        return f"{parameter}={brief(list(value))}" if len(value) <= 8 else f"{parameter}=list({parameter})"
    if isinstance(value, int) and not isinstance(value, bool) and "tuple[int, ..." in expected:
        return f"{parameter}=({value},)"
    if numbers and type(value).__module__ == "numpy":
        return f"{parameter}={numbers[0]}({parameter})"
    return ""


def _translated(message: str, name: str, bound: Mapping[str, Any]) -> LayersimError:
    """Translate an error of jaxtyping into an error of this package.

    Args:
        message: of jaxtyping's error.
        name: of the call.
        bound: its arguments by name.
    """
    what = r"(?:parameter '(?P<name>\w+)'|return value).*?"
    values = r"Actual value: (?P<given>.*?)\nExpected type: (?P<expected>.*?)\.?\n"
    match = re.search(what + values, message, re.DOTALL)
    if not match:
        return LayersimTypeError(message.splitlines()[0], given=message, expected="see the annotations", do=f"help({name})")
    expected = match["expected"].removeprefix("<class '").removesuffix("'>")
    if match["name"] in bound:
        return _wrong_type(name, match["name"], bound[match["name"]], expected)
    which = f"`{match['name']}` of {name}" if match["name"] else f"The result of {name}"
    return LayersimTypeError(
        f"{which} is not of its declared type.",
        given=match["given"],
        expected=expected,
        do=f"help({name}) explains each argument",
    )
