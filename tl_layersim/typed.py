"""The one decorator that checks shapes and types of public calls: jaxtyping with beartype.

A checked call costs tens of microseconds, so it stands on what users call and on results, never inside a kernel:
kernels travel to machines that have neither package.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from jaxtyping import TypeCheckError, jaxtyped

from .errors import LayersimError


@contextmanager
def _without_mounted_save() -> Iterator[None]:
    """Take nnsight's `.save` off `object` for a moment.

    nnsight mounts it for every Python object; beartype hashes all of `object`'s attributes while it is imported, and this
    one has no hash. So `import nnsight` before the first `import beartype` fails without this.
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


def typed(thing: _T) -> _T:
    """Check the arguments of a function, or of a class when it is made, against their annotations.

    Raises:
        LayersimError: names the parameter, what it was and what it must be. (jaxtyping's own error goes on to print every
            argument, which for a model is pages.)
    """
    checked = _checked(thing)
    target: Any = vars(checked)["__init__"] if isinstance(checked, type) else checked

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except TypeCheckError as error:
            raise _refusal(str(error), thing.__name__) from None

    if isinstance(checked, type):
        checked.__init__ = call  # type: ignore[misc]  # wrapped, with the signature that it had
        return cast(_T, checked)
    return cast(_T, call)


def _refusal(message: str, name: str) -> LayersimError:
    """The parts of jaxtyping's message that say something."""
    what = r"(?:parameter '(?P<name>\w+)'|return value).*?"
    values = r"Actual value: (?P<given>.*?)\nExpected type: (?P<expected>.*?)\.?\n"
    found = re.search(what + values, message, re.DOTALL)
    if not found:
        return LayersimError(message.splitlines()[0], given=message, expected="see the annotations", do=f"help({name})")
    which = f"{found['name']}=" if found["name"] else "its result"
    return LayersimError(
        f"{name} does not take this for {which[:-1]}." if found["name"] else f"{name} returned something else.",
        given=f"{which}{found['given']}"[:300] if found["name"] else found["given"][:300],
        expected=found["expected"].removeprefix("<class '").removesuffix("'>"),
        do=f"help({name}) says what each argument means",
    )


__all__ = ["typed"]
