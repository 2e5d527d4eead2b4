"""Refusals of models and analyzers that cannot be attached."""

from __future__ import annotations

from collections.abc import Mapping

from ..analyzers.base import Analyzer
from ..architectures.blocks import in_both_stacks
from ..core.errors import LayersimError
from ..models.hooked import HookedSource
from .attach_recorder import stack_side
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
    if stack_side(source) == "both":
        raise in_both_stacks(source.module)
    for name, analyzer in chosen.items():
        analyzer.check(*plan.models(name, [source.model], [source]))
        instead = "lsim.analyze(model, data, analyzers)"
        if analyzer.label_source:
            reason = f"labels={analyzer.options().get('labels')!r} are those of the data, and a loop has tokens only"
        elif analyzer.reads_head and source.model.head is not None and source.model.head.reads != "every":
            reason = f"the head of {source.model.name} classifies whole rows, and it is not known where a row ends"
        elif analyzer.needs_rows:
            reason = "it holds out rows of the data, and it is not known which rows run"
        elif analyzer.needs_calls:
            reason = "it replays blocks, which would add forward passes to your loop"
        elif analyzer.first_kernel() is not None:
            reason, instead = "it needs a first pass over the data", analyzer.one_pass or instead
        else:
            continue
        raise LayersimError(f"{type(analyzer).__name__} cannot be attached: {reason}. Use {instead}.")
