"""Checks of the arguments of public calls: types and shapes, with jaxtyping and beartype.

A check costs tens of microseconds per call. It belongs on public functions and on results, never inside a kernel:
kernels run on servers that have neither jaxtyping nor beartype.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from jaxtyping import TypeCheckError, jaxtyped

from .errors import LayersimTypeError
from .wording import brief


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

_checked = jaxtyped(typechecker=beartype)
_T = TypeVar("_T", bound=Callable[..., Any])
# Of jaxtyping's message: the argument, none for the returned value, and the type that it should have.
_MESSAGE = re.compile(r"(?:parameter '(?P<name>\w+)'|return value).*?Expected type: (?P<expected>.*?)\.?\n", re.DOTALL)


def typed(call: _T) -> _T:
    """Check the arguments of a function, or of a class when it is instantiated, against its annotations.

    Args:
        call: the function or class; the decorated one has the same signature.

    Raises:
        LayersimTypeError: names the argument, its value and the type expected. (jaxtyping's own error prints every argument,
            which for a model is pages.)
    """
    checked = _checked(call)
    target: Any = vars(checked)["__init__"] if isinstance(checked, type) else checked
    signature = inspect.signature(target)

    @functools.wraps(target)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except TypeCheckError as error:
            given = signature.bind(*args, **kwargs).arguments
            raise _in_a_sentence(str(error), call.__qualname__, given) from None

    if isinstance(checked, type):
        checked.__init__ = checked_call  # type: ignore[misc]  # wrapped, with the signature that it had
        return cast(_T, checked)
    return cast(_T, checked_call)


def _in_a_sentence(message: str, name: str, given: dict[str, Any]) -> LayersimTypeError:
    """The error of this package for one of jaxtyping.

    Args:
        message: of jaxtyping's error.
        name: of the call.
        given: its arguments by name.
    """
    match = _MESSAGE.search(message)
    parameter = match["name"] if match else None
    expected = match["expected"].removeprefix("<class '").removesuffix("'>").replace("typing.", "") if match else "its type"
    which, value = (f"`{parameter}` of {name}", brief(given[parameter])) if parameter in given else (f"A value of {name}", "")
    return LayersimTypeError(
        f"{which} cannot be {value or 'of another type'}.",
        given=f"{parameter}={value}",
        expected=expected,
        do=f"help({name}) explains each argument",
    )
