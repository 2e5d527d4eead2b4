"""Refusals of models and analyzers that cannot be attached."""

from __future__ import annotations

from collections.abc import Mapping

from ..analyzers.base import Analyzer
from ..core.errors import LayersimError
from ..models.block_lists import in_both_stacks
from ..models.hooked import HookedSource
from ..models.reading import stack_side
from .site_plan import SitePlan


def refuse_unattachable(source: HookedSource, chosen: Mapping[str, Analyzer], plan: SitePlan) -> None:
    """Refuse a model or an analyzer that needs more than the forward passes of the user's loop.

    Args:
        source: the model.
        chosen: analyzers by name.
        plan: the sites that each analyzer reads.

    Raises:
        LayersimError: names the analyzer and what it needs.
    """
    if stack_side(source.module, source.paths).side == "both":
        raise in_both_stacks(source.module)
    for name, analyzer in chosen.items():
        analyzer.check(*plan.models(name, [source.model], [source]))
        if analyzer.label_source:
            raise LayersimError(
                f"{type(analyzer).__name__} needs labels from the data, and `attach` receives tokens only.",
                given=f"labels={analyzer.options().get('labels')!r}",
                expected="labels='next_token'",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.reads_head and source.model.head is not None and source.model.head.reads != "every":
            raise LayersimError(
                f"The head of {source.model.name} classifies whole rows, and under `attach` it is not known where a row ends.",
                given=type(analyzer).__name__,
                expected="a head that says something at every position",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.needs_rows:
            raise LayersimError(
                f"{type(analyzer).__name__} holds out rows of the data, and under `attach` it is not known which rows run.",
                given=type(analyzer).__name__,
                expected="an analyzer of all rows",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.needs_calls:
            raise LayersimError(
                f"{type(analyzer).__name__} cannot be attached: replaying blocks would add forward passes to your loop.",
                given=type(analyzer).__name__,
                expected="an analyzer that only reads",
                do="lsim.analyze(model, data, analyzers)",
            )
        if analyzer.first_kernel() is not None:
            raise LayersimError(
                f"{type(analyzer).__name__} needs a first pass over the data, and `attach` makes one pass only.",
                given=", ".join(f"{k}={v!r}" for k, v in analyzer.options().items()),
                expected="an analyzer of one pass",
                do=analyzer.one_pass or "lsim.analyze(model, data, analyzers), which makes two passes",
            )
