"""`Probe`: measures the forward passes of a user's own loop, or nnsight traces."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from ..activations.row_pools import SAMPLES_OF_ROW, TEXTS_OF_POOL, PoolKernel
from ..activations.view import View, reduce
from ..analyzers.analyzer import Analyzer
from ..core.errors import LOG, LayersimError, recorded_warnings, warn
from ..core.results import Report
from ..core.sums import DataBlock, Sums, SumTree, Tally
from ..core.wording import first_line
from ..data.batches import new_digest
from ..data.padding_masks import as_mask
from ..data.positions import Positions
from ..engine.report_assembly import make_report
from ..engine.run import TYPICAL_LEAVES, bytes_of, check_memory, sums_of
from ..engine.run_arguments import refuse_server
from ..engine.site_plan import SitePlan
from ..remote.probe_in_trace import PROBES, PassReader, ShippedProbe
from ..remote.traces import FormOfSums, partial_sums
from ..sources.activation_checks import refuse_not_finite
from ..sources.hooked_module import HookedSource
from ..sources.hooks import kernels_alone
from ..sources.model_description import ModelDescription
from ..sources.nnsight import NNsightSource, shippable
from ..sources.source import CanReadSites, OnServer
from .probe_hooks import Call, ForwardPassPositions, Recorder, continues

# Counted positions for one call of a kernel: cached generation gives one at a time, and few calls are faster than many.
BUFFERED_TOKENS = 2048


class Probe:
    """Measures the forward passes of a user's own loop, or nnsight traces.

    `results()` is the report so far, at any time; `reset()` begins anew, such as for each epoch. A loop is measured inside
    `with lsim.attach(...) as probe`, in the thread of this statement. Errors of the probe are raised by `results()`, never in
    the loop. In an nnsight trace, `read()` measures the forward pass and raises its own errors.
    """

    _source: CanReadSites

    def __init__(self, analyzers: dict[str, Analyzer], plan: SitePlan, positions: Positions, intervals: bool) -> None:
        self._analyzers = analyzers
        self._plan = plan
        self._rule = positions
        self._intervals = intervals
        self._mask: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        """Reset all sums and counts."""
        # Forward passes stand in the place of rows.
        self._tree = SumTree(1 if self._intervals else None)
        self._forwards = 0
        self._sequences = 0
        self._tokens = 0
        self._digest = new_digest()

    def __enter__(self) -> Probe:
        raise LayersimError(
            "The probe of an nnsight model cannot be entered. Call probe.read() in an empty invoke of each trace: with "
            "tracer.invoke(): probe.read()."
        )

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        raise NotImplementedError

    def read(self) -> Probe:
        """Measure the forward pass of an nnsight trace. Call it in an empty invoke, after those with interventions.

        ```python
        with model.trace() as tracer:
            with tracer.invoke(tokens):
                model.model.layers[1].mlp.output[:] = 0
            with tracer.invoke():
                probe.read()
        ```

        The probe reads all rows of the trace, with the mask and the padding of nnsight. If the trace runs on a server, only
        sums return.

        Returns:
            The probe.

        Raises:
            LayersimError: the positions of the rows are not known, or activations are not finite.
            OutOfOrderError: nnsight's error if the trace has run past the sites. Its message names them and what to do.
        """
        raise LayersimError(
            "probe.read() is for nnsight models only. Leave it out: the probe of this model measures every forward pass "
            "inside its `with` block."
        )

    @property
    def mask(self) -> Tensor | None:
        """Mask of the positions to count in the next forward passes (bool `batch pos`).

        None counts the positions of the model's attention mask, or all; `positions=` selects among them. The mask holds until
        it is replaced. Single-position steps of cached generation always count.
        """
        return self._mask

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self._mask = None if mask is None else as_mask(mask)

    def results(self) -> Report:
        """The report of all forward passes so far.

        Raises:
            LayersimError: no forward pass ran, or too few for an analyzer; activations were not finite; or a forward pass could
                not be measured.
        """
        with kernels_alone():
            return self._report(self._sums(), tuple(self._analyzers))

    def headline(self) -> dict[str, float]:
        """Headline numbers of all forward passes so far, for a logger.

        Analyzers that need more data than there is so far are left out; the dict may be empty. The call raises no error and
        repeats no warning, so that it cannot end a loop; `results()` raises errors.
        """
        numbers: dict[str, float] = {}
        with kernels_alone(), suppress(Exception):
            sums = self._sums()
            for name in self._analyzers:
                with suppress(Exception), recorded_warnings(issued=False):
                    numbers |= self._report(sums, (name,)).headline()
        return numbers

    def reset(self) -> None:
        """Forget all forward passes so far. `results()` then covers later forward passes only.

        The probe stays attached, and `probe.mask` stays as it is. `results()` still raises an error from before the reset.
        """
        with kernels_alone():
            self._begin()

    def _sums(self) -> SumTree:
        """The sums of all forward passes so far.

        Raises:
            LayersimError: there are none, or a forward pass could not be measured.
        """
        raise NotImplementedError

    def _described(self) -> tuple[Mapping[str, list[ModelDescription]], dict[str, Any]]:
        """Two dicts for the provenance: the models of each analyzer, and further fields."""
        raise NotImplementedError

    def _checked(
        self, names: tuple[str, ...], not_finite: Sequence[Tensor], out: Mapping[str, Any], where: str
    ) -> dict[str, Sums]:
        """Convert outputs of kernels to sums; raise an error if activations are not finite.

        Args:
            names: names of the kernels.
            not_finite: the number of activations that are not finite, `site`.
            out: outputs by kernel.
            where: description of the forward pass, for the message.
        """
        refuse_not_finite(not_finite, [self._source.sites], where)
        sums = sums_of(names, out)
        # The size of sums is known after the first forward pass that has some; later passes need not be checked.
        has_earlier_sums = any(node.sums[name] for node in self._tree.nodes for name in names)
        if self._intervals and not has_earlier_sums:
            check_memory(bytes_of(sums), TYPICAL_LEAVES, True)
        return sums

    def _report(self, tree: SumTree, names: tuple[str, ...]) -> Report:
        analyzers = {name: self._analyzers[name] for name in names}
        tally = Tally(self._forwards, self._sequences, self._tokens, self._digest.hexdigest(), tree=tree)
        models, further_fields = self._described()
        provenance = {"attached": True, "positions": self._rule.record()} | self._plan.record() | further_fields
        if self._intervals:
            provenance["intervals"] = True
        return make_report(analyzers, models, tally, {}, provenance)


class LoopProbe(Probe):
    """Measures the forward passes inside `with lsim.attach(...)`."""

    _source: HookedSource

    def __init__(
        self,
        source: HookedSource,
        analyzers: dict[str, Analyzer],
        plan: SitePlan,
        positions: Positions,
        intervals: bool,
        every: int,
    ) -> None:
        self._source = source
        self._every = every
        self._recorder: Recorder | None = None
        whole_rows = any(analyzer.needs.whole_rows for analyzer in analyzers.values())
        self._positions = ForwardPassPositions(positions, source, whole_rows)
        self._kernels = plan.kernels(analyzers, {})
        # Kernels that use the head run during the forward pass: in training, its weights change afterwards.
        self._immediate = [name for name in self._kernels if name in analyzers and analyzers[name].needs.unembeds]
        self._dtype = _dtype_of(source)
        self._dtypes = [source.model.dtype]
        self._error: LayersimError | None = None
        super().__init__(analyzers, plan, positions, intervals)
        self._hooks = ExitStack()

    def _begin(self) -> None:
        super()._begin()
        # By kernel, the views that wait until they are enough for one call.
        self._waiting: dict[str, list[View]] = {name: [] for name in self._kernels if name not in self._immediate}
        # Index of the first row of the last forward pass, and its number of rows.
        self._last = (0, 0)
        # Number of rows of all forward passes.
        self._rows = 0
        self._dtypes = self._dtypes[-1:]
        self._positions.notes.begin()
        if self._recorder is not None:
            self._recorder.passes_begun = 0

    def __enter__(self) -> LoopProbe:
        if self._recorder is not None:
            raise LayersimError("The probe was already attached; each `lsim.attach(...)` can be entered once.")
        compare = bool(self._immediate)
        self._recorder = Recorder(self._source, self._rule.pooled, self._choose, self._add, self._fail, compare, self._every)
        self._hooks.enter_context(self._recorder.attached())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._hooks.close()

    def _sums(self) -> SumTree:
        if self._error:
            raise self._error
        if self._forwards == 0 and self._recorder is not None and self._recorder.last_read is not None:
            last = self._recorder.names[self._recorder.last_read]
            raise LayersimError(
                f"The probe measured nothing: forward passes inside its `with` block ended after {last}, before the last of "
                f"{len(self._recorder.names)} sites. Run the model to its end, without stop_at_layer, or attach to the sites "
                "that are reached (at=)."
            )
        if self._forwards == 0:
            raise LayersimError(
                "The probe measured nothing: no forward pass ran inside its `with` block. Call model(tokens), not "
                'model.forward(tokens); a compiled model also needs torch.compiler.set_stance("force_eager").'
            )
        if self._tokens == 0:
            raise LayersimError(
                f"The probe measured nothing: a mask or `positions` excludes every position of {self._forwards} forward passes."
            )
        if self._recorder is not None and self._recorder.compare:
            raise LayersimError(
                f"The logit lens cannot be checked: {self._forwards} forward passes ran the blocks without the output head. "
                "Run the whole model once inside the `with` block."
            )
        # Views that wait are reduced for this report and wait on: calling results() must not change the minibatches.
        pending = {name: self._reduced(name, views) for name, views in self._waiting.items() if views}
        if self._error:
            raise self._error
        self._positions.notes.once(self._positions.notes.runs.warning(self._source.model))
        # The first forward pass may have shown that the modules form no residual stream, or sites of different widths.
        self._plan.check_sites(self._analyzers)
        return self._tree.add(self._leaf(0, pending)) if pending else self._tree

    def _described(self) -> tuple[Mapping[str, list[ModelDescription]], dict[str, Any]]:
        model = replace(self._source.model.as_it_is_now(), dtype=", then ".join(self._dtypes))
        fields: dict[str, Any] = {"masked_by_pad_id": self._positions.notes.masked}
        if self._every > 1:
            fields["every"] = self._every
        return self._plan.models(model), fields

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
            refusal.__cause__ = error
            error = refusal
        if self._error is not None:
            return
        self._error = error
        # A filter of the user may make errors of warnings.
        with suppress(Warning):
            warn(f"The probe stopped measuring, and probe.results() will raise this error: {error}")

    def _choose(self, call: Call) -> tuple[Tensor, Tensor]:
        return self._positions.choose(call, self._mask)

    @kernels_alone()
    def _add(self, view: View, call: Call) -> None:
        self._forwards += 1
        self._source.note_widths(view)
        dtype = _dtype_of(self._source)
        if dtype != self._dtype:
            self._dtypes = [*self._dtypes, dtype]
            self._dtype = dtype
        count = view.tokens.numel()
        if count == 0:
            return
        self._tokens += count
        self._digest.update(view.tokens.cpu().numpy().tobytes())
        sums = {name: self._reduced(name, [view]) for name in self._immediate}
        rows_before, continued = self._rows_before(call)
        if not continued:
            self._sequences += torch.unique_consecutive(view.sequence).numel()
        for name, views in self._waiting.items():
            # A pool kernel draws samples by row: rows of different passes must have different numbers.
            is_pool = isinstance(self._kernels[name], PoolKernel)
            views.append(replace(view, sequence=view.sequence + rows_before) if is_pool else view)
            if self._is_enough(name, views, continued):
                sums[name] = self._reduced(name, views)
                self._waiting[name] = []
        self._tree = self._tree.add(self._leaf(count, sums))

    def _rows_before(self, call: Call) -> tuple[int, bool]:
        """Index of a forward pass's first row, and whether its rows began in an earlier pass.

        Steps of cached generation continue the rows of the prompt, because their tokens belong to one text.
        """
        rows = call.shape[0]
        if continues(call) and self._last[1] == rows:
            return self._last[0], True
        self._last = (self._rows, rows)
        self._rows += rows
        return self._last[0], False

    def _is_enough(self, name: str, views: list[View], continued: bool) -> bool:
        """Whether `views` hold enough samples for one call of a kernel.

        Cached generation gives one position at a time, and few calls are faster than many.
        """
        kernel = self._kernels[name]
        if not isinstance(kernel, PoolKernel):
            return sum(view.tokens.numel() for view in views) >= BUFFERED_TOKENS
        counts = torch.unique(torch.cat([view.sequence for view in views]), return_counts=True)[1]
        if continued and bool((counts >= SAMPLES_OF_ROW).all()):
            # Further steps would add to the memory alone.
            return True
        rows = len(counts)
        if rows < TEXTS_OF_POOL:
            return False
        samples = rows if kernel.whole_rows else int(counts.clamp(max=SAMPLES_OF_ROW).sum())
        return samples >= kernel.size

    def _leaf(self, tokens: int, sums: Mapping[str, Sums]) -> DataBlock:
        """Make a `DataBlock` of the sums that were computed after one forward pass.

        Kernels that have not run yet have empty sums.
        """
        names = (*self._immediate, *self._waiting)
        return DataBlock(1, tokens, {name: sums.get(name, Sums()) for name in names})

    def _reduced(self, name: str, views: list[View]) -> Sums:
        """Sums of a kernel over the activations of several forward passes; empty if the kernel fails."""
        kernel = self._kernels[name]
        try:
            joined = _by_row(views) if isinstance(kernel, PoolKernel) else _joined(views)
            not_finite, out = reduce({name: kernel}, joined)
            return self._checked((name,), not_finite, out, f"forward pass {self._forwards} or shortly before")[name]
        except Exception as error:
            self._fail(error)
            return Sums()


def _dtype_of(source: HookedSource) -> str:
    first = next(source.module.parameters(), None)
    return str(first.dtype) if first is not None else "unknown"


def _joined(views: list[View]) -> View:
    """Concatenate the samples of several forward passes. Rows of different passes get different sequence numbers."""
    if len(views) == 1:
        return views[0]
    rows = []
    offset = 0
    for view in views:
        rows.append(view.sequence + offset)
        offset += int(view.sequence.max()) + 1
    return _with_sequence(views, torch.cat(rows))


def _by_row(views: list[View]) -> View:
    """Concatenate the samples of several forward passes, sorted by row."""
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
        activations=torch.cat([view.activations for view in views], dim=1),
        tokens=torch.cat([view.tokens for view in views]),
        sequence=sequence,
        position=torch.cat([view.position for view in views]),
        next_token=torch.cat([view.next_token for view in views if view.next_token is not None]),
        sites=views[0].sites,
        widths=views[0].widths,
    )


class TraceProbe(Probe):
    """Measures nnsight traces. Each trace calls `probe.read()` in an empty invoke.

    `results()` is the report of all traces so far; `reset()` begins anew.

    Attributes:
        sent: tickets of requests whose results have not arrived.
        form: form of the sums of one forward pass.
    """

    _source: NNsightSource

    def __init__(
        self, source: NNsightSource, analyzers: dict[str, Analyzer], plan: SitePlan, positions: Positions, intervals: bool
    ) -> None:
        self.sent: set[str] = set()
        self._key = uuid.uuid4().hex
        PROBES[self._key] = self
        self._source = source
        self._kernels = shippable(plan.kernels(analyzers, {}))
        self.form = FormOfSums(1, (len(source.sites),), tuple(self._kernels), True)
        super().__init__(analyzers, plan, positions, intervals)

    def _begin(self) -> None:
        super()._begin()
        self._padded = 0

    def read(self) -> TraceProbe:
        self.add(self._reader(on_server=False).read())
        return self

    def _reader(self, on_server: bool) -> PassReader:
        model = self._source.model
        # A padding id that also begins or ends texts does not tell that a row is padded.
        edges = {*model.starts, *model.ends}
        return PassReader(
            replace(self._source.reader(), on_server=on_server),
            self._kernels,
            self._rule,
            model.mask_input,
            any(analyzer.needs.whole_rows for analyzer in self._analyzers.values()),
            tuple(pad for pad in model.pads if pad not in edges),
            self._sequences,
        )

    @property
    def mask(self) -> Tensor | None:
        """Always None: nnsight itself passes the mask of a trace to the model."""
        return None

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        raise LayersimError(
            "`probe.mask` cannot be set for an nnsight model. Pass {'input_ids': tokens, 'attention_mask': mask} to the invoke."
        )

    def _sums(self) -> SumTree:
        if self._tokens:
            return self._tree
        if self.sent:
            raise LayersimError(
                f"No result of the {len(self.sent)} traces with this probe has arrived. In the function that opens the trace, "
                "the probe must be an argument or a local variable, such as `probe = self.probe`."
            )
        raise LayersimError("The probe measured nothing: no trace called probe.read(), or no position was counted.")

    def _described(self) -> tuple[Mapping[str, list[ModelDescription]], dict[str, Any]]:
        source = self._source
        models = self._plan.models(source.model.as_it_is_now())
        fields: dict[str, Any] = {"in_traces": True, "rows_with_attended_padding": self._padded}
        if isinstance(source, OnServer):
            fields["remote"] = [source.record()]
        return models, fields

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the probe as a `ShippedProbe`. nnsight pickles a probe to send it with a trace."""
        for analyzer in self._analyzers.values():
            refuse_server(analyzer)
        ticket = uuid.uuid4().hex
        self.sent.add(ticket)
        return ShippedProbe, (self._key, ticket, self._reader(on_server=True))

    def add(self, output: Mapping[str, Any]) -> None:
        """Add the sums of one forward pass.

        Args:
            output: output of `PassReader.read`.

        Raises:
            LayersimError: activations are not finite.
        """
        self._forwards += 1
        if output["padded"] and not self._padded:
            warn(
                f"In a trace, {output['padded']} rows start or end with a padding id that no attention mask excludes, and the "
                "padding is measured. Pass {'input_ids': tokens, 'attention_mask': mask} to the invoke."
            )
        self._padded += output["padded"]
        if not output["tokens"]:
            return
        [part] = partial_sums([(1, output["sums"])])
        sums = self._checked(tuple(self._kernels), part.not_finite, part.out, f"forward pass {self._forwards}")
        self._sequences += output["rows"]
        self._tokens += output["tokens"]
        self._digest.update(output["hash"].numpy().tobytes())
        self._tree = self._tree.add(DataBlock(1, output["tokens"], sums))
