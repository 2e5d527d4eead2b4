"""`attach`: run analyzers on the forward passes of a user's own loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..activations.row_pools import ROWS, SAMPLES_OF_ROW, PoolKernel
from ..activations.view import View, reduce
from ..analyzers.analyzer import Analyzer
from ..architectures.blocks import in_both_stacks
from ..core.arguments import typed
from ..core.errors import LOG, LayersimError, warn
from ..core.sums import DataBlock, Sums, SumTree
from ..core.wording import brief, first_line
from ..data.positions import Positions
from ..engine.chosen_analyzers import AnalyzersArgument, choose_analyzers
from ..engine.plan import DEFAULT, AtArgument, SitePlan, attached_rule, plan_sites
from ..engine.run import TYPICAL_LEAVES, check_memory, sums_of, sums_so_far
from ..remote.open import open_source
from ..sources.checks import refuse_not_finite, refuse_other_logits
from ..sources.hooked import HookedSource
from ..sources.hooks import kernels_alone
from ..sources.model import Model
from ..sources.nnsight import NNsightSource
from ..sources.open import OpenedModel, is_nnsight
from .positions import ForwardPassPositions, continues
from .probe import Probe
from .recorder import Call, Callbacks, Choice, Recorder, stack_side
from .trace_probe import TraceProbe, refuse_untraceable, settle


def refuse_unattachable(source: HookedSource | NNsightSource, chosen: Mapping[str, Analyzer], plan: SitePlan) -> None:
    """Raise an error if a model or an analyzer needs more than the forward passes of the user's loop.

    Args:
        source: the model.
        chosen: the analyzers, by name.
        plan: the sites that each analyzer reads.

    Raises:
        LayersimError: names the analyzer and its need.
    """
    if isinstance(source, NNsightSource):
        refuse_untraceable(source)
    elif stack_side(source) == "both":
        raise in_both_stacks(source.module)
    for name, analyzer in chosen.items():
        analyzer.check(*plan.models(name, [source.model], [source]))
        instead = "lsim.analyze(model, data, analyzers)"
        if analyzer.label_source:
            reason = f"labels={analyzer.options().get('labels')!r} come from the data, and a loop has only tokens"
        elif analyzer.reads_head and source.model.head is not None and source.model.head.reads != "every":
            reason = f"the head of {source.model.name} classifies whole rows, and it is not known where a row ends"
        elif analyzer.needs_rows:
            reason = "it holds out rows of the data, and it is not known which rows run"
        elif analyzer.needs_calls:
            reason = "it replays blocks, which would run without your interventions and add forward passes to your loop"
        elif analyzer.first_kernel() is not None:
            reason, instead = "it needs a first pass over the data", analyzer.one_pass or instead
        else:
            continue
        raise LayersimError(f"{type(analyzer).__name__} cannot be attached: {reason}. Use {instead}.")


BUFFERED_TOKENS = 2048


class LoopProbe(Probe):
    """Adds up sums of the forward passes of a model inside `with lsim.attach(...) as probe`."""

    def __init__(
        self, source: HookedSource, analyzers: dict[str, Analyzer], plan: SitePlan, positions: Positions, intervals: bool
    ) -> None:
        self._source = source
        self._positions = ForwardPassPositions(positions, source, any(a.whole_rows for a in analyzers.values()))
        self._hooks: AbstractContextManager[None] | None = None
        kernels = plan.kernels(analyzers, {})
        self._pooled = {name: kernel for name, kernel in kernels.items() if isinstance(kernel, PoolKernel)}
        # Kernels that use the head run during the forward pass: in training, its weights change afterwards.
        needing_head = [name for name in kernels if name in analyzers and analyzers[name].needs_unembed]
        self._immediate = {name: kernels[name] for name in needing_head}
        self._deferred = {name: kernel for name, kernel in kernels.items() if name not in (self._immediate | self._pooled)}
        self._checked = not self._immediate
        self._dtype, self._dtypes = _dtype_of(source), [source.model.dtype]
        self._error: LayersimError | None = None
        super().__init__(analyzers, plan, positions, intervals)

    def _begin(self) -> None:
        super()._begin()
        # By kernel, the views that wait until they are enough for one call.
        self._waiting: dict[str, list[View]] = {name: [] for name in self._deferred | self._pooled}
        # Index of the first row of the last forward pass, and its number of rows.
        self._last = (0, 0)
        # Number of rows of all forward passes.
        self._rows = 0
        self._dtypes = self._dtypes[-1:]
        self._positions.notes.begin()

    def __enter__(self) -> LoopProbe:
        if self._hooks is not None:
            raise LayersimError("The probe was already attached; each `lsim.attach(...)` can be entered once.")
        compare = None if self._checked else self._compare
        recorder = Recorder(self._source, Callbacks(self._add, self._choose, compare, self._fail))
        self._hooks = recorder.attached()
        self._hooks.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._hooks is not None
        self._hooks.__exit__(kind, error, trace)

    def _sums(self) -> SumTree:
        if self._error:
            raise self._error
        if self._forwards == 0:
            raise LayersimError(
                "The probe measured nothing: no forward pass ran inside its `with` block. Call model(tokens), not "
                'model.forward(tokens); a compiled model also needs torch.compiler.set_stance("force_eager").'
            )
        if self._tokens == 0:
            raise LayersimError(
                "The probe measured nothing: `probe.mask`, the attention mask or `positions=` excludes every position of the "
                f"forward passes so far ({self._forwards})."
            )
        if not self._checked:
            raise LayersimError(
                f"The lens cannot be checked: the head never ran in {self._forwards} forward passes of the blocks alone. Run "
                "the whole model once inside the `with` block."
            )
        # Views that wait are reduced for this report and wait on: calling results() must not change the minibatches.
        pending = {name: self._reduced(name, views) for name, views in self._waiting.items() if views}
        if self._error:
            raise self._error
        self._positions.notes.once(self._positions.notes.runs.warning(self._source.model))
        # The first forward pass may have shown that the modules form no residual stream, or sites of different widths.
        self._plan.check_sites(self._analyzers, [self._source])
        return self._tree.add(self._block(0, pending)) if pending else self._tree

    def _described(self) -> tuple[Mapping[str, list[Model]], dict[str, Any]]:
        model = replace(self._source.model.as_it_is_now(), dtype=", then ".join(self._dtypes))
        return self._plan.models_by_analyzer([model], [self._source]), {"masked_by_pad_id": self._positions.notes.masked}

    def _fail(self, error: Exception) -> None:
        """Keep an error for `results()`, so that the user's loop continues."""
        # The frames of a traceback would keep activations in memory.
        LOG.debug("The probe stopped measuring.", exc_info=error)
        link: BaseException | None = error
        while link is not None:
            link = link.with_traceback(None)
            link = link.__cause__ or link.__context__
        if not isinstance(error, LayersimError):
            refusal = LayersimError(
                "A forward pass could not be measured; the loop continued without the probe. "
                f"{type(error).__name__}: {first_line(error)}"
            )
            refusal.__cause__, error = error, refusal
        if self._error is not None:
            return
        self._error = error
        # A filter of the user may make errors of warnings.
        with suppress(Warning):
            warn(f"The probe stopped measuring, and probe.results() raises the reason: {error}")

    def _compare(self, gap: Tensor, computed: torch.dtype) -> None:
        """Compare the lens with the model's own logits on the first forward pass that reaches the head."""
        self._checked = True
        refuse_other_logits(gap, self._source.model, computed)

    def _choose(self, call: Call) -> Choice:
        return self._positions.choose(call, self._mask)

    @kernels_alone()
    def _add(self, view: View, call: Call) -> None:
        self._forwards += 1
        self._source.note_widths(view)
        dtype = _dtype_of(self._source)
        if dtype != self._dtype:
            self._dtypes, self._dtype = [*self._dtypes, dtype], dtype
        count = view.tokens.numel()
        if count == 0:
            return
        self._tokens += count
        self._digest.update(view.tokens.cpu().numpy().tobytes())
        own = {name: self._reduced(name, [view]) for name in self._immediate}
        first, continued = self._first_row(call)
        self._sequences += 0 if continued else torch.unique_consecutive(view.sequence).numel()
        for name, views in self._waiting.items():
            views.append(replace(view, sequence=view.sequence + first) if name in self._pooled else view)
            if self._is_enough(name, views, continued):
                own[name] = self._reduced(name, views)
                self._waiting[name] = []
        self._tree = self._tree.add(self._block(count, own))

    def _first_row(self, call: Call) -> tuple[int, bool]:
        """Index of a forward pass's first row among all rows, and whether its rows continue the pass before.

        Steps of cached generation go on with the rows of the prompt: their tokens are of one text.
        """
        rows = call.shape[0]
        if continues(call) and self._last[1] == rows:
            return self._last[0], True
        self._last = (self._rows, rows)
        self._rows += rows
        return self._last[0], False

    def _is_enough(self, name: str, views: list[View], continued: bool) -> bool:
        """Whether there are enough views to call a kernel: many tokens, or a pool of rows.

        Cached generation gives one position at a time, and few calls are faster than many.
        """
        kernel = self._pooled.get(name)
        if kernel is None:
            return sum(view.tokens.numel() for view in views) >= BUFFERED_TOKENS
        counts = torch.unique(torch.cat([view.sequence for view in views]), return_counts=True)[1]
        rows, taken = len(counts), counts.clamp(max=SAMPLES_OF_ROW)
        if continued and bool((counts >= SAMPLES_OF_ROW).all()):
            # Further steps would add to the memory alone.
            return True
        return rows >= ROWS and (rows if kernel.whole_rows else int(taken.sum())) >= kernel.size

    def _block(self, tokens: int, sums: Mapping[str, Sums]) -> DataBlock:
        """Sums of one forward pass."""
        names = (*self._immediate, *self._waiting)
        return DataBlock(1, tokens, {name: sums.get(name, Sums()) for name in names})

    def _reduced(self, name: str, views: list[View]) -> Sums:
        """Output of a kernel for some views; empty if the kernel fails."""
        kernel = (self._immediate | self._deferred | self._pooled)[name]
        try:
            joined = _by_row(views) if name in self._pooled else _joined(views)
            not_finite, out = reduce({name: kernel}, joined)
            refuse_not_finite(not_finite, [self._source.sites], f"forward pass {self._forwards} or shortly before")
            own = sums_of((name,), out, sums_so_far(self._tree))
            if self._intervals:
                check_memory(own, TYPICAL_LEAVES, True)
            return own[name]
        except Exception as error:
            self._fail(error)
            return Sums()


def _dtype_of(source: HookedSource) -> str:
    """Current dtype of the model's first weights."""
    first = next(source.module.parameters(), None)
    return str(first.dtype) if first is not None else "unknown"


def _joined(views: list[View]) -> View:
    """Join several views into one; rows of different views get different sequence numbers."""
    if len(views) == 1:
        return views[0]
    rows, offset = [], 0
    for view in views:
        rows.append(view.sequence + offset)
        offset += int(view.sequence.max()) + 1
    return _with_sequence(views, torch.cat(rows))


def _by_row(views: list[View]) -> View:
    """Join several views whose sequence numbers count all rows, so that the samples of a row follow each other."""
    rows = torch.cat([view.sequence for view in views])
    number = torch.unique(rows, return_inverse=True)[1]
    joined = _with_sequence(views, number)
    if bool((number[1:] >= number[:-1]).all()):
        return joined
    order = number.argsort(stable=True)
    return replace(
        joined,
        activations=joined.activations[:, order.to(joined.activations.device)],
        tokens=joined.tokens[order.to(joined.tokens.device)],
        sequence=number[order],
        position=joined.position[order.to(joined.position.device)],
        next_token=None,
    )


def _with_sequence(views: list[View], sequence: Tensor) -> View:
    return View(
        activations=torch.cat([v.activations for v in views], dim=1),
        tokens=torch.cat([v.tokens for v in views]),
        sequence=sequence,
        position=torch.cat([v.position for v in views]),
        next_token=torch.cat([v.next_token for v in views if v.next_token is not None]),
        sites=views[0].sites,
        widths=views[0].widths,
    )


@typed
def attach(
    model: Any,
    analyzers: AnalyzersArgument,
    *,
    at: AtArgument = DEFAULT,
    per_head: bool = False,
    positions: str | slice | Callable[[Tensor], Any] | None = None,
    intervals: bool = False,
) -> Probe:
    """Run analyzers on every forward pass of a model inside a `with` block: in your own loop, a training step or `generate`.

    Outputs, gradients and state of the model do not change, and every hook is removed at the end, also after an exception.
    Errors of the probe are raised by `probe.results()`, not in the loop. Positions that the model's attention mask excludes are
    not counted; in an encoder-decoder it is the mask of the stack that is read. Changes by hooks at the same hook points are
    measured if these hooks were added before.

    An nnsight model is measured inside your own traces, after your interventions, in this process or on a server: call
    `probe.read()` in an empty invoke of each trace, see `Probe.read`. The lens and the sites are checked by a short row of
    tokens when the probe is made.

    Args:
        model: HookedTransformer, TransformerBridge, a Hugging Face or an nnsight model; or what `open_model` returns.
        analyzers: as in `analyze`, without those that need a first pass over the data.
        at: the sites to read, see `analyze`.
        per_head: see `analyze`.
        positions: the positions of each row of a forward pass that are measured, as in `analyze`. Steps of cached generation
            are counted only by "all" and "last". Columns of data and "assistant" are not available: set `probe.mask`.
        intervals: keep the sums of 16 to 32 blocks of forward passes, which give every result confidence intervals, see
            `analyze`.

    Returns:
        A `Probe`, which measures the model inside a `with` block, or traces by `read()`, and whose `results()` returns the
        report.

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
    chosen, opened = choose_analyzers(analyzers), OpenedModel.of(model)
    if is_nnsight(opened.model) and not opened.remote and not getattr(opened.model, "dispatched", True):
        # Traces of a model without weights run on the server; those of this process would load it.
        opened = replace(opened, remote=True)
    source = open_source(opened, either_stack=True, at=at)
    if not isinstance(source, HookedSource | NNsightSource):
        raise LayersimError(
            f"`model` is {brief(opened.model)}, whose modules are not known, so it cannot be attached. Use "
            "lsim.analyze(model, data, analyzers)."
        )
    plan = plan_sites([source], chosen, at, per_head)
    plan.check_sites(chosen, [source])
    refuse_unattachable(source, chosen, plan)
    rule = attached_rule(positions, source.model, chosen)
    if isinstance(source, HookedSource):
        return LoopProbe(source, chosen, plan, rule, intervals)
    settle(source, chosen, plan)
    return TraceProbe(source, chosen, plan, rule, intervals)
