"""Runs several models on the same batches.

Models in this process run side by side, and kernels read the activations of all models. If a model is on a server, or if an
analyzer needs one model at a time, the models run one after the other, and only small statistics of each model (`Exchange`)
are kept and joined. Edits of one model on one server may run in one request, see `Analysis.single_source`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..activations.row_pools import AnyKernel, run_batch
from ..activations.view import Kernel, Reduced
from ..analyzers.analyzer import Analyzer, Exchange
from ..core.errors import LayersimError, in_words
from ..core.sums import SIZES
from ..data.batches import Batch, BatchSize
from ..sources.out_of_memory import reduce_batch
from ..sources.source import PartialSums, Source
from .site_plan import SitePlan


def side_by_side(
    sources: Sequence[Source], batches: Iterator[Batch], kernels: Mapping[str, AnyKernel]
) -> Iterator[list[PartialSums]]:
    """Run each batch on all models, and run kernels on the activations of all models.

    Args:
        sources: the models, in this process.
        batches: the batches, in the order of the data.
        kernels: the kernels, by name.
    """

    def run(batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        return reduce_batch(batch, kernels, *(source.collect(batch) for source in sources))

    for batch in batches:
        # No variable holds sums while the next batch runs.
        yield [PartialSums(batch.leaf, *reduced) for reduced in run_batch(run, batch, kernels)]


def exchanges(analyzers: Mapping[str, Analyzer]) -> dict[str, Exchange]:
    """Dict from analyzer names to `Exchange` objects, which compare models on different machines.

    Raises:
        LayersimError: an analyzer needs the activations of both models in one place.
    """
    by_name = {}
    for name, analyzer in analyzers.items():
        statistics = analyzer.exchange()
        if statistics is None:
            raise LayersimError(
                f"{analyzer!r} needs the activations of both models on one machine, but a model is on a server. Load both "
                'models here, pass two edits of one model on the server, or use CKA(estimator="minibatch").'
            )
        by_name[name] = statistics
    return by_name


def one_after_another(
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
    exchange_of = exchanges(analyzers)
    kernels = []
    for number in range(len(sources)):
        exchange_kernels = {name: plan.kernel(name, exchange.kernel, number) for name, exchange in exchange_of.items()}
        kernels.append(exchange_kernels | plan.kernels_of_sizes(analyzers, number))
    for batch in batches:
        # By model, the statistics of each leaf.
        leaves_of = []
        for number, source in enumerate(sources):
            show(f"model {number + 1} of {len(sources)}")
            leaves_of.append(source.sums(batch, kernels[number]))
        if any(len(leaves) != len(leaves_of[0]) for leaves in leaves_of):
            # A model whose activations are not finite returns a single leaf.
            not_finite = []
            for leaves in leaves_of:
                not_finite += leaves[0][0]
            yield [PartialSums(batch.leaf, not_finite, {})]
            continue
        yield [PartialSums(batch.leaf, *_joined(exchange_of, leaf)) for leaf in zip(*leaves_of, strict=True)]


def _joined(exchange_of: Mapping[str, Exchange], reduced: Sequence[Reduced]) -> Reduced:
    """Combine the statistics of all models over the same rows.

    An analyzer has no statistics here if its pool of rows ends in another group of rows.
    """
    not_finite = [count for counts, _ in reduced for count in counts]
    if any(bool(count.any()) for count in not_finite):
        return not_finite, {}
    out = {}
    for name, exchange in exchange_of.items():
        statistics = [model_out[name] for _, model_out in reduced]
        out[name] = exchange.join(*map(exchange.prepare, statistics)) if all(statistics) else {}
        sizes = {}
        for number, (_, model_out) in enumerate(reduced):
            for key, value in model_out.get(SIZES + name, {}).items():
                # Each model was number 0 in its own pass.
                sizes[f"{number}{key[1:]}"] = value
        out[SIZES + name] = sizes
    return not_finite, out


def crossing(analyzers: Mapping[str, Analyzer], models: int, plan: SitePlan, sizes: Sequence[BatchSize]) -> str:
    """Message with the number of batches and the bytes that a comparison transfers.

    Args:
        analyzers: the analyzers, by name.
        models: number of models.
        plan: the sites that each analyzer reads.
        sizes: sizes of the batches.
    """
    transferred = 0
    for name, exchange in exchanges(analyzers).items():
        for choice in plan.choices[name]:
            for batch in sizes:
                transferred += exchange.size(batch.texts, batch.density, len(choice.numbers))
    order = "on one model and then on the other" if models == 2 else f"on {models} models in turn"
    return f"{len(sizes)} batches, each run {order}; {in_words(transferred)} are transferred in all."
