"""Comparison of models by statistics of each: one model runs after the other, and no activations are kept or transferred.

Models on servers are compared in this way, and more than two models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..analyzers.base import Analyzer, Exchange
from ..core.errors import LayersimError, in_words
from ..data.batches import Batch
from ..models.source import PartialSums, Source
from .site_plan import SitePlan


def exchanges(analyzers: Mapping[str, Analyzer]) -> dict[str, Exchange]:
    """The cross-model statistics of each analyzer, by which it compares two models on different machines.

    Raises:
        LayersimError: an analyzer needs the activations of both models in one place.
    """
    by_name = {}
    for name, analyzer in analyzers.items():
        statistics = analyzer.exchange()
        if statistics is None:
            raise LayersimError(
                f"{analyzer!r} needs the activations of both models in one process.",
                given="a model on a server",
                expected="an analyzer that compares models by small statistics of each",
                do='CKA(estimator="minibatch"), for which Gram matrices cross; or load both models here',
            )
        by_name[name] = statistics
    return by_name


def exchange(
    sources: Sequence[Source],
    batches: Iterator[Batch],
    analyzers: Mapping[str, Analyzer],
    plan: SitePlan,
    show: Callable[[str], None],
) -> Iterator[list[PartialSums]]:
    """Run each batch on one model after the other, and join the statistics of all.

    Args:
        sources: the models.
        batches: in the order of the data.
        analyzers: by name.
        plan: the sites that each analyzer reads.
        show: takes a few words on which model runs.
    """
    by_name = exchanges(analyzers)
    kernels = [
        {name: plan.kernel(name, item.kernel, number) for name, item in by_name.items()} for number in range(len(sources))
    ]
    for batch in batches:
        not_finite, sides = [], []
        for number, source in enumerate(sources):
            show(f"model {number + 1} of {len(sources)}")
            counts, out = source.run(batch, kernels[number])
            not_finite += counts
            sides.append({name: by_name[name].prepare(statistics) for name, statistics in out.items()})
        finite = all(not bool(count.any()) for count in not_finite)
        joined = {name: item.join(*(side[name] for side in sides)) for name, item in by_name.items()} if finite else {}
        yield [PartialSums(1, not_finite, joined)]


def crossing(
    analyzers: Mapping[str, Analyzer], sources: Sequence[Source], plan: SitePlan, sizes: Sequence[tuple[int, int]]
) -> str:
    """A sentence on how many bytes the comparison of models transfers.

    Args:
        analyzers: by name.
        sources: the models; the size of activations is stated where the widths of all are known.
        plan: the sites that each analyzer reads.
        sizes: samples and rows of each batch.
    """
    size = sum(
        item.size(samples, rows, len(choice.numbers))
        for name, item in exchanges(analyzers).items()
        for choice in plan.choices[name]
        for samples, rows in sizes
    )
    how = "on one model and then on the other" if len(sources) == 2 else f"on {len(sources)} models in turn"
    words = f"{len(sizes)} batches, each run {how}; {in_words(size)} cross in all"
    numbers = [_numbers_per_sample(source) for source in sources]
    if all(numbers):
        activations = 4 * sum(numbers) * sum(samples for samples, _ in sizes)
        words += f", where the activations would be {in_words(activations)} in float32"
    return words + "."


def _numbers_per_sample(source: Source) -> int:
    """Number of activations that all sites of a model have for one sample; 0 where widths are not known yet."""
    if source.widths or source.sites != source.model.layers:
        return sum(source.widths)
    return len(source.sites) * (source.model.d_model or 0)
