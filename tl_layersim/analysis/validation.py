"""Validation of a run's arguments: the chosen analyzers, the tokenizer, and the tokens that two models share."""

from __future__ import annotations

import difflib
import os
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from torch.nn import Module

from ..analyzers import find_analyzers
from ..analyzers.base import Analyzer
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, LayersimWarning, in_words
from ..core.server_addresses import shown
from ..core.wording import brief
from ..data.data import DATA_OPTIONS
from ..data.inputs import PIXELS
from ..models.exit_heads import ExitHeads
from ..models.model_info import Model

# Bytes of the heads of layers that a request to a server carries at most.
LARGEST_HEADS = 512_000_000
# Keys beside the names of analyzers in the costs that `estimate` returns.
COSTS = ("forward", "head")

if TYPE_CHECKING:
    AnalyzersArgument: TypeAlias = Analyzer | str | Sequence[Analyzer | str] | Mapping[str, Analyzer | str]
    DataArgument: TypeAlias = Iterable[Any]
else:
    # Not checked as types in a call: `choose_analyzers` and the readers of data name what is wrong and what to write.
    AnalyzersArgument = DataArgument = Any


def choose_analyzers(analyzers: Any) -> dict[str, Analyzer]:
    """Analyzers by name: the keys of a mapping, or their own names; a name in place of an analyzer selects its default options.

    Raises:
        LayersimError: a name is not known or not allowed, no analyzer is given, or a list holds two of one name.
    """
    chosen: dict[str, Analyzer] = {}
    if isinstance(analyzers, Mapping):
        for name, item in analyzers.items():
            chosen[name] = _analyzer_of(item)
            _check_name(name, chosen[name])
    else:
        items = list(analyzers) if is_several(analyzers) else [analyzers]
        for item in map(_analyzer_of, items):
            if item.name in chosen:
                cls = type(item).__name__
                raise LayersimError(
                    "`analyzers` holds two analyzers of the same name, and a report has one result for each name.",
                    given=f"{item.name!r} twice",
                    expected="each analyzer once in a list, or a mapping from names to analyzers",
                    do=f'{{"{item.name}_a": {cls}(...), "{item.name}_b": {cls}(...)}} in place of the list',
                )
            chosen[item.name] = item
    if not chosen:
        raise LayersimError("`analyzers` is empty.", given="[]", expected="at least one", do="[lsim.Cosine(), lsim.CKA()]")
    return chosen


def is_several(analyzers: Any) -> bool:
    """Whether an argument holds several analyzers, a list or a mapping, and the call returns a report of them."""
    return isinstance(analyzers, Sequence | Mapping) and not isinstance(analyzers, str)


def _analyzer_of(item: Any) -> Analyzer:
    """The analyzer that an entry of `analyzers` is or names."""
    if isinstance(item, str):
        known = find_analyzers()
        if item not in known:
            parts = [part.strip().lower() for part in item.split(",")]
            near = [n for part in parts for n in difflib.get_close_matches(part, known, n=1)]
            raise LayersimError(
                "`analyzers` names an analyzer that does not exist.",
                given=brief(item),
                expected=f"one of {', '.join(sorted(known))}",
                do=f"did you mean {near[0] if len(near) == 1 else near!r}?" if near else "tl-layersim analyzers lists them",
            )
        item = known[item]()
    _check_analyzer(item)
    return cast(Analyzer, item)


def _check_name(name: Any, analyzer: Analyzer) -> None:
    """Refuse a name that files, columns of tables or options of the command line cannot hold, or that misleads."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        fitting = re.sub(r"\W+", "_", str(name), flags=re.ASCII).strip("_")
        fitting = fitting if fitting[:1].isalpha() else f"{analyzer.name}_{fitting}".rstrip("_")
        raise LayersimError(
            "A name in `analyzers` must be letters, digits and _, with a letter first.",
            given=brief(name),
            expected="a name that files, columns of tables and --option can hold",
            do=f'{{"{fitting}": {type(analyzer).__name__}(...)}}',
        )
    if name in COSTS:
        raise LayersimError(
            f"A name in `analyzers` is that of a part of the model in `estimate`, {name!r}.",
            given=f'"{name}": {type(analyzer).__name__}(...)',
            expected=f"a name other than {' and '.join(COSTS)}",
            do=f'{{"{name}_{analyzer.name}": {type(analyzer).__name__}(...)}}',
        )
    other = find_analyzers().get(name)
    if other is not None and not isinstance(analyzer, other):
        raise LayersimError(
            f"A name in `analyzers` is that of another analyzer, {other.__name__}.",
            given=f'"{name}": {type(analyzer).__name__}(...)',
            expected="a name of your own, or the analyzer's own name",
            do=f'{{"{analyzer.name}": {type(analyzer).__name__}(...)}}',
        )


def _check_analyzer(analyzer: Any) -> None:
    """Refuse, before the model runs, an analyzer whose result could not be recorded."""
    if not isinstance(analyzer, Analyzer | type):
        raise LayersimError(
            "`analyzers` must contain only analyzers, or the names of analyzers.",
            given=brief(analyzer),
            expected="an Analyzer or the name of one",
            do="[lsim.Cosine(), lsim.CKA()]",
        )
    if isinstance(analyzer, type):
        raise LayersimError(
            f"`analyzers` holds the class {analyzer.__name__}, not an instance of it.",
            given=analyzer.__name__,
            expected="an object",
            do=f"{analyzer.__name__}(), with brackets" if issubclass(analyzer, Analyzer) else "lsim.Cosine()",
        )
    name = getattr(analyzer, "name", None)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise LayersimError(
            f"{type(analyzer).__name__} has no name that a report can use as a key.",
            given=f"name = {name!r}",
            expected="lower-case letters, digits and _",
            do=f'name: ClassVar[str] = "{type(analyzer).__name__.lower()}" in the class',
        )
    if not is_dataclass(analyzer):
        raise LayersimError(
            f"{type(analyzer).__name__} must be a dataclass, so that its options can be recorded.",
            given=type(analyzer).__name__,
            expected="a frozen dataclass",
            do="@dataclass(frozen=True) above the class",
        )
    clash = cast(Analyzer, analyzer).options().keys() & set(DATA_OPTIONS)
    if clash:
        raise LayersimError(
            f"{type(analyzer).__name__} has an option whose name is reserved for a data option.",
            given=", ".join(sorted(clash)),
            expected=f"names other than {', '.join(DATA_OPTIONS)}",
            do="rename the field of the dataclass",
        )


def refuse_large_heads(analyzer: Analyzer) -> None:
    """Refuse heads of layers that are too large to be sent to a server with every request.

    Raises:
        LayersimError: they take more than `LARGEST_HEADS` bytes.
    """
    heads = getattr(analyzer, "heads", None)
    if isinstance(heads, ExitHeads) and heads.nbytes > LARGEST_HEADS:
        raise LayersimError(
            f"`heads` of {type(analyzer).__name__} are too large for a server: every request carries them.",
            given=f"{in_words(heads.nbytes)}, {heads}",
            expected=f"at most {in_words(LARGEST_HEADS)}",
            do="the model in this process; heads.to(torch.bfloat16) halves the size of float32 heads",
        )


def with_tokenizer(model: Model, tokenizer: Any) -> Model:
    """The model with its tokenizer or its processor of images replaced by `tokenizer`; unchanged where `tokenizer` is None."""
    if tokenizer is None:
        return model
    if getattr(tokenizer, "image_processor", None) is not None:
        # A processor of both texts and images.
        return replace(model, tokenizer=getattr(tokenizer, "tokenizer", None), processor=tokenizer.image_processor)
    if PIXELS in (getattr(tokenizer, "model_input_names", None) or ()):
        return replace(model, processor=tokenizer)
    if not callable(tokenizer) or isinstance(tokenizer, type | FunctionType | Module):
        raise LayersimError(
            "`tokenizer` must be a loaded tokenizer.",
            given=f"tokenizer={brief(tokenizer)}",
            expected="a loaded Hugging Face tokenizer, or a processor of images",
            do="AutoTokenizer.from_pretrained(name)",
        )
    return replace(model, tokenizer=tokenizer)


def shared_tokens(a: Model, b: Model, given: bool) -> Model:
    """A description of the inputs that both models accept, with the smaller context and vocabulary.

    Args:
        a: the first model, whose tokenizer is used.
        b: the second model.
        given: whether the user passed a tokenizer for both.

    Raises:
        LayersimError: the same ids are different tokens in the two vocabularies.
    """
    if not given and a.tokenizer is not None and b.tokenizer is not None and a.tokenizer is not b.tokenizer:
        words_a, words_b = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
        if words_a != words_b:
            odd = next((w for w in words_a if words_b.get(w) != words_a[w]), next(iter(words_b), ""))
            raise LayersimError(
                "The two models have different tokenizers, so their samples do not match.",
                given=f"{odd!r} is token {words_a.get(odd)} of {a.name} and {words_b.get(odd)} of {b.name}",
                expected="models with the same tokenizer",
                do="models of one family; tokenizer=... only if both were trained with it; or vectors of whole texts, as "
                "docs/add_a_source.md compares them",
            )
    if a.token_input != b.token_input:
        raise LayersimError(
            "The models read different inputs of the data, so their samples do not match.",
            given=f"`{a.token_input}` of {a.name} and `{b.token_input}` of {b.name}",
            expected="the decoders of two encoder-decoders, or encoders and models of one stack",
            do="at='encoder.resid_post', or layers=, for the encoder of an encoder-decoder",
        )

    sure = a.tokenizer is not None and b.tokenizer is not None and not given
    if not sure and None not in (a.vocabulary, b.vocabulary) and a.vocabulary != b.vocabulary:
        warnings.warn(
            f"The vocabularies have {a.vocabulary} and {b.vocabulary} entries, so the same id may be another token in the "
            "second model. Set model.tokenizer on each model, and the vocabularies are compared.",
            LayersimWarning,
            stacklevel=3,
        )

    def smaller(x: int | None, y: int | None) -> int | None:
        return min((v for v in (x, y) if v is not None), default=None)

    context = smaller(a.context, b.context)
    # Errors about long rows name the model with the shorter context.
    name = a.name if context == a.context else b.name
    vocabulary = smaller(a.vocabulary, b.vocabulary)
    # A head that reads a row as one needs whole rows, whichever model has it.
    head = a.head if a.reads_rows else b.head
    return replace(a, name=name, vocabulary=vocabulary, context=context, head=head, **a.inputs_with(b))


def refuse_no_comparison(analyzers: Mapping[str, Analyzer], call: str) -> None:
    """Refuse analyzers that do not compare two models.

    Args:
        analyzers: by name.
        call: the call to make, with a place for an analyzer.

    Raises:
        LayersimError: names the analyzer.
    """
    for name, analyzer in analyzers.items():
        if not analyzer.compares:
            able = [cls.__name__ for cls in find_analyzers().values() if cls.compares]
            raise LayersimError(
                f"{type(analyzer).__name__} cannot compare two models.",
                given=f"{name!r} in {call.partition('(')[0]}()",
                expected=f"one of {', '.join(able)}",
                do=call.format(f"{able[0]}()"),
            )


def refuse_idle_options(remote: bool | str, blocking: bool, checkpoint: str | os.PathLike[str] | None) -> None:
    """Refuse options that contradict each other, before a model is opened."""
    on_server = remote not in (False, "local")
    if on_server and rank_and_size()[1] > 1:
        raise LayersimError(
            "`remote` cannot be used in a torch.distributed group: every process would send the same requests.",
            given="remote= in a torch.distributed group",
            expected="one process",
            do="call it in one process; the server does the work",
        )
    if not blocking and not on_server:
        raise LayersimError(
            "`blocking=False` needs a model on an NDIF server.",
            given=f"blocking=False with remote={shown(remote)}",
            expected="remote=True, or the address of an NDIF server",
            do="leave out blocking=False",
        )
    if not blocking and checkpoint is not None:
        raise LayersimError(
            "`checkpoint` cannot be combined with `blocking=False`: the server keeps the state of a non-blocking job.",
            given="checkpoint= with blocking=False",
            expected="one of them",
            do="run.save(path) keeps the sums that arrived too",
        )
