"""`analyze` and `compare`: run analyzers on one model, or on two."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, TypedDict, TypeVar, Unpack, overload

from tqdm.auto import tqdm

from ..analyzers.analyzer import Analyzer, Run
from ..core.arguments import FilePath, typed
from ..core.distributed import add_blocks_over_ranks, add_over_ranks, agree, failing_together, rank_and_size, weight_peers
from ..core.errors import LayersimError
from ..core.file_format import refuse_unwritable
from ..core.results import Report, Result
from ..core.resumable_file import ResumableFile, plain
from ..core.sums import Sums
from ..core.wording import brief
from ..data.batches import Batches
from ..data.data import Data
from ..remote.open_model import open_source
from ..sources.open_local import OpenedModel, records_of, refuse_changed, untrained
from ..sources.shared_modules import refuse_one_model
from ..sources.source import HasModule, position_counter
from ..sources.vectors import VectorSource
from .report_assembly import make_report
from .run import run
from .run_arguments import (
    AnalyzersArgument,
    choose_analyzers,
    is_several,
    refuse_contradictions,
    refuse_no_comparison,
    shared_tokens,
    with_tokenizer,
)
from .run_description import Analysis, DataPart
from .run_files import tallies_of
from .run_identity import refuse_other_data_on_ranks, refuse_other_ranks
from .shards import FilesArgument, merged_first, paths_of, run_shard
from .site_plan import DEFAULT, AtArgument, chosen_rule, plan_sites
from .submitted_runs import RemoteRun, start
from .vectors_as_data import data_of_call, readers

BaselineArgument: TypeAlias = Literal["untrained"] | None
# Seeds of the fresh weights.
SEEDS = 3


def run_analysis(analysis: Analysis, path: FilePath | None = None) -> Report:
    """Run an analysis over all data and return its report.

    Args:
        analysis: models, data and analyzers.
        path: path of the checkpoint file; None for none.

    Raises:
        LayersimError: a model or the data does not suit an analyzer, or the data differs from the data of the checkpoint.
    """
    analysis.check()
    # For each model, the ranks that share its weights; empty if this process holds them all.
    peers = []
    for source in analysis.sources:
        peers.append(weight_peers(source.module) if isinstance(source, HasModule) else frozenset())
    deal = agree(peers)
    rank, size = rank_and_size()
    rank_path = None
    if path is not None:
        rank_path = Path(f"{path}.rank{rank}" if rank else path)
    refuse_unwritable(rank_path, "checkpoint")
    identity = {}
    if path is not None or size > 1:
        identity = analysis.identity(None if path is None else "checkpoint") | {"processes": size, "copies": deal.copies}
        # Ranks that share a model hold different parts of its weights.
        common_models = []
        for model, sharing_ranks in zip(identity["models"], peers, strict=True):
            common_models.append(model | {"weights": ""} if sharing_ranks else model)
        refuse_other_ranks("run", identity | {"models": common_models})
    file = ResumableFile(rank_path, "checkpoint", identity)
    tallies = file.resume(tallies_of) or {}
    analysis.read_ahead()
    data_pass = run(analysis, DataPart(deal), file, tallies)
    tally = data_pass.state.tally
    refuse_other_data_on_ranks(tally)
    total = add_over_ranks(tally.sums(data_pass.kernels), deal)
    blocks = () if tally.tree.size is None else add_blocks_over_ranks(tally.tree, data_pass.kernels, deal)
    seconds = sum(pass_tally.seconds for pass_tally in tallies.values())
    return make_report(
        analysis.analyzers,
        analysis.plan.models(),
        replace(tally, seconds=seconds),
        data_pass.first_sums,
        analysis.provenance,
        (total, blocks),
    )


def run_with_baseline(
    opened: Sequence[OpenedModel],
    data: Data,
    prepare: Callable[[Sequence[OpenedModel]], Analysis],
    baseline: BaselineArgument,
    checkpoint: FilePath | None,
) -> Report:
    """Run an analysis on the given models and, with `baseline="untrained"`, on models with fresh weights.

    Args:
        opened: the trained models.
        data: the data.
        prepare: function that returns the analysis of some models, see `opened_analysis`.
        baseline: see `analyze`.
        checkpoint: see `analyze`.

    Raises:
        LayersimError: no untrained model can be measured.
    """
    if baseline is None:
        return run_analysis(prepare(opened), checkpoint)
    if data.read_once:
        raise LayersimError(
            f'`data` is {brief(data.source)}; it must be readable more than once for `baseline="untrained"`. Pass list(data).'
        )
    for trained in opened:
        if trained.on_server:
            raise LayersimError(
                '`baseline="untrained"` cannot be combined with `remote`: untrained models run in this process.'
            )
        refuse_changed(trained.model)
    report = run_analysis(prepare(opened), checkpoint)
    twin_reports: list[Report] = []
    for seed in range(SEEDS):
        twins = []
        for number, trained in enumerate(opened):
            # No two models of any seed have the same weights.
            model = untrained(trained.model, seed * len(opened) + number)
            twins.append(replace(trained, model=model, verify=None))
        twin_reports.append(run_analysis(replace(prepare(twins), intervals=False)))
    with_twins = {}
    for name, result in report.items():
        with_twins[name] = result.with_twins([twin_report[name] for twin_report in twin_reports])
    return Report(with_twins)


SeveralAnalyzers: TypeAlias = Sequence[Analyzer | str] | Mapping[str, Analyzer | str]
R_co = TypeVar("R_co", bound=Result, covariant=True)


class _Computes(Protocol[R_co]):
    """Protocol for type checkers: an analyzer whose results have the type `R_co`."""

    def compute(self, sums: Sums, run: Run) -> R_co: ...


class SharedKeywords(TypedDict, total=False):
    """Types of the keywords that several public functions share."""

    at: AtArgument
    per_head: bool
    intervals: bool
    baseline: BaselineArgument
    checkpoint: FilePath | None


@overload
def analyze(
    model: Any, data: Any, analyzers: AnalyzersArgument, *, blocking: Literal[True] = True, **options: Unpack[SharedKeywords]
) -> Report: ...
@overload
def analyze(
    model: Any, data: Any, analyzers: AnalyzersArgument, *, blocking: Literal[False], **options: Unpack[SharedKeywords]
) -> RemoteRun: ...
@overload
def analyze(
    model: Any, data: Any, analyzers: AnalyzersArgument, *, blocking: bool, **options: Unpack[SharedKeywords]
) -> Report | RemoteRun: ...
@overload
def analyze(
    model: Any,
    data: Any,
    analyzers: AnalyzersArgument,
    *,
    shard: tuple[int, int],
    save_to: FilePath,
    first: FilesArgument | None = None,
    **options: Unpack[SharedKeywords],
) -> Path: ...
@overload
def analyze(model: VectorSource, *, analyzers: AnalyzersArgument, **options: Unpack[SharedKeywords]) -> Report: ...
@overload
def analyze(
    model: VectorSource,
    *,
    analyzers: AnalyzersArgument,
    shard: tuple[int, int],
    save_to: FilePath,
    first: FilesArgument | None = None,
    **options: Unpack[SharedKeywords],
) -> Path: ...
@failing_together()
@typed
def analyze(
    model: Any,
    data: Any = None,
    analyzers: AnalyzersArgument | None = None,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: FilePath | None = None,
    blocking: bool = True,
    shard: tuple[int, int] | None = None,
    save_to: FilePath | None = None,
    first: FilesArgument | None = None,
) -> Report | RemoteRun | Path:
    """Run analyzers on one model, in one pass over the data. Analyzers that need a mean over all data take two passes.

    Memory holds sums, not activations. The model runs in evaluation mode, without gradients, and is not changed. In an
    initialised `torch.distributed` group each rank measures a part of the batches and returns the same report.

    Args:
        model: HookedTransformer, TransformerBridge, nnsight `TransformersModel` or `NNsight(module)`, a Hugging Face model, or
            any torch module; or the result of `open_model`, which also says where the model runs and which modules are its
            blocks; or vectors that you already have, see `from_vectors`.
        data: a `Data`, which says how rows are made and which positions are measured; or raw data, which is read with the
            defaults of `Data`. Leave it out for vectors.
        analyzers: analyzers, or their names as `tl-layersim analyzers` lists them, for default options; or a mapping from names
            to analyzers, such as `{"raw": LogitLens(norm="none"), "normed": LogitLens()}`. The names are the keys of the
            report. Without a mapping, each class of analyzer can appear once.
        at: the sites to read. Families: "resid_post" (the input of block 0 and every block's output), "resid_mid", "attn_out",
            "mlp_out", "z", "q", "k", "v", "mlp_post", "ln1", "ln2", "ln_final"; or several; the index of a block, whose output
            is read, negative from the end, or several; a list of names of hook points or of module paths; a pattern such as
            "blocks.*.hook_attn_out"; or a function of names that returns True for the sites to read. In an encoder-decoder,
            families are the decoder's; "encoder.resid_post" names one of the encoder. `sites` lists the sites of a model.
            Analyzers that need the residual stream raise an error for other sites.
        per_head: read each head of "z", "q", "k" or "v" as a site of its own, such as `blocks.3.attn.hook_z[5]`.
        intervals: keep the sums of 16 to 32 jackknife blocks of consecutive rows, which give every result confidence intervals:
            `result.interval("values")`. Memory holds up to 54 times the sums.
        baseline: "untrained" also measures three models of the same architecture with fresh weights
            (`tl_layersim.sources.untrained`) on the same data. Figures and tables show them beside the trained model;
            `result.untrained` holds their results.
        checkpoint: a file for partial sums, written about every 30 s, after each request to a server, and on an interrupt. The
            same call resumes from it, and ends with exactly the numbers of an uninterrupted run.
        blocking: False to send all requests of the main pass to a server and return without waiting.
        shard: measure one of several contiguous parts of the data: its index, from 0, and the number of parts, as (3, 64); 3/64
            on the command line. Each call reads all data to count the batches, and runs the model on its own part. `merge`
            makes the report from all files.
        save_to: the file for the sums of the shard, which is also its checkpoint: the same call continues from it, and returns
            without running if the shard is complete.
        first: with `shard`, if an analyzer needs a first pass with the model: the files of the first pass, which the same
            calls without `first` wrote for all shards. Also a folder or a pattern.

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
    chosen = choose_analyzers(analyzers)
    opened = [OpenedModel.of(model)]
    data = data_of_call(data, opened)
    arguments = {"shard": shard, "save_to": save_to, "first": first, "checkpoint": checkpoint, "baseline": baseline}
    refuse_contradictions(arguments, blocking, opened[0])
    first_pass = None if first is None else merged_first(paths_of(first, "first"))
    prepare = partial(opened_analysis, data=data, analyzers=chosen, at=at, per_head=per_head, intervals=intervals)
    if not blocking:
        return start(prepare(opened))
    if shard is None or save_to is None:
        return run_with_baseline(opened, data, prepare, baseline, checkpoint)
    analysis = prepare(opened)
    path = run_shard(analysis, plain(analysis.identity("save_to")), shard, Path(save_to), first_pass)
    if first_pass is None and analysis.first_needs_model:
        names = ", ".join(type(analysis.analyzers[name]).__name__ for name in analysis.first_kernels)
        tqdm.write(
            f"{path} holds only the first pass, for {names}, over shard {shard[0]} of {shard[1]}. After the first pass "
            "over all shards, call analyze(..., shard=(i, n), first=[files of the first pass], save_to=another path).",
            file=sys.stderr,
        )
    return path


def opened_analysis(
    opened: Sequence[OpenedModel], data: Data, analyzers: dict[str, Analyzer], at: AtArgument, per_head: bool, intervals: bool
) -> Analysis:
    """Make the `Analysis` of a run: open the models, and choose the sites and positions.

    Args:
        opened: the model, or the models to compare.
        data: the data with its reading options.
        analyzers: the analyzers, by name.
        at: see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.

    Raises:
        LayersimError: a model lacks the sites, an analyzer cannot use the sites or the positions, or the models read different
            tokens.
    """
    _, ranks = rank_and_size()
    if any(opened_model.on_server for opened_model in opened) and ranks > 1:
        raise LayersimError("`remote` cannot be used in a torch.distributed group: every process would send the same requests.")
    sources = [open_source(opened_model, either_stack=True, at=at) for opened_model in opened]
    plan = plan_sites(sources, analyzers, at, per_head)
    plan.start_reading()
    reading_sources = readers(sources)
    models = [source.model for source in reading_sources]
    chosen = {}
    for name, analyzer_models in plan.models().items():
        chosen[name] = analyzers[name].settled(analyzer_models[0], data.positions)
    # The first model with a tokenizer reads the data.
    with_tokenizer_first = sorted(models, key=lambda model: model.tokenizer is None)
    shared = reduce(partial(shared_tokens, given=data.tokenizer is not None), with_tokenizer_first)
    labelled = any(analyzer.needs.labels == "data" for analyzer in chosen.values())
    rule = chosen_rule(data.positions, models, chosen, data.skip_first)
    batches = Batches(data.counting(rule), with_tokenizer(shared, data.tokenizer), labelled, position_counter(reading_sources))
    record = opened[0].record() if len(opened) == 1 else records_of(opened)
    return Analysis(plan, batches, chosen, record, intervals)


@overload
def compare(model_a: Any, model_b: Any, data: Any, analyzers: str, **options: Unpack[SharedKeywords]) -> Result: ...
@overload
def compare(model_a: Any, model_b: Any, data: Any, analyzers: _Computes[R_co], **options: Unpack[SharedKeywords]) -> R_co: ...
@overload
def compare(
    model_a: Any, model_b: Any, data: Any, analyzers: SeveralAnalyzers, **options: Unpack[SharedKeywords]
) -> Report: ...
@overload
def compare(  # type: ignore[overload-overlap]  # a text is a sequence of texts, too
    model_a: VectorSource, model_b: VectorSource, *, analyzers: str, **options: Unpack[SharedKeywords]
) -> Result: ...
@overload
def compare(
    model_a: VectorSource, model_b: VectorSource, *, analyzers: _Computes[R_co], **options: Unpack[SharedKeywords]
) -> R_co: ...
@overload
def compare(
    model_a: VectorSource, model_b: VectorSource, *, analyzers: SeveralAnalyzers, **options: Unpack[SharedKeywords]
) -> Report: ...
@failing_together()
@typed
def compare(
    model_a: Any,
    model_b: Any,
    data: Any = None,
    analyzers: Any = None,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: FilePath | None = None,
) -> Report | Result:
    """Compare the layers of two models that read the same tokens. Widths and depths may differ.

    Args:
        model_a: the model of the result's rows; kinds as in `analyze`. A request to a server runs one model, so each server
            returns statistics of its model's layers, which are joined in this process: for CKA the Gram matrices of
            minibatches, not the activations. Their size is printed first. Edits of one model on one server (`model.edit()` of
            nnsight) run in one request if an analyzer has no such statistics, as `InterventionEffect`.
        model_b: the model of the result's columns.
        data: as in `analyze`, tokenised once, by the first model's tokenizer. One rule of positions holds for both models; pass
            it if their heads read different positions. Leave it out for two sources of vectors, whose samples are paired by
            index. Vectors beside a model have one row for each row of its data.
        analyzers: an analyzer that compares models, or several: a list, or a mapping from names as in `analyze`.
        at: the sites to read in both models, see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.
        baseline: "untrained" also compares three pairs of models with fresh weights, see `analyze`: how similar two models are
            only because they read the same tokens.
        checkpoint: see `analyze`.

    Returns:
        The `Result` of a single analyzer; a `Report` for a list or a mapping of analyzers.

    Raises:
        LayersimError: an analyzer does not compare models, the models have different tokenizers, or they are a base model and
            its adapters (`PeftModel`), which change the base in place.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> lsim.compare(model, model, lsim.demo_text()[:4], lsim.CKA(minibatch=64)).distance() < 1e-3
        True
    """
    chosen = choose_analyzers(analyzers)
    pair = (OpenedModel.of(model_a, "model_a"), OpenedModel.of(model_b, "model_b"))
    refuse_no_comparison(chosen)
    refuse_one_model({"model_a": model_a, "model_b": model_b})
    data = data_of_call(data, pair)
    prepare = partial(opened_analysis, data=data, analyzers=chosen, at=at, per_head=per_head, intervals=intervals)
    report = run_with_baseline(pair, data, prepare, baseline, checkpoint)
    return report if is_several(analyzers) else next(iter(report.values()))
