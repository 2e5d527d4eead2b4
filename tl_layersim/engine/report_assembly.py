"""Makes the report of a run from its sums.

The report has results, jackknife replicates, provenance and warnings.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache, partial, reduce
from importlib.metadata import PackageNotFoundError, version
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..activations.norms import FIRST_PLACES, LEAST_TOKENS
from ..activations.text_order import neighbour_correlations_of_texts
from ..analyzers.analyzer import Analyzer, Run
from ..core.errors import LayersimError, recorded_warnings, warn
from ..core.intervals import aligned, bounds_of, leave_one_out, neighbour_correlation, with_and_without_blocks
from ..core.result_declarations import JOINT, OF_MODELS, OF_SOME, Provenance
from ..core.results import Report, Result
from ..core.site_names import site_in_words
from ..core.sums import SIZES, TEXT_ORDER, DataBlock, Sums, Tally, with_pools
from ..core.wording import amount, brief
from ..data.texts import LEAST_TEXTS
from ..sources.model_description import ModelDescription

# docs/traps.md has the measurements behind both.
LEAST_EFFECTIVE_FRACTION = 0.2
LARGEST_DIMENSION = 0.5


# A warning, and the names of the analyzers that it is about.
Note = tuple[str, list[str]]


def notes_on_sizes(
    analyzers: Mapping[str, Analyzer],
    models_of: Mapping[str, Sequence[ModelDescription]],
    sums: Mapping[str, Sums],
    options: Mapping[str, Any],
) -> list[Note]:
    """Warnings about results that depend mostly on few tokens or on one dimension.

    Args:
        analyzers: the analyzers, by name.
        models_of: by analyzer, the models with the sites that it read.
        sums: sums of the main pass over the data.
        options: how the data was read.
    """
    names_by_text: dict[str, list[str]] = {}
    for name, analyzer in analyzers.items():
        sizes = sums.get(SIZES + name, Sums())
        if not sizes:
            continue
        for dominant in analyzer.needs.dominance:
            if dominant != "samples":
                text = _text_on_dimension(sizes, models_of[name], dominant)
            elif analyzer.needs.whole_rows:
                # The sizes are those of tokens, and a sample is a row.
                continue
            else:
                text = _text_on_samples(sizes, models_of[name], options)
            if text:
                names_by_text.setdefault(text, []).append(name)
    return [(f"{', '.join(names)}: {text}", names) for text, names in names_by_text.items()]


def effective_fraction(sums: Sums, number: int, start: int) -> Tensor:
    """Effective sample size of each `site`, as a fraction of the samples.

    Samples before position `start` are left out; NaN without samples. The fraction is (sum |x|^2)^2 / (n sum |x|^4).

    Args:
        sums: sums of the kernel `activation_sizes`.
        number: index of the model.
        start: the first position that is counted.
    """
    second = sums[f"{number} norm^2"][:, start:].sum(1)
    fourth = sums[f"{number} norm^4"][:, start:].sum(1)
    return second.square() / (fourth * sums[f"{number} tokens"][start:].sum())


def _text_on_samples(sums: Sums, models: Sequence[ModelDescription], options: Mapping[str, Any]) -> str:
    """Warning that the effective sample size is small; "" for no warning."""
    if int(sums["0 tokens"].sum()) < LEAST_TOKENS:
        return ""
    # By number of first positions that are left out, the sites at which few samples weigh most.
    small_fractions = [_small_fractions(sums, models, start) for start in range(FIRST_PLACES + 1)]
    fractions = small_fractions[0]
    if not fractions:
        return ""
    smallest = min(fractions, key=lambda layer: fractions[layer])
    # The fewest first positions to leave out so that as few sites as possible remain.
    start = min(range(FIRST_PLACES + 1), key=lambda number: len(small_fractions[number]))
    text = (
        f"few tokens decide these numbers at {_count_sites(fractions)}. At {site_in_words(smallest)}, the effective sample "
        f"size is {fractions[smallest]:.2g} of the tokens. "
    )
    if not start:
        return text + "The large tokens are not at the start of a row; inspect the rows."
    # `skip_first` does not apply to other rules of positions.
    if options.get("positions", "all") == "all":
        text += f"skip_first={start} leaves out the large tokens."
    else:
        text += f"Leave the first {start} out of positions=."
    if small_fractions[start]:
        text += f" At {len(small_fractions[start])} of these sites, few tokens still decide."
    return text


def _small_fractions(sums: Sums, models: Sequence[ModelDescription], start: int) -> dict[str, float]:
    """Effective sample size of the sites at which it is small, see `effective_fraction`."""
    fractions = {}
    for number, model in enumerate(models):
        for layer, fraction in zip(model.layers, effective_fraction(sums, number, start), strict=True):
            if fraction < LEAST_EFFECTIVE_FRACTION:
                fractions[layer] = float(fraction)
    return fractions


def _count_sites(values: Mapping[str, float]) -> str:
    return f"{len(values)} site{'s' * (len(values) > 1)}"


def _text_on_dimension(sums: Sums, models: Sequence[ModelDescription], weighed: str) -> str:
    """Warning that one dimension has most of the squared norm or of the variance; "" for no warning."""
    large_shares = {}
    for number, model in enumerate(models):
        shares = sums[f"{number} largest {weighed}"] / sums[f"{number} all {weighed}"]
        for layer, share in zip(model.layers, shares, strict=True):
            if share > LARGEST_DIMENSION:
                large_shares[layer] = float(share)
    if not large_shares:
        return ""
    layer = max(large_shares, key=lambda name: large_shares[name])
    total = "of a token's squared norm" if weighed == "power" else "of the variance"
    return (
        f"one dimension decides these numbers at {_count_sites(large_shares)}. At {site_in_words(layer)}, this dimension has "
        f"{100 * large_shares[layer]:.0f} % {total}. CCA and LinearPredictivity weight all dimensions equally."
    )


# Below this number of jackknife blocks a warning is given: a standard error from few blocks is itself uncertain.
FEW_BLOCKS = 16
# Below this number of texts a warning is given, with what 16, 32 and 64 texts give in `benchmarks/studies/coverage.py`.
MANY_TEXTS = 64
COVERED_BY_16 = 55
COVERED_BY_32 = 80
COVERED_BY_64 = 95
# Above this correlation of neighbouring jackknife blocks a warning is given.
# 3 to 4 of 100 independent data sets of 16 blocks reach it.
MOST_CORRELATION = 0.4


class JackknifeBlock(NamedTuple):
    """Sums of one analyzer over a block of consecutive rows. One jackknife replicate leaves this block out.

    Attributes:
        tokens: number of counted positions.
        sums: sums of the analyzer.
    """

    tokens: int
    sums: Sums


def jackknife_blocks(blocks: Sequence[DataBlock], name: str) -> list[JackknifeBlock]:
    """Sums and token counts of an analyzer, by jackknife block.

    Sums of a pool of rows belong to the block of the pool's last row.

    Args:
        blocks: blocks of consecutive rows, from the main pass.
        name: name of the analyzer.
    """
    analyzer_blocks: list[JackknifeBlock] = []
    tokens = 0
    for block in blocks:
        tokens += block.tokens
        sums = with_pools(block.sums, name)
        # No sums: the pool of these rows ends in a later block, to which their tokens are added.
        if sums:
            analyzer_blocks.append(JackknifeBlock(tokens, sums))
            tokens = 0
    return analyzer_blocks


def replicated(result: Result, analyzer: Analyzer, run: Run, name: str, blocks: Sequence[JackknifeBlock]) -> Result:
    """The result with its jackknife replicates.

    Each replicate is computed without one jackknife block. The sums of a first pass are held fixed, because the kernel of the
    main pass was made of them.

    Args:
        result: result of all data.
        analyzer: the analyzer that computed the result.
        run: the run that `compute` received.
        name: name of the analyzer.
        blocks: the jackknife blocks of the analyzer.
    """
    tokens = tuple(block.tokens for block in blocks)
    if len(blocks) < 2:
        return result.with_replicates((), tokens)
    replicates = []
    try:
        # What is said of all data need not be said again of each part.
        with recorded_warnings(issued=False):
            remaining_sums = leave_one_out([block.sums for block in blocks], Sums.__add__)
            # Shown only for results that take long, such as those with many decompositions.
            for sums in tqdm(
                remaining_sums, desc=f"intervals of {name}", total=len(blocks), delay=2, leave=False, disable=None
            ):
                replicates.append(analyzer.compute(sums, run))
            if len(run.models) > 1:
                first_half = analyzer.compute(reduce(Sums.__add__, (block.sums for block in blocks[::2])), run)
                second_half = analyzer.compute(reduce(Sums.__add__, (block.sums for block in blocks[1::2])), run)
                result = result.with_halves(first_half, second_half)
    except (LayersimError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]  # not among torch's exports
        # The result of all data is not lost with that of a part of it.
        warn(f"{name!r} has no intervals: the analyzer failed on a subset of the {len(blocks)} jackknife blocks. {error}")
        return result
    return result.with_replicates(tuple(replicates), tokens)


# Below this multiple of its standard deviation, the correlation of texts that follow each other may be by chance.
LEAST_DEVIATIONS = 2.0
# Of runs on independent texts, this fraction at most is warned of the largest correlation over sites.
FALSE_WARNINGS = 0.05


def correlation_by_chance(pairs: int, sites: int) -> float:
    """Largest correlation over sites that pairs of independent texts have by chance: Bonferroni's bound over the sites.

    Args:
        pairs: number of pairs of texts that follow each other.
        sites: number of sites.

    Examples:
        >>> round(correlation_by_chance(100, 1), 3), round(correlation_by_chance(100, 30), 3)
        (0.2, 0.294)
    """
    deviations = NormalDist().inv_cdf(1 - FALSE_WARNINGS / sites)
    return max(LEAST_DEVIATIONS, deviations) / math.sqrt(pairs)


def notes_on_order(sums: Sums, names: Sequence[str]) -> list[Note]:
    """Warning that intervals are too narrow, because texts that follow each other in the data are alike.

    Args:
        sums: sums of the kernel of `activations.text_order`; empty if it did not run.
        names: names of the analyzers with intervals.
    """
    if not sums or not names:
        return []
    texts = int(sums["texts"])
    correlations = neighbour_correlations_of_texts(sums.fields)
    if not len(correlations):
        return []
    correlation = float(correlations.max())
    by_chance = correlation_by_chance(int(sums["pairs"]), len(correlations))
    if not correlation > by_chance:
        return []
    text = (
        f"Intervals of {', '.join(map(repr, names))} are too narrow: texts that follow each other have a correlation of "
        f"{correlation:.2f} in their activations, and {texts} independent texts have at most {by_chance:.2f}. If rows belong "
        "together, such as paragraphs of one document, name their documents with Data(groups=...). Otherwise draw the texts at "
        "random from their whole source."
    )
    return [(text, list(names))]


def notes_on_texts(texts: int, rows: int, rows_as_texts: int, names: Sequence[str]) -> list[Note]:
    """Warnings about intervals that rest on few texts, or on rows of one text.

    Args:
        texts: number of texts.
        rows: number of rows.
        rows_as_texts: number of rows that stand for texts.
        names: names of the analyzers with intervals.
    """
    if not names:
        return []
    notes: list[Note] = []
    named = ", ".join(map(repr, names))
    if rows_as_texts:
        text = (
            f"Intervals of {named} take {amount(texts, 'unit')} as independent that may be parts of one text, because the data "
            f"is packed or has fewer than {LEAST_TEXTS} texts."
        )
        if texts >= 2 * LEAST_TEXTS:
            text += " Minibatches of CKA, RSA and MutualKNN hold no neighbouring units."
        notes.append((text, list(names)))
    if texts < MANY_TEXTS:
        row_count = f" ({amount(rows, 'row')})" if texts < rows else ""
        text = (
            f"Intervals of {named} rest on {amount(texts, 'text')}{row_count}. Of a mean that few texts decide, such as a loss "
            f"of 10 in 5 % of the texts, simulated 95 % intervals contain the true value in {COVERED_BY_16} % (16 texts), "
            f"{COVERED_BY_32} % (32) and {COVERED_BY_64} % (64); otherwise in 92 to 96 %."
        )
        notes.append((text, list(names)))
    return notes


def notes_on_drift(results: Mapping[str, Result]) -> list[Note]:
    """Warning that intervals are too narrow, because neighbouring jackknife blocks are correlated.

    Args:
        results: results with their replicates, by name of the analyzer.
    """
    correlations = {}
    for name, result in results.items():
        correlation = drift_of(result)
        if correlation > MOST_CORRELATION:
            correlations[name] = correlation
    if not correlations:
        return []
    text = (
        f"Intervals of {', '.join(map(repr, correlations))} are too narrow: neighbouring jackknife blocks have a correlation "
        f"of {max(correlations.values()):.2f}, and independent blocks of about 0. Draw the texts at random from their whole "
        "source, or pass more texts."
    )
    return [(text, list(correlations))]


def drift_of(result: Result) -> float:
    """Mean correlation between neighbouring jackknife blocks; NaN for fewer than `FEW_BLOCKS` blocks.

    The mean is taken over all numbers of the result that have an interval, see `neighbour_correlation`.

    Args:
        result: any result.
    """
    if len(result.replicates) < FEW_BLOCKS:
        return math.nan
    correlations = []
    for field, bounds in bounds_of(result).items():
        # A field without bounds has no interval.
        if bounds is not None:
            _, replicates = with_and_without_blocks(result, partial(aligned, result=result, field=field))
            correlations.append(neighbour_correlation(replicates).flatten())
    return float(torch.cat(correlations).nanmean()) if correlations else math.nan


def notes_on_blocks(blocks: Mapping[str, Sequence[JackknifeBlock]]) -> list[Note]:
    """Warning about intervals that rest on few jackknife blocks.

    Args:
        blocks: the jackknife blocks, by analyzer.
    """
    few = {name: len(analyzer_blocks) for name, analyzer_blocks in blocks.items() if len(analyzer_blocks) < FEW_BLOCKS}
    if not few:
        return []
    names_by_count: dict[int, list[str]] = {}
    for name, count in few.items():
        names_by_count.setdefault(count, []).append(repr(name))
    statements = []
    for count, names in names_by_count.items():
        statements.append(f"{', '.join(names)} rest on {amount(count, 'jackknife block')}")
    text = (
        f"Intervals of {', those of '.join(statements)}; {FEW_BLOCKS} or more are good, and fewer than 2 give no interval. "
        "Pass more texts, or fewer rows in each forward pass in attach. For measures over pairs of samples, such as CKA, a "
        "block has at least 16 texts and minibatch= samples."
    )
    return [(text, list(few))]


PACKAGES = ("tl_layersim", "torch", "transformers", "transformer-lens", "nnsight", "datasets")


def refuse_empty(tokens: int, rows: int) -> None:
    """Raise an error if the data has no token to measure.

    Args:
        tokens: number of counted positions.
        rows: number of rows.

    Raises:
        LayersimError: no token was counted.
    """
    if tokens:
        return
    if rows == 0:
        raise LayersimError("`data` is empty. A generator can be read only once: pass list(data).")
    raise LayersimError(
        f"`data` has no token to measure: all tokens of its {rows} rows are masked, or left out by `skip_first` or `positions`."
    )


def make_report(
    analyzers: Mapping[str, Analyzer],
    models_of: Mapping[str, Sequence[ModelDescription]],
    tally: Tally,
    first_sums: Mapping[str, Sums],
    data_options: Mapping[str, Any],
    over_ranks: tuple[Mapping[str, Sums], Sequence[DataBlock]] | None = None,
) -> Report:
    """Compute the results of all analyzers.

    Args:
        analyzers: the analyzers, by name.
        models_of: by analyzer, the model or the compared models, with the sites that the analyzer read.
        tally: counts and digest of the data, and the sums of the main pass.
        first_sums: sums of the first pass, by analyzer.
        data_options: how the data was read, for the provenance.
        over_ranks: sums and jackknife blocks of the main pass of all ranks, in place of those in `tally`.

    Raises:
        LayersimError: no token was counted, or the sums do not suffice for an analyzer.
    """
    refuse_empty(tally.tokens, tally.sequences)
    tree = tally.tree
    sums: Mapping[str, Sums]
    blocks: Sequence[DataBlock]
    if over_ranks:
        sums, blocks = over_ranks
    else:
        sums = tree.total().sums
        blocks = tree.blocks() if tree.size else ()
    blocks_of: dict[str, list[JackknifeBlock]] = {}
    if tree.size is not None:
        blocks_of = {name: jackknife_blocks(blocks, name) for name in analyzers}
    notes = notes_on_blocks(blocks_of) + notes_on_sizes(analyzers, models_of, sums, data_options)
    results: dict[str, Result] = {}
    # By analyzer, the warnings of its computation and the notes that name it.
    warnings_of: dict[str, list[str]] = {}
    for name, analyzer in analyzers.items():
        options = {**analyzer.options(), **data_options}
        models = models_of[name]
        provenance = record(models, tally, options, getattr(analyzer, "seed", None))
        run = Run(tuple(models), provenance, first_sums.get(name, Sums()))
        with recorded_warnings() as warnings_of[name]:
            result = analyzer.compute(with_pools(sums, name), run)
            if not isinstance(result, Result):
                raise LayersimError(f"{type(analyzer).__name__}.compute returned {brief(result)}; it must return a Result.")
            if name in blocks_of:
                result = replicated(result, analyzer, run, name, blocks_of[name])
        results[name] = result
    measured = [name for name, result in results.items() if result.has_intervals]
    rows_as_texts = int(data_options.get("rows_as_texts", 0))
    notes += notes_on_texts(tally.texts or tally.sequences, tally.sequences, rows_as_texts, measured)
    notes += notes_on_order(sums.get(TEXT_ORDER, Sums()), measured)
    for text, names in notes + notes_on_drift(results):
        warn(text)
        for name in names:
            warnings_of[name].append(text)
    reported = {}
    for name, result in results.items():
        warnings = tuple(dict.fromkeys(warnings_of[name]))
        reported[name] = replace(result, provenance=replace(result.provenance, warnings=warnings))
    return Report(reported)


def record_of_models(models: Sequence[ModelDescription]) -> dict[str, Any]:
    """The provenance fields that describe the models. Values of several models are joined."""
    # The first field, `model`, holds the attribute `name`; all others have the name of their attribute.
    attributes = dict(zip(OF_MODELS, ("name", *OF_MODELS[1:]), strict=True))
    fields = {}
    for field, attribute in attributes.items():
        values = [getattr(model, attribute) for model in models]
        # Of models without changes, or without known attention heads, nothing is said.
        is_recorded = field not in OF_SOME or any(values)
        fields[field] = JOINT.join(values) if is_recorded else ""
    return fields


def record(models: Sequence[ModelDescription], tally: Tally, options: Mapping[str, Any], seed: int | None) -> Provenance:
    """The provenance of a result: models, data, options and versions."""
    return Provenance(
        **record_of_models(models),
        data=tally.digest,
        tokens=tally.tokens,
        sequences=tally.sequences,
        texts=tally.texts,
        batches=tally.batches,
        seed=seed,
        options=dict(options),
        versions=dict(_installed()),
        seconds=tally.seconds,
    )


@cache
def _installed() -> Mapping[str, str]:
    """Versions of the packages that a result records."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
