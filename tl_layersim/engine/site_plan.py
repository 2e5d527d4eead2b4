"""Chooses the sites that analyzers read, and the positions that a run counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

from ..activations.norms import activation_sizes
from ..activations.row_pools import AnyKernel, PoolKernel
from ..activations.view import at_sites
from ..analyzers.analyzer import Analyzer, listed
from ..architectures.hook_points import HookPoint, distinct_points
from ..architectures.site_selection import as_int, items_of
from ..core.arguments import Layer
from ..core.errors import LayersimError
from ..core.sums import POOL, SIZES, Sums
from ..core.wording import brief
from ..data.data import Data
from ..data.positions import PositionRule, Positions
from ..sources.model_description import ModelDescription
from ..sources.source import CanReadSites, Source

# For type checkers: a block, a family, a name or a pattern, several of these, or a function of names.
AtArgument: TypeAlias = Layer | Sequence[Layer] | Callable[[str], bool]
DEFAULT = "resid_post"
MID = "resid_mid"
Points = tuple[HookPoint, ...]


@dataclass(frozen=True)
class SiteChoice:
    """The sites of one model that an analyzer reads.

    Attributes:
        numbers: indices of the sites among all sites that the source reads.
        stream: see `ModelDescription`; None for the residual layers, for which the model has it.
    """

    numbers: tuple[int, ...]
    stream: str | None = None


@dataclass(frozen=True)
class SitePlan:
    """The sites that each analyzer reads on each model.

    Attributes:
        sources: the models: one, or several to compare.
        choices: by name of the analyzer, a choice for each model.
        points: for each model, the hook points that the analyzers read together; None for a source that reads the residual
            stream alone.
        at: the option `at`, as the user gave it, for the record.
        per_head: whether each head is a site of its own.
    """

    sources: Sequence[Source]
    choices: Mapping[str, tuple[SiteChoice, ...]]
    points: tuple[Points | None, ...] = ()
    at: int | str | list[int | str] = DEFAULT
    per_head: bool = False

    def start_reading(self) -> None:
        """Make the sources read the sites of this plan from now on."""
        for source, points in zip(self.sources, self.points, strict=True):
            if points is not None:
                assert isinstance(source, CanReadSites)
                source.read_at(points)

    def kernel(self, name: str, kernel: AnyKernel, number: int | None = None) -> AnyKernel:
        """Wrap an analyzer's kernel to select the analyzer's sites from the activations of all sites.

        The given kernel accepts only activations of the analyzer's own sites.

        Args:
            name: name of the analyzer.
            kernel: kernel of views of the analyzer's own sites.
            number: index of the single model whose view the kernel takes; None for all models.
        """
        choices = self.choices[name] if number is None else (self.choices[name][number],)
        sites = tuple(choice.numbers for choice in choices)
        if isinstance(kernel, PoolKernel):
            return replace(kernel, sites=sites)
        return partial(at_sites, kernel=kernel, sites=sites)

    def kernels(self, analyzers: Mapping[str, Analyzer], first_sums: Mapping[str, Sums]) -> dict[str, AnyKernel]:
        """Kernels of the main pass, by name.

        Kernels of pools and of sizes are named after their analyzer, with `POOL` or `SIZES` before it.

        Args:
            analyzers: the analyzers, by name.
            first_sums: sums of the first pass, by analyzer.
        """
        kernels: dict[str, AnyKernel] = {}
        for name, analyzer in analyzers.items():
            sums = first_sums.get(name, Sums())
            kernels[name] = self.kernel(name, analyzer.kernel(sums))
            pool_kernel = analyzer.pool_kernel(sums)
            if pool_kernel is not None:
                kernels[POOL + name] = self.kernel(name, pool_kernel)
        return kernels | self.kernels_of_sizes(analyzers)

    def kernels_of_sizes(self, analyzers: Mapping[str, Analyzer], number: int | None = None) -> dict[str, AnyKernel]:
        """Kernels that sum squared norms and variances of activations, by name.

        They run for analyzers that give larger samples or dimensions more weight.

        Args:
            analyzers: the analyzers, by name.
            number: see `kernel`.
        """
        kernels = {}
        for name, analyzer in analyzers.items():
            if analyzer.needs.dominance:
                kernels[SIZES + name] = self.kernel(name, activation_sizes, number)
        return kernels

    def models(self, *models: ModelDescription) -> dict[str, list[ModelDescription]]:
        """Descriptions of the models, by analyzer. Their `layers` are the sites that the analyzer reads.

        Args:
            *models: a description of each model; by default that of its source, which a forward pass may complete.
        """
        described = models or [source.model for source in self.sources]
        by_analyzer: dict[str, list[ModelDescription]] = {}
        for name, choices in self.choices.items():
            by_analyzer[name] = []
            for model, source, choice in zip(described, self.sources, choices, strict=True):
                by_analyzer[name].append(_at_choice(model, source, choice))
        return by_analyzer

    def check_sites(self, analyzers: Mapping[str, Analyzer]) -> None:
        """Raise an error if an analyzer cannot use its sites.

        Args:
            analyzers: the analyzers, by name.
        """
        for name, models in self.models().items():
            analyzers[name].check_sites(*models)

    def record(self) -> dict[str, Any]:
        """The options `at` and `per_head`, for the provenance of a result."""
        return {"at": self.at, "per_head": self.per_head}


def plan_sites(
    sources: Sequence[Source], analyzers: Mapping[str, Analyzer], at: AtArgument = DEFAULT, per_head: bool = False
) -> SitePlan:
    """Choose the sites of every analyzer. `SitePlan.start_reading` makes the sources read them.

    Args:
        sources: the models.
        analyzers: the analyzers, by name.
        at: the sites for analyzers that can read any sites.
        per_head: whether each head is a site of its own.

    Raises:
        LayersimError: a model lacks the sites, or an analyzer cannot use them.
    """
    points: list[Points | None] = []
    choices_by_source = []
    for source in sources:
        points_of = _points_by_analyzer(source, analyzers, at, per_head)
        distinct = _distinct_points(source, points_of)
        points.append(distinct)
        choices_by_source.append(_choices(source, points_of, distinct))
    choices: dict[str, tuple[SiteChoice, ...]] = {}
    for name in analyzers:
        choices[name] = tuple(by_analyzer[name] for by_analyzer in choices_by_source)
    return SitePlan(sources, choices, tuple(points), _recorded(as_int(at)), per_head)


def _recorded(at: AtArgument) -> int | str | list[int | str]:
    """The option `at` in a form that a file can hold."""
    if isinstance(at, int | str):
        return at
    if callable(at):
        return f"function {getattr(at, '__qualname__', at)}"
    return items_of(at)


def _points_by_analyzer(
    source: Source, analyzers: Mapping[str, Analyzer], at: AtArgument, per_head: bool
) -> dict[str, Points | None]:
    """The hook points of one model that each analyzer reads, see `_points_of`."""
    at = source.without_stack(at) if isinstance(source, CanReadSites) else at
    return {name: _points_of(source, analyzer, at, per_head) for name, analyzer in analyzers.items()}


def _distinct_points(source: Source, points_of: Mapping[str, Points | None]) -> Points | None:
    """The hook points of one model that its analyzers read together; None for a source that reads the residual stream alone."""
    if not isinstance(source, CanReadSites):
        return None
    if all(points is None for points in points_of.values()):
        return source.residual.points
    union: list[HookPoint] = []
    for points in points_of.values():
        union.extend(source.residual.points if points is None else points)
    return distinct_points(union)


def _choices(source: Source, points_of: Mapping[str, Points | None], distinct: Points | None) -> dict[str, SiteChoice]:
    """The sites of one model that each analyzer reads, among all that the model will read.

    Args:
        source: the model.
        points_of: by name of the analyzer, its hook points; None for the default layers of the residual stream.
        distinct: see `SitePlan.points`.
    """
    if all(points is None for points in points_of.values()):
        residual = SiteChoice(tuple(range(len(source.model.layers))))
        return dict.fromkeys(points_of, residual)
    assert isinstance(source, CanReadSites)
    assert distinct is not None
    numbers = {point.name: number for number, point in enumerate(distinct)}
    choices = {}
    for name, points in points_of.items():
        if points is None:
            # The model describes the residual stream itself.
            choices[name] = SiteChoice(tuple(numbers[point.name] for point in source.residual.points))
        else:
            choices[name] = SiteChoice(tuple(numbers[point.name] for point in points), _stream(points))
    return choices


def _points_of(source: Source, analyzer: Analyzer, at: AtArgument, per_head: bool) -> Points | None:
    """Hook points that an analyzer reads; None if it reads the default layers of the residual stream."""
    families = items_of(at)
    if families == [DEFAULT] and not per_head and not analyzer.needs.families:
        return None
    if not isinstance(source, CanReadSites):
        if analyzer.needs.families:
            statement = f"{type(analyzer).__name__} reads {', '.join(analyzer.needs.families)}"
        else:
            statement = f"`at` is {brief(at)}{' and `per_head` is True' if per_head else ''}"
        raise LayersimError(
            f"{statement}; the source {type(source).__name__} reads only its own sites ({listed(source.sites)}), as it does "
            "not inherit from CanReadSites."
        )
    if analyzer.needs.families:
        return source.hook_points([*analyzer.needs.families, *_optional(source, analyzer)], False)
    if analyzer.needs.residual_stream:
        if analyzer.needs.resid_mid and set(families) <= {DEFAULT, MID}:
            return _with_ends(source, source.hook_points(families, per_head))
        raise LayersimError(
            f"`at` is {brief(at)}; it must be {DEFAULT!r}{f', {MID!r} or both' if analyzer.needs.resid_mid else ''} for "
            f"{type(analyzer).__name__}, which reads the residual stream."
        )
    return source.hook_points(at, per_head)


def _optional(source: CanReadSites, analyzer: Analyzer) -> list[str]:
    """Optional families of an analyzer whose hook points the model has."""
    families = []
    for family in analyzer.needs.optional_families:
        with suppress(LayersimError):
            source.hook_points(family, False)
            families.append(family)
    return families


def _with_ends(source: CanReadSites, points: Points) -> Points:
    """Add the first and the last layer of the residual stream, which the logit lens needs."""
    lowest = source.residual.points[0]
    highest = source.residual.points[-1]
    inner = [point for point in points if point.name not in (lowest.name, highest.name)]
    return (lowest, *inner, highest)


def _stream(points: Points) -> str:
    """Value of `ModelDescription.stream`: "parts" if all hook points lie in the residual stream, else "none"."""
    return "parts" if all(".hook_resid_" in point.name for point in points) else "none"


def _at_choice(model: ModelDescription, source: Source, choice: SiteChoice) -> ModelDescription:
    """Description of a model with the sites of one analyzer."""
    if choice.stream is None:
        return model
    layers = tuple(source.sites[number] for number in choice.numbers)
    widths = tuple(source.widths[number] for number in choice.numbers) if source.widths else ()
    # The width of the residual stream says nothing of other sites.
    return replace(model, layers=layers, stream=choice.stream, widths=widths, d_model=None)  # type: ignore[arg-type]  # one of its words


def chosen_rule(
    positions: PositionRule | None, models: Sequence[ModelDescription], analyzers: Mapping[str, Analyzer], skip_first: int = 0
) -> PositionRule:
    """Rule for the positions that a run counts.

    Args:
        positions: the user's rule; None for the default: the position that the head reads, or all positions for other models.
        models: one model, or two that are compared.
        analyzers: the analyzers, by name.
        skip_first: the option `skip_first` of the run.

    Raises:
        LayersimError: the default is ambiguous, or an analyzer cannot use the rule.
    """
    rule = _default_rule(models, analyzers, skip_first) if positions is None else Positions(positions).rule
    for analyzer in analyzers.values():
        if rule == "mean" and analyzer.needs.single_positions:
            raise LayersimError(
                f"`positions` is 'mean', for which {type(analyzer).__name__} is not defined: the mean of a row has no next "
                "token and no logits."
            )
        for model in models if analyzer.needs.positions_of_head else ():
            _refuse_other_position(rule, skip_first, analyzer, model)
    return rule


def refuse_selection(data: Data, reads: str, *names: str) -> None:
    """Raise an error if `data` sets an option that the calling function does not accept.

    The calling function chooses the positions itself.

    Args:
        data: the data of the call.
        reads: the positions that the function reads, in words.
        *names: names of the options.

    Raises:
        LayersimError: one of the options is given.
    """
    for name in names:
        if getattr(data, name):
            raise LayersimError(f"`{name}` of `Data` is {brief(getattr(data, name))}; it must be left out: {reads}.")


def _default_rule(models: Sequence[ModelDescription], analyzers: Mapping[str, Analyzer], skip_first: int) -> str:
    """Default of `positions`: the position that the head reads, or "all"."""
    rules = [_rule_of(model) for model in models]
    if set(rules) == {"all"}:
        return "all"
    # Analyzers of what the head reads, such as the lens, read the head's position in any case; those that call blocks again
    # read the others too.
    of_whole_rows = []
    of_positions = []
    for analyzer in analyzers.values():
        needs = analyzer.needs
        if needs.whole_rows and (needs.calls or not needs.positions_of_head):
            of_whole_rows.append(type(analyzer).__name__)
        elif not needs.whole_rows and not needs.positions_of_head:
            of_positions.append(type(analyzer).__name__)
    if of_whole_rows and not of_positions:
        return "all"
    if of_whole_rows:
        raise LayersimError(
            f"`positions` must be given: {of_whole_rows[0]} reads whole rows, and {of_positions[0]} reads single positions. "
            "Pass positions='all', or call once for each analyzer."
        )
    if len(set(rules)) > 1:
        raise LayersimError(
            "`positions` must be given, because the output heads of the models read different positions: "
            f"{'; '.join(map(_head_reads, dict.fromkeys(rules)))}. Pass a rule, such as positions='all'."
        )
    if rules[0] == "first" and skip_first:
        raise LayersimError(
            f"`skip_first` is {skip_first}; it must be 0, because the head of {models[0].name} reads only the first position. "
            "Pass positions='all' to measure other positions."
        )
    return rules[0]


def _refuse_other_position(rule: PositionRule, skip_first: int, analyzer: Analyzer, model: ModelDescription) -> None:
    """Raise an error for positions that the output head does not read."""
    if model.head is None or model.head.reads == "every":
        return
    head_rule = _rule_of(model)
    name = type(analyzer).__name__
    if rule not in ("all", head_rule):
        allowed = "'all'" if head_rule == "all" else f"{head_rule!r} or 'all'"
        raise LayersimError(
            f"`positions` is {Positions(rule).record()}; it must be {allowed} for {name}, as the head of {model.name} reads "
            f"{_head_reads(model.head.reads)} of a row."
        )
    if skip_first and model.head.reads == "rows":
        raise LayersimError(
            f"`skip_first` is {skip_first}; it must be 0 for {name}, as the head of {model.name} reads whole rows."
        )


def _rule_of(model: ModelDescription) -> str:
    """Position rule of a model's output head; "all" if the head reads several positions, or if there is no head."""
    if model.head is None or model.head.reads in ("every", "rows"):
        return "all"
    return model.head.reads


def _head_reads(rule: str) -> str:
    """Positions that an output head reads, in words."""
    return {"all": "every position", "rows": "all positions"}.get(rule, f"the {rule} position")
