"""Registry of extensions, found as subclasses in the modules of a package."""

from __future__ import annotations

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .errors import LayersimError
from .wording import brief

T = TypeVar("T")


@dataclass(frozen=True)
class Registry(Generic[T]):
    """The concrete subclasses of a base class, found in a package and its modules.

    A new module in the package, or in a folder that is added to its `__path__`, needs no other edit.

    Args:
        package: dotted name of the package.
        base: abstract class of the extensions, which have a class attribute `name`.
        argument: name of the argument by which users select an extension.
    """

    package: str
    base: Callable[..., T]
    argument: str

    def all(self) -> dict[str, type[T]]:
        """The classes of all extensions, by name.

        Raises:
            TypeError: a class has no name, or two classes have the same.
        """
        return dict(_discovered(self.package, tuple(importlib.import_module(self.package).__path__), self.base))

    def named(self, name: object, argument: str | None = None) -> type[T]:
        """The class of the extension with this name.

        Args:
            name: the value of the argument.
            argument: name of the argument in the error message; None for `self.argument`.

        Raises:
            LayersimError: no extension has this name.
        """
        classes = self.all()
        if isinstance(name, str) and name in classes:
            return classes[name]
        names = ", ".join(sorted(classes))
        raise LayersimError(f"`{argument or self.argument}` is {brief(name)}; it must be one of {names}.")


@functools.cache
def _discovered(package: str, path: tuple[str, ...], base: Any) -> dict[str, type[Any]]:
    classes: dict[str, type[Any]] = {}
    module_names = [package, *(f"{package}.{info.name}" for info in pkgutil.iter_modules(path))]
    for module_name in module_names:
        module = importlib.import_module(module_name)
        for _, cls in inspect.getmembers(module, inspect.isclass):
            is_extension = issubclass(cls, base) and cls is not base and not inspect.isabstract(cls)
            # A class that the module only imports belongs to another module.
            if not is_extension or cls.__module__ != module.__name__:
                continue
            name = getattr(cls, "name", None)
            if not isinstance(name, str) or name in classes:
                allowed = "it must be a string that no other class uses"
                raise TypeError(f"`{cls.__qualname__}.name` in {module.__name__} is {name!r}; {allowed}.")
            classes[name] = cls
    return classes
