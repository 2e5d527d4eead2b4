"""Results of untrained twins (same architecture, fresh weights) beside a trained model's, for `baseline="untrained"`."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from ..core.errors import LayersimError
from ..core.results import Report
from ..core.wording import brief
from ..data.data import Data
from ..sources.open import OpenedModel
from ..sources.untrained import refuse_changed, untrained

BaselineArgument: TypeAlias = Literal["untrained"] | None
# Seeds of the fresh weights.
SEEDS = 3


def with_untrained(found: Any, run: Callable[[int], Any]) -> Any:
    """Add results of untrained twins to a result or a report; `plot`, `to_frame` and `print` show them beside it.

    Args:
        found: result or report of the trained models.
        run: function of a seed that measures untrained twins on the same data, and returns a result or report like `found`.
    """
    twins = [run(seed) for seed in range(SEEDS)]
    if isinstance(found, Report):
        return Report({name: result.with_twins([twin[name] for twin in twins]) for name, result in found.items()})
    return found.with_twins(twins)


def twin_of(opened: OpenedModel, seed: int) -> OpenedModel:
    """An untrained twin: the same architecture with fresh weights, opened as the trained model is.

    Args:
        opened: the trained model.
        seed: random seed of the weights.
    """
    return replace(opened, model=untrained(opened.model, seed), verify=None)


def refuse_no_twin(models: Collection[OpenedModel], data: Data, blocking: bool = True, shard: Any = None) -> None:
    """Raise an error for a run in which no untrained model can be measured.

    Args:
        models: the trained models.
        data: the data of the run.
        blocking: the option `blocking` of the run.
        shard: the option `shard`; None for all data.

    Raises:
        LayersimError: names the argument.
    """
    if data.read_once:
        raise LayersimError(
            f'`data` is {brief(data.source)}, which can be read only once, and `baseline="untrained"` reads it for each model. '
            "Pass list(data)."
        )
    idle = {"remote": any(one.on_server for one in models), "blocking": not blocking, "shard": shard is not None}
    for name, wrong in idle.items():
        if wrong:
            raise LayersimError(
                f'`baseline="untrained"` cannot be combined with `{name}`: models with fresh weights run in this process, on '
                "all data."
            )
    for one in models:
        refuse_changed(one.model)


def seeds_of(seed: int, models: int) -> range:
    """Seeds for the weights of several models; different values of `seed` share none.

    Args:
        seed: seed of the twins.
        models: number of models.

    Examples:
        >>> [list(seeds_of(seed, 2)) for seed in range(3)]
        [[0, 1], [2, 3], [4, 5]]
    """
    return range(seed * models, (seed + 1) * models)
