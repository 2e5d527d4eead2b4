"""analyze and compare: batches through a source, kernels' sums added up, results made of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import version
from typing import Any

from tqdm.auto import tqdm

from ..analyzers import find_analyzers
from ..analyzers.base import Analyzer, code_digest
from ..core.addresses import shown
from ..core.distributed import add_over_ranks, agree, rank_and_size
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.resumable import Checkpoint, Tally
from ..core.sums import Sums
from ..core.typed import typed
from ..data.batches import Batches
from ..data.cached_batches import CachedBatches
from ..data.options import DataOptions
from ..models.source import Source
from ..remote.open import open_source
from ..remote.source import RemoteSource
from .cross_model import crossing
from .data_pass import DataPass, batch_sizes
from .remote_run import start
from .report_assembly import make_report
from .validation import choose_analyzers, shared_tokens, with_tokenizer


@typed
def analyze(
    model: Any,
    data: Any,
    analyzers: Any,
    *,
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
    column: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    tokens_per_request: int | None = None,
    blocking: bool = True,
) -> Any:
    """Run analyzers over data on one model, in one pass (two where a dataset mean is needed).

    Nothing but sums is kept. The model runs in evaluation mode, without gradients, and is left as it was found. In an
    initialised `torch.distributed` group every rank takes its share of the batches and returns the same report.

    Args:
        model: HookedTransformer, TransformerBridge, nnsight `TransformersModel` or `NNsight(module)`, a Hugging Face model,
            or any torch module with `layers`.
        data: a list of texts, a token tensor `batch pos`, a mapping with `input_ids` and `attention_mask`, a
            `datasets.Dataset` or `IterableDataset`, or an iterable of these.
        analyzers: analyzers, or names of those that `tl-layersim analyzers` lists, with their default options.
        layers: paths of the blocks, for layouts that are not known. They are numbered in the order given, and recorded.
        unembed: paths of the final norm and of what follows it up to the logits, for models where they are not found; the norm
            first, if there is one.
        remote: for nnsight models: True for the NDIF server that nnsight is set to, the address of another one, or "local"
            for nnsight's simulation of a server. The model stays there, and sums come back.
        tokenizer: in place of the model's own.
        batch_size: rows in a forward pass.
        seq_len: longest row of tokens; longer texts and rows go on in further rows. Default: 256 for texts or the model's
            context if that is shorter; token rows as they are.
        pack: join texts and cut full rows from the whole, instead of padding each.
        max_tokens: stop after this many counted tokens.
        skip_first: leave out the first positions of each row, whose activations are massive in many models.
        prepend_bos: start every row that comes from text with the tokenizer's BOS, as TransformerLens does.
        column: of a data set, the one that holds texts or tokens.
        checkpoint: a file for partial sums: written about every 30 s, after each request to a server, and on an interrupt; the
            same call resumes from it and ends with exactly the numbers of an undisturbed run.
        tokens_per_request: on a server, the most positions of forward passes that one request may hold. Default: as many
            passes as run in about 10 s, or in a quarter of the operator's limit; fewer where a job is ended for its time.
        blocking: False to send all requests of the main pass to a server and return at once.

    Returns:
        A `Report`, the results by analyzer name; with `blocking=False` a `RemoteRun`, which gives it later.

    Raises:
        LayersimError: the call cannot be done as asked, or activations are not finite.

    Example:
        >>> import tl_layersim as lsim
        >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Cosine(center="none")])
        >>> list(report)
        ['cosine']
    """
    chosen = choose_analyzers(analyzers)
    _refuse_idle_options(remote, blocking, checkpoint)
    source = open_source(model, layers=layers, unembed=unembed, remote=remote, tokens_per_request=tokens_per_request)
    described = with_tokenizer(source.model, tokenizer)
    labelled = any(analyzer.label_source == "data" for analyzer in chosen.values())
    batches = Batches(
        data, described, DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column), labelled
    )
    return _run([source], batches, chosen, checkpoint, {"layers": layers, "unembed": unembed}, blocking)


@typed
def compare(
    model_a: Any,
    model_b: Any,
    data: Any,
    analyzers: Any,
    *,
    layers: tuple[list[str] | None, list[str] | None] = (None, None),
    remote: bool | str | tuple[bool | str, bool | str] = False,
    tokenizer: Any = None,
    batch_size: int = 16,
    seq_len: int | None = None,
    pack: bool = False,
    max_tokens: int | None = None,
    skip_first: int = 0,
    prepend_bos: bool = True,
    column: str | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> Any:
    """Relate the layers of two models that read the same tokens; widths and depths may differ.

    Args:
        model_a: gives the rows of the result; kinds as in `analyze`.
        model_b: gives the columns.
        data: as in `analyze`, tokenised once, by the first model's tokenizer.
        analyzers: one analyzer that compares, or several.
        layers: paths of the blocks of each model, for layouts that are not known.
        remote: as in `analyze`, for both models or for each. One request is one model, so what each measures of its own layers
            crosses and is joined here: of CKA the Gram matrices of minibatches, never the activations. How much is said first.
        tokenizer: in place of the first model's own; the two are then taken to share it.
        batch_size: see `analyze`, as for all further options.
        seq_len: see `analyze`.
        pack: see `analyze`.
        max_tokens: see `analyze`.
        skip_first: see `analyze`.
        prepend_bos: see `analyze`.
        column: see `analyze`.
        checkpoint: see `analyze`.

    Returns:
        The `Result` of a single analyzer, a `Report` of a list.

    Raises:
        LayersimError: an analyzer does not compare, or the models do not share their tokens.

    Example:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> lsim.compare(model, model, lsim.demo_text()[:4], lsim.CKA(minibatch=64)).distance() < 1e-3
        True
    """
    chosen = choose_analyzers(analyzers)
    for name, analyzer in chosen.items():
        if not analyzer.compares:
            able = [cls.__name__ for cls in find_analyzers().values() if cls.compares]
            raise LayersimError(
                f"{type(analyzer).__name__} measures one model, and cannot compare two.",
                given=f"{name!r} in compare()",
                expected=f"one of {', '.join(able)}",
                do=f"compare(model_a, model_b, data, {able[0]}())",
            )
    places = remote if isinstance(remote, tuple) else (remote, remote)
    for place in places:
        _refuse_idle_options(place, True, checkpoint)
    sources = [
        open_source(m, layers=paths, remote=place) for m, paths, place in zip((model_a, model_b), layers, places, strict=True)
    ]
    shared = with_tokenizer(shared_tokens(sources[0].model, sources[1].model, given=tokenizer is not None), tokenizer)
    batches = Batches(data, shared, DataOptions(batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column))
    report: Report = _run(sources, batches, chosen, checkpoint, {"layers": list(layers) if any(layers) else None})
    return report if isinstance(analyzers, Sequence) and not isinstance(analyzers, str) else next(iter(report.values()))


def _run(
    sources: list[Source],
    batches: Batches,
    analyzers: dict[str, Analyzer],
    path: str | os.PathLike[str] | None,
    opened_with: dict[str, Any],
    blocking: bool = True,
) -> Any:
    settings = batches.record() | opened_with
    first_kernels = {name: kernel for name, a in analyzers.items() if (kernel := a.first_kernel()) is not None}
    _check(sources, batches, analyzers)
    deal = agree([source.peers() for source in sources])
    checkpoint = Checkpoint(path, _identity(sources, analyzers, settings), deal)
    tallies = checkpoint.load()
    batches = _read_once(sources, batches, {name: analyzers[name] for name in first_kernels})
    total = _announce(sources, batches, analyzers, len(first_kernels) > 0)
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.evaluating())
            if any(analyzer.needs_calls for analyzer in analyzers.values()):
                stack.enter_context(source.with_calls())
        first: dict[str, Sums] = {}
        if first_kernels:
            with_first = {name: analyzers[name] for name in first_kernels}
            # Counting tokens or labels needs no model.
            models = [] if all(analyzer.first_without_model for analyzer in with_first.values()) else sources
            DataPass("first", models, batches, with_first, first_kernels, tallies, checkpoint, total, deal).run()
            first = add_over_ranks(tallies["first"].sums, deal)
        kernels = {name: analyzer.kernel(first.get(name, Sums())) for name, analyzer in analyzers.items()}
        if not blocking:
            assert isinstance(sources[0], RemoteSource)
            digest = tallies["first"].digest if first_kernels else ""
            return start(sources[0], batches, analyzers, kernels, first, settings, digest)
        DataPass("main", sources, batches, analyzers, kernels, tallies, checkpoint, total, deal).run()
    tally = tallies["main"]
    if first_kernels:
        _refuse_other_rows(tallies["first"], tally)
        tally = replace(tally, seconds=tally.seconds + tallies["first"].seconds)
    settings = settings | batches.found()
    places = [record for source in sources if (record := source.record())]
    if places:
        settings = settings | {"remote": places}
    # A source may know more of its model after a forward pass.
    return make_report(analyzers, [s.model for s in sources], tally, add_over_ranks(tally.sums, deal), first, settings)


def _check(sources: list[Source], batches: Batches, analyzers: Mapping[str, Analyzer]) -> None:
    """Refuse models and options that an analyzer cannot work with, and print what an analyzer costs where that is much."""
    models = [source.model for source in sources]
    for analyzer in analyzers.values():
        analyzer.check_sites(*models)
        analyzer.check(*models)
        if analyzer.prompts and batches.options.pack:
            raise LayersimError(
                f"{type(analyzer).__name__} takes each row for a prompt, and packed rows end anywhere in a text.",
                given="pack=True",
                expected="one text a row",
                do="pack=False, in a call of its own if other analyzers want packed rows; --no-pack on the command line",
            )
    for analyzer in analyzers.values():
        if cost := analyzer.cost(models[0]):
            tqdm.write(cost, file=sys.stderr)


def _identity(sources: list[Source], analyzers: Mapping[str, Analyzer], settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint must have in common with the call that resumes it."""
    return {
        "models": [
            (m.name, m.config_hash, m.weights_hash, m.source, m.basis, m.dtype) for m in (source.model for source in sources)
        ],
        "analyzers": {
            name: (f"{type(analyzer).__module__}.{type(analyzer).__qualname__}", analyzer.options())
            for name, analyzer in analyzers.items()
        },
        "code": {name: code_digest(analyzer) for name, analyzer in analyzers.items()},
        "data": settings,
        "version": version("tl_layersim"),
    }


def _read_once(sources: list[Source], batches: Batches, with_first: Mapping[str, Analyzer]) -> Batches:
    """Batches that are kept in memory between passes, where the run makes several and they fit.

    Raises:
        LayersimError: the data is an iterator, needed more than once, and too large to be kept.
    """
    remote = any(source.is_remote for source in sources)
    if not with_first and not remote:
        return batches
    cached = CachedBatches.of(batches)
    if not cached.one_shot:
        return cached
    if with_first:
        analyzer = next(iter(with_first.values()))
        do = "list(data)" + (f", or {analyzer.one_pass}" if analyzer.one_pass else "")
        cached.read_ahead(type(analyzer).__name__, do)
    elif len(sources) == 2:
        # What crosses between two models is stated before it does.
        cached.read_ahead("a comparison with a model on a server", "list(data)")
    else:
        return batches
    return cached


def _refuse_other_rows(first: Tally, main: Tally) -> None:
    """Refuse data that gave other rows on the second pass."""
    if first.digest != main.digest:
        raise LayersimError(
            "`data` was not the same on the second pass.",
            given=f"{first.tokens} tokens, then {main.tokens}" + (" others" if main.tokens else ""),
            expected="data that gives the same rows each time it is iterated over",
            do="list(data)",
        )


def _refuse_idle_options(remote: bool | str, blocking: bool, checkpoint: str | os.PathLike[str] | None) -> None:
    """Refuse, before anything is opened, options that contradict each other."""
    on_server = remote not in (False, "local")
    if on_server and rank_and_size()[1] > 1:
        raise LayersimError(
            "Several processes would send the same server the work of one.",
            given="remote= in a torch.distributed group",
            expected="one process",
            do="call it in one process; the server does the work",
        )
    if not blocking and not on_server:
        raise LayersimError(
            "`blocking=False` needs a model on an NDIF server, which goes on by itself.",
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


def _announce(sources: list[Source], batches: Batches, analyzers: Mapping[str, Analyzer], twice: bool) -> int | None:
    """Print what a run asks of a server before it does; return the number of counted tokens, None where it is not known."""
    remote_sources = [source for source in sources if source.is_remote]
    if not remote_sources or batches.one_shot:
        return batches.options.max_tokens
    sizes = batch_sizes(batches)
    tokens = sum(size.tokens for size in sizes)
    if len(sources) == 2:
        # Printed also where stderr is no terminal, unlike progress bars.
        tqdm.write(crossing(analyzers, sources, [(size.tokens, size.rows) for size in sizes]), file=sys.stderr)
    elif sizes:
        largest = max(sizes, key=lambda size: size.positions)
        remote_sources[0].refuse_larger(largest.rows, largest.positions)
        tqdm.write(remote_sources[0].plan(2 if twice else 1, len(sizes), tokens, largest.positions), file=sys.stderr)
    return tokens
