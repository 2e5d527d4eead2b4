"""Comparison of models by statistics of each model, so that no activations are kept or transferred.

Models on servers are compared in this way, and more than two models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..activations.view import Reduced
from ..analyzers.analyzer import Analyzer, Exchange
from ..core.errors import LayersimError, in_words
from ..core.sums import SIZES
from ..data.batches import Batch, BatchSize
from ..sources.source import PartialSums, Source
from .plan import SitePlan


def exchanges(analyzers: Mapping[str, Analyzer]) -> dict[str, Exchange]:
    """The cross-model statistics of each analyzer, which compare two models on different machines.

    Raises:
        LayersimError: an analyzer needs the activations of both models in one place.
    """
    by_name = {}
    for name, analyzer in analyzers.items():
        statistics = analyzer.exchange()
        if statistics is None:
            raise LayersimError(
                f"{analyzer!r} needs the activations of both models in one place, but one of the models is on a server, and "
                'they are not edits of one model there. Load both here, or use CKA(estimator="minibatch").'
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
    """Run each batch on one model after the other, and join the statistics of all models.

    Args:
        sources: the models.
        batches: the batches, in the order of the data.
        analyzers: the analyzers, by name.
        plan: the sites that each analyzer reads.
        show: function that shows a few words on the model that runs.
    """
    by_name = exchanges(analyzers)
    kernels = [
        {name: plan.kernel(name, item.kernel, number) for name, item in by_name.items()}
        | plan.kernels_of_sizes(analyzers, number)
        for number in range(len(sources))
    ]
    for batch in batches:
        sides = []
        for number, source in enumerate(sources):
            show(f"model {number + 1} of {len(sources)}")
            sides.append(source.sums(batch, kernels[number]))
        if any(len(leaves) != len(sides[0]) for leaves in sides):
            # Of a model whose activations are not finite.
            yield [PartialSums(batch.leaf, [count for leaves in sides for count in leaves[0][0]], {})]
            continue
        yield [PartialSums(batch.leaf, *_joined(by_name, leaves)) for leaves in zip(*sides, strict=True)]


def _joined(by_name: Mapping[str, Exchange], leaves: Sequence[Reduced]) -> Reduced:
    """The sums of one leaf, joined from the statistics of all models; none for an analyzer without a pool that ends there."""
    not_finite = [count for counts, _ in leaves for count in counts]
    if any(bool(count.any()) for count in not_finite):
        return not_finite, {}
    out = {}
    for name, item in by_name.items():
        statistics = [own[name] for _, own in leaves]
        out[name] = item.join(*map(item.prepare, statistics)) if all(statistics) else {}
        sizes = [own.get(SIZES + name, {}) for _, own in leaves]
        # Each was number 0 in its own pass.
        out[SIZES + name] = {f"{i}{key[1:]}": value for i, each in enumerate(sizes) for key, value in each.items()}
    return not_finite, out


def crossing(analyzers: Mapping[str, Analyzer], sources: Sequence[Source], plan: SitePlan, sizes: Sequence[BatchSize]) -> str:
    """A sentence on the number of bytes that the comparison of models transfers.

    Args:
        analyzers: the analyzers, by name.
        sources: the models. The size of activations is stated if the widths of all models are known.
        plan: the sites that each analyzer reads.
        sizes: sizes of the batches.
    """
    size = sum(
        item.size(batch.rows, batch.density, len(choice.numbers))
        for name, item in exchanges(analyzers).items()
        for choice in plan.choices[name]
        for batch in sizes
    )
    how = "on one model and then on the other" if len(sources) == 2 else f"on {len(sources)} models in turn"
    words = f"{len(sizes)} batches, each run {how}; {in_words(size)} are transferred in all"
    numbers = [_numbers_per_sample(source) for source in sources]
    if all(numbers):
        activations = 4 * sum(numbers) * sum(batch.samples for batch in sizes)
        words += f", while the activations would be {in_words(activations)} in float32"
    return words + "."


def _numbers_per_sample(source: Source) -> int:
    """Number of activations that all sites of a model have for one sample; 0 if widths are not known yet."""
    if source.widths or source.sites != source.model.layers:
        return sum(source.widths)
    return len(source.sites) * (source.model.d_model or 0)
