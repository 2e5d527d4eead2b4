"""The source text of what travels, as it was when a run began.

nnsight ships functions as source, which it reads from their files anew for each request. A file that is saved while a run goes
on would put two kernels into one sum.
"""

from __future__ import annotations

import linecache
import sys
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import CodeType, FunctionType
from typing import Any

from ..core.code_digest import called_by, codes_in, plain_constants
from ..core.errors import LayersimError


class ShippedSource:
    """Files of modules that travel: each is read once, and every request of this object's owner ships that text."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[int, None, list[str], str]] = {}
        self._checked: set[FunctionType] = set()

    @contextmanager
    def in_place(self, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
        """The held text in the place from which Python reads source; what was there before comes back at the end.

        Raises:
            LayersimError: a kernel's file is not what was imported, so that something else would be shipped than is at hand.
        """
        functions = {name: k.func if isinstance(k, partial) else k for name, k in kernels.items()}
        roots = {"tl_layersim", *(function.__module__.split(".")[0] for function in functions.values())}
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if path and path.endswith(".py") and path not in self._entries and module.__name__.split(".")[0] in roots:
                with tokenize.open(path) as file:
                    lines = file.readlines()
                self._entries[path] = (sum(map(len, lines)), None, lines, path)
        for name, function in functions.items():
            self._refuse_other_code(name, function)
        # Without a time of change, an entry is never looked up on disk again.
        before = {path: linecache.cache.get(path) for path in self._entries}
        linecache.cache.update(self._entries)
        try:
            yield
        finally:
            for path, entry in before.items():
                if entry is None:
                    linecache.cache.pop(path, None)
                else:
                    linecache.cache[path] = entry

    def _refuse_other_code(self, name: str, function: Callable[..., Any]) -> None:
        if not isinstance(function, FunctionType) or function in self._checked:
            return
        self._checked.add(function)
        code = function.__code__
        if code.co_filename not in self._entries:
            # What was typed into a notebook or a console has no file that could change.
            return
        try:
            whole = compile("".join(self._entries[code.co_filename][2]), code.co_filename, "exec", dont_inherit=True)
            found = {(other.co_qualname, other.co_firstlineno): other for other in codes_in(whole)}
        except SyntaxError:
            found = {}
        # What it calls travels with it.
        for each in called_by([function]):
            mine = each.__code__
            if mine.co_filename != code.co_filename or _same(mine, found.get((mine.co_qualname, mine.co_firstlineno))):
                continue
            raise LayersimError(
                f"The file of the kernel of {name!r} has changed since it was imported.",
                given=f"{each.__qualname__} in {code.co_filename}",
                expected="the source of the function that is loaded: source is what travels",
                do="importlib.reload(module), or start Python again",
            )


def _same(a: CodeType, b: CodeType | None) -> bool:
    if b is None or a.co_code != b.co_code or a.co_names != b.co_names:
        return False
    return plain_constants(a) == plain_constants(b)
