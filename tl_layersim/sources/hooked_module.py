"""HookedSource: reads activations of a torch module in this process by forward hooks.

Hooks are placed on TransformerLens hook points if the model has them. The model itself is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from ..activations.block_call import BlockCall, record_call, with_own_residual
from ..activations.row_pools import AnyKernel
from ..activations.view import Kernel, Reduced, SiteBuffer, View, kept_of
from ..architectures.anatomy import Anatomy
from ..architectures.blocks import anatomy_of, choose_blocks, refuse_paths, with_blocks
from ..architectures.hook_points import HookPoint, multiplied, positions_of, read_in_next_run, residual_points, to_positions
from ..architectures.module_paths import modules_by_path
from ..architectures.output_heads import lens_of, possible_heads
from ..architectures.unembed import Head, tensor_of, unembed_gap
from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from ..data.batches import Batch
from .forward_arguments import call_on, device_of, forward_arguments, refusing_failed_forward
from .hooks import ForwardRun, in_this_thread, on_enter, on_leave, on_tensor, temporary_hooks, unrecorded
from .identity import StoredWeights, hooks_on
from .kept_activations import KeptActivations
from .model_description import describe, describe_transformer_lens
from .out_of_memory import reduce_batch, refusing_out_of_memory
from .source import CanReadSites, tells_heads_apart


def whole_tensor(hidden: Tensor, name: str) -> Tensor:
    """Return activations as a plain tensor.

    Args:
        hidden: a plain or a distributed tensor.
        name: name of the site.

    Raises:
        LayersimError: each process holds only a part.
    """
    shared: Any = hidden
    placements = getattr(shared, "placements", None)
    if placements is None:
        return hidden
    if not all(placement.is_replicate() for placement in placements):
        raise LayersimError(
            f"The activations at {name}, {' x '.join(map(str, hidden.shape))}, are split over several processes (sequence "
            "parallelism); every process must hold all of them."
        )
    whole: torch.Tensor = shared.to_local()
    return whole


class HookedSource(CanReadSites):
    """Source that reads activations of a torch module in this process by forward hooks.

    The blocks must run one after the other, once each, and the first axis of their outputs must be the batch. TorchScript
    modules cannot be read.

    Args:
        model: HookedTransformer, TransformerBridge, a Hugging Face model or another torch module.
        layers: paths of the blocks; None to find them by the layout.
        unembed: paths of the final norm and the head; None to find them by the layout.
        anatomy: the anatomy of the model if it is known; None to find it.
    """

    can_run_tail = True
    _kept_activations: KeptActivations | None = None  # of the run, if it passes over its data twice
    _is_summing: bool = False  # whether the forward passes are those of `sums`

    def __init__(
        self,
        model: torch.nn.Module,
        layers: list[str] | None = None,
        unembed: list[str] | None = None,
        anatomy: Anatomy | None = None,
    ) -> None:
        self.module = model
        self.anatomy = anatomy_of(model) if anatomy is None else anatomy
        self.blocks: list[torch.nn.Module]
        self._open(layers, unembed)
        self.blocks = [self.module.get_submodule(path) for path in self.paths]
        if self.anatomy.library == "transformer_lens":
            points = tuple(HookPoint(name, name) for name in self._model.layers)
        else:
            points = residual_points(self._model.layers, self.paths)
        self._start_reading(points, tuple(range(len(points))))
        self.unembed = lens_of(self.module, self._model.head)
        self._check: Callable[[Batch], None] | None = None
        self.choose_row_head()

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        """Choose the blocks, and set the description of the model."""
        model = self.module
        if self.anatomy.library == "transformer_lens":
            refuse_paths(layers, unembed, "TransformerLens models")
            self._model = describe_transformer_lens(model)
            paths = [f"blocks.{number}" for number in range(len(model.blocks))]  # type: ignore[arg-type]  # its list of blocks
            self.anatomy = with_blocks(model, self.anatomy, paths, named=False)
        else:
            self.anatomy = choose_blocks(model, self.anatomy, layers)
            tokenizer = getattr(model, "tokenizer", None)
            self._model = describe(model, self.anatomy, self.anatomy.model, tokenizer, unembed)
            self._heads = possible_heads(model, self.anatomy, self._model.head) if unembed is None else ()

    @property
    def is_settled(self) -> bool:
        return super().is_settled and self._check is None

    @contextmanager
    def keeping_activations(self) -> Iterator[None]:
        """A context manager in which `sums` runs the model once on data that fits into one forward pass."""
        self._kept_activations = KeptActivations()
        try:
            yield
        finally:
            self._kept_activations = None

    def sums(self, batch: Batch, kernels: Mapping[str, AnyKernel]) -> list[Reduced]:
        self._is_summing = True
        try:
            return super().sums(batch, kernels)
        finally:
            self._is_summing = False

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        kept = self._kept_activations
        # Checks of the model, which are not summed, run it on other rows and at other sites.
        if kept is None or not self._is_summing:
            return super().run(batch, kernels)
        # Calls of blocks hold more than activations, and processes that share the weights run the same forward passes.
        if self.calling or weight_peers(self.module):
            return super().run(batch, kernels)
        view = kept.of(batch)
        if view is None:
            view = self.collect(batch)
            kept.keep(batch, view)
        # Each pass over the data has a memo of its own, and the head may have been chosen since.
        return reduce_batch(batch, kernels, replace(view, memo={}, unembed=self.unembed))

    def renew_description(self) -> None:
        super().renew_description()
        weights = self._model.weights
        if isinstance(weights, StoredWeights):
            self._model = replace(self._model, changes=hooks_on(weights.module))

    def _set_head(self, head: Head) -> None:
        super()._set_head(head)
        self.unembed = lens_of(self.module, head)

    def check_first_row(self, check: Callable[[Batch], None]) -> None:
        """Store a function that checks one batch; the next `settle` calls it once."""
        self._check = check

    def count_positions(self, batch: Batch) -> int:
        counts: list[int] = []
        point = self.reading.points[0]

        def count(hidden: Tensor) -> None:
            counts.append(positions_of(hidden.shape, point.channels, point.name))
            forward.stop()

        refusing = refusing_failed_forward(self.module)
        with refusing, temporary_hooks() as handles, torch.no_grad(), self.evaluating(), ForwardRun() as forward:
            handles.append(on_tensor(self._module_at(point.module), point.incoming, count))
            self.call(batch)
        if not counts:
            raise self._wrong_order(f"{point.name} was not reached")
        return counts[0]

    def settle(self, batch: Batch) -> None:
        self.run_check(batch)
        super().settle(batch)

    def run_check(self, batch: Batch) -> None:
        """Run the check of the model on the first batch; later calls do nothing.

        Args:
            batch: rows with all inputs that the check needs.
        """
        if self._check is not None:
            check = self._check
            self._check = None
            check(batch)

    def note_widths(self, view: View) -> None:
        """Store the widths of the sites in `view`, unless these sites are the residual layers."""
        if not self.reads_residual:
            self.reading = replace(self.reading, widths=view.widths)

    def _module_at(self, path: str) -> torch.nn.Module:
        hook_modules: Any = self.module.hook_dict if self.anatomy.library == "transformer_lens" else {}
        hook_module: torch.nn.Module | None = hook_modules.get(path)
        return self.module.get_submodule(path) if hook_module is None else hook_module

    def modules_read(self) -> dict[tuple[torch.nn.Module, bool], list[int]]:
        """A dict from (module, whether its input is read) to the indices of the sites there."""
        sites_by_module: dict[tuple[torch.nn.Module, bool], list[int]] = {}
        for site, point in enumerate(self.reading.points):
            sites_by_module.setdefault((self._module_at(point.module), point.incoming), []).append(site)
        return sites_by_module

    def _collect(self, batch: Batch) -> View:
        points = self.reading.points
        order = self.reading.order
        sites_read: list[int] = []
        calls: list[BlockCall] = []
        runs: Counter[int] = Counter()
        counted_positions, token_fields = kept_of(batch)
        rows, pos = batch.counted.shape
        buffer = SiteBuffer(self.sites, counted_positions, (rows, pos), batch.pooled, batch.has_positions)

        def read(sites: list[int], hidden: Tensor) -> None:
            if self.aside():
                return
            for site in read_in_next_run(points, sites, runs):
                point = points[site]
                if site in sites_read:
                    raise self._wrong_order(f"{point.name} (module {point.module}) was reached twice")
                if order is not None and site != order[len(sites_read)]:
                    expected = points[order[len(sites_read)]].name
                    raise self._wrong_order(f"{point.name} (module {point.module}) was reached before {expected}")
                whole = whole_tensor(hidden, point.name)
                by_position = to_positions(whole, point.channels, point.name, batch.token_positions)
                buffer.put(site, multiplied(by_position, point.multiplier), point.part)
                sites_read.append(site)
            has_calls = not self.calling or len(calls) == len(self.blocks)
            if len(sites_read) == len(points) and has_calls:
                forward.stop()

        refusing = refusing_failed_forward(self.module)
        with refusing, torch.no_grad(), temporary_hooks() as handles, ForwardRun() as forward:
            if self.calling:
                handles += self._call_hooks(calls)
            for (module, incoming), sites in self.modules_read().items():
                handles.append(on_tensor(module, incoming, partial(read, sites)))
            self.call(batch)
        if len(sites_read) < len(points):
            raise self._wrong_order(f"{len(sites_read)} of {len(points)} sites were reached")
        if self.calling and len(calls) != len(self.blocks):
            raise self._wrong_order(f"it made {len(calls)} calls of {len(self.blocks)} blocks")
        return buffer.view(token_fields, self.unembed, calls)

    def _call_hooks(self, calls: list[BlockCall]) -> list[RemovableHandle]:
        """Register hooks that append each block call to `calls`."""
        arguments: dict[torch.nn.Module, tuple[Any, dict[str, Any]]] = {}

        def enter(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments[block] = with_own_residual(args, kwargs)

        def leave(block: torch.nn.Module, _args: Any, output: Any) -> None:
            if not self.aside():
                args, kwargs = arguments.pop(block)
                calls.append(record_call(block, args, kwargs, output))

        # Before all other hooks, which will change the arguments once more when the block is called again.
        enter_handles = [on_enter(block, in_this_thread(enter), first=True) for block in self.blocks]
        leave_handles = [on_leave(block, in_this_thread(leave)) for block in self.blocks]
        return enter_handles + leave_handles

    def _wrong_order(self, reason: str) -> LayersimError:
        """The error for a forward pass that does not reach each site once and in order."""
        return LayersimError(
            f"The forward pass of {self.model.name} must reach each site once, in the order of the blocks, but {reason}. Each "
            "block must run once, and no hook may run the model again."
        )

    def unembed_gap(self, batch: Batch) -> Tensor:
        row = batch.first_row
        gap = None if tells_heads_apart(row) else self.on_synthetic_row(self._gap_on_row)
        return self._gap_on_row(row) if gap is None else gap

    def _gap_on_row(self, row: Batch) -> Tensor:
        assert self.unembed is not None
        last_point = self.residual.points[-1]
        residuals: list[Tensor] = []

        def append(hidden: Tensor) -> None:
            if not self.aside():
                residuals.append(hidden)

        with refusing_out_of_memory(row), temporary_hooks() as handles, torch.no_grad():
            handles.append(on_tensor(self._module_at(last_point.module), False, append))
            logits = tensor_of(self.call(row))
            if not residuals:
                raise self._wrong_order(f"{last_point.name} was not reached")
            # The run of the last block that is measured.
            residual = residuals[0]
            self.choose_head(residual, logits, row)
            return unembed_gap(self.unembed, residual[0], logits[0], row.attention[0])

    def call(self, batch: Batch, **keywords: Any) -> Any:
        """Run one forward pass over a batch, with further keyword arguments."""
        embedding = self.anatomy.embedding
        device = device_of(self.module if embedding is None else embedding)
        # accelerate loads offloaded weights and moves their inputs by its own hooks.
        device = torch.device("cpu") if device.type == "meta" else device
        args, options = forward_arguments(self.module, batch, self._model)
        # Graphs of `module.compile()` have no place for hooks.
        compiled = any(module._compiled_call_impl is not None for module in modules_by_path(self.module).values())
        with unrecorded(), torch.compiler.set_stance("force_eager") if compiled else nullcontext():
            return call_on(device, self.module, args, options | keywords)
