"""Source: a model that runs batches and passes activations to functions of analyzers (kernels)."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel, run_batch
from ..activations.view import Kernel, Reduced, View
from ..architectures.anatomy import Anatomy, WatchedAnatomy
from ..architectures.blocks import POST_NORM, PRE_NORM, choose_stacks
from ..architectures.hook_points import (
    SITE_NAMES,
    HookPoint,
    StreamSum,
    at_point,
    channels_at,
    read_in_next_run,
    to_positions,
)
from ..architectures.output_heads import lens_of, text_config
from ..architectures.site_selection import items_of, points_at, refuse_sharded_sites, site_map, sums_with
from ..architectures.unembed import Head, rounding, tensor_of, unembed_gap
from ..core.distributed import weight_peers
from ..core.errors import LOG, LayersimError
from ..core.wording import amount
from .batch_independence import TIMES_NOISE, Together, allowed_gaps, gaps, row_to_compare
from .find_anatomy import (
    RecordedForward,
    arithmetic_of,
    find_anatomy,
    record_forward,
    synthetic_row,
    tail_runs,
    watched_head,
    watched_tail,
)
from .forward_arguments import refusing_failed_forward
from .hooks import eval_mode, kernels_alone, on_tensor, temporary_hooks
from .model_description import ModelDescription, settled
from .out_of_memory import in_parts, is_out_of_memory, joined, reduce_batch, refusing_out_of_memory, release_memory, too_large
from .row_heads import pooled_head, positions_of_head
from .watched_forward import WatchedForward, watch

if TYPE_CHECKING:
    from ..data.batches import Batch

T = TypeVar("T")
# Part of the names of sites on the residual stream.
STREAM_SITE = ".hook_resid_"


@dataclass(frozen=True)
class PartialSums:
    """Sums of kernel outputs over a group of consecutive rows.

    Attributes:
        count: number of rows, a power of two; at the end of the data it may count rows that do not exist.
        not_finite: for each view `layer`, the number of activations that were NaN or infinite.
        out: sums of the kernel outputs, by kernel name.
    """

    count: int
    not_finite: list[Tensor]
    out: Mapping[str, Mapping[str, Tensor]]


class Source(ABC):
    """A model that runs batches and passes its activations to kernels.

    A kernel is an analyzer's function from a batch of activations to a dict of tensors.

    A new source implements `model` and `run`, and `collect` if activations may leave the process that computes them. A source
    that can do more inherits from the classes below as well.
    """

    @property
    @abstractmethod
    def model(self) -> ModelDescription:
        """The description of the model."""

    @abstractmethod
    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        """Run one forward pass over the batch and apply the kernels to its activations.

        Return the output of `reduce`, which runs in the process that holds the activations.
        """

    def collect(self, batch: Batch) -> View:
        """Run one forward pass over the batch and return its activations as a `View`.

        Raises:
            LayersimError: activations cannot leave the process that computes them.
        """
        raise LayersimError(
            f"Activations of {self.model.name} ({type(self).__name__}) cannot leave the process that computes them; the "
            "model must be in this process."
        )

    def opened(self) -> Source:
        """The source for one call of a public function; by default itself.

        Weights, hooks and edits of its model may have changed since the last call; replaced blocks need a new source.
        """
        return self

    def beside(self, others: Sequence[Source]) -> Source | None:
        """A source that runs this model and others in one trace or request.

        Args:
            others: sources of further models.

        Returns:
            A source whose kernels take a view of each model; None if the models cannot run together where their activations
            stay.
        """
        return None

    @property
    def sites(self) -> tuple[str, ...]:
        """Names of the sites to read; the residual layers unless `CanReadSites.read_at` chose others."""
        return self.model.layers

    @property
    def widths(self) -> tuple[int, ...]:
        """Width of each site; empty for residual layers, or if unknown."""
        return ()

    def sums(self, batch: Batch, kernels: Mapping[str, AnyKernel]) -> list[Reduced]:
        """Run one batch and return a list of kernel outputs, one for each group of consecutive rows.

        Args:
            batch: a batch of one or more forward passes.
            kernels: kernels of views (see `run`) and of pools of rows.
        """
        return run_batch(self.run, batch, kernels)

    def stream(
        self,
        batches: Iterator[Batch],
        kernels: Mapping[str, AnyKernel],
        start: int,
        say: Callable[[str], None],
        first_block: int | None,
    ) -> Iterator[list[PartialSums]]:
        """An iterator that runs batches in order and yields sums of kernel outputs over consecutive rows.

        Args:
            batches: each with at least one counted token.
            kernels: kernels of views (see `run`) and of pools of rows.
            start: number of rows of the data before the first batch, which an earlier process or another shard runs.
            say: function that shows a short progress message.
            first_block: number of rows per block (`core.sums`), whose boundaries no group crosses; None for no boundaries.

        Returns:
            Sums of the next batches in groups of 2^k rows that can be pushed by `core.sums.push`: the index of a group's first
            row is a multiple of its count.
        """
        for batch in batches:
            # No variable holds sums while the next batch runs.
            yield [PartialSums(batch.leaf, not_finite, out) for not_finite, out in self.sums(batch, kernels)]


class HasModule(Source):
    """A source of a torch module, which runs in evaluation mode.

    Attributes:
        module: the model.
    """

    module: torch.nn.Module

    def evaluating(self) -> AbstractContextManager[None]:
        """A context manager in which the model runs without dropout."""
        return eval_mode(self.module)


class CanUnembed(Source):
    """A source with a logit lens (`View.unembed`); its model has a `head`."""

    @abstractmethod
    def unembed_gap(self, batch: Batch) -> Tensor:
        """The norm of the logit lens's error at the last layer, and the norm of the model's logits, on the first row.

        They are those of `architectures.unembed.unembed_gap`.
        """


class CanReplay(Source):
    """A source whose blocks an analyzer can call again. Its `ModelDescription.calls` is not "none".

    Attributes:
        calling: whether views must contain `calls`.
    """

    calling: bool = False


class CanCountPositions(Source):
    """A source that accepts rows without token ids, such as images."""

    @abstractmethod
    def count_positions(self, batch: Batch) -> int:
        """Number of positions of a row, such as the patches of an image and [CLS].

        Args:
            batch: one row.
        """


class OnServer(Source):
    """A source of a model on a server; its `stream` may run several batches per request."""

    @abstractmethod
    def plan(self, passes: int, count: int, tokens: int) -> str:
        """Describe a run on the server before it starts.

        Args:
            passes: number of passes over the data.
            count: number of forward passes.
            tokens: number of tokens in all batches.
        """

    @abstractmethod
    def refuse_larger(self, rows: int, positions: int) -> None:
        """Raise an error if batches exceed `tokens_per_request`.

        Args:
            rows: number of rows of the largest batch.
            positions: number of positions of the largest batch, padding included.
        """

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """A dict of facts about the server, stored in results."""


@contextmanager
def running(source: Source, calls: bool = False) -> Iterator[None]:
    """A context manager in which the model runs without dropout.

    Args:
        source: the model.
        calls: whether views contain `calls`.

    Raises:
        LayersimError: the weights cannot have gradients, or calls of blocks are needed and the source has none.
    """
    if calls and not isinstance(source, CanReplay):
        raise LayersimError(
            f"`calls` of {type(source).__name__}.model is {source.model.calls!r}, but the source does not inherit from "
            "CanReplay. Inherit from it, or set calls='none'."
        )
    with source.evaluating() if isinstance(source, HasModule) else nullcontext():
        if not calls:
            yield
            return
        assert isinstance(source, CanReplay)
        if isinstance(source, HasModule):
            refuse_inference_weights(source.module)
        source.calling = True
        try:
            yield
        finally:
            source.calling = False


def refuse_inference_weights(module: torch.nn.Module) -> None:
    """Raise an error if weights were created under `torch.inference_mode()`, because autograd cannot use them."""
    unusable = [path for path, parameter in module.named_parameters() if parameter.is_inference()]
    if unusable:
        raise LayersimError(
            f"The weights of {type(module).__name__} were created under torch.inference_mode(), so they can have no "
            f"gradients: {len(unusable)} parameters, the first {unusable[0]}. Load the model under torch.no_grad()."
        )


@dataclass(frozen=True)
class SitesRead:
    """The hook points to read, with their order and widths.

    Attributes:
        points: the hook points.
        order: order in which a forward pass reaches the points (and further events of the source); None if not known yet.
        widths: widths of the points; empty if they are the residual layers, or the widths are not known yet.
    """

    points: tuple[HookPoint, ...]
    order: tuple[int, ...] | None
    widths: tuple[int, ...] = ()


def position_counter(sources: Sequence[Source]) -> Callable[[Batch], int] | None:
    """A function that counts the positions of a row without token ids.

    None if a source does not accept such rows. The function raises an error if the models give a row different numbers of
    positions.
    """
    counting_sources = [source for source in sources if isinstance(source, CanCountPositions)]

    def count_positions(batch: Batch) -> int:
        counts = [source.count_positions(batch) for source in counting_sources]
        # The mean of a row is one sample in each of them.
        if len(set(counts)) > 1 and not batch.pooled:
            by_model = [f"{count} in {source.model.name}" for source, count in zip(counting_sources, counts, strict=True)]
            raise LayersimError(
                "The models have different numbers of positions for the same row, so their samples do not match: "
                + ", ".join(by_model)
                + ". Pass positions='mean' to compare one sample for each row."
            )
        return counts[0]

    return count_positions if len(counting_sources) == len(sources) else None


def firing_order(
    points: Sequence[HookPoint], modules: Mapping[str, torch.nn.Module], run: Callable[[], Any], pos: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The order in which a forward pass reaches hook points, and the width of each.

    Args:
        points: the hook points.
        modules: the modules of the points, by path.
        run: runs the forward pass; its errors after the last hook point are ignored.
        pos: number of positions of the one row, if tokens determine it.

    Raises:
        LayersimError: a module runs more than once in a forward pass and the name of its point has no run, or has fewer runs;
            or a tensor has other axes than `batch pos`.
    """
    order: list[int] = []
    widths: dict[int, int] = {}
    runs: Counter[int] = Counter()
    # Points that read one module have one hook.
    points_by_module: dict[tuple[str, bool], list[int]] = {}
    for number, point in enumerate(points):
        points_by_module.setdefault((point.module, point.incoming), []).append(number)

    shape = None if pos is None else (1, pos)

    def see(points_of_module: list[int], tensor: Tensor) -> None:
        numbers = read_in_next_run(points, points_of_module, runs)
        for number in numbers:
            if number in widths:
                raise not_once(points[number].name, points[number].module, SEVERAL_RUNS)
        order.extend(numbers)
        for number in numbers:
            point = points[number]
            hidden = to_positions(tensor, point.channels, point.name, pos)
            if STREAM_SITE in point.name and hidden.dim() > 3:
                raise LayersimError(
                    f"`at` names {point.name}, which is {' x '.join(map(str, hidden.shape))} for one row; a residual stream "
                    "must be one tensor batch x pos x width."
                )
            widths[number] = at_point(hidden, point.part, shape, point.name).shape[-1]

    # To the end of the pass: a module that runs again is not what its name says. Probes that are attached do not record it.
    with temporary_hooks() as handles, torch.no_grad(), kernels_alone():
        for (path, incoming), numbers in points_by_module.items():
            handles.append(on_tensor(modules[path], incoming, partial(see, numbers)))
        try:
            run()
        except LayersimError:
            raise
        except Exception:
            # What fails after the last point is no part of what is measured.
            if len(order) < len(points):
                raise
    for numbers in points_by_module.values():
        for number in numbers:
            point = points[number]
            if number in widths:
                continue
            if point.run is None:
                raise not_once(point.name, point.module, "no forward pass of the model on this data runs it")
            raise LayersimError(f"`at` names {point.name}, but its module runs {runs[numbers[0]]} times in a forward pass.")
    return tuple(order), tuple(widths[number] for number in range(len(points)))


def on_short_row(batch: Batch, check: Callable[[Batch], T]) -> T:
    """Run a check on a short row of a batch; or on a whole row if the model does not take the short one.

    Some models pad rows to a multiple of a window, so that their activations have the positions of certain rows only. A row of
    twice the length then shows whether activations have the positions of the rows, or as many by chance.

    Args:
        batch: the rows.
        check: function that runs a forward pass over one row, and raises an error if the activations are not those of the row.
    """
    short_row = batch.short_row
    whole_row = batch.whole_row
    try:
        return check(short_row)
    except Exception:
        if short_row.tokens.shape == whole_row.tokens.shape:
            raise
    result = check(whole_row)
    try:
        check(batch.doubled_row)
    except LayersimError:
        raise
    except Exception:
        # The row is too long for the model.
        return result
    return result


# Number of different tokens in a row from which it tells heads apart.
DIFFERENT_TOKENS = 4


def tells_heads_apart(row: Batch) -> bool:
    """Whether a row has enough different tokens to test a head on it. Many functions map one token alike."""
    return not row.has_tokens or len(set(row.tokens.flatten().tolist())) >= DIFFERENT_TOKENS


# The reason of `not_once` for a module that runs several times.
SEVERAL_RUNS = "it runs more than once in a forward pass. Name its runs by `[0]`, `[1]`, ... behind its name"


def not_once(name: str, module: str, why: str) -> LayersimError:
    """The error for a module that does not run exactly once in a forward pass.

    Args:
        name: name of the hook point.
        module: path of its module.
        why: how often the module runs, as a clause.
    """
    return LayersimError(f"`at` names {name}, but its module {module} does not run exactly once in a forward pass: {why}.")


class CanReadSites(HasModule, CanReplay, CanUnembed, CanCountPositions):
    """A source that reads hook points by name, by default the residual layers.

    Attributes:
        anatomy: what lies where in the model, and which of its blocks are read: those of one stack in an encoder-decoder.
        in_this_process: whether forward passes run in this process, and not on a server.
        residual: the hook points of the residual layers.
        reading: the hook points that forward passes read.
    """

    anatomy: Anatomy
    in_this_process: bool = True
    residual: SitesRead
    reading: SitesRead
    _rows: int | None = None  # largest number of rows in a forward pass; None as long as every batch fits
    _model: ModelDescription
    _heads: tuple[Head, ...] = ()  # heads among which the first watched forward pass chooses
    _is_watched: bool = False  # whether a forward pass has shown that each block runs once, and what it passes on
    _compares_rows: bool = False  # whether rows are compared with themselves alone, after the first `settle`
    can_run_tail: bool = False  # whether the lens can run the rest of a forward pass behind the last block
    _rows_together: Together = Together.ALL  # the rows of a batch that run in one forward pass
    _compared: set[tuple[Together, bool]]  # kinds of batches in which a row had the same activations as alone

    @property
    def model(self) -> ModelDescription:
        return self._model

    @property
    def paths(self) -> list[str]:
        """Paths of the blocks that are read."""
        return list(self.anatomy.blocks)

    def opened(self) -> Source:
        self.renew_description()
        return self

    def renew_description(self) -> None:
        """Describe the weights as they are now, which may have changed since the source was opened."""
        self._model = self._model.as_it_is_now()

    def _start_reading(self, points: tuple[HookPoint, ...], order: tuple[int, ...]) -> None:
        self.residual = self.reading = SitesRead(self._with_channels(points), order)
        self._compared = set()

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        return reduce_batch(batch, kernels, self.collect(batch))

    @abstractmethod
    def _collect(self, batch: Batch) -> View:
        """Run one forward pass over the batch and return its activations as a `View`."""

    def collect(self, batch: Batch) -> View:
        """Return the activations of a batch as a `View`, from as many forward passes as the model requires.

        If other rows or padding change the activations of a row, only rows of equal length run together, or each row alone. The
        first batch of several rows shows this, and the first one with padding.

        Raises:
            LayersimError: a forward pass runs out of memory; or rows must run together, but change one another.
        """
        while True:
            view = self._collect_groups(batch, self._rows_together)
            if self._needs_comparison(batch) and self._changes_rows(batch, view):
                self._separate_rows()
                continue
            return view

    def _collect_groups(self, batch: Batch, together: Together) -> View:
        """Run the rows of a batch that may run together, group by group."""
        if together is Together.ALL:
            return self._collect_in_memory(batch)
        groups = together.groups(batch)
        if len(groups) > 1 and self._indivisible():
            raise self._inseparable_rows()
        return joined(batch, groups, lambda rows: self._collect_in_memory(batch.chosen(rows)))

    def refuse_dependent_rows(self, batch: Batch) -> None:
        """Raise an error if rows of a batch that run together change one another.

        Raises:
            LayersimError: they do.
        """
        if len(batch.tokens) == 1:
            return
        if self._needs_comparison(batch):
            with self._without_calls():
                self.collect(batch)
        if self._rows_together is not Together.ALL and len(self._rows_together.groups(batch)) > 1:
            raise self._inseparable_rows()

    def _inseparable_rows(self) -> LayersimError:
        """The error for rows that change one another, but must run in one forward pass."""
        return LayersimError(
            f"`batch_size` is above 1, but in {self.model.name} other rows of a batch, or padding, change the activations of a "
            f"row, and they cannot run apart{self._indivisible()}. Use Data(..., batch_size=1)."
        )

    def _needs_comparison(self, batch: Batch) -> bool:
        """Whether rows of this batch have not been compared yet with the same rows alone."""
        # Processes that share the weights run the same forward passes.
        is_known = (self._rows_together, batch.padded) in self._compared
        return self._compares_rows and not is_known and not weight_peers(self.module)

    def _changes_rows(self, batch: Batch, view: View) -> bool:
        """Whether the rows that run together change one another, by a comparison of one row with itself alone.

        Args:
            batch: the rows.
            view: their activations.
        """
        row_number = row_to_compare(batch, self._rows_together)
        if row_number is None:
            return False
        row = batch.chosen([row_number])
        with self._without_calls():
            alone = self._collect_in_memory(row).activations
            in_batch = view.activations[:, (view.sequence == row_number).nonzero()[:, 0]]
            gaps_to_batch = gaps(in_batch, alone)
            allowed = allowed_gaps(len(in_batch), self._model.torch_dtype, in_batch.device)
            if bool((gaps_to_batch > allowed).any()):
                # Copies of the row have the same rounding as a batch, and change one another least.
                copies = self._collect_in_memory(row.chosen([0] * len(batch.tokens)))
                first_copy = copies.activations[:, (copies.sequence == 0).nonzero()[:, 0]]
                noise = gaps(first_copy, alone)
                if bool((gaps_to_batch > allowed + TIMES_NOISE * noise).any()):
                    return True
        self._compared.add((self._rows_together, batch.padded))
        return False

    def _separate_rows(self) -> None:
        """Run fewer rows together from now on."""
        self._rows_together = self._rows_together.next
        LOG.warning(
            "Other rows of a batch, or padding, change the activations of a row in %s: %s from now on.",
            self.model.name,
            "each row runs alone" if self._rows_together is Together.ALONE else "only rows of equal length run together",
        )

    @contextmanager
    def _without_calls(self) -> Iterator[None]:
        """A context manager in which views contain no calls of blocks."""
        was_calling = self.calling
        self.calling = False
        try:
            yield
        finally:
            self.calling = was_calling

    def _collect_in_memory(self, batch: Batch) -> View:
        """Run rows together, in as many forward passes as memory requires.

        A forward pass that runs out of memory is repeated with half of its rows; further batches begin with the number of rows
        that worked.

        Raises:
            LayersimError: a forward pass of one row, or of rows that must run together, runs out of memory.
        """
        total = len(batch.tokens)
        first_size = min(self._rows or total, total)
        size = first_size
        while True:
            try:
                view = self._collect(batch) if size == total else in_parts(batch, size, self._collect)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if size == 1 or self._indivisible():
                    raise too_large(batch.part(0, size), f"a forward pass{self._indivisible()}", error) from error
            # After the `except` clause, because the traceback holds the activations of the failed forward pass.
            size = (size + 1) // 2
            release_memory()
        if size < first_size:
            self._rows = size
            LOG.warning(
                "Out of memory with %d rows in a forward pass (batch of rows %d to %d, %d positions): %s at a time from "
                "now on. Minibatches stay as they are.",
                first_size,
                batch.first,
                batch.first + total - 1,
                batch.tokens.shape[1],
                amount(size, "row"),
            )
        return view

    def _indivisible(self) -> str:
        """Reason why all rows of a batch must run in one forward pass; "" if there is none."""
        if self.calling:
            return " (an analyzer calls blocks again with all rows of a batch)"
        if weight_peers(self.module):
            return " (processes that share the weights must run the same forward passes)"
        return ""

    @property
    def reads_residual(self) -> bool:
        """Whether the sites are the residual layers."""
        return self.reading is self.residual

    @property
    def is_settled(self) -> bool:
        """Whether `settle` has verified the residual layers, if they are read, and knows the order of the sites."""
        is_verified = self._is_watched or (not self.reads_residual and self.model.stream != "unknown")
        return is_verified and self.reading.order is not None

    def aside(self) -> bool:
        """Whether hooks must ignore the current forward pass, as while the front model of a stitched model runs."""
        return False

    @abstractmethod
    def call(self, batch: Batch) -> Any:
        """Run one forward pass of the module in this process."""

    def _module_at(self, path: str) -> torch.nn.Module:
        return self.module.get_submodule(path)

    def _events(self) -> tuple[HookPoint, ...]:
        """Hook points that are not read, but whose order in the forward pass must be known."""
        return ()

    def settle(self, batch: Batch) -> None:
        """Run one row to verify the residual layers, and to find order and widths of the sites.

        Nothing runs if all of this is known.

        Raises:
            LayersimError: a block runs several times or never, or does not pass on `batch pos width`; or a site is reached
                several times or never.
        """
        with refusing_out_of_memory(batch.first_row), refusing_failed_forward(self.module):
            if self.reads_residual and not self._is_watched:
                on_short_row(batch, self._watch)
                self._is_watched = True
            elif self._model.stream == "unknown":
                with torch.no_grad(), self.settling():
                    self.call(batch.first_row)
            if self.reading.order is None:
                points = self.reading.points
                order, widths = on_short_row(batch, partial(self._find_order, (*points, *self._events())))
                self.reading = SitesRead(points, order, widths[: len(points)])
        self._compares_rows = True

    def _watch(self, row: Batch) -> None:
        """Watch a forward pass over one row, check the residual layers, and correct the description of the model.

        The pass runs to its end: a block that runs again is no layer of a residual stream that is read once.
        """
        # What TransformerLens processes it describes itself.
        paths = [] if self.anatomy.library == "transformer_lens" else self.paths
        blocks = [self.module.get_submodule(path) for path in paths]
        with torch.no_grad(), kernels_alone(), self.evaluating(), self.settling():
            forward = self.watched(lambda: self.call(row), row.token_positions, blocks)
        if forward.is_post_norm and self._model.basis == PRE_NORM:
            self._model = replace(self._model, basis=POST_NORM)
        if forward.output is not None and forward.last is not None:
            self.choose_head(forward.last, forward.output, row)

    def watched(
        self, call: Callable[[], Any], pos: int | None = None, blocks: Sequence[torch.nn.Module] = ()
    ) -> WatchedForward:
        """Watch the residual layers in a forward pass over one row.

        Args:
            call: runs the forward pass.
            pos: number of positions of the row; None if it is not known.
            blocks: blocks whose output may be that of a norm.

        Raises:
            LayersimError: a block runs several times, never or out of order, or passes on other axes than `batch pos width`.
        """
        points = self.residual.points
        modules = {point.module: self._module_at(point.module) for point in points}
        forward = watch(points, modules, blocks, call, pos, self.aside)
        forward.check(self._model.name)
        return forward

    def choose_head(self, hidden: Tensor, output: Any, row: Batch) -> None:
        """Keep the first head that gives the model's own logits: of the possible heads, then the one that a forward pass shows.

        If none does, the likeliest is kept.

        Args:
            hidden: activations of the last block, for one row.
            output: output of the model.
            row: the row.
        """
        forward_passes = [(hidden, output, row)]
        if not tells_heads_apart(row):
            synthetic_pass = self.on_synthetic_row(self._forward_with_last_block)
            if synthetic_pass is not None:
                forward_passes.append(synthetic_pass)
        possible_heads = self._heads
        if possible_heads and self._model.head is not None:
            # First the head that a synthetic row has verified.
            possible_heads = (self._model.head, *possible_heads)
        # The heads of a recorded forward pass come last, and are looked for only if no other head fits.
        self._keep_verified(itertools.chain(dict.fromkeys(possible_heads), self._watched_heads(row)), forward_passes)

    def _keep_verified(self, heads: Iterable[Head], forward_passes: Sequence[tuple[Tensor, Any, Batch]]) -> bool:
        """Keep the first head that gives the model's own logits in all forward passes. Returns whether there is one.

        Args:
            heads: the heads.
            forward_passes: activations of the last block, the model's output, and the row.
        """
        allowed = rounding(self._model.torch_dtype, torch.float32)
        for head in heads:
            if all(self._head_gap(head, *forward_pass) <= allowed for forward_pass in forward_passes):
                self._set_head(head)
                return True
        return False

    def choose_row_head(self) -> None:
        """Find out, on a synthetic row, which positions the head of a row classifier reads."""
        head = self._model.head
        if not self._heads or head is None or head.reads == "every":
            return
        try:
            self.on_synthetic_row(self._find_row_head)
            return
        except (RuntimeError, MemoryError) as error:
            # A row of the data needs as much memory, and its error says which rows.
            if not is_out_of_memory(error):
                raise
        # After the `except` clause, because the traceback holds the activations of the failed forward pass.
        release_memory()

    def _find_row_head(self, row: Batch) -> None:
        hidden, output, row = self._forward_with_last_block(row)
        if not row.has_tokens:
            # An image or a recording has as many positions as its activations.
            every = torch.ones(1, hidden.shape[1], dtype=torch.bool)
            row = replace(row, tokens=torch.zeros_like(every, dtype=torch.int64), attention=every, counted=every)
        if self._keep_verified(self._heads, [(hidden, output, row)]):
            return
        dtype = self._model.torch_dtype
        logits = tensor_of(output)
        recorded = record_forward(self.module, lambda: self.call(row), without_inside_of=self.paths)
        # Feature maps have no axis of positions, and logits of 0 depend on nothing.
        if self._leaves_out_later_blocks(recorded) or hidden.dim() != 3 or not bool(logits.any()):
            return
        head = pooled_head(recorded, self.paths[-1], logits, dtype)
        if head is not None and self._keep_verified((head,), [(hidden, output, row)]):
            return
        # No lens is known, but measures of the residual stream read the same positions as the head.
        reads = positions_of_head(self.module.get_submodule(self.paths[-1]), lambda: self.call(row), logits, dtype)
        self._set_head(replace(self._heads[0], reads=reads, pool=None))

    def on_synthetic_row(self, run: Callable[[Batch], T]) -> T | None:
        """Run a function on a synthetic row; None if the model does not take it, or is on a server."""
        if not self.in_this_process:
            return None
        try:
            with torch.no_grad(), kernels_alone(), self.evaluating():
                return run(synthetic_row(self.module, self._model))
        except Exception as error:
            # A model of any library may need other inputs than a synthetic row has.
            if is_out_of_memory(error):
                raise
            LOG.info("%s does not run on a synthetic row: %s", self._model.name, error)
            return None

    def _forward_with_last_block(self, row: Batch) -> tuple[Tensor, Any, Batch]:
        """The activations of the last block and the output of a forward pass over a row, with the row."""
        hidden: list[Tensor] = []
        with temporary_hooks() as handles:
            handles.append(on_tensor(self.module.get_submodule(self.paths[-1]), False, hidden.append))
            output = self.call(row)
        return hidden[-1], output, row

    def _head_gap(self, head: Head, hidden: Tensor, output: Any, row: Batch) -> float:
        """Error of a head at the last block, relative to the norm of the model's logits; infinite if it cannot be called."""
        # A norm of another width fails, and so does a head whose input is another one.
        with suppress(RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            lens = lens_of(self.module, head)
            assert lens is not None
            difference, size = unembed_gap(lens, hidden[0], tensor_of(output)[0], row.attention[0]).tolist()
            gap: float = difference / max(size, 1e-3)
            return float("inf") if math.isnan(gap) else gap
        return float("inf")

    def _watched_heads(self, row: Batch) -> Iterator[Head]:
        """The head that a recorded forward pass shows, for a model whose head is none of those that its modules suggest.

        Args:
            row: the row of the pass.
        """
        if not self._heads or not self.in_this_process:
            return
        with torch.no_grad(), kernels_alone(), self.evaluating():
            recorded = record_forward(self.module, lambda: self.call(row))
        yield from self._heads_of(recorded, int(row.tokens[0, 0]))

    def _leaves_out_later_blocks(self, recorded: RecordedForward) -> bool:
        """Whether `layers` leaves out later blocks, which are no part of a head."""
        last_block_run = recorded.runs_of(self.paths[-1])[-1]
        kinds_behind = {type(run.module) for run in tail_runs(recorded, last_block_run)}
        return type(last_block_run.module) in kinds_behind

    def _heads_of(self, recorded: RecordedForward, token: int) -> Iterator[Head]:
        """The head of a recorded forward pass as a chain of modules, then as the rest of the pass on a token id."""
        if self._leaves_out_later_blocks(recorded):
            return
        arithmetic = arithmetic_of(text_config(getattr(self.module, "config", None)), self._model.torch_dtype)
        head = watched_head(recorded, self.paths[-1], tensor_of(recorded.output), arithmetic)
        if head is not None:
            yield head
        tail = watched_tail(recorded, self.paths, self._model, token)
        if tail is not None and self.can_run_tail:
            LOG.info("The logits of %s come from the rest of its forward pass: %s", self._model.name, tail)
            yield tail

    def _set_head(self, head: Head) -> None:
        """Replace the head in the description of the model, and the logit lens."""
        self._model = replace(self._model, head=head)

    def _find_order(self, events: tuple[HookPoint, ...], row: Batch) -> tuple[tuple[int, ...], tuple[int, ...]]:
        modules = {point.module: self._module_at(point.module) for point in events}
        return firing_order(events, modules, lambda: self.call(row), row.token_positions)

    @contextmanager
    def settling(self) -> Iterator[None]:
        """A context manager that tests, in its first forward pass, whether modules share one residual stream."""
        with temporary_hooks() as handles:
            for module, incoming, see in self.stream_test(lambda: None):
                handles.append(on_tensor(module, incoming, see))
            yield

    def stream_test(self, end: Callable[[], object]) -> list[tuple[torch.nn.Module, bool, Callable[[Tensor], None]]]:
        """The hooks that test the residual stream, as tuples of the arguments of `on_tensor`.

        The list is empty if `ModelDescription.stream` is known.

        Args:
            end: function that is called after the last module.
        """
        # The first row of what the module before returned.
        last_output: Tensor | None = None
        # Paths of the modules that do not pass on the stream; a dict, because they are named in order.
        strangers = dict[str, None]()

        def enter(path: str, hidden: Tensor) -> None:
            # NaNs are reported elsewhere.
            row = hidden.detach()[:1].nan_to_num()
            if last_output is None or row.shape != last_output.shape or not torch.equal(row, last_output.to(row).nan_to_num()):
                strangers[path] = None

        def leave(path: str, hidden: Tensor) -> None:
            nonlocal last_output
            is_first = path == self.paths[0]
            if is_first:
                # A new forward pass.
                strangers.clear()
            changes_width = not is_first and last_output is not None and hidden.shape[-1] != last_output.shape[-1]
            if hidden.dim() > 3 or changes_width:
                strangers[path] = None
            # A copy, because additions in place change the output; detached first, as checkpointing counts saved tensors.
            # One copy at a time: those of all modules may be larger than the memory that is left.
            last_output = hidden.detach()[:1].clone()
            if path == self.paths[-1] and self._model.stream == "unknown":
                self._model = settled(self._model, self.module, self.anatomy, list(strangers))
                end()

        if self._model.stream != "unknown":
            return []
        hooks: list[tuple[torch.nn.Module, bool, Callable[[Tensor], None]]] = []
        for path in self.paths:
            module = self.module.get_submodule(path)
            # No module of the stream runs before the first one.
            if path != self.paths[0]:
                hooks.append((module, True, partial(enter, path)))
            hooks.append((module, False, partial(leave, path)))
        return hooks

    @property
    def sites(self) -> tuple[str, ...]:
        return self.model.layers if self.reads_residual else tuple(point.name for point in self.reading.points)

    @property
    def widths(self) -> tuple[int, ...]:
        return self.reading.widths

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        """The hook points that `at=` selects in this model.

        Raises:
            LayersimError: the model lacks them.
        """
        anatomy = self.anatomy_with_sublayers()
        items = items_of(at)
        prefixes = tuple(f"{stack.name}." for stack in anatomy.stacks) if anatomy.kind == "stages" else ()
        # Names with a stage may lie in other stages than the one whose residual stream is read.
        if any(isinstance(item, str) and item.startswith(prefixes) for item in items):
            # Each stage has a number of positions of its own, so families keep the names of their stages.
            at = [f"{anatomy.stack}.{item}" if item in SITE_NAMES else item for item in items]
            anatomy = choose_stacks(self.module, anatomy, None)
        points = points_at(site_map(self.module, anatomy), at, per_head)
        refuse_sharded_sites(self.module, points)
        return self._with_channels(points)

    def anatomy_with_sublayers(self) -> Anatomy:
        """The anatomy, with what a forward pass shows if blocks are missing in the table of layouts."""
        if self.anatomy.watched is None and self.anatomy.unknown_blocks and self.in_this_process:
            self.anatomy = replace(self.anatomy, watched=self.watched_anatomy)
        return self.anatomy

    @cached_property
    def watched_anatomy(self) -> WatchedAnatomy | None:
        """What a forward pass over a synthetic row shows of the model; None if the pass fails."""
        return self.on_synthetic_row(self._find_anatomy)

    def _find_anatomy(self, row: Batch) -> WatchedAnatomy:
        recorded = record_forward(self.module, lambda: self.call(row))
        anatomy = find_anatomy(recorded, self.paths, self.anatomy.config, self._model.torch_dtype)
        hidden = recorded.runs_of(anatomy.blocks[-1].path)[-1].output
        if hidden is None:
            return anatomy
        for head in (*self._heads, *self._heads_of(recorded, int(row.tokens[0, 0]))):
            gap = self._head_gap(head, hidden, recorded.output, row)
            if gap <= rounding(self._model.torch_dtype, torch.float32):
                return replace(anatomy, head=head, head_gap=gap)
        return anatomy

    def _with_channels(self, points: tuple[HookPoint, ...]) -> tuple[HookPoint, ...]:
        """Hook points with the channel axes of their modules, if the model has convolutions."""
        if self.anatomy.library == "transformer_lens" or not self.anatomy.has_convolution:
            return points
        return tuple(replace(point, channels=channels_at(self.module, point.module)) for point in points)

    def stream_sums(self) -> tuple[StreamSum, ...]:
        """The additions to the residual stream (`StreamSum`) that involve a site chosen by `read_at`."""
        if self.reads_residual:
            return ()
        return sums_with(site_map(self.module, self.anatomy_with_sublayers()), self.sites)

    def without_stack(self, at: Any) -> Any:
        """Replace "encoder.attn_out" in `at` by "attn_out" if the encoder is read, and likewise for other stacks.

        Only names of families are changed.

        Args:
            at: see `hook_points`.
        """
        prefix = f"{self.anatomy.stack}."
        items = items_of(at)
        renamed: list[Any] = []
        for item in items:
            family = item.removeprefix(prefix) if isinstance(item, str) else item
            renamed.append(family if family in SITE_NAMES else item)
        return at if renamed == items else renamed

    def read_at(self, points: tuple[HookPoint, ...]) -> None:
        """Read these hook points instead of the residual layers in later forward passes."""
        self.reading = self.residual if points == self.residual.points else SitesRead(points, None)

    @contextmanager
    def reading_at(self, points: tuple[HookPoint, ...]) -> Iterator[None]:
        """A context manager in which forward passes read other hook points."""
        previous = self.reading
        self.read_at(points)
        try:
            yield
        finally:
            self.reading = previous
