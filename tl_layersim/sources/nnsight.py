"""NNsightSource: source of an nnsight model in this process, or in a local simulation of a server.

`TraceReader`, `read_step` and `remote_lens` are shipped to NDIF servers by value: they need torch and Python's library alone.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..activations.block_call import first_tensor, gradients, record_call, with_leaf, with_own_residual
from ..activations.row_pools import AnyKernel, PoolKernel, by_leaf, drawn
from ..activations.view import Kernel, Reduced, SiteBuffer, View, at_sites, kept_of, reduce
from ..architectures.anatomy import Anatomy
from ..architectures.blocks import anatomy_of, choose_blocks
from ..architectures.hook_points import SITE_NAMES, HookPoint, multiplied, positions_of, residual_points, to_positions
from ..architectures.module_paths import modules_by_path
from ..architectures.output_heads import lens_of, possible_heads
from ..architectures.site_selection import items_of, site_map
from ..architectures.unembed import Head, Unembed, tensor_of, unembed_gap
from ..core.errors import LayersimError, shown
from ..core.wording import with_article
from ..data.batches import Batch
from .activation_checks import refuse_not_finite
from .forward_arguments import call_on, device_of, forward_arguments, refuse_no_weights, refusing_failed_forward
from .identity import StoredWeights, edits_of, hooks_on
from .model_description import describe, processor_of
from .out_of_memory import refusing_out_of_memory
from .result_seals import are_two_norms, is_shape, sealed, ticket_of
from .source import CanReadSites, Source


@dataclass
class TraceStep:
    """A module's input or output that a trace reads.

    Attributes:
        path: path of the module.
        envoy: envoy of the module.
        incoming: True to read the input, False for the output.
        is_block: whether the module is a block, whose calls may be recorded.
        sites: index and hook point of each site in this tensor.
    """

    path: str
    envoy: Any
    incoming: bool
    is_block: bool
    sites: list[tuple[int, HookPoint]] = field(default_factory=list)


@dataclass
class TraceReader:
    """Reads a model's activations inside nnsight traces, and holds the model's logit lens.

    Attributes:
        model: the nnsight model, with its edits.
        names: names of the sites.
        steps: reads of each trace, in the order of the forward pass.
        unembed: the lens; None if the model has none.
        on_server: whether the traces run on a server, where the lens takes its dtype and device from the activations.
        differentiated: whether calls of blocks keep the autograd graph of the forward pass, see `BlockCall.graph`.
    """

    model: Any
    names: tuple[str, ...]
    steps: list[TraceStep]
    unembed: Unembed | None
    on_server: bool
    differentiated: bool

    def read(self, buffer: SiteBuffer, token_fields: Mapping[str, Tensor], calling: bool) -> View:
        """Read the sites inside a trace, and return them as a `View`.

        Args:
            buffer: empty buffer of the activations.
            token_fields: further fields of the view, `sample`.
            calling: whether the view carries block calls.
        """
        calls: list[Any] = []
        arguments: dict[str, Any] = {}
        block_output: Any = None
        for step in self.steps:
            read_step(step, buffer, arguments, calls if calling else None, self.differentiated)
            if step.is_block and not step.incoming:
                block_output = step.envoy.output
        lens = self.unembed
        if self.on_server and lens is not None:
            lens = None if block_output is None else remote_lens(lens, first_tensor(block_output))
        return buffer.view(token_fields, lens, calls)

    def positions_of_first_site(self) -> tuple[int, int]:
        """Numbers of rows and positions at the first site of a trace. `read` must follow before the model goes on."""
        step = self.steps[0]
        if step.incoming:
            args, kwargs = step.envoy.inputs
            hidden = first_tensor((*args, *kwargs.values()))
        else:
            hidden = first_tensor(step.envoy.output)
        point = step.sites[0][1]
        places = to_positions(hidden, point.channels, point.name, None)
        # A model of vectors has one position for each row.
        return places.shape[0], places.shape[1] if places.dim() > 2 else 1


def remote_lens(unembed: Unembed, hidden: Tensor) -> Unembed:
    """A copy of the logit lens with the dtype and device of the model on a server.

    A model without weights has the dtype of its configuration; the server may use another one.

    Args:
        unembed: the lens as it was made without weights.
        hidden: the output of the model's last block.
    """
    return replace(unembed, dtype=hidden.dtype, norm_dtype=hidden.dtype, device=hidden.device)


def is_edited(model: Any) -> bool:
    """Whether an nnsight model has edits (`model.edit()`), which run in each of its traces.

    A trace of such a model runs to the end of the forward pass: nnsight raises `OutOfOrderError` for an edit of a module that
    a stopped trace has not reached.
    """
    return bool(model._edits)


def read_step(
    step: TraceStep, buffer: SiteBuffer, arguments: dict[str, Any], calls: list[Any] | None, differentiated: bool
) -> None:
    """Inside a trace, read the sites of a `TraceStep` and append block calls to `calls`.

    Args:
        step: the step.
        buffer: buffer of the activations.
        arguments: arguments of the blocks entered so far, by path; changed in place.
        calls: list of block calls, changed in place; None if no analyzer needs them.
        differentiated: see `TraceReader`.
    """
    if step.incoming:
        args, kwargs = step.envoy.inputs
        if step.is_block and differentiated:
            arguments[step.path], step.envoy.inputs = with_leaf(args, kwargs)
        elif step.is_block and calls is not None:
            arguments[step.path] = with_own_residual(args, kwargs)
        value: Any = (*args, *kwargs.values())
    else:
        value = step.envoy.output
        if calls is not None and step.is_block:
            args, kwargs = arguments[step.path]
            calls.append(record_call(step.envoy, args, kwargs, value, differentiated))
    for site, point in step.sites:
        hidden = to_positions(first_tensor(value), point.channels, point.name, buffer.token_positions)
        buffer.put(site, multiplied(hidden, point.multiplier), point.part)


T = TypeVar("T")
K = TypeVar("K", bound=AnyKernel)


class NNsightSource(CanReadSites):
    """Source of an nnsight model: `TransformersModel`, `NNsight(module)`, or another class with `trace`.

    Kernels run inside the trace if the model is remote or blocks are called again; else on the view that a trace returns.

    Args:
        model: the nnsight model.
        layers: paths of the blocks, None to find them by the layout.
        unembed: paths of the final norm and the head, None to find them.
        remote: False for this process, "local" for nnsight's simulation of a server; `RemoteSource` is for real servers.
        anatomy: the anatomy of the model if it is known; None to find it.
    """

    def __init__(
        self,
        model: Any,
        layers: list[str] | None,
        unembed: list[str] | None,
        remote: bool | str,
        anatomy: Anatomy | None = None,
    ) -> None:
        import nnsight

        # Functions of this package and of a user's analyzers are shipped by value: the server does not have them.
        nnsight.register("tl_layersim")
        self.envoy = model
        self.where = _trace_options(model, remote)
        self._remote = remote
        self.in_this_process = remote in (False, "local")
        if not getattr(model, "dispatched", True) and self.in_this_process:
            # Weights that are loaded at the first trace have neither a hash nor an evaluation mode before it.
            model.dispatch()
            # It replaces the modules of which the anatomy was made.
            anatomy = None
        self.module: torch.nn.Module = model._module
        if self.in_this_process:
            refuse_no_weights(self.module)
        self.anatomy = choose_blocks(self.module, anatomy or anatomy_of(self.module), layers)
        source = type(model).__name__
        if remote:
            source += f" (remote={shown(remote)})"
        tokenizer = getattr(model, "tokenizer", None)
        description = describe(self.module, self.anatomy, source, tokenizer, unembed)
        self._heads = possible_heads(self.module, self.anatomy, description.head) if unembed is None else ()
        changes = "; ".join(filter(None, (edits_of(model), description.changes)))
        processor = processor_of(model) or description.processor
        self._model = replace(description, processor=processor, changes=changes)
        # By module, because nnsight may rename an envoy.
        self._envoys = {id(envoy._module): envoy for envoy in self.envoy.modules()}
        self.blocks = [self._envoy_at(path) for path in self.paths]
        # Built from nnsight envoys, which stand for the modules in this process or on a server.
        self.lens = lens_of(self.module, self._model.head, self._envoy_at)
        points = residual_points(self._model.layers, self.paths)
        events = (*points, *self._events())
        block_numbers = {path: number for number, path in enumerate(self.paths)}

        def forward_order(event: int) -> tuple[int, bool]:
            # Block by block, the input of a block before its output.
            point = events[event]
            return block_numbers[point.module], not point.incoming

        order = sorted(range(len(events)), key=forward_order)
        self._start_reading(points, tuple(order))
        self.choose_row_head()

    def renew_description(self) -> None:
        super().renew_description()
        weights = self._model.weights
        if isinstance(weights, StoredWeights):
            changes = filter(None, (edits_of(self.envoy), hooks_on(weights.module)))
            self._model = replace(self._model, changes="; ".join(changes))

    def _envoy_at(self, path: str) -> Any:
        """The envoy of the module at a path, even if nnsight renames it."""
        return self._envoys[id(self.module.get_submodule(path))]

    def _set_head(self, head: Head) -> None:
        super()._set_head(head)
        self.lens = lens_of(self.module, head, self._envoy_at)

    def _events(self) -> tuple[HookPoint, ...]:
        events: list[HookPoint] = []
        for path in self.paths:
            events.append(HookPoint(path, path, incoming=True))
            events.append(HookPoint(path, path, incoming=False))
        return tuple(events)

    def hook_points(self, at: Any, per_head: bool) -> tuple[HookPoint, ...]:
        points = super().hook_points(self._without_aliases(at), per_head)
        for point in points:
            if point.run is not None:
                raise LayersimError(
                    f"`at` names {point.name}, one of several runs of a module, and a trace of nnsight reads modules that run "
                    "once. Measure the torch module itself in this process."
                )
        return points

    def _without_aliases(self, at: Any) -> Any:
        """Replace names that nnsight's `rename=` gives to modules by the paths of the modules.

        Args:
            at: see `hook_points`. A pattern is replaced only if it matches no other name.
        """
        aliases = self._aliases()
        if not aliases:
            return at
        paths: list[Any] = []
        for item in items_of(at):
            if isinstance(item, str):
                paths += self._paths_of_alias(item, aliases)
            else:
                paths.append(item)
        return paths

    def _aliases(self) -> dict[str, str]:
        """Path of a module by each further name that nnsight's `rename=` gives it."""
        from nnsight.intervention.aliasing import spellings

        rename = self.envoy._rename
        aliases: dict[str, str] = {}
        if not rename:
            return aliases
        root = self.envoy.path
        for path, module in modules_by_path(self.module).items():
            if path:
                # The first spelling is the path itself.
                for spelling in spellings(rename, f"{root}.{path}", module)[1:]:
                    aliases[spelling.removeprefix(f"{root}.")] = path
        return aliases

    def _paths_of_alias(self, name: str, aliases: Mapping[str, str]) -> list[str]:
        """Paths of the modules that a name or pattern means by an alias; the name itself if it means none."""
        sites = site_map(self.module, self.anatomy)
        names = {site.point.name for site in sites.sites} | set(sites.other_names)
        if name in SITE_NAMES or fnmatch.filter(names, name):
            return [name]
        matches = fnmatch.filter(aliases, name)
        return list(dict.fromkeys(aliases[match] for match in matches)) or [name]

    def call(self, batch: Batch) -> Any:
        # Outside nnsight.
        return call_on(device_of(self.module), self.module, *forward_arguments(self.module, batch, self._model))

    def steps(self) -> list[TraceStep]:
        """The module inputs and outputs that a trace reads, in forward order."""
        points = self.reading.points
        order = self.reading.order
        assert order is not None
        events = (*points, *self._events())
        steps: list[TraceStep] = []
        for number in order:
            point = events[number]
            is_site = number < len(points)
            if not is_site and not self.calling:
                continue
            if not steps or steps[-1].path != point.module or steps[-1].incoming != point.incoming:
                envoy = self._envoy_at(point.module)
                steps.append(TraceStep(point.module, envoy, point.incoming, point.module in self.paths))
            if is_site:
                steps[-1].sites.append((number, point))
        return steps

    def reader(self) -> TraceReader:
        # Edits do not apply to a block that is called again.
        differentiated = self.calling and is_edited(self.envoy)
        return TraceReader(self.envoy, self.sites, self.steps(), self.lens, not self.in_this_process, differentiated)

    def count_positions(self, batch: Batch) -> int:
        args, options = forward_arguments(self.module, batch, self._model)
        point = self.reading.points[0]
        envoy = self._envoy_at(point.module)

        def run(where: dict[str, Any]) -> list[int]:
            return trace_shape(self.envoy, envoy, point.incoming, args, where | options)

        with refusing_out_of_memory(batch), refusing_failed_forward(self.module):
            shape = self.request(run, is_shape)
        return positions_of(shape, point.channels, point.name)

    def request(self, run: Callable[[dict[str, Any]], T], fits: Callable[[Any], bool], size: int = 0) -> T:
        """Open one trace: call `run` with a dict of nnsight's keyword arguments, such as `remote`.

        Args:
            run: opens the trace, which seals its result if it runs on a server (`result_seals.sealed`).
            fits: whether a result of a server has the form that `run` returns.
            size: approximate number of bytes of the result.
        """
        return run(dict(self.where))

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        if self._remote or self.calling:
            # Blocks are called again inside the trace.
            self.refuse_dependent_rows(batch)
            with refusing_out_of_memory(batch, f"a forward pass{self._indivisible()}"):
                return self._run_trace(batch, kernels)
        return super().run(batch, kernels)

    def _run_trace(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        args, options = forward_arguments(self.module, batch, self._model)
        return _trace(self.reader(), batch, (args, self.where | options), shippable(kernels), self.calling)

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self.lens is not None
        lens = self.lens
        row = batch.first_row
        attended = row.attention[0]
        args, options = forward_arguments(self.module, row, self._model)
        last_block = self.blocks[-1]
        on_server = not self.in_this_process

        def run(where: dict[str, Any]) -> Tensor:
            return _trace_gap(self.envoy, last_block, lens, on_server, args, where | options, attended)

        with refusing_out_of_memory(row):
            return self.request(run, are_two_norms)

    def collect(self, batch: Batch) -> View:
        if not self.in_this_process:
            return Source.collect(self, batch)
        # Outside a trace the modules of this process are in place of envoys.
        lens = lens_of(self.module, self._model.head)
        return replace(super().collect(batch), unembed=lens)

    def _collect(self, batch: Batch) -> View:
        not_finite, out = self._run_trace(batch, {"view": whole_view})
        rows = f"rows {batch.first} to {batch.first + len(batch.tokens) - 1}"
        refuse_not_finite([count.cpu() for count in not_finite], [self.sites], rows)
        fields: dict[str, Any] = out["view"]
        return View(**fields)


def own_function(kernel: Any) -> Any:
    """The analyzer's function that a kernel wraps in `functools.partial` or other objects."""
    # Argument of each wrapping function that holds the wrapped kernel.
    wrapped_argument = {at_sites: "kernel", by_leaf: "kernel", drawn: "read"}
    while isinstance(kernel, partial | PoolKernel):
        if isinstance(kernel, PoolKernel):
            kernel = kernel.sums
        elif kernel.func in wrapped_argument:
            kernel = kernel.keywords[wrapped_argument[kernel.func]]
        else:
            kernel = kernel.func
    return kernel


def shippable(kernels: Mapping[str, K]) -> dict[str, K]:
    """Register the kernels' Python packages with nnsight, which sends their code to servers; return the kernels."""
    import nnsight

    for kernel in kernels.values():
        nnsight.register(own_function(kernel).__module__.split(".")[0])
    return dict(kernels)


def _trace_options(model: Any, remote: bool | str) -> dict[str, Any]:
    """Keyword arguments of a trace in this process or in the local simulation."""
    from nnsight.intervention.backends.local import LocalSimulationBackend
    from nnsight.modeling.mixins.remotable import Remotable

    if not remote:
        return {}
    if isinstance(model, Remotable):
        return {"remote": remote}
    if remote == "local":
        # A wrapped module does not take `remote=`, which would be passed to its forward.
        # The simulation asks for the objects that a request references but does not contain.
        objects = partial(Remotable._remoteable_persistent_objects, model)
        return {"backend": LocalSimulationBackend(SimpleNamespace(_remoteable_persistent_objects=objects))}
    raise LayersimError(
        f"`remote` is {shown(remote)}, but `model` is {with_article(type(model).__name__)}, which a server cannot load "
        "by name. Use nnsight.TransformersModel('org/name', task='text-generation', tokenizer=tokenizer)."
    )


def whole_view(view: View) -> dict[str, Any]:
    """Kernel that returns everything in a view as a dict: activations, site names, widths and data by token."""
    return {"activations": view.activations, "sites": view.sites, "widths": view.widths} | view.token_fields()


def _trace(
    reader: TraceReader,
    batch: Batch,
    arguments: tuple[tuple[Tensor, ...], dict[str, Any]],
    kernels: dict[str, Kernel],
    calling: bool,
) -> Reduced:
    """Run kernels on a batch in one trace. The body is shipped, so it uses only local names, torch and the stdlib."""
    import nnsight

    model = reader.model
    names = reader.names
    counted_positions, token_fields = kept_of(batch)
    shape = (len(batch.counted), batch.counted.shape[1])
    pooled = batch.pooled
    has_tokens = batch.has_positions
    args, options = arguments
    ends_early = not is_edited(model)
    differentiated = reader.differentiated
    with torch.no_grad(), model.trace(*args, **options) as tracer:
        with gradients(differentiated):
            buffer = SiteBuffer(names, counted_positions, shape, pooled, has_tokens)
            view = reader.read(buffer, token_fields, calling)
            with torch.no_grad():
                reduced = reduce(kernels, view)
        out: Reduced = nnsight.save(reduced)
        if ends_early:
            tracer.stop()
    return out


def _trace_gap(
    model: Any,
    block: Any,
    unembed: Unembed,
    on_server: bool,
    args: tuple[Tensor, ...],
    options: dict[str, Any],
    attended: Tensor,
) -> Tensor:
    """The error of the logit lens on one row (`unembed_gap`), from one trace. The body is shipped, see `_trace`."""
    import nnsight

    ticket = ticket_of(options)
    with torch.no_grad(), model.trace(*args, **options):
        with torch.no_grad():
            hidden = first_tensor(block.output)
            lens = remote_lens(unembed, hidden) if on_server else unembed
            logits = tensor_of(model.output)[0]
            # Kernels run outside autocast, which a server may have switched on. Here the user's autocast gives the logits.
            keeps_autocast = not on_server and torch.is_autocast_enabled(hidden.device.type)
            with torch.autocast(device_type=hidden.device.type, enabled=keeps_autocast):
                norms = unembed_gap(lens, hidden[0], logits, attended)
        # A server sends back the variable of this name.
        found: Tensor = nnsight.save(sealed(norms, ticket))
    return found


def trace_shape(model: Any, module: Any, incoming: bool, args: tuple[Tensor, ...], options: dict[str, Any]) -> list[int]:
    """The shape of a module's input or output, from one trace. The body is shipped, see `_trace`."""
    import nnsight

    ends_early = not is_edited(model)
    ticket = ticket_of(options)
    with torch.no_grad(), model.trace(*args, **options) as tracer:
        shape = list(first_tensor(module.input if incoming else module.output).shape)
        # A server sends back the variable of this name.
        found: list[int] = nnsight.save(sealed(shape, ticket))
        if ends_early:
            tracer.stop()
    return found
