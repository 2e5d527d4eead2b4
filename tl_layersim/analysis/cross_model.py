"""Two models in different places: what each measures of its own layers crosses, and never the activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from ..analyzers.base import Analyzer, Exchange
from ..core.errors import LayersimError, in_words
from ..data.batches import Batch
from ..models.source import PartialSums, Source


def exchanges(analyzers: Mapping[str, Analyzer]) -> dict[str, Exchange]:
    """How each analyzer relates two models that are not in one place.

    Raises:
        LayersimError: one of them needs both models' activations side by side.
    """
    found = {}
    for name, analyzer in analyzers.items():
        given = analyzer.exchange()
        if given is None:
            raise LayersimError(
                f"{type(analyzer).__name__}, as it is set, needs both models' activations in one place.",
                given=f"{analyzer!r} with a model that is elsewhere",
                expected="an analyzer that can do with something small of each model",
                do='CKA(estimator="minibatch"), for which Gram matrices cross; or load both models here',
            )
        found[name] = given
    return found


def exchange(
    sources: Sequence[Source], batches: Iterator[Batch], analyzers: Mapping[str, Analyzer], say: Callable[[str], None]
) -> Iterator[list[PartialSums]]:
    """Each batch runs on one model, then on the other; what the two say is joined here."""
    found = exchanges(analyzers)
    kernels = {name: item.kernel for name, item in found.items()}
    for batch in batches:
        not_finite, sides = [], []
        for number, source in enumerate(sources):
            say(f"model {number + 1} of 2")
            counts, out = source.run(batch, kernels)
            not_finite += counts
            sides.append(out)
        whole = all(not bool(count.any()) for count in not_finite)
        joined = {name: item.join(sides[0][name], sides[1][name]) for name, item in found.items()} if whole else {}
        yield [PartialSums(1, not_finite, joined)]


def crossing(analyzers: Mapping[str, Analyzer], sources: Sequence[Source], sizes: Sequence[tuple[int, int]]) -> str:
    """What will cross between the places, in words, from how many tokens and rows each batch has.

    For a model of unknown width the share of its activations is left out.
    """
    layers = [len(source.model.layers) for source in sources]
    found = exchanges(analyzers).values()
    size = sum(item.size(tokens, rows, number) for item in found for tokens, rows in sizes for number in layers)
    words = f"{len(sizes)} batches, each run on one model and then on the other; {in_words(size)} cross in all"
    widths = [source.model.d_model for source in sources]
    if all(width is not None for width in widths):
        whole = sum(
            4 * number * (width or 0) * sum(tokens for tokens, _ in sizes) for number, width in zip(layers, widths, strict=True)
        )
        words += f", where the activations would be {in_words(whole)} in float32"
    return words + "."
