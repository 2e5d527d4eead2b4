"""Checks of the types, bounds and shapes of arguments, with jaxtyping and beartype.

A check costs tens of microseconds per call. It belongs on public functions and on results, never inside a kernel:
kernels run on servers that have neither jaxtyping nor beartype.

Numbers within bounds: `PositiveInt`, `NonNegativeInt`, `TwoOrMore`, `ThreeOrMore`, `RowCount`, `Seed`, `PermutationCount`,
`PositiveFloat`, `NonNegativeFloat`, `Limit`, `Fraction`, `Probability`, `OpenFraction`, `FractionBelowOne`. Paths: `FilePath`.
"""

from __future__ import annotations

import functools
import inspect
import math
import os
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import (
    Annotated,
    Any,
    Literal,
    SupportsIndex,
    TypeAlias,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from .errors import LayersimTypeError, remove_secrets
from .wording import brief, with_article

_T = TypeVar("_T", bound=Callable[..., Any])
# A block, by its number (an int, or an integer of NumPy) or by its name.
Layer: TypeAlias = SupportsIndex | str
# Parts of beartype's message: the argument, if the value is not the returned one, and the expected type.
_MESSAGE = re.compile(r"(?:parameter (?P<name>\w+)=|return ).*? violates type hint (?P<expected>.*?), as ", re.DOTALL)
# Colours, which beartype's message has in a terminal.
_COLOURS = re.compile(r"\x1b\[[\d;]*m")


@contextmanager
def without_mounted_save() -> Iterator[None]:
    """Context manager that removes nnsight's `.save` from the class `object`.

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


@functools.cache
def _checker() -> tuple[Callable[[Any], Any], type[Exception]]:
    """The decorator of jaxtyping that checks arguments, and the exception that it raises."""
    # Imported here, so that kernels can be imported where neither library is installed.
    with without_mounted_save():
        from beartype import beartype
        from jaxtyping import TypeCheckError, jaxtyped
    return jaxtyped(typechecker=beartype), TypeCheckError


def typed(call: _T) -> _T:
    """Decorator that checks the arguments of a function or dataclass against its annotations, at each call.

    Annotations are read at the first call, which also imports jaxtyping and beartype.

    Raises:
        LayersimTypeError: names the argument, its value and the type expected. (jaxtyping's own error prints every argument,
            which for a model is pages.)
    """
    cls = call if isinstance(call, type) else None
    target: Any = call if cls is None else vars(cls)["__init__"]

    @functools.cache
    def checked() -> tuple[Callable[..., Any], inspect.Signature]:
        if cls is not None:
            _resolve_inherited(cls, target)
        return _checker()[0](target), inspect.signature(target)

    @functools.wraps(target)
    def checked_call(*args: Any, **kwargs: Any) -> Any:
        run, signature = checked()
        try:
            return run(*args, **kwargs)
        except Exception as error:
            name = call.__qualname__.removesuffix(".__init__")
            try:
                # Only of a call that failed: binding takes as long as checking.
                arguments = signature.bind(*args, **kwargs).arguments
            except TypeError as unbound:
                raise TypeError(f"{name}() {unbound}") from None
            remove_secrets(error)
            if isinstance(error, _checker()[1]):
                raise _error_in_words(error, name, arguments) from None
            raise

    if cls is not None:
        cls.__init__ = checked_call  # type: ignore[misc]  # wrapped, with the signature that it had
        return call
    return cast(_T, checked_call)


def _resolve_inherited(cls: type, init: Any) -> None:
    """Replace inherited string annotations by types. Their names may be known only in the module of the base class."""
    annotations = init.__annotations__
    inherited = [field for field in annotations if field not in inspect.get_annotations(cls) and field != "return"]
    if inherited:
        hints = get_type_hints(cls, include_extras=True)
        annotations.update({field: hints[field] for field in inherited})


# jaxtyping's types of arguments, in words.
_TENSORS = {"Float": "a floating-point tensor", "Integer": "an integer tensor", "Shaped": "a tensor"}


def _type_in_words(expected: str) -> str:
    """Wording of a type that jaxtyping printed."""

    def tensor_in_words(match: re.Match[str]) -> str:
        kind, shape = match.groups()
        return f"{_TENSORS[kind]} `{shape.strip()}`"

    expected = re.sub(r"(?:jaxtyping\.)?\b(Float|Integer|Shaped)\[Tensor, '([^']*)'\]", tensor_in_words, expected)
    expected = re.sub(r"(?:typing\.)?Annotated\[.*?beartype\.vale\.Is\[([^\]]*)\]\]", r"\1", expected)
    # Names of modules are removed from types.
    expected = re.sub(r"(?:\w+\.)*Callable\[\.\.\., Any\]", "a function", expected)
    expected = re.sub(r"\b(?:\w+\.)+(?=[A-Z])", "", expected).replace("NoneType", "None").replace("SupportsIndex", "int")
    return re.sub(r"Optional\[([^\[\]]*)\]", r"\1 or None", expected)


def _error_in_words(error: BaseException, name: str, arguments: dict[str, Any]) -> LayersimTypeError:
    """Convert a jaxtyping error to a `LayersimTypeError`.

    Args:
        error: jaxtyping's error.
        name: name of the call.
        arguments: arguments of the call by name.
    """
    message = str(error)
    # jaxtyping's own message may name no argument: beartype checks one random item of a list, and picks another one when
    # jaxtyping repeats its check. The error of beartype's check is among the contexts of jaxtyping's error.
    match = None
    cause = error.__context__
    while match is None and cause is not None:
        match = _MESSAGE.search(_COLOURS.sub("", str(cause)))
        cause = cause.__context__
    if match is None:
        return LayersimTypeError(f"{name}: {message}")
    expected = _type_in_words(match["expected"].removeprefix("<class '").removesuffix("'>"))
    # Sizes that other arguments give to the dimensions of the shape.
    sizes = []
    for axis, size in re.findall(r"^(\w+)=(\d+)$", message, re.MULTILINE):
        if axis in expected:
            sizes.append(f"{axis}={size}")
    if sizes:
        expected += f" with {', '.join(sizes)}"
    parameter = match["name"]
    if parameter not in arguments:
        subject = f"`{parameter}`" if parameter else "The result"
        return LayersimTypeError(f"{subject} of {name} is not {expected}.")
    value = arguments[parameter]
    text = brief(value)
    # The text of a tensor or of a long list names its type.
    if value is not None and not text.startswith(("a ", "an ", "the ")):
        text += f", {with_article(type(value).__name__)}"
    return LayersimTypeError(f"`{parameter}` of {name} is {text}; it must be {expected}.")


def is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value is of a type, with every item that it holds. A bool is no number, and a type of unknown form holds all.

    Args:
        value: plain data, as a file holds it.
        hint: the type: a class, a union, a literal, a tuple, or a mapping.

    Examples:
        >>> is_of_type(("a", 7), tuple[str, ...]), is_of_type(("a", "b"), tuple[str, ...]), is_of_type(True, int)
        (False, True, False)
    """
    origin = get_origin(hint)
    parts = get_args(hint)
    if hint is Any:
        return True
    if origin is Annotated:
        return is_of_type(value, parts[0])
    if origin in (Union, types.UnionType):
        return any(is_of_type(value, part) for part in parts)
    if origin is Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        return isinstance(value, tuple) and _are_of_types(value, parts)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        key_type, entry_type = parts
        if not isinstance(value, Mapping):
            return False
        return all(is_of_type(key, key_type) and is_of_type(entry, entry_type) for key, entry in value.items())
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    cls = hint if origin is None else origin
    # A type of another form, such as a type variable, holds everything.
    return not isinstance(cls, type) or isinstance(value, cls)


def _are_of_types(items: tuple[Any, ...], parts: tuple[Any, ...]) -> bool:
    """Whether the items of a tuple are of the types in `tuple[...]`."""
    if len(parts) == 2 and parts[1] is Ellipsis:
        return all(is_of_type(item, parts[0]) for item in items)
    return len(items) == len(parts) and all(is_of_type(item, part) for item, part in zip(items, parts, strict=True))


with without_mounted_save():
    from beartype.vale import Is


@dataclass(frozen=True)
class _Within:
    """Bounds of a numeric argument. Errors print its `repr`. A bool is not a number, and NaN is outside all bounds."""

    words: str
    holds: Callable[[float], bool]

    def __call__(self, value: float) -> bool:
        return not isinstance(value, bool) and self.holds(value)

    def __repr__(self) -> str:
        return self.words


# Limits of Linux, in bytes of UTF-8.
LONGEST_NAME = 255
LONGEST_PATH = 4095


@dataclass(frozen=True)
class _Path:
    """A path that an operating system can look up. Errors print its `repr`."""

    def __call__(self, value: Any) -> bool:
        if not isinstance(value, str | os.PathLike):
            return False
        text = os.fspath(value)
        if not isinstance(text, str) or "\0" in text:
            return False
        try:
            encoded = os.fsencode(text)
        except UnicodeEncodeError:
            return False
        names = encoded.split(os.fsencode(os.sep))
        return len(encoded) <= LONGEST_PATH and all(len(name) <= LONGEST_NAME for name in names)

    def __repr__(self) -> str:
        return f"a path without zero bytes, with names of at most {LONGEST_NAME} bytes"


is_path = _Path()
FilePath: TypeAlias = Annotated[str | os.PathLike[str], Is[is_path]]
PositiveInt = Annotated[int, Is[_Within("an int of 1 or more", lambda n: 1 <= n < 2**63)]]
NonNegativeInt = Annotated[int, Is[_Within("an int of 0 or more", lambda n: 0 <= n < 2**63)]]
TwoOrMore = Annotated[int, Is[_Within("an int of 2 or more", lambda n: 2 <= n < 2**63)]]
ThreeOrMore = Annotated[int, Is[_Within("an int of 3 or more", lambda n: 3 <= n < 2**63)]]
RowCount = Annotated[int, Is[_Within("an int from 1 to 2^20", lambda n: 1 <= n <= 2**20)]]
Seed = Annotated[int, Is[_Within("an int from 0 to 2^31 - 1", lambda n: 0 <= n < 2**31)]]
# With fewer than 19 permutations, no p-value can be 0.05 or less.
PermutationCount = Annotated[int, Is[_Within("0 for no null, or an int of 19 or more", lambda n: n == 0 or 19 <= n < 2**63)]]
PositiveFloat = Annotated[int | float, Is[_Within("a finite float above 0", lambda x: 0 < x < math.inf)]]
NonNegativeFloat = Annotated[int | float, Is[_Within("a finite float of 0 or more", lambda x: 0 <= x < math.inf)]]
Limit = Annotated[int | float, Is[_Within("a float above 0, infinite for no limit", lambda x: x > 0)]]
Fraction = Annotated[int | float, Is[_Within("a float above 0 and at most 1", lambda x: 0 < x <= 1)]]
Probability = Annotated[int | float, Is[_Within("a float from 0 to 1", lambda x: 0 <= x <= 1)]]
FractionBelowOne = Annotated[int | float, Is[_Within("a float of 0 or more and below 1", lambda x: 0 <= x < 1)]]
OpenFraction = Annotated[int | float, Is[_Within("a float above 0 and below 1", lambda x: 0 < x < 1)]]
