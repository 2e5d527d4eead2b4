"""Source text of shipped functions, read once at the start of a run.

nnsight ships functions as source, which it reads from their files again for each request. Without this module, a file that is
saved during a run would put two versions of a kernel into one sum.
"""

from __future__ import annotations

import inspect
import linecache
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

from ..core.errors import LayersimError
from ..core.functions import called_by, codes_in, plain_constants
from ..sources.nnsight import own_function

READ_LINES = inspect.getsourcelines


class ShippedSource:
    """Source text of the files of shipped functions. Each file is read once, and every request of a run ships this text."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, None, list[str], str]] = {}
        self._checked: set[FunctionType] = set()
        self._lines: dict[tuple[str, CodeType], tuple[list[str], int]] = {}

    @contextmanager
    def in_place(self, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """A context in which `linecache` holds this text; its previous entries are restored at the end.

        Results of `inspect.getsourcelines`, which takes most of the time of serialising, are cached.

        Args:
            kernels: functions that are shipped, by name.

        Raises:
            LayersimError: the file of a kernel has changed since it was imported.
        """
        functions = {name: own_function(k) for name, k in kernels.items()}
        roots = {"tl_layersim", *(function.__module__.split(".")[0] for function in functions.values())}
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path and path.endswith(".py") and path not in self._entries and module.__name__.split(".")[0] in roots:
                with tokenize.open(path) as file:
                    lines = file.readlines()
                self._entries[path] = (sum(map(len, lines)), None, lines, path)
        for name, function in functions.items():
            self._refuse_other_code(name, function)
        # An entry without a modification time is never compared with the file again.
        before = {path: linecache.cache.get(path) for path in self._entries}
        linecache.cache.update(self._entries)
        inspect.getsourcelines = self._lines_of  # type: ignore[assignment]
        try:
            yield
        finally:
            inspect.getsourcelines = READ_LINES
            for path, entry in before.items():
                if entry is None:
                    linecache.cache.pop(path, None)
                else:
                    linecache.cache[path] = entry

    def _lines_of(self, thing: Any) -> tuple[list[str], int]:
        """Like `inspect.getsourcelines`, with cached results for functions of the shipped files."""
        if (
            not isinstance(thing, FunctionType)
            or hasattr(thing, "__wrapped__")
            or thing.__code__.co_filename not in self._entries
        ):
            return READ_LINES(thing)
        key = (thing.__code__.co_filename, thing.__code__)
        if key not in self._lines:
            self._lines[key] = READ_LINES(thing)
        lines, first = self._lines[key]
        return list(lines), first

    def _refuse_other_code(self, name: str, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType) or function in self._checked:
            return
        self._checked.add(function)
        code = function.__code__
        if code.co_filename not in self._entries:
            # Code from a notebook or a console has no file that could change.
            return
        try:
            whole = compile("".join(self._entries[code.co_filename][2]), code.co_filename, "exec", dont_inherit=True)
            on_disk = {(other.co_qualname, other.co_firstlineno): other for other in codes_in(whole)}
        except SyntaxError:
            on_disk = {}
        # The functions that a kernel calls are shipped with it.
        for each in called_by([function]):
            mine = each.__code__
            if mine.co_filename != code.co_filename or _same(mine, on_disk.get((mine.co_qualname, mine.co_firstlineno))):
                continue
            raise LayersimError(
                f"The file of the kernel of {name!r} has changed since it was imported: {each.__qualname__} in "
                f"{code.co_filename}. Use importlib.reload(module), or restart Python."
            )


def _same(a: CodeType, b: CodeType | None) -> bool:
    if b is None or a.co_code != b.co_code or a.co_names != b.co_names:
        return False
    return plain_constants(a) == plain_constants(b)
