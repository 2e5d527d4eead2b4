"""Choice of the positions that a run measures: the default of the model's head, and rules that an analyzer cannot use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..analyzers.base import Analyzer
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.data import Data
from ..data.positions import PositionRule, Positions
from ..models.model_info import Model


def chosen_rule(
    given: PositionRule | None, models: Sequence[Model], analyzers: Mapping[str, Analyzer], skip_first: int = 0
) -> PositionRule:
    """The rule that a run counts positions by.

    Args:
        given: the user's; None for the position that the head reads, and for all positions of other models.
        models: one model, or two that are compared.
        analyzers: by name.
        skip_first: of the run.

    Raises:
        LayersimError: the default is not clear, or an analyzer cannot use the rule.
    """
    rule = _default(models, analyzers, skip_first) if given is None else Positions(given).rule
    for analyzer in analyzers.values():
        if rule == "mean" and analyzer.needs_positions:
            raise LayersimError(
                f"`positions` is 'mean', at which {type(analyzer).__name__} is not defined: the mean of a row has no next "
                "token and no logits."
            )
        for model in models:
            _refuse_other_position(rule, analyzer, model)
            _refuse_incomplete_rows(analyzer, model, skip_first)
    return rule


def attached_rule(given: PositionRule | None, model: Model, analyzers: Mapping[str, Analyzer]) -> Positions:
    """The rule that `attach` counts positions of forward passes by, see `chosen_rule`.

    Raises:
        LayersimError: as `chosen_rule`; or the rule needs a column of data.
    """
    positions = Positions(chosen_rule(given, [model], analyzers))
    if positions.marked:
        raise LayersimError(
            f"`positions` is {brief(positions.rule)}, a column of data, and `attach` receives forward passes only. Set "
            "`probe.mask` before the forward pass."
        )
    return positions


def refuse_selection(data: Data, reads: str, *names: str) -> None:
    """Refuse options of `Data` that select positions, in a function whose positions are fixed.

    Args:
        data: of the call.
        reads: the positions that the function reads, in words.
        *names: of the options that are refused.

    Raises:
        LayersimError: one of them is given.
    """
    for name in names:
        if getattr(data, name):
            raise LayersimError(f"`{name}` of `Data` is {brief(getattr(data, name))}; it cannot be chosen here: {reads}.")


def _default(models: Sequence[Model], analyzers: Mapping[str, Analyzer], skip_first: int) -> str:
    """The rule without `positions=`: the position that the head reads, unless all analyzers read whole rows."""
    rules = [_rule_of(model) for model in models]
    if set(rules) == {"all"}:
        return "all"
    # Analyzers of what the head reads, such as the lens, read the head's position in any case; those that call blocks again
    # read the others too.
    whole = [type(a).__name__ for a in analyzers.values() if a.whole_rows and (a.needs_calls or not a.reads_head)]
    single = [type(a).__name__ for a in analyzers.values() if not a.whole_rows and not a.reads_head]
    if whole and not single:
        return "all"
    if whole:
        raise LayersimError(
            f"`positions` must be given: {whole[0]} reads whole rows, and {single[0]} single positions. Use positions='all', "
            "or a call for each."
        )
    if len(set(rules)) > 1:
        raise LayersimError(
            f"`positions` must be given: the heads of the models read {' and '.join(map(_head_reads, dict.fromkeys(rules)))}."
        )
    if rules[0] == "first" and skip_first:
        raise LayersimError(
            f"`skip_first` is {skip_first}, which leaves out the position that the head of {models[0].name} reads. Use "
            "positions= to measure others."
        )
    return rules[0]


def _refuse_other_position(rule: PositionRule, analyzer: Analyzer, model: Model) -> None:
    """Refuse the lens of a row classifier at a position that its head does not read."""
    if not analyzer.reads_head or model.head is None or model.head.reads == "every":
        return
    own = _rule_of(model)
    if rule not in ("all", own):
        allowed = "'all'" if own == "all" else f"{own!r} or 'all'"
        raise LayersimError(
            f"`positions` is {Positions(rule).record()}; {type(analyzer).__name__} needs {allowed}, as the head of "
            f"{model.name} reads {_head_reads(model.head.reads)} of a row."
        )


def _refuse_incomplete_rows(analyzer: Analyzer, model: Model, skip_first: int) -> None:
    """Refuse the lens of a head that reads whole rows where some of their positions are left out."""
    if skip_first and analyzer.reads_head and model.head is not None and model.head.reads == "rows":
        raise LayersimError(
            f"`skip_first` is {skip_first}; it must be 0 for {type(analyzer).__name__}, as the head of {model.name} reads "
            "whole rows."
        )


def _rule_of(model: Model) -> str:
    """The rule whose positions the head of a model reads; "all" where it reads several."""
    return "all" if model.head is None or model.head.reads in ("every", "rows") else model.head.reads


def _head_reads(rule: str) -> str:
    """The rule of a head in words."""
    return {"all": "every position", "rows": "all positions"}.get(rule, f"the {rule} position")
