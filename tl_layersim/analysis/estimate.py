"""`estimate`: the cost of a run before it starts, for a model in this process or from a configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..core.argument_checks import typed
from ..core.bounds import PositiveInt, RowCount
from ..core.errors import LayersimError
from ..core.wording import with_article
from ..data.batches import Batch, Batches
from ..data.data import Data
from ..data.inputs import ROW_AXES
from ..models.model_inputs import position_counter, shape_of_row
from ..models.open import OpenedModel, is_nnsight
from ..models.source import Source
from ..models.without_weights import WeightlessSource, has_no_weights, model_without_weights
from ..remote.open import open_source
from .cost_estimate import CostEstimate, assemble
from .site_plan import DEFAULT, AtArgument, plan_sites
from .validation import AnalyzersArgument, choose_analyzers
from .workload import meter


@typed
def estimate(
    model_or_config: Any,
    analyzers: AnalyzersArgument,
    *,
    tokens: PositiveInt = 1_000_000,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    batch_size: RowCount = 16,
    seq_len: PositiveInt = 256,
    intervals: bool = False,
) -> CostEstimate:
    """Estimate FLOPs, memory and traffic of `analyze` on a model, before the run; and its time, if the model is loaded.

    One batch of random tokens, images or recordings runs through the forward pass and the kernels of the analyzers. For a model
    in this process the batch is also timed, for ten seconds. From a configuration alone it runs on the meta device, where
    tensors have shapes and no values, so that models of any size cost seconds and no memory; results of comparisons are then
    assumed to be typical, and time is not known.

    Args:
        model_or_config: a model as in `analyze`; or a configuration of transformers, its fields as a dict with `model_type`,
            or the folder or hub name of a model, of which only the configuration is read. For
            `open_model(model_or_config, remote=True)`, requests and traffic are counted too. The server is not asked: without
            `tokens_per_request`, a request is taken to hold 8,192 positions; a run chooses their number by time.
        analyzers: as in `analyze`.
        tokens: number of counted tokens of the run.
        at: the sites to read, see `analyze`.
        per_head: see `analyze`.
        batch_size: rows in a forward pass.
        seq_len: tokens in a row, all of which are counted. Images have as many as their size gives.
        intervals: whether the run keeps sums of blocks for confidence intervals.

    Returns:
        The estimate, whose `repr` is a table.

    Raises:
        LayersimError: an analyzer refuses the model, as in `analyze`; or the model cannot run on the meta device.

    Examples:
        >>> import tl_layersim as lsim
        >>> cost = lsim.estimate(lsim.demo_model(), [lsim.Cosine(center="none")], tokens=1_000_000, batch_size=2, seq_len=32)
        >>> cost.sites, cost.seconds > 0
        (9, True)
    """
    chosen, opened = choose_analyzers(analyzers), OpenedModel.of(model_or_config)
    source, module = _opened(opened, at)
    plan = plan_sites([source], chosen, at, per_head)
    chosen = plan.settled(chosen, source, None)
    for name, models in plan.models_by_analyzer([source.model], [source]).items():
        chosen[name].check_sites(*models)
        chosen[name].check(*models)
    labelled = any(analyzer.label_source == "data" for analyzer in chosen.values())
    batch = _random_batch(source, module, batch_size, seq_len, labelled)
    for analyzer in chosen.values():
        analyzer.check_batch(batch, source.model)
    weightless, remote = isinstance(source, WeightlessSource), opened.on_server
    try:
        workload = meter(source, module, batch, chosen, plan, timed=not weightless and not remote, remote=remote)
    except LayersimError:
        raise
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if not weightless:
            raise
        raise LayersimError(
            f"{source.model.name} with {', '.join(chosen)} cannot run without weights, because the operations depend on values "
            f"({type(error).__name__}: {str(error)[:160]}). Pass a model with weights, such as a smaller one of the same "
            "architecture."
        ) from error
    return assemble(workload, tokens, remote, intervals, opened.tokens_per_request)


def _opened(opened: OpenedModel, at: AtArgument) -> tuple[Source, torch.nn.Module]:
    """The source of a model or of a configuration, and the module that it runs."""
    model = opened.model
    if isinstance(model, Source):
        raise LayersimError(
            f"`model_or_config` is {with_article(type(model).__name__)}; it must be the model that this source runs."
        )
    module = model._module if is_nnsight(model) else model
    if not isinstance(module, torch.nn.Module):
        module = model_without_weights(dict(module) if isinstance(module, Mapping) else module)
    if has_no_weights(module):
        return WeightlessSource(module, opened.layers, opened.unembed), module
    return open_source(OpenedModel(module, opened.layers, opened.unembed), either_stack=True, at=at), module


def _random_batch(source: Source, module: torch.nn.Module, rows: int, length: int, labelled: bool) -> Batch:
    """A batch of random tokens, images or recordings.

    Raises:
        LayersimError: the model takes other inputs, inputs of unknown size, or fewer tokens.
    """
    described, random = source.model, torch.Generator().manual_seed(0)
    data: dict[str, Any] = {"label": torch.arange(rows) % 2} if labelled else {}
    if described.main_input in ROW_AXES:
        shape = shape_of_row(module, described, described.main_input)
        data[described.main_input] = torch.randn(rows, *shape, generator=random)
    elif described.vocabulary is None:
        raise LayersimError(f"`model_or_config` is {described.name}, which reads neither tokens nor images.")
    elif described.context is not None and length > described.context:
        raise LayersimError(f"`seq_len` is {length}; the context of {described.name} has {described.context} tokens.")
    else:
        data["input_ids"] = torch.randint(described.vocabulary, (rows, length), generator=random)
        data["attention_mask"] = torch.ones(rows, length, dtype=torch.int64)
    return next(iter(Batches(Data(data, batch_size=rows), described, labelled, position_counter([source]))))
