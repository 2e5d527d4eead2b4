"""`Probe`: the sums of the forward passes of a user's own loop or traces so far, and their report."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any

from torch import Tensor

from ..analyzers.analyzer import Analyzer
from ..core.errors import LayersimError, recorded_warnings
from ..core.results import Report
from ..core.sums import SumTree, Tally
from ..data.batches import new_digest
from ..data.padding import as_mask
from ..data.positions import Positions
from ..engine.plan import SitePlan
from ..engine.report_assembly import make_report
from ..sources.hooks import kernels_alone
from ..sources.model import Model


class Probe:
    """Adds up sums of the forward passes of a user's own loop, inside `with lsim.attach(...) as probe`, or of nnsight traces.

    `results()` is the report so far, at any time; `reset()` begins anew, such as for each epoch. In a loop a forward pass in
    another thread than the one that entered the block is an error, and an error of the probe is raised by `results()`, never in
    the loop. In a trace `read()` measures the forward pass, and raises its own errors.
    """

    def __init__(self, analyzers: dict[str, Analyzer], plan: SitePlan, positions: Positions, intervals: bool) -> None:
        self._analyzers, self._plan, self._rule, self._intervals = analyzers, plan, positions, intervals
        self._mask: Tensor | None = None
        self._begin()

    def _begin(self) -> None:
        """Begin with empty sums."""
        # Forward passes stand in the place of rows.
        self._tree = SumTree(1 if self._intervals else None)
        self._forwards, self._sequences, self._tokens, self._digest = 0, 0, 0, new_digest()

    def __reduce__(self) -> tuple[Any, ...]:
        raise _not_copied()

    def __copy__(self) -> Probe:
        raise _not_copied()

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        raise _not_copied()

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

        The probe reads all rows of the trace, with the mask and the padding of nnsight. Where the trace runs on a server, only
        sums return.

        Returns:
            The probe.

        Raises:
            LayersimError: the positions of the rows are not known, or activations are not finite.
        """
        raise LayersimError(
            "probe.read() measures traces of nnsight models. The probe of another model measures every forward pass inside its "
            "`with` block."
        )

    @property
    def mask(self) -> Tensor | None:
        """Mask `batch pos` of the positions to count in the next forward passes.

        None counts the positions of the model's attention mask, or all; `positions=` selects among them. The mask holds until
        it is replaced. Single-position steps of cached generation always count.
        """
        return self._mask

    @mask.setter
    def mask(self, mask: Tensor | None) -> None:
        self._mask = None if mask is None else as_mask(mask)

    def results(self) -> Report:
        """The report of all forward passes so far, at any time inside the block and after it.

        Raises:
            LayersimError: no forward pass ran, or too few for an analyzer; activations were not finite; or a forward pass could
                not be measured.
        """
        with kernels_alone():
            return self._report(self._sums(), tuple(self._analyzers))

    def headline(self) -> dict[str, float]:
        """The headline numbers of all forward passes so far as a flat dict for a logger, see `Report.headline`.

        Analyzers that need more data than there is so far are left out; the dict may be empty. It raises nothing and repeats no
        warning, so that it cannot end a loop: `results()` raises what is wrong.
        """
        numbers: dict[str, float] = {}
        with kernels_alone(), suppress(Exception):
            sums = self._sums()
            for name in self._analyzers:
                with suppress(Exception), recorded_warnings(issued=False):
                    numbers |= self._report(sums, (name,)).headline()
        return numbers

    def reset(self) -> None:
        """Forget all forward passes so far, such as at the end of an epoch: `results()` then covers those that follow.

        The probe stays attached, and `probe.mask` stays as it is. So does an error: `results()` raises that of a forward pass
        before the reset too.
        """
        with kernels_alone():
            self._begin()

    def _sums(self) -> SumTree:
        """The sums of all forward passes so far.

        Raises:
            LayersimError: there are none, or a forward pass could not be measured.
        """
        raise NotImplementedError

    def _described(self) -> tuple[Mapping[str, list[Model]], dict[str, Any]]:
        """The model by analyzer, and the options that only this kind of probe records."""
        raise NotImplementedError

    def _report(self, tree: SumTree, names: tuple[str, ...]) -> Report:
        """The report of some analyzers."""
        analyzers = {name: self._analyzers[name] for name in names}
        tally = Tally(self._forwards, self._sequences, self._tokens, self._digest.hexdigest())
        models, more = self._described()
        how = {"attached": True, "positions": self._rule.record()} | self._plan.record() | more
        how |= {"intervals": True} if self._intervals else {}
        blocks = tree.blocks() if self._intervals else None
        return make_report(analyzers, models, tally, tree.total().sums, {}, how, blocks)


def _not_copied() -> LayersimError:
    return LayersimError(
        "A probe cannot be copied or pickled, because it belongs to its model. Use probe.results(), a report that can be saved."
    )
