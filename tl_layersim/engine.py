"""analyze and compare: batches through a source, kernels' sums added up, results made of them."""

from __future__ import annotations

import difflib
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any, overload

from tqdm.auto import tqdm

from .analyzer import Analyzer, Run
from .analyzers import find_analyzers
from .checkpoint import SECONDS_BETWEEN_SAVES, Checkpoint, Tally
from .data import Batch, Batches, fingerprint, new_digest
from .distributed import add_over_ranks, rank_and_size
from .errors import LayersimError
from .results import Provenance, Report, Result
from .source import Kernel, Model, Source, reduce
from .sources import open_source
from .sums import Sums
from .typed import typed

PACKAGES = ("tl_layersim", "torch", "transformers", "transformer-lens", "nnsight", "datasets")


@typed
def analyze(
    model: Any,
    data: Any,
    analyzers: Analyzer | str | Sequence[Analyzer | str],
    *,
    layers: list[str] | None = None,
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
        layers: paths of the blocks, for layouts that are not known.
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
    source = open_source(model, layers=layers, remote=remote, tokenizer=tokenizer)
    batches = Batches(data, source.model, batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column)
    return _run([source], batches, choose_analyzers(analyzers), checkpoint)


@overload
def compare(model_a: Any, model_b: Any, data: Any, analyzers: Analyzer | str, **options: Any) -> Result: ...
@overload
def compare(model_a: Any, model_b: Any, data: Any, analyzers: Sequence[Analyzer | str], **options: Any) -> Report: ...
@typed
def compare(
    model_a: Any,
    model_b: Any,
    data: Any,
    analyzers: Analyzer | str | Sequence[Analyzer | str],
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
) -> Result | Report:
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
        The result of a single analyzer, a report of several.

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
    sources = [open_source(m, layers=paths, tokenizer=tokenizer) for m, paths in zip((model_a, model_b), layers, strict=True)]
    shared = _shared_tokens(sources[0].model, sources[1].model, given=tokenizer is not None)
    batches = Batches(data, shared, batch_size, seq_len, pack, max_tokens, skip_first, prepend_bos, column)
    report = _run(sources, batches, chosen, checkpoint)
    return report if isinstance(analyzers, Sequence) and not isinstance(analyzers, str) else next(iter(report.values()))


def _shared_tokens(a: Model, b: Model, given: bool) -> Model:
    """What holds for both models, and a refusal where the same ids would be different words."""
    if not given and a.tokenizer is not None and b.tokenizer is not None and a.tokenizer is not b.tokenizer:
        words_a, words_b = a.tokenizer.get_vocab(), b.tokenizer.get_vocab()
        if words_a != words_b:
            odd = next((w for w in words_a if words_b.get(w) != words_a[w]), next(iter(words_b), ""))
            raise LayersimError(
                "The two models read different tokens, so their samples do not match.",
                given=f"{odd!r} is token {words_a.get(odd)} of {a.name} and {words_b.get(odd)} of {b.name}",
                expected="models with the same tokenizer",
                do="compare models of one family; tokenizer=... only if both were trained with it",
            )

    def smaller(x: int | None, y: int | None) -> int | None:
        return min((v for v in (x, y) if v is not None), default=None)

    return replace(a, vocabulary=smaller(a.vocabulary, b.vocabulary), context=smaller(a.context, b.context))


def choose_analyzers(analyzers: Analyzer | str | Sequence[Analyzer | str]) -> dict[str, Analyzer]:
    """Analyzers by name; a name stands for that analyzer with its defaults.

    Raises:
        LayersimError: a name is not known, nothing was given, or one name stands twice.
    """
    items = [analyzers] if isinstance(analyzers, Analyzer | str) else list(analyzers)
    chosen: dict[str, Analyzer] = {}
    for item in items:
        if isinstance(item, str):
            known = find_analyzers()
            if item not in known:
                near = difflib.get_close_matches(item, known, n=1)
                raise LayersimError(
                    "There is no such analyzer.",
                    given=repr(item),
                    expected=f"one of {', '.join(sorted(known))}",
                    do=f"did you mean {near[0]!r}?" if near else "tl-layersim analyzers lists them",
                )
            item = known[item]()
        if item.name in chosen:
            raise LayersimError(
                "One report holds one result of a name.",
                given=f"{item.name!r} twice",
                expected="each analyzer once",
                do="call analyze() once for each set of options",
            )
        chosen[item.name] = item
    if not chosen:
        raise LayersimError("No analyzer was given.", given="[]", expected="at least one", do="[lsim.Cosine(), lsim.CKA()]")
    return chosen


def _run(
    sources: list[Source], batches: Batches, analyzers: dict[str, Analyzer], path: str | os.PathLike[str] | None
) -> Report:
    models = [source.model for source in sources]
    first_kernels = {name: k for name, a in analyzers.items() if (k := a.first_kernel()) is not None}
    for name, analyzer in analyzers.items():
        analyzer.check(*models)
        if name in first_kernels and batches.one_shot:
            raise LayersimError(
                f"{type(analyzer).__name__} reads the data twice, and this data is gone after one pass.",
                given=type(batches.data).__name__,
                expected="data that can be iterated over again: a list, a tensor, a datasets.Dataset",
                do=f"list(data), or {analyzer.one_pass}",
            )
    options = {name: analyzer.options() for name, analyzer in analyzers.items()}
    identity = {
        "models": [(m.name, m.config_hash, m.source, m.basis, m.dtype) for m in models],
        "analyzers": options,
        "data": batches.options(),
    }
    checkpoint = Checkpoint(path, identity)
    tallies = checkpoint.load()
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source.evaluating())
        first: dict[str, Sums] = {}
        if first_kernels:
            _pass("first", "mean of the data", sources, batches, first_kernels, tallies, checkpoint)
            first = add_over_ranks(tallies["first"].sums)
        kernels = {name: analyzer.kernel(first.get(name, Sums())) for name, analyzer in analyzers.items()}
        _pass("main", "layers", sources, batches, kernels, tallies, checkpoint)
    tally = tallies["main"]
    if first_kernels and tallies["first"].digest != tally.digest:
        raise LayersimError(
            "The data was not the same on the second pass.",
            given=f"{tallies['first'].tokens} tokens, then {tally.tokens}" + (" others" if tally.tokens else ""),
            expected="data that gives the same rows each time it is iterated over",
            do=f"list(data), or {next(analyzers[name].one_pass for name in first_kernels)}",
        )
    return make_report(analyzers, models, tally, add_over_ranks(tally.sums), first, batches.options())


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

    def both(values: list[str]) -> str:
        return " | ".join(values)

    results = {}
    for name, analyzer in analyzers.items():
        provenance = Provenance(
            model=both([m.name for m in models]),
            config_hash=both([m.config_hash for m in models]),
            source=both([m.source for m in models]),
            basis=both([m.basis for m in models]),
            dtype=both([m.dtype for m in models]),
            data=tally.digest,
            tokens=tally.tokens,
            sequences=tally.sequences,
            batches=tally.batches,
            seed=getattr(analyzer, "seed", None),
            options={**analyzer.options(), **data_options},
            versions=_versions(),
            seconds=tally.seconds,
        )
        run = Run(models[0].layers, models[-1].layers, provenance, first.get(name, Sums()))
        results[name] = analyzer.compute(sums[name], run)
    return Report(results)


def _pass(
    label: str,
    title: str,
    sources: list[Source],
    batches: Batches,
    kernels: Mapping[str, Kernel],
    tallies: dict[str, Tally],
    checkpoint: Checkpoint,
) -> None:
    """One pass over the data into `tallies[label]`, from wherever a checkpoint left it."""
    tally = tallies.setdefault(label, Tally({name: Sums() for name in kernels}))
    if tally.done:
        return
    rank, size = rank_and_size()
    digest, resumed, saved = new_digest(), tally.batches, time.monotonic()
    bar = tqdm(desc=title, unit="token", unit_scale=True, total=batches.max_tokens, initial=tally.tokens, disable=None if rank == 0 else True)
    try:
        with bar:
            for index, batch in enumerate(batches):
                start = time.perf_counter()
                fingerprint(digest, batch)
                if index < resumed:
                    if index == resumed - 1 and digest.hexdigest() != tally.digest:
                        raise LayersimError(
                            "The data is not that of the checkpoint.",
                            given=f"other rows among the first {resumed} batches",
                            expected="the same data in the same order",
                            do="pass the data of the interrupted run, or another checkpoint path",
                        )
                    continue
                sums = dict(tally.sums)
                if index % size == rank and bool(batch.counted.any()):
                    out = _on_both(sources, batch, kernels)
                    refuse_not_finite(out[""], [s.model.layers for s in sources], f"batch {index}")
                    sums = {name: total + Sums.of(out[name]) for name, total in sums.items()}
                tokens = int(batch.counted.sum())
                # One assignment: an interrupt finds a batch either counted with all its sums or not at all.
                tallies[label] = tally = Tally(
                    sums,
                    index + 1,
                    tally.sequences + len(batch.tokens),
                    tally.tokens + tokens,
                    digest.hexdigest(),
                    tally.seconds + time.perf_counter() - start,
                )
                bar.update(tokens)
                if time.monotonic() - saved > SECONDS_BETWEEN_SAVES:
                    _save_or_warn(lambda: checkpoint.save(tallies))
                    saved = time.monotonic()
    except BaseException as error:
        try:
            checkpoint.save(tallies)
        except OSError as full:
            error.add_note(str(full))
        raise
    tallies[label] = replace(tally, done=True)
    _save_or_warn(lambda: checkpoint.save(tallies))


def _save_or_warn(save: Callable[[], None]) -> None:
    """A checkpoint that cannot be written must not end a run whose sums are still in memory."""
    try:
        save()
    except OSError as error:
        warnings.warn(f"The run goes on without a new checkpoint. {error}", RuntimeWarning, stacklevel=2)


def _on_both(sources: list[Source], batch: Batch, kernels: Mapping[str, Kernel]) -> dict[str, Any]:
    if len(sources) == 1:
        return sources[0].run(batch, kernels)
    return reduce(kernels, *(source.collect(batch) for source in sources))


def refuse_not_finite(counts: Mapping[str, Any], layers: list[tuple[str, ...]], where: str) -> None:
    """Name the layers whose activations are not finite, instead of averaging them in."""
    for number, names in enumerate(layers):
        bad = {name: int(n) for name, n in zip(names, counts[f"not_finite_{number}"], strict=True) if n}
        if bad:
            raise LayersimError(
                f"Activations are NaN or infinite in {where}" + (f", model {number + 1}." if len(layers) > 1 else "."),
                given=", ".join(f"{name}: {count} values" for name, count in list(bad.items())[:4]),
                expected="finite activations",
                do="load the model in float32 or bfloat16, and check its weights from the first layer named on",
            )


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
