"""`compare_grid`: compare all pairs of many models, each of which runs once a batch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, Unpack, overload

from ..analyzers.base import Analyzer
from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.wording import counted
from ..data.batches import Batches
from ..data.data import Data
from ..models.model_info import Model
from ..models.model_inputs import position_counter
from ..models.open import OpenedModel, records_of
from ..remote.open import open_source
from .all_pairs import AllPairs
from .api import SeveralAnalyzers, SharedKeywords
from .baselines import BaselineArgument, refuse_no_twin, seeds_of, twin_of, with_untrained
from .engine import Analysis
from .model_grid import ModelGrid
from .model_groups import group_labels
from .position_rules import chosen_rule
from .run_analysis import run_analysis
from .site_plan import DEFAULT, AtArgument, plan_sites
from .validation import (
    choose_analyzers,
    is_several,
    refuse_idle_options,
    refuse_no_comparison,
    shared_tokens,
    with_tokenizer,
)


class _Grid(SharedKeywords, total=False):
    groups: Any
    distance: Callable[[Any], Any] | None


@overload
def compare_grid(models: Mapping[str, Any], data: Any, analyzer: Analyzer | str, **options: Unpack[_Grid]) -> ModelGrid: ...
@overload
def compare_grid(models: Mapping[str, Any], data: Any, analyzer: SeveralAnalyzers, **options: Unpack[_Grid]) -> Report: ...
@typed
def compare_grid(
    models: Mapping[str, Any],
    data: Any,
    analyzer: Any,
    *,
    groups: Any = None,
    distance: Callable[[Any], Any] | None = None,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    intervals: bool = False,
    baseline: BaselineArgument = None,
    checkpoint: str | os.PathLike[str] | None = None,
) -> ModelGrid | Report:
    r"""Compare all pairs of some models on the same tokens: do they fall into groups?

    Each model runs once a batch, however many it is compared with, and every pair has the result that `compare` gives. For CKA
    of minibatches, the centred Gram matrices of each model are computed once a batch and joined for all pairs; beside the
    models' own memory a batch needs 8 n bytes for each token and site of each model, n = `minibatch`. The exact estimator, and
    measures without such statistics, hold the activations of all models on one batch. Memory does not grow with the data.

    The distance of two models is that of the result, for CKA equation 2 of Brown et al.,

    $$\sqrt{\sum_{l=1}^{L} \arccos(\mathrm{CKA}(H_l, H'_l))^2},$$

    over models of equal depth. Models of different depths, and analyzers without a distance, need `distance`.

    Args:
        models: a mapping from names to models, kinds as in `analyze`; statistics return from servers as in `compare`.
        data: as in `analyze`, tokenised once, by the tokenizer of the first model that has one. One rule of positions holds for
            all models.
        analyzer: an analyzer that compares two models, such as `CKA()`, or its name; or several: a list, or a mapping from
            names as in `analyze`.
        groups: a mapping from names of models to groups, or a list of groups in the order of the models, for
            `compare_groups` and the figures of the result.
        distance: the number of a pair, from the result that `compare` gives; 0 for equal models.
        at: the sites to read in all models, see `analyze`.
        per_head: see `analyze`.
        intervals: see `analyze`.
        baseline: see `compare`; distances of untrained twins of all models are those of the results' `untrained`.
        checkpoint: see `analyze`.

    Returns:
        A `ModelGrid`: distances `row_model column_model`, `grid["a", "b"]` for the result of a pair, heat map; for
        `compare_groups` and `dendrogram`. For a list or a mapping of analyzers a `Report` with the grid of each.

    Raises:
        LayersimError: there are fewer than two models, they have different tokenizers or depths, or the analyzer does not
            compare models.

    Source:
        Brown et al. 2023 (arXiv 2310.14993), section 4, appendix C.2, equation 2, figures 2 and 8.

    Examples:
        >>> import tl_layersim as lsim
        >>> models = {name: lsim.demo_model() for name in "abc"}
        >>> grid = lsim.compare_grid(models, lsim.demo_text()[:4], lsim.CKA(minibatch=64))
        >>> grid.values.shape, bool(grid.values.max() < 1e-3), grid["a", "c"].values.shape
        (torch.Size([3, 3]), True, torch.Size([9, 9]))
    """
    data = Data.of(data)
    given = locals() | {"baseline": None}
    names = tuple(models)
    if len(names) < 2:
        raise LayersimError(f"`models` holds {counted(len(names), 'model')}; it must hold two or more, each with its own name.")
    opened = {name: OpenedModel.of(models[name]) for name in names}
    if baseline is not None:
        refuse_no_twin(opened.values(), data)

        def twins(seed: int) -> Any:
            own = {name: twin_of(opened[name], n) for name, n in zip(names, seeds_of(seed, len(names)), strict=True)}
            return compare_grid(**given | {"models": own, "intervals": False, "checkpoint": None})

        joined: ModelGrid | Report = with_untrained(compare_grid(**given), twins)
        return joined
    labels = () if groups is None else group_labels(groups, names)
    chosen = choose_analyzers(analyzer)
    refuse_no_comparison(chosen)
    many: dict[str, Analyzer] = {name: AllPairs(measure, names, labels, distance) for name, measure in chosen.items()}
    for one in opened.values():
        refuse_idle_options(one, True, checkpoint)
    sources = [open_source(one, either_stack=True) for one in opened.values()]
    plan = plan_sites(sources, chosen, at, per_head)
    described = [source.model for source in sources]
    rule = chosen_rule(data.positions, described, chosen, data.skip_first)
    shared = with_tokenizer(_tokens_of_all(described, data.tokenizer is not None), data.tokenizer)
    batches = Batches(data.counting(rule), shared, count_positions=position_counter(sources))
    report = run_analysis(Analysis(sources, batches, many, plan, records_of(list(opened.values())), intervals), checkpoint)
    assert isinstance(report, Report)
    if is_several(analyzer):
        return report
    grid: ModelGrid = next(iter(report.values()))
    return grid


def _tokens_of_all(models: list[Model], given: bool) -> Model:
    """A description of the inputs that all models accept; the first model with a tokenizer reads the data."""
    with_own = sorted(models, key=lambda model: model.tokenizer is None)
    return reduce(lambda a, b: shared_tokens(a, b, given=given), with_own)
