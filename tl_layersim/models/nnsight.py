"""Source of an nnsight model, which runs in this process or in nnsight's local simulation of a server."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..core.distributed import weight_peers
from ..core.errors import LayersimError
from ..core.server_addresses import shown
from ..data.batches import Batch
from .block_call import first_tensor, record_call
from .head_layout import head_dtype
from .hooks import eval_mode
from .layout import call_options, find_blocks, no_forward, refuse_no_weights, same_stream, settled
from .model_description import describe
from .model_info import Model
from .source import Source
from .unembed import Unembed, tensor_of, unembed_gap
from .view import Kernel, Reduced, View, place, reduce

T = TypeVar("T")


class NNsightSource(Source):
    """Source of an nnsight model: `TransformersModel`, `NNsight(module)`, or anything that traces like them.

    Kernels run inside the trace, and only their sums leave it.

    Args:
        model: the nnsight model.
        layers: paths of the blocks, None to find them by the layout.
        unembed: paths of the final norm and the head, None to find them.
        remote: False for this process, "local" for nnsight's simulation of a server; `RemoteSource` is for real servers.
    """

    def __init__(self, model: Any, layers: list[str] | None, unembed: list[str] | None, remote: bool | str) -> None:
        import nnsight

        # Functions of this package and of a user's analyzers are shipped by value: the server does not have them.
        nnsight.register("tl_layersim")
        self.envoy, self.where = model, _where(model, remote)
        self._remote = remote
        if not getattr(model, "dispatched", True) and remote in (False, "local"):
            # Weights that are loaded at the first trace have neither a hash nor an evaluation mode before it.
            model.dispatch()
        self.module: torch.nn.Module = model._module
        if remote in (False, "local"):
            refuse_no_weights(self.module)
        self.paths = paths = find_blocks(self.module, layers)
        self._named = layers is not None
        self.blocks = [model.get(path) for path in paths]
        where = f" (remote={shown(remote)})" if remote else ""
        tokenizer = getattr(model, "tokenizer", None)
        self._model = describe(self.module, paths, type(model).__name__ + where, tokenizer, unembed, self._named)
        self._unembed = self._open_head()

    def _open_head(self) -> Unembed | None:
        """The logit lens, made of nnsight's envoys, which resolve to the modules in this process or on a server."""
        head = self._model.head
        if head is None:
            return None
        parts = [self.module.get_submodule(path) for path in head.parts]
        return Unembed(
            norm=self.envoy.get(head.norm) if head.norm else None,
            parts=tuple(self.envoy.get(path) for path in head.parts),
            reads=head.reads,
            scale=head.scale,
            soft_cap=head.soft_cap,
            dtype=head_dtype(parts),
            device=None,
            norm_dtype=head_dtype([self.module.get_submodule(head.norm)]) if head.norm else None,
        )

    @property
    def model(self) -> Model:
        return self._model

    def evaluating(self) -> AbstractContextManager[None]:
        return eval_mode(self.module)

    def settle(self, batch: Batch) -> None:
        if self._model.stream == "unknown":
            row = batch.first_row
            options = self.where | call_options(self.module, row)
            try:
                same = _trace_stream(self.envoy, self.blocks, row.tokens, options)
            except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
                raise no_forward(self.module, error) from error
            strangers = [path for path, one in zip(self.paths[1:], same.tolist(), strict=True) if not one]
            self._model = settled(self._model, self.module, self.paths, self._named, strangers)

    def peers(self) -> frozenset[int]:
        return weight_peers(self.module)

    def request(self, run: Callable[[dict[str, Any]], T]) -> T:
        """Call a function that opens one trace, with the keyword arguments by which nnsight runs it in the right process."""
        return run(dict(self.where))

    def run(self, batch: Batch, kernels: Mapping[str, Kernel]) -> Reduced:
        return _trace(
            self.envoy,
            self.blocks,
            batch,
            self._unembed,
            self.where | call_options(self.module, batch),
            shippable(kernels),
            self.calling,
        )

    def unembed_gap(self, batch: Batch) -> Tensor:
        assert self._unembed is not None
        row = batch.first_row
        options = self.where | call_options(self.module, row)
        return _trace_gap(self.envoy, self.blocks[-1], self._unembed, row.tokens, options)

    def collect(self, batch: Batch) -> View:
        if self._remote:
            raise LayersimError(
                "Activations of a remote model stay on the server.",
                given=f"remote={self._remote!r}",
                expected="a model in this process",
                do="run compare() on models that are loaded in this process",
            )
        _, out = self.run(batch, {"view": whole_view})
        fields: dict[str, Any] = out["view"]
        return View(**fields)


def shippable(kernels: Mapping[str, Kernel]) -> dict[str, Kernel]:
    """The kernels, after their modules are registered to be shipped by value.

    Raises:
        LayersimError: a kernel is not a function of a module.
    """
    import nnsight

    for name, kernel in kernels.items():
        function = kernel.func if isinstance(kernel, partial) else kernel
        if not inspect.isfunction(function):
            raise LayersimError(
                f"The kernel of {name!r} cannot be shipped to a server.",
                given=f"a {type(function).__name__}",
                expected="a function of a module, with functools.partial for its options",
                do="move the method's body to a function outside the class",
            )
        nnsight.register(function.__module__.split(".")[0])
    return dict(kernels)


def kept_of(batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Indices of the counted positions in the flattened `batch pos`, and the fields of a view for these, each `token`."""
    keep = batch.counted.reshape(-1).nonzero()[:, 0]
    row, column = batch.sources
    given = {"tokens": batch.tokens, "next_token": batch.next_tokens, "row": row, "column": column}
    given |= {} if batch.labels is None else {"labels": batch.labels}
    return keep, {name: values.reshape(-1)[keep] for name, values in given.items()}


def _where(model: Any, remote: bool | str) -> dict[str, Any]:
    """Keyword arguments of a trace by which nnsight runs it in this process or in its local simulation."""
    from nnsight.modeling.mixins.remotable import Remotable

    if not remote:
        return {}
    if isinstance(model, Remotable):
        return {"remote": remote}
    if remote == "local":
        # A wrapped module does not take `remote=`, which would be passed to its forward. The simulation of a server needs
        # only the module tree of the model.
        from nnsight.intervention.backends.local import LocalSimulationBackend

        return {"backend": LocalSimulationBackend(_ModuleTree(model))}
    raise LayersimError(
        "`remote` requires a model that a server can load by its name, not a wrapped module.",
        given=f"{type(model).__name__}(module) with remote={shown(remote)}",
        expected="a model that the server loads by its name",
        do="nnsight.TransformersModel('org/name', task='text-generation', tokenizer=tokenizer)",
    )


class _ModuleTree:
    """The part of a model that nnsight's local simulation needs: the objects that a request refers to and does not contain."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def _remoteable_persistent_objects(self) -> dict[str, Any]:
        from nnsight.modeling.mixins.remotable import Remotable

        objects: dict[str, Any] = Remotable._remoteable_persistent_objects(self._model)
        return objects


def whole_view(view: View) -> dict[str, Tensor]:
    """The kernel that returns the whole view, for models in this process."""
    fields = ("activations", "tokens", "sequence", "position", "next_token", "row", "column", "labels")
    return {name: getattr(view, name) for name in fields if getattr(view, name) is not None}


def _trace(
    model: Any,
    blocks: list[Any],
    batch: Batch,
    unembed: Unembed | None,
    options: dict[str, Any],
    kernels: dict[str, Kernel],
    calling: bool,
) -> Reduced:
    """Run kernels on a batch in one trace, whose body is shipped: it refers to local names, torch and the stdlib alone."""
    import nnsight

    keep, kept = kept_of(batch)
    pos = batch.counted.shape[1]
    total = len(blocks) + 1
    tokens = batch.tokens
    with torch.no_grad(), model.trace(tokens, **options) as tracer:
        with torch.no_grad():
            buffer = place(None, 0, total, blocks[0].input, keep)
            noted: list[Any] = []
            for index, block in enumerate(blocks):
                args, kwargs = block.inputs if calling else ((), {})
                output = block.output
                buffer = place(buffer, index + 1, total, first_tensor(output), keep)
                if calling:
                    noted.append(record_call(block, args, kwargs, output))
            here: dict[str, Any] = {name: values.to(buffer.device) for name, values in kept.items()}
            rows = keep.to(buffer.device)
            view = View(
                activations=buffer,
                sequence=rows // pos,
                position=rows % pos,
                unembed=unembed,
                calls=tuple(noted) if calling else None,
                **here,
            )
            reduced = reduce(kernels, view)
        out: Reduced = nnsight.save(reduced)
        tracer.stop()
    return out


def _trace_stream(model: Any, blocks: list[Any], tokens: Tensor, options: dict[str, Any]) -> Tensor:
    """Whether the input of each block after the first equals the output of the block before it; one trace, as in `_trace`."""
    import nnsight

    with torch.no_grad(), model.trace(tokens, **options) as tracer:
        with torch.no_grad():
            same: list[bool] = []
            last = None
            for block in blocks:
                args, kwargs = block.inputs
                if last is not None:
                    same.append(same_stream(first_tensor((*args, *kwargs.values())), last))
                last = first_tensor(block.output).clone()
        out: Tensor = nnsight.save(torch.tensor(same))
        tracer.stop()
    return out


def _trace_gap(model: Any, block: Any, unembed: Unembed, tokens: Tensor, options: dict[str, Any]) -> Tensor:
    """`unembed_gap` of one row; one trace of the whole model, as in `_trace`."""
    import nnsight

    last = tokens.shape[1] - 1
    with torch.no_grad(), model.trace(tokens, **options):
        with torch.no_grad():
            hidden = first_tensor(block.output)[0]
            logits = tensor_of(model.output)[0]
            norms = unembed_gap(unembed, hidden, logits, last)
        gap: Tensor = nnsight.save(norms)
    return gap
