"""`attach`: runs analyzers on the forward passes of a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..analyzers.analyzer import Analyzer
from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.batches import Batch
from ..data.input_names import ROW_AXES
from ..data.positions import Positions
from ..engine.run_arguments import AnalyzersArgument, choose_analyzers
from ..engine.site_plan import DEFAULT, AtArgument, SitePlan, chosen_rule, plan_sites
from ..remote.open_model import open_source
from ..sources.activation_checks import check_lens, check_stream_sums
from ..sources.find_anatomy import synthetic_row
from ..sources.hooked_module import HookedSource
from ..sources.nnsight import NNsightSource
from ..sources.open_local import OpenedModel, is_nnsight, only_on_servers
from .probe import LoopProbe, Probe, TraceProbe
from .probe_hooks import stack_side


def refuse_unattachable(source: HookedSource | NNsightSource, chosen: Mapping[str, Analyzer], plan: SitePlan) -> None:
    """Raise an error if `attach` cannot use the model or an analyzer.

    Args:
        source: the model.
        chosen: the analyzers, by name.
        plan: the sites that each analyzer reads.

    Raises:
        LayersimError: names the analyzer and its need.
    """
    if isinstance(source, NNsightSource):
        # A trace does not tell which of the two stacks its inputs belong to.
        if source.anatomy.kind == "encoder-decoder":
            raise LayersimError(
                f"`model` is {source.model.name}; `attach` needs an nnsight model that is not an encoder-decoder. Use "
                "lsim.analyze(model.edit(...), data, analyzers)."
            )
    elif stack_side(source) == "both":
        raise source.anatomy.in_both_stacks()
    for name, analyzer in chosen.items():
        analyzer.check(*plan.models()[name])
        needs = analyzer.needs
        one_pass = analyzer.first_kernel() is None
        head_reads_rows = source.model.head is not None and source.model.head.reads != "every"
        conditions = {
            f"the labels of the data (labels={analyzer.options().get('labels')!r})": needs.own_labels,
            f"whole rows, which the head of {source.model.name} classifies": needs.positions_of_head and head_reads_rows,
            "replays of blocks": needs.calls,
            "a first pass over the data": not one_pass,
            "the rows of the data": needs.single_texts,
        }
        unmet = [need for need, applies in conditions.items() if applies]
        if unmet:
            need = unmet[0]
            instead = "lsim.analyze(model, data, analyzers)"
            if not one_pass and needs.one_pass:
                instead = needs.one_pass
            raise LayersimError(f"{type(analyzer).__name__} cannot be attached: it needs {need}. Use {instead}.")


def settle(source: NNsightSource, analyzers: Mapping[str, Analyzer], plan: SitePlan) -> None:
    """Run the model on a few arbitrary tokens, or an arbitrary image or recording, to check the sites and the logit lens.

    The forward pass also finds the order and the widths of the sites.

    Args:
        source: the model.
        analyzers: the analyzers, by name.
        plan: the sites that each analyzer reads.

    Raises:
        LayersimError: an analyzer does not take the sites, the lens differs from the model's logits, or the model does not
            run on such a row.
    """
    model = source.model
    if model.main_input in ROW_AXES:
        row = synthetic_row(source.module, model)
    else:
        special = {*model.pads, *model.starts, *model.ends}
        ids = [token for token in range(model.vocabulary or 32) if token not in special][:4]
        tokens = torch.tensor([ids])
        every_position = torch.ones_like(tokens, dtype=torch.bool)
        row = Batch(tokens, every_position, every_position, 0)
    if not source.is_settled:
        try:
            source.settle(row)
        except LayersimError as error:
            if error.__cause__ is None:
                raise
            raise LayersimError(
                f"`model` is {model.name}, which fails on a row of {'token ids' if row.has_tokens else model.main_input}, with "
                f"which `attach` checks its sites before the first trace. Use lsim.analyze(model, data, analyzers). {error}"
            ) from error
        check_stream_sums(source, row)
    plan.check_sites(analyzers)
    if model.head is not None and any(analyzer.needs.unembeds for analyzer in analyzers.values()):
        check_lens(source, row)


@typed
def attach(
    model: Any,
    analyzers: AnalyzersArgument,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    positions: str | slice | Callable[[Tensor], Any] | None = None,
    intervals: bool = False,
    every: int = 1,
) -> Probe:
    """Run analyzers on every forward pass of a model inside a `with` statement.

    The forward passes may be those of your own loop, a training step or `generate`. Outputs, gradients and state of the model
    do not change, and every hook is removed at the end, also after an exception. Errors of the probe are raised by
    `probe.results()`, not in the loop. Positions that the model's attention mask excludes are not counted; in an
    encoder-decoder, the mask of the stack that is read counts. Changes by hooks at the same hook points are measured if these
    hooks were added before.

    An nnsight model is measured inside your own traces, after your interventions, in this process or on a server: call
    `probe.read()` in an empty invoke of each trace, see `Probe.read`. A model of a hub whose weights are not loaded is
    taken to be on a server; one of a folder is loaded. The lens and the sites are checked by a short row of tokens when the
    probe is made.

    Args:
        model: HookedTransformer, TransformerBridge, a Hugging Face or an nnsight model; or what `open_model` returns.
        analyzers: as in `analyze`, without those that need a first pass over the data.
        at: the sites to read, see `analyze`.
        per_head: see `analyze`.
        positions: the positions of each row of a forward pass that are measured, as in `analyze`. Steps of cached generation
            are counted only by "all" and "last". Columns of data and "assistant" are not available: set `probe.mask`.
        intervals: keep the sums of 16 to 32 jackknife blocks of forward passes, which give every result confidence intervals.
        every: n to measure the first of each n forward passes, counted from the start of the `with` block or from `reset()`;
            the others run without the probe's work. Steps of cached generation belong together and raise an error if n > 1.

    Returns:
        A `Probe`. It measures forward passes inside a `with` statement, or traces by `read()`; `results()` is the report.

    Raises:
        LayersimError: the model cannot be hooked, or an analyzer needs a first pass.

    Examples:
        >>> import tl_layersim as lsim, torch
        >>> model = lsim.demo_model()
        >>> with lsim.attach(model, lsim.Cosine(center="none")) as probe:
        ...     _ = model(torch.arange(40).view(2, 20))
        >>> probe.results()["cosine"].provenance.tokens
        40
    """
    if every < 1:
        raise LayersimError(f"`every` is {every}; it must be 1 or more.")
    chosen = choose_analyzers(analyzers)
    opened = OpenedModel.of(model)
    if is_nnsight(opened.model) and not opened.remote and only_on_servers(opened.model):
        # Traces of a model without weights run on the server; those of this process would load it.
        opened = replace(opened, remote=True)
    source = open_source(opened, either_stack=True, at=at)
    if not isinstance(source, HookedSource | NNsightSource):
        raise LayersimError(
            f"`model` is {brief(opened.model)}; it must be a torch module or an nnsight model. Use "
            "lsim.analyze(model, data, analyzers)."
        )
    plan = plan_sites([source], chosen, at, per_head)
    plan.start_reading()
    plan.check_sites(chosen)
    for name, described in plan.models().items():
        chosen[name] = chosen[name].settled(described[0], None)
    refuse_unattachable(source, chosen, plan)
    rule = Positions(chosen_rule(positions, [source.model], chosen))
    if rule.marked:
        raise LayersimError(
            f"`positions` is {brief(positions)}; `attach` accepts no mask column and no 'assistant', because it sees only "
            "forward passes. Set `probe.mask` before the forward pass."
        )
    if isinstance(source, HookedSource):
        return LoopProbe(source, chosen, plan, rule, intervals, every)
    if every > 1:
        raise LayersimError(
            f"`every` is {every}, but an nnsight model is measured in the traces that call probe.read(). Leave out `every`, "
            "and call it in the traces to be measured."
        )
    settle(source, chosen, plan)
    return TraceProbe(source, chosen, plan, rule, intervals)
