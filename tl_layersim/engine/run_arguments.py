"""Checks of a run's arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..analyzers import find_analyzers
from ..analyzers.analyzer import Analyzer
from ..analyzers.linear_probe import ProbeOptions
from ..core.code_digests import UNKNOWN_CONTENTS
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError, in_words, shown, warn
from ..core.file_format import refuse_unwritable
from ..core.wording import brief
from ..data.data import DATA_OPTIONS
from ..data.input_names import PIXELS
from ..lens.exit_heads import ExitHeads
from ..sources.model_description import ModelDescription
from ..sources.open_local import OpenedModel

# Bytes of the heads of layers that a request to a server carries at most.
LARGEST_HEADS = 512_000_000

# Parts of the model in the costs that `estimate` returns, beside the names of analyzers.
COSTS = ("forward", "head")

if TYPE_CHECKING:
    AnalyzersArgument: TypeAlias = Analyzer | str | Sequence[Analyzer | str] | Mapping[str, Analyzer | str]
else:
    # Not checked as a type in a call: `choose_analyzers` names what is wrong.
    AnalyzersArgument = Any


def choose_analyzers(analyzers: Any) -> dict[str, Analyzer]:
    """The analyzers of a run, by name.

    The names are the keys of a mapping, or the analyzers' own names. A string stands for an analyzer with default options.

    Raises:
        LayersimError: a name is not known or not allowed, no analyzer is given, or a list has two analyzers of one name.
    """
    chosen: dict[str, Analyzer] = {}
    if analyzers is None:
        raise LayersimError("`analyzers` is None. Without data, name the argument: analyze(vectors, analyzers=[lsim.CKA()]).")
    if isinstance(analyzers, Mapping):
        for name, item in analyzers.items():
            _check_name(name, "`analyzers` has the key")
            chosen[name] = _analyzer_of(item)
            named_class = find_analyzers().get(name)
            if name in COSTS or (named_class is not None and not isinstance(chosen[name], named_class)):
                if named_class is None:
                    use = "`estimate` uses for a part of the model"
                else:
                    use = f"is the name of {named_class.__name__}"
                raise LayersimError(f"`analyzers` has the key {name!r}, which {use}. Choose another key.")
    else:
        for item in analyzers if is_several(analyzers) else [analyzers]:
            analyzer = _analyzer_of(item)
            _check_name(getattr(analyzer, "name", None), f"`name` of {type(analyzer).__name__} is")
            if analyzer.name in chosen:
                raise LayersimError(
                    f"`analyzers` holds {analyzer.name!r} twice. Pass a mapping from different names to the analyzers."
                )
            chosen[analyzer.name] = analyzer
    if not chosen:
        raise LayersimError("`analyzers` is empty; it must hold one analyzer or more.")
    return chosen


def _check_name(name: Any, statement: str) -> None:
    """Raise an error if the name of an analyzer is not allowed. `statement` is the start of the message."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise LayersimError(f"{statement} {brief(name)}; it must begin with a letter and hold only letters, digits and _.")


def is_several(analyzers: Any) -> bool:
    """Whether `analyzers` is a list or a mapping."""
    return isinstance(analyzers, Sequence | Mapping) and not isinstance(analyzers, str)


def _analyzer_of(item: Any) -> Analyzer:
    if isinstance(item, str):
        classes = find_analyzers()
        if item not in classes:
            raise LayersimError(f"`analyzers` names {brief(item)}; it must be one of {', '.join(sorted(classes))}.")
        return classes[item]()
    if isinstance(item, ProbeOptions) and not isinstance(item, Analyzer):
        raise LayersimError(
            f"`analyzers` contains {brief(item)}, which keeps activations and no sums. Use lsim.linear_probe(model, data, "
            f"{type(item).__name__}(...)), or LinearProbe."
        )
    if not isinstance(item, Analyzer):
        raise LayersimError(
            f"`analyzers` contains {brief(item)}; it must contain analyzers such as lsim.Cosine(), or their names."
        )
    shared_options = item.options().keys() & set(DATA_OPTIONS)
    if shared_options:
        raise LayersimError(
            f"{type(item).__name__} has the option {', '.join(sorted(shared_options))}, which is also an option of `Data`. "
            "Rename the option of the analyzer."
        )
    return item


def refuse_large_heads(analyzer: Analyzer) -> None:
    """Raise an error if exit heads are too large for requests to a server.

    Raises:
        LayersimError: they take more than `LARGEST_HEADS` bytes.
    """
    heads = getattr(analyzer, "heads", None)
    if isinstance(heads, ExitHeads) and heads.nbytes > LARGEST_HEADS:
        raise LayersimError(
            f"`heads` of {type(analyzer).__name__} take {in_words(heads.nbytes)}; they must take at most "
            f"{in_words(LARGEST_HEADS)} in a request to a server. heads.to(torch.bfloat16) halves the size of float32 heads."
        )


def refuse_unknown_functions(analyzer: Analyzer, argument: str) -> None:
    """Raise an error if an option of an analyzer is a function that a later run cannot recognise.

    Args:
        analyzer: the analyzer.
        argument: name of the argument that holds the run's file.

    Raises:
        LayersimError: the function holds objects without a digest.
    """
    for option, value in analyzer.options().items():
        if isinstance(value, str) and value.endswith(UNKNOWN_CONTENTS):
            raise LayersimError(
                f"`{argument}` needs analyzers that a later run can recognise, but `{option}` of {type(analyzer).__name__} is "
                f"{value}. Write it as a function that holds only numbers, texts and tensors."
            )


def refuse_server(analyzer: Analyzer) -> None:
    """Raise an error if an analyzer cannot measure a model on a server.

    Raises:
        LayersimError: names the analyzer.
    """
    if analyzer.needs.in_process:
        raise LayersimError(
            f"{type(analyzer).__name__} calls your function on activations in this process, and a server returns sums only. "
            "Load the model here, or use another analyzer."
        )


def with_tokenizer(model: ModelDescription, tokenizer: Any) -> ModelDescription:
    """Copy of a model description with another tokenizer or image processor. None changes nothing."""
    if tokenizer is None:
        return model
    # A class, such as AutoTokenizer, has some attributes of its instances.
    if not isinstance(tokenizer, type):
        if getattr(tokenizer, "image_processor", None) is not None:
            # A processor of both texts and images.
            return replace(model, tokenizer=getattr(tokenizer, "tokenizer", None), processor=tokenizer.image_processor)
        if PIXELS in (getattr(tokenizer, "model_input_names", None) or ()):
            return replace(model, processor=tokenizer)
        if callable(tokenizer) and hasattr(tokenizer, "bos_token_id"):
            return replace(model, tokenizer=tokenizer)
    raise LayersimError(f"`tokenizer` is {brief(tokenizer)}; it must be a loaded tokenizer, or an image processor.")


def shared_tokens(a: ModelDescription, b: ModelDescription, given: bool) -> ModelDescription:
    """Merge two model descriptions; the result accepts only inputs that both models accept.

    The context and the vocabulary of the result are the smaller of the two models'.

    Args:
        a: the first model, whose tokenizer is used.
        b: the second model.
        given: whether the user passed a tokenizer, which then holds for both models.

    Raises:
        LayersimError: the same ids stand for different tokens in the two vocabularies, or may do so.
    """
    both_have_tokenizers = a.tokenizer is not None and b.tokenizer is not None
    if not given and both_have_tokenizers and a.tokenizer is not b.tokenizer:
        ids_a = a.tokenizer.get_vocab()
        ids_b = b.tokenizer.get_vocab()
        if ids_a != ids_b:
            # The order of a vocabulary differs from call to call: the token with the smallest id is named.
            token, _ = min(ids_a.items() ^ ids_b.items(), key=lambda entry: (entry[1], entry[0]))
            statements = []
            for ids, name in ((ids_a, a.name), (ids_b, b.name)):
                if token in ids:
                    statements.append(f"has id {ids[token]} in {name}")
                else:
                    statements.append(f"is not in the vocabulary of {name}")
            raise LayersimError(
                "The two models have different tokenizers, so their samples do not match: token "
                f"{token!r} {' and '.join(statements)}."
            )
    if a.token_input != b.token_input:
        raise LayersimError(
            f"The models read different inputs of the data, so their samples do not match: {a.name} reads "
            f"`{a.token_input}`, and {b.name} reads `{b.token_input}`."
        )
    # Without both tokenizers, the sizes of the vocabularies are all that tells whether ids stand for the same tokens.
    must_compare_sizes = not given and not both_have_tokenizers
    if must_compare_sizes and a.vocabulary is not None and b.vocabulary is not None and a.vocabulary != b.vocabulary:
        sizes = f"The vocabularies of {a.name} and {b.name} have {a.vocabulary} and {b.vocabulary} entries"
        remedy = "Set model.tokenizer on both models, which are then compared, or pass the common one as Data(tokenizer=)."
        if not may_be_padding(a.vocabulary, b.vocabulary):
            raise LayersimError(f"{sizes}, so an id stands for different tokens in the two models. {remedy}")
        warn(f"{sizes}. If this is no padding, an id stands for different tokens in the two models. {remedy}")

    def smaller(size_a: int | None, size_b: int | None) -> int | None:
        return min((size for size in (size_a, size_b) if size is not None), default=None)

    context = smaller(a.context, b.context)
    # Errors of data that one model does not take name both, because the inputs are those of both.
    name = a.name if a.name == b.name else f"{a.name} with {b.name}"
    vocabulary = smaller(a.vocabulary, b.vocabulary)
    # A head that reads a row as one needs whole rows, whichever model has it.
    head = a.head if a.reads_rows else b.head
    return replace(a, name=name, vocabulary=vocabulary, context=context, head=head, **a.inputs_with(b))


def may_be_padding(size_a: int, size_b: int) -> bool:
    """Whether two vocabularies may be one, padded to a multiple of 64 or more, as GPU kernels prefer.

    Pythia has 50,304, 50,432 and 50,688 entries for one tokenizer, and Megatron pads GPT-2's 50,257 to 51,200 (1.8 %).

    Args:
        size_a: number of entries of one model's vocabulary.
        size_b: number of entries of the other model's.

    Examples:
        >>> may_be_padding(50304, 50688), may_be_padding(50257, 32000)
        (True, False)
    """
    larger = max(size_a, size_b)
    return larger % 64 == 0 and abs(size_a - size_b) <= 0.02 * larger


def refuse_no_comparison(analyzers: Mapping[str, Analyzer]) -> None:
    """Raise an error for analyzers that cannot compare two models.

    Args:
        analyzers: the analyzers, by name.

    Raises:
        LayersimError: names the analyzer.
    """
    for analyzer in analyzers.values():
        if analyzer.needs.models == "one":
            able = ", ".join(_classes_that_compare())
            raise LayersimError(f"{type(analyzer).__name__} cannot compare two models; {able} can.")


def _classes_that_compare() -> list[str]:
    """Names of the classes whose analyzers with default options compare two models."""
    names = []
    for cls in find_analyzers().values():
        # A class of another package may have an option without a default.
        with suppress(TypeError):
            if cls().needs.models != "one":
                names.append(cls.__name__)
    return names


def refuse_contradictions(arguments: Mapping[str, Any], blocking: bool, opened: OpenedModel) -> None:
    """Raise an error for arguments of `analyze` that contradict each other.

    Args:
        arguments: `shard`, `save_to`, `first`, `checkpoint` and `baseline` as given to `analyze`.
        blocking: see `analyze`.
        opened: the model, with the options of `open_model`.

    Raises:
        LayersimError: two arguments exclude each other, one lacks another, or no file can be written at `save_to`.
    """
    shard = arguments["shard"]
    if not blocking:
        if not opened.on_server:
            raise LayersimError(f"`blocking=False` needs a model on a server; `remote` is {shown(opened.remote)}.")
        _refuse_given(arguments, ("shard", "checkpoint", "baseline"), "cannot be combined with `blocking=False`")
    if shard is None:
        _refuse_given(arguments, ("save_to", "first"), "needs `shard`, such as shard=(0, 64)")
        return
    _refuse_given(arguments, ("checkpoint", "baseline"), "cannot be combined with `shard`")
    if not 0 <= shard[0] < shard[1]:
        raise LayersimError(
            f"`shard` is {shard}; it must be (i, n): the index i of a shard, from 0 to n - 1, and the number n of shards."
        )
    if arguments["save_to"] is None:
        raise LayersimError(f"`shard` is {shard}; it needs `save_to`, the path of a file for the sums of this shard.")
    _, ranks = rank_and_size()
    if ranks > 1:
        raise LayersimError(
            f"`shard` is {shard}; it cannot be used in a torch.distributed group, whose {ranks} ranks divide the data already."
        )
    refuse_unwritable(arguments["save_to"], "save_to")


def _refuse_given(arguments: Mapping[str, Any], names: Sequence[str], why: str) -> None:
    """Raise an error if one of the named arguments is given."""
    for name in names:
        if arguments[name] is not None:
            raise LayersimError(f"`{name}` is {brief(arguments[name])}; it {why}.")
