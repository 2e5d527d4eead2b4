"""Source of a model in this process that is read by forward hooks: HookedTransformer, TransformerBridge, Hugging Face models.

Hooks are placed on TransformerLens hook points where the model has them. The model itself is not changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from ..data.batches import Batch
from .block_call import BlockCall, first_tensor, record_call
from .feature_maps import positions_of
from .firing_order import firing_order
from .head_layout import open_head
from .hook_point import HookPoint, residual_points
from .hooks import (
    ForwardRun,
    StopForward,
    eval_mode,
    in_kernel,
    in_this_thread,
    kernels_alone,
    on_enter,
    on_leave,
    temporary_hooks,
    uncompiled,
)
from .layout import (
    find_blocks,
    find_embedding,
    refuse_no_weights,
    refuse_paths,
    refusing_failed_forward,
    same_stream,
    settled,
)
from .model_description import describe
from .model_info import Model
from .model_inputs import device_of, forward_arguments
from .out_of_memory import refusing_full_memory, refusing_one_row
from .point_source import PointSource, SitesRead
from .reading import Call, Callbacks, Choice, Reading, Tap, stack_side
from .recorder import Recorder
from .transformer_lens import is_transformer_lens, open_transformer_lens
from .unembed import Unembed, tensor_of, unembed_gap
from .view import Kernel, Reduced, View, reduce, tokens_alone


class HookedSource(PointSource):
    """Source of a model whose blocks are modules of this process, read by forward hooks.

    Args:
        model: HookedTransformer, TransformerBridge, or a Hugging Face model.
        layers: paths of the blocks of a plain model whose layout is not known.
        unembed: paths of its final norm and head, where the layout does not give them.
    """

    can_hook = True

    def __init__(self, model: torch.nn.Module, layers: list[str] | None = None, unembed: list[str] | None = None) -> None:
        self.module = model
        self._embed: torch.nn.Module | None
        self.blocks: list[torch.nn.Module]
        self._is_transformer_lens = is_transformer_lens(model)
        self._open(layers, unembed)
        self._place_blocks()
        self._check: Callable[[Batch], None] | None = None

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        """Set the paths of the blocks, the embedding and the description of the model."""
        model = self.module
        if self._is_transformer_lens:
            refuse_paths(layers, unembed, "TransformerLens models")
            self._embed, self._model = open_transformer_lens(model)
            self.paths, self._named = [f"blocks.{number}" for number in range(len(model.blocks))], False  # type: ignore[arg-type]
        else:
            self._check_weights(model)
            self.paths, self._named = find_blocks(model, layers), layers is not None
            self._embed = find_embedding(model)
            tokenizer = getattr(model, "tokenizer", None)
            self._model = describe(model, self.paths, type(model).__name__, tokenizer, unembed, self._named)
        self._home, self._head_paths = self.paths, unembed

    def _check_weights(self, model: torch.nn.Module) -> None:
        """Refuse a model whose weights were never loaded."""
        refuse_no_weights(model)

    def _place_blocks(self) -> None:
        """Set the blocks, the places of the residual layers and the head."""
        if self._is_transformer_lens:
            self.blocks = list(self.module.blocks)  # type: ignore[arg-type]  # its list of blocks
            points = tuple(HookPoint(name, name) for name in self._model.layers)
        else:
            self.blocks = [self.module.get_submodule(path) for path in self.paths]
            points = residual_points(self._model.layers, self.paths)
        self._start_reading(points, tuple(range(len(points))))
        self.head, self.unembed = self._open_head()

    def _open_head(self) -> tuple[torch.nn.Module | None, Unembed | None]:
        """The module that gives logits (before scale and soft-cap), and the logit lens."""
        return (None, None) if self._model.head is None else open_head(self.module, self._model.head)

    @property
    def model(self) -> Model:
        return self._model

    def aside(self) -> bool:
        """True while the forward pass is not to be recorded."""
        return False

    def evaluating(self) -> AbstractContextManager[None]:
        return eval_mode(self.module)

    @property
    def is_settled(self) -> bool:
        return super().is_settled and self._check is None

    def check_first_row(self, check: Callable[[Batch], None]) -> None:
        """Let `settle` call `check` with its batch, once."""
        self._check = check

    def count_positions(self, batch: Batch) -> int:
        seen, point = list[int](), self._reading.points[0]

        def note(given: Any) -> None:
            seen.append(positions_of(first_tensor(given).shape, point.channels, point.name))
            run.stop()

        enter = in_this_thread(lambda _m, args, kwargs=None: note((*args, *(kwargs or {}).values())))
        leave = in_this_thread(lambda _m, _args, output: note(output))
        with temporary_hooks() as handles, torch.no_grad(), self.evaluating(), ForwardRun() as run:
            module = self._module_at(point.module)
            handles.append(on_enter(module, enter) if point.incoming else on_leave(module, leave))
            self._forward(batch)
        if not seen:
            raise self._not_in_order(f"no {point.name}")
        return seen[0]

    def settle(self, batch: Batch) -> None:
        if self._check is not None:
            check, self._check = self._check, None
            check(batch)
        if self._model.stream == "unknown":
            row = batch.first_row
            with refusing_one_row(row), torch.no_grad(), ForwardRun() as run, self.settling(run):
                self._forward(row)
        if self._reading.order is None:
            points, row = self._reading.points, batch.short_row
            modules = {point.module: self._module_at(point.module) for point in points}
            self._reading = SitesRead(points, *firing_order(points, modules, lambda: self._forward(row), row.token_positions))

    def note_widths(self, view: View) -> None:
        """Take the widths of sites from a view, where no forward pass of this package has shown them."""
        if not self.reads_residual:
            self._reading = replace(self._reading, widths=view.widths)

    def _module_at(self, path: str) -> torch.nn.Module:
        """The module at a path, or the hook point of a TransformerLens model of that name."""
        points: Any = self.module.hook_dict if self._is_transformer_lens else {}
        point: torch.nn.Module | None = points.get(path)
        return self.module.get_submodule(path) if point is None else point

    def _places(self) -> Reading:
        """The sites, for a recorder."""
        points, output = self._reading.points, self.residual_points[-1].name
        taps = tuple(Tap(self._module_at(p.module), p.incoming, p.part, p.module, p.channels) for p in points)
        names = [point.name for point in points]
        last = names.index(output) if output in names else None
        # The sites of the residual stream lie inside the module that runs the blocks; others may lie anywhere.
        return Reading(self.sites, taps, self._reading.order, self.reads_residual, last)

    @contextmanager
    def settling(self, run: ForwardRun | None = None, on_error: Callable[[Exception], None] | None = None) -> Iterator[None]:
        """A context whose first forward pass tests whether the modules pass on one residual stream, where this is not known.

        Args:
            run: the run that ends after the test; None to let the forward pass run to its end.
            on_error: as in `tapped`.
        """
        if self._model.stream != "unknown":
            yield
            return
        # Each thread runs its own forward pass.
        seen = threading.local()

        def before(path: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            last: Tensor | None = getattr(seen, "last", None)
            if last is None or not same_stream(first_tensor((*args, *(kwargs or {}).values())).detach()[:1], last):
                seen.strangers = [*getattr(seen, "strangers", ()), path]

        def after(number: int, output: Any) -> None:
            if number == 0:
                seen.strangers = []
            if first_tensor(output).dim() > 3:  # a feature map of a convolution
                seen.strangers.append(self.paths[number])
            # A copy, because additions in place change the output; detached first, as checkpointing counts saved tensors.
            seen.last = first_tensor(output).detach()[:1].clone()
            if number == len(self.blocks) - 1 and self._model.stream == "unknown":
                for handle in handles:
                    handle.remove()
                self._model = settled(self._model, self.module, self.paths, self._named, getattr(seen, "strangers", []))
                if run is not None:
                    run.stop()

        def guarded(call: Callable[..., None]) -> Callable[..., None]:
            def hook(*given: Any) -> None:
                if in_kernel() or torch._C._current_graph_task_id() != -1 or self._model.stream != "unknown":
                    return
                try:
                    call(*given)
                except StopForward:
                    raise
                except Exception as error:
                    if on_error is None:
                        raise
                    on_error(error)

            # The recorder reports a compiled forward pass.
            return uncompiled(hook, lambda: None) if on_error is not None else in_this_thread(hook)

        with temporary_hooks() as handles:
            for number, (path, block) in enumerate(zip(self.paths, self.blocks, strict=True)):
                if number:
                    enter = guarded(lambda _m, args, kwargs=None, path=path: before(path, args, kwargs))
                    handles.append(on_enter(block, enter))
                leave = guarded(lambda _m, _a, output, number=number: after(number, output))
                handles.append(on_leave(block, leave))
            yield

    def peers(self) -> frozenset[int]:
        return weight_peers(self.module)

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        view = self.collect(batch)
        with kernels_alone(), refusing_full_memory(batch, ", ".join(kernels)):
            return reduce(kernels, view)

    def collect(self, batch: Batch) -> View:
        return self._parts.collect(batch, self._collect, self._indivisible)

    def _collect(self, batch: Batch) -> View:
        """The view of one forward pass over the batch."""
        views: list[View] = []

        def keep(view: View) -> None:
            views.append(view)
            if not self.calling or len(calls) == len(self.blocks):
                run.stop()

        calls: list[BlockCall] = []
        with (
            torch.no_grad(),
            _noting(self.blocks if self.calling else [], calls, self.aside),
            self.tapped(keep, lambda _call: Choice(batch.counted, batch.attention, batch.pooled, batch.has_positions)),
            ForwardRun() as run,
        ):
            self._forward(batch)
        if views:
            view = views[0]
            # The batch has all of these fields, also where the embedding of the model is not known and has no hook.
            known, device = tokens_alone(batch), view.activations.device
            names = ("tokens", "next_token", "row", "column", "labels")
            given = {name: getattr(known, name).to(device) for name in names if getattr(known, name) is not None}
            if self.calling and len(calls) != len(self.blocks):
                raise self._not_in_order(f"{len(calls)} calls of {len(self.blocks)} blocks")
            return replace(view, calls=tuple(calls) if self.calling else None, **given)
        raise self._not_in_order(f"{len(self.sites)} sites")

    def _not_in_order(self, given: str) -> LayersimError:
        return LayersimError(
            f"The forward pass of {self.model.name} did not go through its layers in order: {given}. Name the blocks in the "
            "order in which they run, as layers=[...]."
        )

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self.unembed is not None
        row = batch.first_row
        seen: list[Tensor] = []
        note = in_this_thread(lambda _m, _a, output: seen.append(first_tensor(output)))
        with refusing_one_row(row), temporary_hooks() as handles, torch.no_grad():
            handles.append(on_leave(self._module_at(self.residual_points[-1].module), note))
            logits = tensor_of(self.call(row))
            return unembed_gap(self.unembed, seen[-1][0], logits[0], row.attention[0])

    def _forward(self, batch: Batch) -> None:
        """Run one forward pass, and explain an error that it raises.

        Raises:
            LayersimError: the model cannot be run on tokens and a mask alone.
        """
        with refusing_failed_forward(self.module, batch.inputs):
            self.call(batch)

    def call(self, batch: Batch, **more: Any) -> Any:
        """One forward pass, over all inputs of the batch, with `more` keyword arguments."""
        device = device_of(self.module)
        if self._embed is not None:
            device = next(self._embed.parameters(), torch.empty(0, device=device)).device
        # accelerate loads offloaded weights and moves their inputs by its own hooks.
        device = torch.device("cpu") if device.type == "meta" else device
        args, options = forward_arguments(self.module, batch, self._model)
        options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
        return self.module(*(value.to(device) for value in args), **options, **more)

    @contextmanager
    def tapped(
        self,
        on_view: Callable[[View], None],
        choose: Callable[[Call], Choice],
        compare: Callable[[Tensor, torch.dtype], None] | None = None,
        on_error: Callable[[Exception], None] | None = None,
    ) -> Iterator[None]:
        """A context with hooks on every site, in which each complete forward pass gives one view.

        Args:
            on_view: called when the last site is read.
            choose: gives the positions of a call that count.
            compare: called once, after the head has run, with `unembed_gap` of lens and logits, and the dtype of the logits.
            on_error: takes errors of these hooks; forward passes of all threads are then read. None: errors are raised, and
                only forward passes that this thread starts itself are read.
        """
        recorder = Recorder(
            reading=(reading := self._places()),
            callbacks=Callbacks(on_view, choose, compare, on_error),
            # Made anew for each forward pass: weights may change their dtype, device or module in a loop.
            lens=lambda: self._open_head()[1],
            # TransformerLens's run_with_hooks and generate call the model's `forward` without its own hooks.
            direct=self._is_transformer_lens,
            aside=self.aside,
            stack=stack_side(self.module, self.paths),
        )
        with temporary_hooks() as handles:
            for level, module in enumerate(self.stacks()):
                handles += recorder.watch(module, level)
            if self._embed is not None:
                handles.append(recorder.watch_embedding(self._embed))
            if self._is_transformer_lens:
                handles.append(recorder.watch_mask(self.blocks[0]))
            for (module, incoming), sites in reading.by_module().items():
                handles.append(recorder.watch_sites(module, incoming, sites))
            if compare is not None and self.head is not None:
                handles.append(recorder.watch_head(self.head))
            yield

    def stacks(self) -> list[torch.nn.Module]:
        """The model and the modules inside it that contain all blocks, outermost first; a caller may run each of them."""
        modules = [self.module]
        inner = vars(self.module).get("original_model")
        for root in (self.module, inner):
            names = {id(sub): name for name, sub in root.named_modules()} if isinstance(root, torch.nn.Module) else {}
            paths = [names.get(id(block)) for block in self.blocks]
            if root is None or None in paths:
                continue
            common: list[str] = []
            for parts in zip(*(str(path).split(".")[:-1] for path in paths), strict=False):
                if len(set(parts)) > 1:
                    break
                common.append(parts[0])
            modules += [root, *(root.get_submodule(".".join(common[: i + 1])) for i in range(len(common)))]
        return list(dict.fromkeys(modules))


@contextmanager
def _noting(blocks: list[torch.nn.Module], calls: list[BlockCall], aside: Callable[[], bool]) -> Iterator[None]:
    """A context with hooks that append each block's call, with all its arguments, to a list."""
    given: dict[torch.nn.Module, tuple[Any, dict[str, Any]]] = {}

    def before(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[block] = (args, kwargs)

    def after(block: torch.nn.Module, _args: Any, output: Any) -> None:
        if not aside():
            calls.append(record_call(block, *given.pop(block), output))

    with temporary_hooks() as handles:
        for block in blocks:
            # Before all other hooks, which will change the arguments once more when the block is called again.
            handles.append(on_enter(block, in_this_thread(before), first=True))
            handles.append(on_leave(block, in_this_thread(after)))
        yield
