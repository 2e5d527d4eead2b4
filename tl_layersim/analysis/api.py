"""`analyze` and `compare`: run analyzers over data on one model, or on two."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from torch import Tensor
from torch.nn import Module

from ..analyzers.base import Analyzer, Run
from ..core.argument_checks import typed
from ..core.results import Report, Result
from ..core.sums import Sums
from ..data.batches import Batches
from ..data.options import Column, DataOptions
from ..models.hugging_face_check import verify_on_first_row
from ..models.model_inputs import shared_positions
from ..models.untrained import untrained
from ..remote.open import open_source
from .baselines import BaselineArgument, refuse_no_twin, seeds_of, with_untrained
from .position_rules import chosen_rule
from .run_analysis import run_analysis
from .shard_run import run_shard
from .shards import FilesArgument, chosen_shard
from .site_plan import DEFAULT, AtArgument, plan_sites
from .submitted_run import RemoteRun
from .validation import (
    AnalyzersArgument,
    DataArgument,
    choose_analyzers,
    is_several,
    refuse_idle_options,
    refuse_no_comparison,
    shared_tokens,
    with_tokenizer,
)

# For type checkers: the Hugging Face model that a TransformerLens model is compared with.
VerifyArgument: TypeAlias = Literal["hf"] | Module | None
SeveralAnalyzers: TypeAlias = Sequence[Analyzer | str] | Mapping[str, Analyzer | str]
R_co = TypeVar("R_co", bound=Result, covariant=True)


class _Computes(Protocol[R_co]):
    """Any analyzer, for type checkers, by the class of the result that `compute` returns."""

    def compute(self, sums: Sums, run: Run) -> R_co: ...


class SharedKeywords(TypedDict, total=False):
    """Keywords that `analyze`, `compare` and `compare_grid` share, for type checkers."""

    at: AtArgument
    per_head: bool
    tokenizer: Any
    batch_size: int
    seq_len: int | None
    pack: bool
    max_tokens: int | None
    skip_first: int
    prepend_bos: bool
    column: Column | None
    positions: str | slice | Callable[[Tensor], Any] | None
    chat_template: str | None
    add_generation_prompt: bool
    intervals: bool
    baseline: BaselineArgument


class OneModelOptions(SharedKeywords, total=False):
    """Keywords of `analyze`, and of calls that pass them on, for type checkers."""

    verify: VerifyArgument
    layers: list[str] | None
    unembed: list[str] | None
    remote: bool | str
    tokens_per_request: int | None


class _OneModel(OneModelOptions, total=False):
    checkpoint: str | os.PathLike[str] | None


class _TwoModels(SharedKeywords, total=False):
    checkpoint: str | os.PathLike[str] | None
    verify: VerifyArgument | tuple[VerifyArgument, VerifyArgument]
    layers: tuple[list[str] | None, list[str] | None]
    remote: bool | str | tuple[bool | str, bool | str]


@overload
def analyze(
    model: Any,
    data: DataArgument,
    analyzers: AnalyzersArgument,
    *,
    blocking: Literal[True] = True,
    **options: Unpack[_OneModel],
) -> Report: ...
@overload
def analyze(
    model: Any, data: DataArgument, analyzers: AnalyzersArgument, *, blocking: Literal[False], **options: Unpack[_OneModel]
) -> RemoteRun: ...
@overload
def analyze(
    model: Any, data: DataArgument, analyzers: AnalyzersArgument, *, blocking: bool, **options: Unpack[_OneModel]
) -> Report | RemoteRun: ...
@overload
def analyze(
    model: Any,
    data: DataArgument,
    analyzers: AnalyzersArgument,
    *,
    shard: tuple[int, int],
    save_to: str | os.PathLike[str],
    first: FilesArgument | None = None,
    **options: Unpack[OneModelOptions],
) -> Path: ...
@typed
def analyze(
    model: Any,
    data: DataArgument,
    analyzers: AnalyzersArgument,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    verify: VerifyArgument = None,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
    tokenizer: Any = None,
    batch_size: int = 16,
    seq_len: int | None = None,
    pack: bool = False,
    max_tokens: int | None = None,
    skip_first: int = 0,
    prepend_bos: bool = True,
    column: Column | None = None,
    positions: str | slice | Callable[[Tensor], Any] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: str | os.PathLike[str] | None = None,
    tokens_per_request: int | None = None,
    blocking: bool = True,
    shard: tuple[int, int] | None = None,
    save_to: str | os.PathLike[str] | None = None,
    first: FilesArgument | None = None,
) -> Report | RemoteRun | Path:
    """Run analyzers over data on one model, in one pass (two where a dataset mean is needed).

    Memory holds sums, not activations. The model runs in evaluation mode, without gradients, and is not changed. In an
    initialised `torch.distributed` group each rank measures a part of the batches and returns the same report.

    Args:
        model: HookedTransformer, TransformerBridge, nnsight `TransformersModel` or `NNsight(module)`, a Hugging Face model,
            or any torch module with `layers`.
        data: a list of texts, a token tensor `batch pos`, a mapping of the model's inputs by name (`input_ids`,
            `attention_mask`, `token_type_ids`, `pixel_values`, ...), a `datasets.Dataset` or `IterableDataset`, chats as lists
            of messages with `role` and `content`, or an iterable of these. Every column that the model's forward takes reaches
            it.
        analyzers: analyzers, or names of those that `tl-layersim analyzers` lists, with their default options; or a mapping
            from names to analyzers, such as `{"raw": LogitLens(norm="none"), "normed": LogitLens()}`. The names are the keys of
            the report. Without a mapping each analyzer can be there once.
        at: the sites to read. Families: "resid_post" (the input of block 0 and every block's output), "resid_mid", "attn_out",
            "mlp_out", "z", "q", "k", "v", "mlp_post", "ln1", "ln2", "ln_final"; or several; a list of names of hook points or
            of module paths; a pattern such as "blocks.*.hook_attn_out"; or a function of names that returns True for those to
            read. Families of an encoder-decoder are those of its decoder, and "encoder.resid_post" names one of the encoder.
            `sites` lists what a model has. Analyzers that need the residual stream refuse other sites.
        per_head: read each head of "z", "q", "k" or "v" as a site of its own, such as `blocks.3.attn.hook_z[5]`.
        verify: "hf" compares the residual stream of a TransformerBridge or a HookedTransformer with the `hidden_states` of the
            Hugging Face model on the first row, site by site, and refuses a model that differs by more than rounding. The
            checkpoint that the model was booted from is loaded a second time, from its folder or the hub's cache. The Hugging
            Face model itself, untouched by a bridge, is compared instead where it is given.
        layers: paths of the blocks, for layouts that are not known. They are numbered in the order given, and recorded.
        unembed: paths of the final norm and of the modules after it up to the logits, for layouts that are not known; the norm
            first, if there is one.
        remote: for nnsight models: True for the NDIF server that nnsight is set to, the address of another one, or "local"
            for nnsight's simulation of a server. Only sums return from the server.
        tokenizer: used in place of the model's own; for images their processor.
        batch_size: rows in a forward pass at most; above 16 the next lower power of two. Results do not depend on it.
        seq_len: longest row of tokens; longer texts and rows continue in further rows. A head that reads a row as one, as that
            of a classifier of texts, reads one row of each text, which the tokenizer cuts. Default: 256 for texts or the
            model's context if that is shorter; token rows as they are.
        pack: join texts and cut rows of full length from the joined text, instead of padding each text.
        max_tokens: stop after this many counted tokens.
        skip_first: leave out the first positions of each row, whose activations are massive in many models.
        positions: the positions of each row that are measured, among the attended ones that `skip_first` leaves: "all",
            "first", "last" or a slice; "mean", one sample a row, the mean over its positions; a function that takes the token
            ids of a row and returns a mask or indices; the name of a mask column beside `input_ids`; or "assistant", the
            assistant's tokens in chat messages. A row is one that the model reads, after `seq_len` and `pack`. Default: the
            position that a row classifier's head reads ("first" for [CLS], "last" for decoders); "all" for any other model, and
            for analyzers that take rows as samples. The rule is recorded.
        prepend_bos: start every row that comes from text with the tokenizer's BOS, as TransformerLens does.
        column: the column of a data set that holds texts, tokens, images or chat messages; two names for pairs of texts.
        chat_template: renders chat messages in place of the tokenizer's own template.
        add_generation_prompt: end each chat with the tokens that begin an answer of the assistant.
        intervals: keep the sums of 16 to 32 blocks of consecutive rows, from which every result gets confidence intervals:
            `result.interval("values")`. Memory holds up to 48 times the sums.
        baseline: "untrained" also measures three models of the same architecture with fresh weights (`lsim.untrained`) on the
            same data. Figures and tables show them beside the trained model, `result.untrained` holds their results.
        checkpoint: a file for partial sums: written about every 30 s, after each request to a server, and on an interrupt; the
            same call resumes from it and ends with exactly the numbers of an uninterrupted run.
        tokens_per_request: on a server, the most positions, padding included, in one request. Default: as many forward passes
            as run in about 10 s, or in a quarter of the operator's time limit; fewer after the server ended a job for its time.
        blocking: False to send all requests of the main pass to a server and return at once.
        shard: measure one of several contiguous parts of the data: its number, from 0, and the number of parts, as (3, 64).
            Each call reads all data to count the batches, and runs the model on its own. `merge` makes the report of all files.
        save_to: the file for the sums of the shard, which is its checkpoint too: the same call continues from it, and returns
            at once if it is complete.
        first: with `shard`, where an analyzer needs a first pass with the model: the files of the first stage, those that the
            same calls without `first` wrote for all shards. A folder or a pattern does too.

    Returns:
        A `Report`, the results by analyzer name; with `blocking=False` a `RemoteRun`, whose `result()` is the report; with
        `shard` the path `save_to`.

    Raises:
        LayersimError: an argument does not fit the others, the model or the data; or activations are not finite.

    Examples:
        >>> import tl_layersim as lsim
        >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Cosine(center="none")])
        >>> list(report)
        ['cosine']
    """
    given = locals()
    chosen = choose_analyzers(analyzers)
    if baseline is not None:
        refuse_no_twin([model], remote, blocking, shard)
        report = analyze(**given | {"baseline": None})
        more = {"baseline": None, "intervals": False, "verify": None, "checkpoint": None}
        joined: Report = with_untrained(report, data, lambda seed: analyze(**given | more | {"model": untrained(model, seed)}))
        return joined
    part = chosen_shard(shard, save_to, first, checkpoint, blocking)
    refuse_idle_options(remote, blocking, checkpoint)
    opening: dict[str, Any] = {"unembed": unembed, "tokens_per_request": tokens_per_request, "either_stack": True, "at": at}
    source = open_source(model, layers=layers, remote=remote, **opening)
    verify_on_first_row(source, verify)
    plan = plan_sites([source], chosen, at, per_head)
    chosen = plan.settled(chosen, source, positions)
    described = with_tokenizer(source.model, tokenizer)
    labelled = any(analyzer.label_source == "data" for analyzer in chosen.values())
    rule = chosen_rule(positions, [source.model], chosen, skip_first)
    reading = DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column, rule)
    reading = replace(reading, chat_template=chat_template, add_generation_prompt=add_generation_prompt)
    batches = Batches(data, described, reading, labelled, source.count_positions)
    opened_with = {"layers": layers, "unembed": unembed, "verify": _verified(verify)}
    if part is not None:
        return run_shard(source, batches, chosen, opened_with, plan, intervals, part)
    return run_analysis([source], batches, chosen, checkpoint, opened_with, plan, blocking, intervals)


@overload
def compare(model_a: Any, model_b: Any, data: DataArgument, analyzers: str, **options: Unpack[_TwoModels]) -> Result: ...
@overload
def compare(
    model_a: Any, model_b: Any, data: DataArgument, analyzers: _Computes[R_co], **options: Unpack[_TwoModels]
) -> R_co: ...
@overload
def compare(
    model_a: Any, model_b: Any, data: DataArgument, analyzers: SeveralAnalyzers, **options: Unpack[_TwoModels]
) -> Report: ...
@typed
def compare(
    model_a: Any,
    model_b: Any,
    data: DataArgument,
    analyzers: Any,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    verify: VerifyArgument | tuple[VerifyArgument, VerifyArgument] = None,
    layers: tuple[list[str] | None, list[str] | None] = (None, None),
    remote: bool | str | tuple[bool | str, bool | str] = False,
    tokenizer: Any = None,
    batch_size: int = 16,
    seq_len: int | None = None,
    pack: bool = False,
    max_tokens: int | None = None,
    skip_first: int = 0,
    prepend_bos: bool = True,
    column: Column | None = None,
    positions: str | slice | Callable[[Tensor], Any] | None = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Report | Result:
    """Relate the layers of two models that read the same tokens; widths and depths may differ.

    Args:
        model_a: gives the rows of the result; kinds as in `analyze`.
        model_b: gives the columns.
        data: as in `analyze`, tokenised once, by the first model's tokenizer.
        analyzers: one analyzer that compares, or several: a list, or a mapping from names as in `analyze`.
        at: the sites to read in both models, see `analyze`.
        per_head: see `analyze`.
        verify: as in `analyze`, for both models or for each.
        layers: paths of the blocks of each model, for layouts that are not known.
        remote: as in `analyze`, for both models or for each. A request runs one model, so statistics of each model's layers
            return from the server and are joined here: for CKA the Gram matrices of minibatches, not the activations. Their
            size is printed first.
        tokenizer: used in place of the first model's own, for both models.
        batch_size: see `analyze`, as for all further options.
        seq_len: see `analyze`.
        pack: see `analyze`.
        max_tokens: see `analyze`.
        skip_first: see `analyze`.
        prepend_bos: see `analyze`.
        column: see `analyze`.
        positions: see `analyze`; one rule for both models. It must be given if their heads read different positions.
        chat_template: see `analyze`.
        add_generation_prompt: see `analyze`.
        intervals: see `analyze`.
        baseline: "untrained" also compares three pairs of models with fresh weights, see `analyze`: how similar two models are
            because both read the same tokens.
        checkpoint: see `analyze`.

    Returns:
        The `Result` of a single analyzer; a `Report` for a list or a mapping of analyzers.

    Raises:
        LayersimError: an analyzer does not compare models, or the models have different tokenizers.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> lsim.compare(model, model, lsim.demo_text()[:4], lsim.CKA(minibatch=64)).distance() < 1e-3
        True
    """
    given = locals()
    chosen = choose_analyzers(analyzers)
    if baseline is not None:
        refuse_no_twin([model_a, model_b], remote if isinstance(remote, tuple) else (remote,), True, None)

        def twins(seed: int) -> Any:
            a, b = (untrained(m, own) for m, own in zip((model_a, model_b), seeds_of(seed, 2), strict=True))
            more = {"model_a": a, "model_b": b, "baseline": None, "intervals": False, "verify": None, "checkpoint": None}
            return compare(**given | more)

        joined: Report | Result = with_untrained(compare(**given | {"baseline": None}), data, twins)
        return joined
    refuse_no_comparison(chosen, "compare(model_a, model_b, data, {})")
    places = remote if isinstance(remote, tuple) else (remote, remote)
    for place in places:
        refuse_idle_options(place, True, checkpoint)
    sources = [
        open_source(m, layers=paths, remote=place, either_stack=True, at=at)
        for m, paths, place in zip((model_a, model_b), layers, places, strict=True)
    ]
    with_own = verify if isinstance(verify, tuple) else (verify, verify)
    for source, untouched in zip(sources, with_own, strict=True):
        verify_on_first_row(source, untouched)
    plan = plan_sites(sources, chosen, at, per_head)
    shared = with_tokenizer(shared_tokens(sources[0].model, sources[1].model, given=tokenizer is not None), tokenizer)
    rule = chosen_rule(positions, [source.model for source in sources], chosen, skip_first)
    reading = DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column, rule)
    reading = replace(reading, chat_template=chat_template, add_generation_prompt=add_generation_prompt)
    batches = Batches(data, shared, reading, count_positions=partial(shared_positions, sources))
    opened_with = {
        "layers": list(layers) if any(layers) else None,
        "verify": [_verified(one) for one in with_own] if any(one is not None for one in with_own) else None,
    }
    report = run_analysis(sources, batches, chosen, checkpoint, opened_with, plan, intervals=intervals)
    assert isinstance(report, Report)
    return report if is_several(analyzers) else next(iter(report.values()))


def _verified(verify: VerifyArgument) -> str | None:
    """The option `verify` for the record: what a model was compared with."""
    return None if verify is None else "hf"
