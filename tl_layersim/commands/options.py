"""`Command`: a command of the command line. Its options are generated from the functions and classes that it calls."""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from cyclopts import Group, Parameter

from ..core.errors import LayersimError

# Panels of `--help`, in their order.
PANELS = {name: Group.create_ordered(name) for name in ("Model", "Data", "Measures", "Run", "Output")}
# Longer defaults, such as lists of numbers, are not shown.
LONGEST_DEFAULT = 30
# A function or a class; or the name of one of this package, which is imported when the options are needed.
OptionSource = Callable[..., Any] | str


@dataclass(frozen=True)
class CommandCall:
    """The options of one call of a command.

    Attributes:
        command: name of the command.
        explicit: options of the command line and of the run file, and the command's own defaults, as text.
        options: values of all options, in the order of the help.
    """

    command: str
    explicit: dict[str, Any]
    options: dict[str, Any]

    def of(self, source: OptionSource, *, without: Sequence[str] = ()) -> dict[str, Any]:
        """The given options that a function or class takes, as a dict of keyword arguments.

        Args:
            source: the function or class.
            without: names to leave out.
        """
        keywords = {}
        for name in _parameters(source):
            value = self.explicit.get(name)
            if value is not None and name not in without:
                keywords[name] = READERS[name](value) if name in READERS else value
        return keywords

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Raise an error if an option is given that this call would ignore.

        Args:
            names: names of the options.
            why: the end of the message, such as "with `shard`".
        """
        for name in names:
            if self.explicit.get(name) not in (None, False):
                raise LayersimError(f"`{name}` is {self.explicit[name]}, but has no effect {why}.")


@dataclass(eq=False)
class Command:
    """A command of the command line; the decorator `command` makes it from a function.

    Attributes:
        name: name of the command.
        function: runs the command.
        sources: functions and classes whose parameters are the options, by panel of the help.
        without: parameters that are not options.
        defaults: defaults of the command line that differ from those in Python.
    """

    name: str
    function: Callable[[CommandCall], None]
    sources: Mapping[str, Sequence[OptionSource]]
    without: Sequence[str]
    defaults: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.__doc__ = self.function.__doc__
        self.__name__ = self.function.__name__
        self.__module__ = self.function.__module__
        # Cyclopts reads the annotations of `__signature__` instead.
        self.__annotations__ = {}

    @cached_property
    def __signature__(self) -> inspect.Signature:
        """The options as parameters of a Python function. Of two with the same name, the first is used."""
        # By name, the parameter and its panel.
        parameters: dict[str, tuple[inspect.Parameter, str]] = {}
        for panel, sources in self.sources.items():
            for source in sources:
                for name, parameter in _parameters(source).items():
                    if name in self.without or name in parameters:
                        continue
                    # Arguments of Python functions are options; only a command's own declarations have positional ones.
                    kind = parameter.KEYWORD_ONLY if isinstance(source, str) else parameter.kind
                    default = self.defaults.get(name, parameter.default)
                    parameters[name] = (parameter.replace(kind=kind, default=default), panel)
        options = [_option(parameter, panel, parameters) for parameter, panel in parameters.values()]
        # A signature must have positional parameters first, and required ones before those with a default.
        return inspect.Signature(sorted(options, key=lambda option: (option.kind, option.default is not option.empty)))

    def takes_several(self) -> dict[str, bool]:
        """For each option, whether it takes several values."""
        takes_several = {}
        for name, option in self.__signature__.parameters.items():
            hint = get_args(option.annotation)[0]
            takes_several[name] = list[str] in (hint, *get_args(hint))
        return takes_several

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        signature = self.__signature__
        explicit = {**self.defaults, **signature.bind(*args, **kwargs).arguments}
        defaults = {name: option.default for name, option in signature.parameters.items()}
        try:
            self.function(CommandCall(self.name, explicit, defaults | explicit))
        except LayersimError as error:
            error.args = (in_options(str(error), signature.parameters),)
            raise


def command(
    name: str, sources: Mapping[str, Sequence[OptionSource]], *, without: Sequence[str] = (), **defaults: Any
) -> Callable[[Callable[[CommandCall], None]], Command]:
    """A decorator that makes a `Command` from a function.

    Args:
        name: name of the command.
        sources: see `Command`.
        without: see `Command`.
        **defaults: see `Command`.
    """
    return lambda function: Command(name, function, sources, without, defaults)


def flag(name: str) -> str:
    """The command-line option of a Python argument.

    Examples:
        >>> flag("seq_len")
        '--seq-len'
    """
    return f"--{name.replace('_', '-')}"


def in_options(text: str, names: Any) -> str:
    """Replace Python arguments in an error message by command-line options.

    Args:
        text: text of the error.
        names: names of the options.

    Examples:
        >>> in_options("`seq_len` is 1; `x` is not.", ["seq_len"])
        '`--seq-len` is 1; `x` is not.'
    """
    return re.sub(r"`(\w+)`", lambda match: f"`{flag(match[1])}`" if match[1] in names else match[0], text)


def _option(parameter: inspect.Parameter, panel: str, names: Mapping[str, Any]) -> inspect.Parameter:
    """A parameter with the annotation that cyclopts reads: its type, its help and its panel."""
    default = parameter.default
    kind, text = get_args(parameter.annotation)
    if kind == list[str] and default not in (None, parameter.empty):
        default = [default] if isinstance(default, str) else [str(item) for item in default]
    default_text = ",".join(default) if isinstance(default, list) else str(default)
    shows_default = len(default_text) < LONGEST_DEFAULT and default_text not in ("None", "False")
    cyclopts_parameter = Parameter(
        help=in_options(text, names),
        group=PANELS[panel],
        negative=() if default is False else None,
        converter=_parse_integer if kind is int else None,
        # Values such as --at -1 begin with a hyphen.
        allow_leading_hyphen=kind in (str, list[str]) and parameter.kind is parameter.KEYWORD_ONLY,
        show_default=(lambda _: default_text) if shows_default else False,
    )
    hint = kind if default is not None else kind | None
    return parameter.replace(annotation=Annotated[hint, cyclopts_parameter], default=default)


def _parse_integer(_: Any, tokens: Sequence[Any]) -> int:
    """Parse an integer; cyclopts itself would round 1.5."""
    return int(tokens[0].value)


def help_of(source: OptionSource) -> dict[str, str]:
    """A dict of parameter descriptions, from the docstring of a function or class."""
    import docstring_parser

    parsed = docstring_parser.parse(inspect.getdoc(_resolved(source)) or "", docstring_parser.DocstringStyle.GOOGLE)
    return {parameter.arg_name: " ".join((parameter.description or "").split()) for parameter in parsed.params}


def _resolved(source: OptionSource) -> Any:
    import tl_layersim

    return attrgetter(source)(tl_layersim) if isinstance(source, str) else source


def _parameters(source: OptionSource) -> dict[str, inspect.Parameter]:
    """A dict of the parameters that the command line can set, annotated with their type and help.

    A reference such as "see `analyze`" is replaced by the help of that function.
    """
    call = _resolved(source)
    hints = get_type_hints(call, include_extras=True)
    texts = help_of(source)
    parameters = {}
    for name, parameter in inspect.signature(call).parameters.items():
        text = texts.get(name, "")
        reference = re.search(r"(?:see|as in) `(analyze|stitch|LogitLens)`", text)
        if reference:
            text = help_of(reference[1]).get(name, text)
        kind = _text_type(hints.get(name, Any))
        if kind is not None:
            parameters[name] = parameter.replace(annotation=Annotated[kind, text])
    return parameters


def _members(hint: Any) -> list[Any]:
    """A list of the types in a union, without None and without `Annotated` metadata."""
    if get_origin(hint) is Annotated:
        return _members(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        members = []
        for part in get_args(hint):
            members += _members(part)
        return members
    return [] if hint is type(None) else [hint]


def _text_type(hint: Any) -> Any:
    """The command-line type for a Python type; None if text cannot express its values."""
    members = {get_origin(member) or member: member for member in _members(hint)}
    if list in members or Sequence in members:
        return list[str]
    if Literal in members:
        return members[Literal]
    if os.PathLike in members or Path in members:
        return Path
    for kind in (float, int, str, bool):
        if kind in members:
            return kind
    return str if tuple in members else None


def names_of(texts: Sequence[str]) -> list[str]:
    """Split names that are separated by commas.

    Args:
        texts: texts with one or several names each.
    """
    return [name.strip() for text in texts for name in text.split(",") if name.strip()]


def stitch_point(text: str) -> tuple[int | str, int | str]:
    """Parse a stitch point: two layers, each a number or a name.

    Args:
        text: the point, such as `4:6`.
    """
    first, colon, second = (part.strip() for part in text.partition(":"))
    if not (first and colon and second):
        raise LayersimError(f"`at` is {text!r}; it must be a layer of FRONT, a colon and a layer of BACK, such as 4:6.")
    return _layer(first), _layer(second)


def _layer(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d+", text) else text


def _sites(texts: Sequence[str]) -> list[int | str]:
    return [_layer(text) for text in names_of(texts)]


def shard_files(texts: Sequence[str], argument: str = "first") -> list[Path]:
    """List the shard files that paths, folders or patterns name. Run files, which a pattern may match too, are left out.

    Args:
        texts: folders, patterns and files.
        argument: name of the argument, for messages.
    """
    from ..engine.shards import paths_of

    return [file for file in paths_of(texts, argument) if file.suffix != ".yaml"]


def _shard(text: str) -> tuple[int, int]:
    if not re.fullmatch(r"\d+/\d+", text):
        raise LayersimError(
            f"`shard` is {text!r}; it must be the index of a shard, a slash and the number of shards, such as 3/64."
        )
    number, shard_count = text.split("/")
    return int(number), int(shard_count)


def _column(text: str) -> str | tuple[str, ...]:
    return tuple(names_of([text])) if "," in text else text


def _numbers(name: str) -> Callable[[Sequence[str]], Any]:
    def read(texts: Sequence[str]) -> tuple[float, ...]:
        try:
            return tuple(float(number) for number in names_of(texts))
        except ValueError:
            raise LayersimError(f"`{name}` is {','.join(texts)}; it must be numbers, separated by commas.") from None

    return read


def _weights(texts: Sequence[str]) -> Any:
    return texts[0] if texts in (["linear"], ["uniform"]) else _numbers("weights")(texts)


def _positions(text: str) -> Any:
    from ..data.positions import as_rule

    return as_rule(text)


# Parsers of values from text, by option.
READERS: dict[str, Callable[[Any], Any]] = {
    "at": _sites,
    "layers": names_of,
    "unembed": names_of,
    "format": names_of,
    "first": shard_files,
    "shard": _shard,
    "column": _column,
    "positions": _positions,
    "thresholds": _numbers("thresholds"),
    "weights": _weights,
}
