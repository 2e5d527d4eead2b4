"""Digests of functions, classes and values, which show whether two runs used the same code and the same settings."""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import is_
from types import BuiltinFunctionType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch

from .tensor_digests import digest_of_tensor


def called_by(starts: Iterable[FunctionType]) -> list[FunctionType]:
    """The given functions, and all functions of the same module that they call, directly or indirectly."""
    functions: dict[int, FunctionType] = {}
    waiting = list(starts)
    while waiting:
        function = waiting.pop()
        if id(function) in functions:
            continue
        functions[id(function)] = function
        for name in sorted(_names_in(function.__code__)):
            item = function.__globals__.get(name)
            if isinstance(item, FunctionType) and item.__module__ == function.__module__:
                waiting.append(item)
    return list(functions.values())


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes in a code object and the code inside it."""
    return {name for inner in codes_in(code) for name in inner.co_names}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """A code object and all code objects nested in it."""
    yield code
    for item in code.co_consts:
        if isinstance(item, CodeType):
            yield from codes_in(item)


def plain_constants(code: CodeType) -> list[str]:
    """Constants of a code object as texts. Nested code is left out, and the texts are equal in every process."""
    texts = []
    for item in code.co_consts:
        if isinstance(item, CodeType):
            continue
        # The order of a set differs between processes.
        texts.append(repr(sorted(map(repr, item)) if isinstance(item, frozenset) else item))
    return texts


def digest_of_code(starts: Iterable[FunctionType]) -> str:
    """Digest (12 hex digits) of the bytecode of functions.

    Functions of the same module that they call are included, see `called_by`.
    """
    codes: dict[str, CodeType] = {}
    for function in called_by(starts):
        for code in codes_in(function.__code__):
            codes[code.co_qualname] = code
    digest = hashlib.sha256()
    for name, code in sorted(codes.items()):
        digest.update(repr((name, code.co_code, code.co_names, plain_constants(code))).encode())
    return digest.hexdigest()[:12]


# Packages that load, place, run and read models. Hooks that they add belong to how a model is used, and do not change it. The
# last entry has the placeholder of a pickled `ProbeHook`.
OWN_PACKAGES = (
    *("tl_layersim.", "nnsight.", "accelerate.", "transformers.", "transformer_lens.", "peft.", "bitsandbytes.", "deepspeed."),
    *("torch.nn.utils.", "torch.nn.parallel.", "torch.distributed.", "torch.ao.", "torch.utils.", "torch._dynamo."),
    "contextlib.",
)
# Packages whose functions and classes are identified by their names and by the version of the package.
LIBRARIES = {package.partition(".")[0] for package in OWN_PACKAGES} | {"torch", "numpy", "scipy", "einops", "timm", "jaxtyping"}


def defined_in(function: Any) -> str:
    """Name of the module that defines a function or an object's class.

    Args:
        function: any object; for a `functools.partial`, the function inside counts.
    """
    while isinstance(function, functools.partial):
        function = function.func
    # `functools.wraps` copies `__module__` from the function inside, but not the globals.
    plain_function = getattr(function, "__func__", function)
    if isinstance(plain_function, FunctionType) and "__name__" in plain_function.__globals__:
        return str(plain_function.__globals__["__name__"])
    return getattr(function, "__module__", None) or type(function).__module__


def is_of_library(item: Any) -> bool:
    """Whether Python, PyTorch or a library that loads and runs models defines a function, a class or an object's class."""
    return _is_library(defined_in(item))


@functools.cache
def _is_library(module: str) -> bool:
    root = module.partition(".")[0]
    return root in LIBRARIES or root in sys.stdlib_module_names


@functools.cache
def version_of(module: str) -> str:
    """Version of the package that holds a module, without the build ("2.7.0" for "2.7.0+cpu"); "" if it is not installed.

    Args:
        module: name of the module.
    """
    with suppress(PackageNotFoundError):
        return version(module.partition(".")[0]).partition("+")[0]
    return ""


class ValueNames:
    """Makes names for functions, classes and values from their code and contents, which are equal in every process.

    A function is named with its closure, its defaults, the object of a method, and the globals that its code reads. A tensor
    is named by its dtype, shape and bytes, a module by its class, its settings and its weights. Functions and classes of
    libraries are named by the version of the package.

    Args:
        names: names of other objects, by `id`.

    Attributes:
        unknown: classes of the objects without such a name, whose contents are missing from the digest.
    """

    def __init__(self, names: Mapping[int, str] = MappingProxyType({})) -> None:
        self._names = dict(names)
        # Objects whose `id` is a key: no other object may get it.
        self._named_objects: list[Any] = []
        self.unknown: list[str] = []

    def function(self, function: Callable[..., Any]) -> str:
        """Qualified name of a function, with a digest of its code and of the values it holds.

        Args:
            function: a function, a method, a `functools.partial`, or an object with `__call__`.

        Examples:
            >>> ValueNames().function(len).split(" ")[0]
            'builtins.len'
        """
        values: list[Any] = []
        while isinstance(function, functools.partial):
            values.append(_partial_arguments(function))
            function = function.func
        # Decorators of libraries such as torch.no_grad() hold objects of their own, so only their code counts.
        while (inner := getattr(function, "__wrapped__", None)) is not None and is_of_library(function):
            values += self._decorator_values(function)
            function = inner
        method_object = getattr(function, "__self__", None)
        # For a method, the function of its class.
        plain_function: Any = getattr(function, "__func__", function)
        name = f"{defined_in(function)}.{getattr(function, '__qualname__', type(function).__qualname__)}"
        is_alone = method_object is None and not values
        if isinstance(plain_function, FunctionType):
            # A function that reaches itself is digested once.
            self._remember(plain_function, name)
            if method_object is not None:
                values.append(self._object_of_method(method_object, plain_function))
            values += [closure_of(plain_function), _default_values(plain_function)]
            module = defined_in(plain_function)
            code = version_of(module) if _is_library(module) else digest_of_code([plain_function])
            if not _is_library(module) and not _is_installed(sys.modules.get(module)):
                values.append(self._global_values(plain_function))
        else:
            # An object that can be called, or a function of C, which has no code to digest.
            self.unknown.append(name)
            call = vars(type(plain_function)).get("__call__")
            code = digest_of_code([call]) if isinstance(call, FunctionType) else ""
            values.append(getattr(plain_function, "__dict__", {}))
        text = f"{name} sha256 {self.digest(code, values)}"
        if is_alone:
            self._remember(plain_function, text)
        else:
            self._names.pop(id(plain_function), None)
        return text

    def _object_of_method(self, value: Any, method: FunctionType) -> Any:
        """The object of a method, or its class and those of its attributes that the method does not change."""
        if id(value) in self._names or isinstance(value, type | torch.nn.Module):
            return value
        attributes = dict(getattr(value, "__dict__", {}))
        for name in attributes.keys() & _written_names(method.__code__):
            del attributes[name]
        return [type(value), attributes]

    def digest(self, text: str, values: Any) -> str:
        """Digest (12 hex digits) of a text and of values."""
        return hashlib.sha256(f"{text} {self.named(values)!r}".encode()).hexdigest()[:12]

    def named(self, value: Any) -> Any:
        """A value as nested lists of numbers and texts. The `repr` of these lists is equal in every process."""
        if isinstance(value, enum.Enum):
            return [type(value).__qualname__, value.name]
        if value is None or isinstance(value, str | bytes | bool | int | float | complex):
            return value
        if id(value) in self._names:
            return self._names[id(value)]
        if isinstance(value, Mapping):
            pairs = [[self.named(key), self.named(item)] for key, item in value.items()]
            return sorted(pairs, key=repr)
        if isinstance(value, list | tuple):
            return [self.named(item) for item in value]
        if isinstance(value, set | frozenset):
            return sorted(map(self.named, value), key=repr)
        if isinstance(value, slice | range | torch.dtype | torch.device | os.PathLike | re.Pattern):
            return repr(value)
        if isinstance(value, torch.autocast):
            return ["autocast", value.device, repr(value.fast_dtype), value._enabled]
        if isinstance(value, torch.nn.Module):
            return self._module_name(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.hasobject:
            return self.named(value.tolist())
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return [str(value.dtype), tuple(value.shape), digest_of_tensor(value).hex()]
        if isinstance(value, ModuleType):
            return value.__name__
        if isinstance(value, type):
            return self._class_name(value)
        if isinstance(value, FunctionType | MethodType | functools.partial):
            return self.function(value)
        if isinstance(value, BuiltinFunctionType) and isinstance(value.__self__, ModuleType | type | None):
            return f"{value.__module__}.{value.__qualname__}"
        if hasattr(value, "tobytes"):
            # Arrays of NumPy, and images.
            kind = getattr(value, "dtype", type(value).__qualname__)
            size = getattr(value, "shape", getattr(value, "size", ""))
            return [str(kind), size, hashlib.sha256(value.tobytes()).hexdigest()]
        self.unknown.append(type(value).__qualname__)
        return type(value).__qualname__

    def _remember(self, value: Any, name: str) -> None:
        """Name an object by `name` from now on."""
        self._names[id(value)] = name
        self._named_objects.append(value)

    def _decorator_values(self, function: Callable[..., Any]) -> list[Any]:
        """Code of a wrapper that a library's decorator made, and the precision that it sets."""
        if not isinstance(function, FunctionType):
            return []
        precision = [item for item in closure_of(function) if isinstance(item, torch.autocast)]
        return [digest_of_code([function]), precision]

    def _module_name(self, module: torch.nn.Module) -> str:
        """Name of a module: its class, and a digest of the settings of all submodules and of its weights."""
        name = type(module).__qualname__
        # A module that reaches itself is digested once.
        self._remember(module, name)
        texts = ObjectTexts(self)
        weights = {key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)}
        settings = [texts.settings(submodule) for submodule in module.modules()]
        self._remember(module, f"{name} {self.digest(repr(settings), weights)}")
        return self._names[id(module)]

    def _class_name(self, kind: type) -> str:
        """Name of a class, with a digest of its code if it is the user's."""
        name = f"{kind.__module__}.{kind.__qualname__}"
        if _is_library(kind.__module__):
            return name
        self._remember(kind, name)
        # What a class holds beside code may have no name; only values that a function holds itself are reported.
        texts = ObjectTexts(ValueNames(self._names))
        digest = hashlib.sha256(texts.class_text(kind).encode()).hexdigest()[:12]
        self._remember(kind, f"{name} {digest}")
        return self._names[id(kind)]

    def _global_values(self, function: FunctionType) -> dict[str, Any]:
        """Names of the global values that a function reads, and of those that it reads from modules of the user."""
        attributes = _names_in(function.__code__)
        names = {}
        for name in sorted(_names_of_globals(function.__code__) - _written_names(function.__code__)):
            if name not in function.__globals__:
                continue
            value = function.__globals__[name]
            names[name] = self._user_module(value, attributes, 2) if isinstance(value, ModuleType) else self.named(value)
        return names

    def _user_module(self, module: ModuleType, attributes: set[str], depth: int) -> Any:
        """Name of a module with those of its attributes that code may read; the name alone for a module of a library.

        Args:
            module: the module.
            attributes: names of attributes in the code.
            depth: number of levels of modules inside modules.
        """
        if _is_library(module.__name__) or _is_installed(module):
            return f"{module.__name__} {version_of(module.__name__)}"
        names_inside = ValueNames(self._names)
        names: dict[str, Any] = {}
        for name in sorted(attributes & vars(module).keys()):
            value = vars(module)[name]
            if not isinstance(value, ModuleType):
                names[name] = names_inside.named(value)
            elif depth:
                names[name] = names_inside._user_module(value, attributes, depth - 1)
        return [module.__name__, sorted(names.items(), key=repr)]


# End of a description of a function or an edit whose values cannot be compared with those of another run.
UNKNOWN_CONTENTS = "whose contents are unknown"


def named_function(function: Callable[..., Any]) -> str:
    """Name of a function with a digest of its code and values, which is equal in every process.

    If the function holds objects that have no digest, the text ends with their classes and `UNKNOWN_CONTENTS`.

    Args:
        function: a function, a method, a `functools.partial`, or an object with `__call__`.
    """
    names = ValueNames()
    return with_unknown_values(names.function(function), names)


def with_unknown_values(text: str, names: ValueNames) -> str:
    """A description, with the values in it that cannot be compared with those of a later run.

    Args:
        text: the description.
        names: the names that it was made with.
    """
    if not names.unknown:
        return text
    unknown_values = ", ".join(dict.fromkeys(names.unknown))
    return f"{text} with {unknown_values}, {UNKNOWN_CONTENTS}"


def _is_installed(module: ModuleType | None) -> bool:
    """Whether a module belongs to an installed package, which its version identifies."""
    file = getattr(module, "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def closure_of(function: FunctionType) -> list[Any]:
    """Values of a function's closure; variables that are not set yet, or that the function changes, are left out."""
    values = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # The cell of a variable that is not set yet is empty.
        with suppress(ValueError):
            if name not in _written_names(function.__code__):
                values.append(cell.cell_contents)
    return values


def _default_values(function: FunctionType) -> list[Any]:
    """Default values of a function's arguments, without those that it changes."""
    code = function.__code__
    defaults = function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    positional = zip(names, defaults, strict=True)
    keyword_only = (function.__kwdefaults__ or {}).items()
    return [value for name, value in (*positional, *keyword_only) if name not in _written_names(code)]


def _partial_arguments(function: functools.partial[Any]) -> list[Any]:
    """Arguments that a `functools.partial` holds, without those that its function changes."""
    inner = getattr(function.func, "__func__", function.func)
    if not isinstance(inner, FunctionType):
        return [function.args, function.keywords]
    names = inner.__code__.co_varnames
    written = _written_names(inner.__code__)
    args = [value for name, value in zip(names, function.args, strict=False) if name not in written]
    # Arguments of a function with *args have no names.
    args += function.args[len(names) :]
    keywords = {name: value for name, value in function.keywords.items() if name not in written}
    return [args, keywords]


@functools.lru_cache(4096)
def _names_of_globals(code: CodeType) -> frozenset[str]:
    """Names of the globals that a code object and the code inside it read."""
    names = set()
    for inner in codes_in(code):
        for instruction in dis.get_instructions(inner):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(instruction.argval)
    return frozenset(names)


# Methods that change a collection.
CHANGING = {"append", "appendleft", "extend", "insert", "add", "update", "setdefault", "pop", "popleft", "clear"}
LOADS = ("LOAD_DEREF", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST", "LOAD_ATTR", "LOAD_CLASSDEREF")


@functools.lru_cache(4096)
def _written_names(code: CodeType) -> frozenset[str]:
    """Names of the variables and attributes that code assigns, or whose items it assigns.

    They hold what the code found, such as activations that a hook keeps, and are no settings of it.
    """
    written = set[str]()
    for inner in codes_in(code):
        instructions = [instruction for instruction in dis.get_instructions(inner) if instruction.opname != "CACHE"]
        for number, instruction in enumerate(instructions):
            name = instruction.argval
            previous = instructions[number - 1] if number else instruction
            if instruction.opname in ("STORE_ATTR", "STORE_DEREF", "STORE_GLOBAL"):
                written.add(name)
            elif instruction.opname in ("LOAD_METHOD", "LOAD_ATTR") and name in CHANGING and previous.opname in LOADS:
                written.add(previous.argval)
            elif instruction.opname == "STORE_SUBSCR":
                written |= _container_names(instructions[:number])
    return frozenset(written)


def _container_names(instructions: list[dis.Instruction]) -> set[str]:
    """The variable or attribute in whose item the code after these instructions stores.

    The key is on top of the container, so the container is below the instructions that together push one value.
    """
    height = 0
    for number in range(len(instructions) - 1, 0, -1):
        instruction = instructions[number]
        height += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if height == 1:
            container = instructions[number - 1]
            return {container.argval} if container.opname in LOADS else set()
    return set()


# Attributes of modules that loading, placing, hooking or running a model changes, and that no number depends on.
PASSING = {"gradient_checkpointing", "name_or_path", "hf_device_map", "max_seq_len_cached"}
PASSING |= {"fwd_hooks", "bwd_hooks", "ctx", "context_level"}  # of hook points of TransformerLens
PASSING |= {*vars(torch.nn.Module()), "_is_hf_initialized", "_output_capturing_hooks_installed", "_compiled_call_impl"}
# Private attributes by which layers of PEFT compute; others of libraries are of how a model was made.
PRIVATE = {"_active_adapter", "_disable_adapters"}
# Classes whose methods are of how a model is loaded and called.
BASES = ("torch.nn.modules.module", "transformers.modeling_utils", "transformers.generation.utils", "builtins")
# Entries of a configuration of Hugging Face of how a model was loaded and is trained. Weights have a dtype of their own.
LOADING = {"_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache", "problem_type"}


def plain_config(config: Any) -> dict[str, Any]:
    """A configuration of Hugging Face as a dict, without entries of how the model was loaded."""
    return _without_loading(config.to_dict())


def _without_loading(entries: Mapping[str, Any]) -> dict[str, Any]:
    plain = {}
    for name, value in entries.items():
        if name not in LOADING:
            plain[name] = _without_loading(value) if isinstance(value, dict) else value
    return plain


def forward_methods(kind: type) -> dict[str, FunctionType]:
    """The methods of a module's class that its forward pass runs: `forward`, and the methods that these call, by name."""
    return dict(code_of_class(kind).methods)


def _forward_methods(kind: type) -> dict[str, FunctionType]:
    """The methods; see `forward_methods`."""
    methods: dict[str, FunctionType] = {}
    waiting = ["forward"]
    while waiting:
        name = waiting.pop()
        item = getattr(kind, name, None)
        if name in methods or not isinstance(item, FunctionType):
            continue
        method = _undecorated(item)
        methods[name] = method
        if defined_in(method) in BASES:
            continue
        for code in codes_in(method.__code__):
            waiting += [called for called in code.co_names if called not in methods]
    return methods


@dataclass(frozen=True)
class ClassCode:
    """The code of a module's class, as it is in memory. The code of what it calls is named where a digest is made.

    Attributes:
        methods: methods that a module's forward pass runs, by name.
        stored: names of the attributes that these methods assign.
        items: what the user wrote among the items of the class and its bases, as pairs of a name and a function or value.
        replaced: functions of the user in the place of functions that the forward pass of a library's class calls, by name.
        names_read: the names that were looked up to find all of this.
    """

    methods: Mapping[str, FunctionType]
    stored: frozenset[str]
    items: Sequence[tuple[str, Any]]
    replaced: Mapping[str, FunctionType]
    names_read: NamesRead


class NamesRead:
    """Names that were looked up in modules and classes, with the values that they had.

    It shows whether a later look-up gives the same, which takes a small fraction of the time of following the code again.

    Examples:
        >>> import types
        >>> module = types.ModuleType("module")
        >>> names = NamesRead()
        >>> names.look_up(vars(module), {"call"})
        {}
        >>> names.are_unchanged()
        True
        >>> module.call = len
        >>> names.are_unchanged()
        False
    """

    def __init__(self) -> None:
        # Each namespace with the names that it has, their values, and the names that it lacks.
        self._lookups: list[tuple[Mapping[str, Any], tuple[str, ...], tuple[Any, ...], frozenset[str]]] = []
        self._classes: list[tuple[type, dict[str, Any]]] = []

    def look_up(self, namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """The values that some of the names have in a namespace, by name.

        Args:
            namespace: the globals of a module.
            names: the names.
        """
        values = {name: namespace[name] for name in names if name in namespace}
        self._lookups.append((namespace, tuple(values), tuple(values.values()), frozenset(names) - values.keys()))
        return values

    def add_class(self, kind: type) -> None:
        """Note everything that a class and its bases define."""
        for base in kind.__mro__:
            self._classes.append((base, dict(vars(base))))

    def are_unchanged(self) -> bool:
        """Whether every name still has the same value, and the others have none."""
        for base, items in self._classes:
            present_items = vars(base)
            if present_items.keys() != items.keys() or not all(map(is_, present_items.values(), items.values())):
                return False
        for namespace, names, values, missing in self._lookups:
            if not namespace.keys().isdisjoint(missing) or not all(map(is_, map(namespace.get, names), values)):
                return False
        return True


# Of classes of libraries, most of which live as long as the process; a library may also make a class for each model.
_code_of_classes: dict[type, ClassCode] = {}
MOST_CLASSES = 1000


def code_of_class(kind: type) -> ClassCode:
    """The code of a module's class. For a class of a library it is looked for again only if a name in it has another value.

    Args:
        kind: the class.
    """
    known = _code_of_classes.get(kind)
    if known is not None and known.names_read.are_unchanged():
        return known
    names_read = NamesRead()
    names_read.add_class(kind)
    methods: dict[str, FunctionType] = {}
    replaced: dict[str, FunctionType] = {}
    if issubclass(kind, torch.nn.Module):
        methods = _forward_methods(kind)
        replaced = _replaced_functions(methods.values(), names_read)
    stored = set[str]()
    for method in methods.values():
        stored |= _written_names(method.__code__)
    code = ClassCode(methods, frozenset(stored), _items_of_user(kind), replaced, names_read)
    if all(_is_library(base.__module__) for base in kind.__mro__):
        if len(_code_of_classes) >= MOST_CLASSES:
            _code_of_classes.clear()
        _code_of_classes[kind] = code
    return code


def _items_of_user(kind: type) -> list[tuple[str, Any]]:
    """What the user wrote in a class and its bases: functions, and the values in classes of the user; with their names."""
    items: list[tuple[str, Any]] = []
    for base in kind.__mro__:
        is_users = not _is_library(base.__module__)
        for name, item in vars(base).items():
            # The function inside a property or a class method.
            function = getattr(item, "fget", getattr(item, "__func__", item))
            if isinstance(function, FunctionType):
                if not is_of_library(_undecorated(function)):
                    items.append((name, function))
            elif is_users and not name.startswith(("__", "_abc_")):
                items.append((name, item))
    return items


# Values that `ValueNames` describes in full.
PLAIN_VALUES = (
    *(str, bool, int, float, complex, enum.Enum, np.generic, np.ndarray, torch.dtype),
    *(FunctionType, BuiltinFunctionType, functools.partial),
)


class ObjectTexts:
    """Describes modules and other objects as texts, so that equal classes, code and settings have equal texts.

    Args:
        names: names of functions and values.
    """

    def __init__(self, names: ValueNames) -> None:
        self._names = names
        # Texts by `id`, with the objects. The text of an object inside itself is None.
        self._texts = dict[int, tuple[Any, str | None]]()
        self._classes = dict[type, tuple[str, frozenset[str]]]()

    def settings(self, value: Any) -> list[Any]:
        """Texts of an object's class, of the user's code in the class, and of the object's attributes.

        Attributes that the forward pass of a module assigns, such as activations that it keeps, are left out.

        Args:
            value: a module or another object.
        """
        kind = type(value)
        if kind not in self._classes:
            code = code_of_class(kind)
            self._classes[kind] = (self._text_of_code(kind, code), code.stored)
        class_text, stored = self._classes[kind]
        private = PRIVATE if _is_library(kind.__module__) else vars(value)
        names = {name for name in vars(value) if name in private or not name.startswith("_")} - PASSING - stored
        texts: list[Any] = [class_text]
        for name in sorted(names):
            # Methods that are replaced are changes of a model (`sources.identity.hooks_on`).
            if callable(getattr(kind, name, None)):
                continue
            text = self.text(vars(value)[name])
            if text is not None:
                texts.append((name, text))
        return texts

    def class_text(self, kind: type) -> str:
        """The name of a class, with names of the user's functions and constants in it, and of functions that the user replaced.

        Args:
            kind: the class.
        """
        return self._text_of_code(kind, code_of_class(kind))

    def _text_of_code(self, kind: type, code: ClassCode) -> str:
        """The text of a class whose code is known; see `class_text`."""
        parts = [f"{kind.__module__}.{kind.__qualname__}"]
        for name, item in code.items:
            text = self._names.function(item) if isinstance(item, FunctionType) else self.text(item)
            if text is not None:
                parts.append(f"{name} {text}")
        parts += [f"{name} {self._names.function(function)}" for name, function in code.replaced.items()]
        return " ".join(parts)

    def text(self, value: Any) -> str | None:
        """Describe a value as text; None for modules, whose settings count on their own, and for objects of libraries.

        Args:
            value: the value of an attribute.
        """
        if isinstance(value, torch.Tensor):
            return None if value.is_meta or hasattr(value, "placements") else digest_of_tensor(value).hex()
        if value is None or isinstance(value, PLAIN_VALUES):
            return repr(self._names.named(value))
        if isinstance(value, MethodType):
            # The object of a method counts on its own where it is a part of the model.
            return f"{defined_in(value)}.{value.__qualname__}"
        if id(value) in self._texts:
            return self._texts[id(value)][1]
        self._texts[id(value)] = (value, None)
        text = None
        if isinstance(value, dict | list | tuple | set | frozenset):
            items = [list(item) for item in value.items()] if isinstance(value, dict) else value
            texts_of_items = [self.text(item) for item in items]
            # Of a collection with other objects too, those with a text.
            texts = [text_of_item for text_of_item in texts_of_items if text_of_item is not None]
            if texts or not items:
                text = str(texts if isinstance(value, list | tuple) else sorted(texts))
        elif isinstance(value, torch.nn.Module | type):
            text = None
        elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
            text = repr(self._names.named(plain_config(value)))
        elif not is_of_library(type(value)) and hasattr(value, "__dict__"):
            text = str(self.settings(value))
        self._texts[id(value)] = (value, text)
        return text


def _undecorated(function: FunctionType) -> FunctionType:
    """The function inside decorators of libraries."""
    while is_of_library(function) and isinstance(getattr(function, "__wrapped__", None), FunctionType):
        function = function.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps
    return function


def _replaced_functions(methods: Iterable[FunctionType], names_read: NamesRead) -> dict[str, FunctionType]:
    """Functions of the user, by name, that the forward pass of a library's class calls, because they replace the library's.

    Args:
        methods: methods that the forward pass runs.
        names_read: gets the names that are looked up.
    """
    starts = [item for item in methods if is_of_library(item) and defined_in(item) not in BASES]
    replaced: dict[str, FunctionType] = {}
    for function in called_by(starts):
        attributes = _names_in(function.__code__)
        values = names_read.look_up(function.__globals__, attributes)
        # Functions of a module's submodules too, such as torch.nn.functional.silu.
        for _ in range(3):
            values_of_modules: dict[str, Any] = {}
            for name, value in values.items():
                if isinstance(value, FunctionType) and not is_of_library(value):
                    replaced[name] = value
                elif isinstance(value, ModuleType) and _is_library(value.__name__):
                    for attribute, item in names_read.look_up(vars(value), attributes).items():
                        values_of_modules[f"{value.__name__}.{attribute}"] = item
            values = values_of_modules
    return dict(sorted(replaced.items()))
