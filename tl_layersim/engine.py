"""analyze and compare: batches through a source, kernels' sums added up, results made of them."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tqdm.auto import tqdm

from .analyzer import Analyzer, Run
from .analyzers import find_analyzers
from .checkpoint import SECONDS_BETWEEN_SAVES, Checkpoint, Tally
from .data import Batch, Batches, fingerprint, new_digest
from .distributed import add_over_ranks, rank_and_size
from .errors import LayersimError
from .guards import gap_or_refusal, refuse_not_finite, refuse_other_logits
from .prepare import choose_analyzers, shared_tokens, with_tokenizer
from .results import Provenance, Report, Result
from .source import Kernel, Model, Reduced, Source, reduce, tokens_alone
from .sources import open_source
from .sums import Sums
from .typed import typed

PACKAGES = ("tl_layersim", "torch", "transformers", "transformer-lens", "nnsight", "datasets")


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
) -> Report:
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
        remote: for nnsight models, what `model.trace(remote=...)` takes.
        tokenizer: in place of the model's own.
        batch_size: rows in a forward pass.
        seq_len: longest row of tokens; longer texts and rows go on in further rows. Default: 256 for texts or the model's
            context if that is shorter; token rows as they are.
        pack: join texts and cut full rows from the whole, instead of padding each.
        max_tokens: stop after this many counted tokens.
        skip_first: leave out the first positions of each row, whose activations are massive in many models.
        prepend_bos: start every row that comes from text with the tokenizer's BOS, as TransformerLens does.
        column: of a data set, the one that holds texts or tokens.
        checkpoint: a file for partial sums: written about every 30 s and on an interrupt; the same call resumes from it
            and ends with exactly the numbers of an undisturbed run.

    Returns:
        The results by analyzer name.

    Raises:
        LayersimError: the call cannot be done as asked, or activations are not finite.

    Example:
        >>> import tl_layersim as lsim
        >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.Cosine(center="none")])
        >>> list(report)
        ['cosine']
    """
    chosen = choose_analyzers(analyzers)
    source = open_source(model, layers=layers, unembed=unembed, remote=remote)
    described = with_tokenizer(source.model, tokenizer)
    labelled = any(analyzer.label_source == "data" for analyzer in chosen.values())
    batches = Batches(data, described, batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column, labelled)
    return _run([source], batches, chosen, checkpoint, {"layers": layers, "unembed": unembed})


@typed
def compare(
    model_a: Any,
    model_b: Any,
    data: Any,
    analyzers: Any,
    *,
    layers: tuple[list[str] | None, list[str] | None] = (None, None),
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
                f"{type(analyzer).__name__} relates layers of one model.",
                given=f"{name!r} in compare()",
                expected=f"one of {', '.join(able)}",
                do=f"compare(model_a, model_b, data, {able[0]}())",
            )
    sources = [open_source(m, layers=paths) for m, paths in zip((model_a, model_b), layers, strict=True)]
    shared = with_tokenizer(shared_tokens(sources[0].model, sources[1].model, given=tokenizer is not None), tokenizer)
    batches = Batches(data, shared, batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column)
    report = _run(sources, batches, chosen, checkpoint, {"layers": list(layers) if any(layers) else None})
    return report if isinstance(analyzers, Sequence) and not isinstance(analyzers, str) else next(iter(report.values()))


def _run(
    sources: list[Source],
    batches: Batches,
    analyzers: dict[str, Analyzer],
    path: str | os.PathLike[str] | None,
    asked: dict[str, Any],
) -> Report:
    settings = batches.options() | asked
    models = [source.model for source in sources]
    first_kernels = {name: k for name, a in analyzers.items() if (k := a.first_kernel()) is not None}
    for name, analyzer in analyzers.items():
        analyzer.check(*models)
        if name in first_kernels and batches.one_shot:
            raise LayersimError(
                f"{type(analyzer).__name__} reads the data twice, and this data is gone after one pass.",
                given=type(batches.data).__name__,
                expected="data that can be iterated over again: a list, a tensor, a datasets.Dataset",
                do="list(data)" + (f", or {analyzer.one_pass}" if analyzer.one_pass else ""),
            )
    options = {name: analyzer.options() for name, analyzer in analyzers.items()}
    identity = {
        "models": [(m.name, m.config_hash, m.weights_hash, m.source, m.basis, m.dtype) for m in models],
        "analyzers": {name: (f"{type(a).__module__}.{type(a).__qualname__}", options[name]) for name, a in analyzers.items()},
        "data": settings,
        "version": version("tl_layersim"),
    }
    checkpoint = Checkpoint(path, identity)
    tallies = checkpoint.load()
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.evaluating())
        first: dict[str, Sums] = {}
        if first_kernels:
            # Counting tokens or labels needs no model.
            without = all(analyzers[name].first_without_model for name in first_kernels)
            asked_first = {name: analyzers[name] for name in first_kernels}
            _pass("first", "first look", [] if without else sources, batches, asked_first, first_kernels, tallies, checkpoint)
            first = add_over_ranks(tallies["first"].sums)
        kernels = {name: analyzer.kernel(first.get(name, Sums())) for name, analyzer in analyzers.items()}
        _pass("main", "layers", sources, batches, analyzers, kernels, tallies, checkpoint)
    tally = tallies["main"]
    if first_kernels:
        tally = replace(tally, seconds=tally.seconds + tallies["first"].seconds)
    if first_kernels and tallies["first"].digest != tally.digest:
        raise LayersimError(
            "The data was not the same on the second pass.",
            given=f"{tallies['first'].tokens} tokens, then {tally.tokens}" + (" others" if tally.tokens else ""),
            expected="data that gives the same rows each time it is iterated over",
            do="list(data)",
        )
    return make_report(analyzers, models, tally, add_over_ranks(tally.sums), first, settings)


def make_report(
    analyzers: Mapping[str, Analyzer],
    models: Sequence[Model],
    tally: Tally,
    sums: Mapping[str, Sums],
    first: Mapping[str, Sums],
    data_options: Mapping[str, Any],
) -> Report:
    """Results of all analyzers from their sums."""
    if tally.tokens == 0:
        raise LayersimError(
            "There is nothing to measure: the data is empty." if tally.sequences == 0 else "No token is left to measure.",
            given=f"{tally.sequences} rows, 0 counted tokens",
            expected="at least one row with a token that is not masked",
            do="check the data" if tally.sequences == 0 else "check the attention mask and skip_first=",
        )

    results = {}
    for name, analyzer in analyzers.items():
        options = {**analyzer.options(), **data_options}
        provenance = record(models, tally, options, getattr(analyzer, "seed", None))
        run = Run(models[0].layers, models[-1].layers, provenance, first.get(name, Sums()), models[0].head)
        result = analyzer.compute(sums[name], run)
        if not isinstance(result, Result):
            raise LayersimError(
                f"{type(analyzer).__name__}.compute returned no result.",
                given=type(result).__name__,
                expected="a Result, such as LayerCurve or LayerMatrix",
                do="return lsim.LayerCurve(values=..., layers=run.layers, provenance=run.provenance)",
            )
        results[name] = result
    return Report(results)


def record(models: Sequence[Model], tally: Tally, options: Mapping[str, Any], seed: int | None) -> Provenance:
    """What was measured on what."""

    def both(values: list[str]) -> str:
        return " | ".join(values)

    return Provenance(
        model=both([m.name for m in models]),
        config_hash=both([m.config_hash for m in models]),
        weights_hash=both([m.weights_hash for m in models]),
        source=both([m.source for m in models]),
        basis=both([m.basis for m in models]),
        dtype=both([m.dtype for m in models]),
        data=tally.digest,
        tokens=tally.tokens,
        sequences=tally.sequences,
        batches=tally.batches,
        seed=seed,
        options=dict(options),
        versions=_versions(),
        seconds=tally.seconds,
    )


def _pass(
    label: str,
    title: str,
    sources: list[Source],
    batches: Batches,
    analyzers: Mapping[str, Analyzer],
    kernels: Mapping[str, Kernel],
    tallies: dict[str, Tally],
    checkpoint: Checkpoint,
) -> None:
    """One pass over the data into `tallies[label]`, from wherever a checkpoint left it."""
    tally = tallies.setdefault(label, Tally({name: Sums() for name in kernels}))
    if tally.done and label == "first":
        # The main pass sees the same data, and the two digests are compared in the end.
        return
    rank, size = rank_and_size()
    digest, resumed, seen, saved = new_digest(), tally.batches, 0, time.monotonic()
    unsure = bool(sources) and label == "main" and any(analyzer.needs_unembed for analyzer in analyzers.values())
    bar = tqdm(
        desc=title,
        unit="token",
        unit_scale=True,
        total=batches.max_tokens,
        initial=tally.tokens,
        disable=None if rank == 0 else True,
    )
    try:
        with bar:
            for index, batch in enumerate(batches):
                start = time.perf_counter()
                fingerprint(digest, batch)
                seen = index + 1
                if index < resumed:
                    if seen == resumed and digest.hexdigest() != tally.digest:
                        raise _other_data(f"other rows among the first {resumed} batches")
                    continue
                if tally.done:
                    raise _other_data(f"more than the {resumed} batches of the finished run")
                sums = dict(tally.sums)
                if index % size == rank and bool(batch.counted.any()):
                    for analyzer in analyzers.values():
                        analyzer.check_batch(batch, batches.model)
                    if unsure:
                        source = sources[0]
                        gap = gap_or_refusal(source.model, partial(source.unembed_gap, batch))
                        refuse_other_logits(gap, source.model)
                        unsure = False
                    not_finite, out = _on_both(sources, batch, kernels)
                    refuse_not_finite(not_finite, [s.model.layers for s in sources], f"batch {index}")
                    sums = add_sums(sums, out)
                tokens = int(batch.counted.sum())
                # One assignment: an interrupt finds a batch either counted with all its sums or not at all.
                tallies[label] = tally = Tally(
                    sums,
                    seen,
                    tally.sequences + len(batch.tokens),
                    tally.tokens + tokens,
                    digest.hexdigest(),
                    tally.seconds + time.perf_counter() - start,
                )
                bar.update(tokens)
                if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    _save_or_warn(lambda: checkpoint.save(tallies))
                    saved = time.monotonic()
            if seen < resumed:
                raise _other_data(f"{seen} batches, where {resumed} had been read")
    except BaseException as error:
        try:
            if checkpoint.save(tallies):
                error.add_note(f"What was summed is in {checkpoint.path}; the same call goes on from there.")
        except OSError as full:
            error.add_note(str(full))
        raise
    tallies[label] = replace(tally, done=True)
    _save_or_warn(lambda: checkpoint.save(tallies))


def _other_data(given: str) -> LayersimError:
    return LayersimError(
        "The data is not that of the checkpoint.",
        given=given,
        expected="the same data in the same order",
        do="pass the data of the interrupted run, or another checkpoint path",
    )


def add_sums(sums: Mapping[str, Sums], out: Mapping[str, Any]) -> dict[str, Sums]:
    """The sums with one batch more, and the name of the analyzer whose kernel gives what cannot be added."""
    total = {}
    for name, before in sums.items():
        try:
            total[name] = before + Sums.of(out[name])
        except (AttributeError, KeyError, ValueError) as error:
            raise LayersimError(
                f"What the kernel of {name!r} returned cannot be added up.",
                given=str(error),
                expected="a dict of tensors whose names and shapes do not depend on the batch",
                do="sum over the token axis inside the kernel",
            ) from error
    return total


def _save_or_warn(save: Callable[[], bool]) -> None:
    """A checkpoint that cannot be written must not end a run whose sums are still in memory."""
    try:
        save()
    except OSError as error:
        warnings.warn(f"The run goes on without a new checkpoint. {error}", RuntimeWarning, stacklevel=2)


def _on_both(sources: list[Source], batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
    if not sources:
        return [], reduce(kernels, tokens_alone(batch))[1]
    if len(sources) == 1:
        return sources[0].run(batch, kernels)
    return reduce(kernels, *(source.collect(batch) for source in sources))


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
