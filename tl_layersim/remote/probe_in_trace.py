"""`Probe.read` in nnsight traces: measures a forward pass of the user's own trace, here or on a server.

nnsight ships the source of `PassReader` and `ShippedProbe`, which use local names, torch and the standard library alone.
"""

from __future__ import annotations

import operator
import pkgutil
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..activations.row_pools import AnyKernel, plan_batch, view_of_tokens
from ..activations.view import SiteBuffer, reduce
from ..core.errors import LayersimError
from ..core.integer_hash import mixed
from ..core.sums import fold
from ..data.batches import FIRST_TEXTS, next_tokens
from ..data.labels import NO_LABEL
from ..data.positions import Positions
from ..sources.nnsight import TraceReader
from ..sources.result_seals import seal_sum, sealed
from .failures import UnsafeAnswer
from .traces import FormOfSums, add_batch_sums, add_leaves

# Rows whose sums a kernel adds within one call, as in `analyze`.
LEAF = 16


@dataclass
class PassReader:
    """Reads activations of a forward pass inside an nnsight trace, and computes sums over its positions.

    Attributes:
        reader: the sites, the modules that are read and the lens.
        kernels: kernels by name.
        rule: the rule that selects the counted positions.
        mask_name: name of the attention mask among the arguments of the model's forward.
        whole_rows: whether an analyzer needs whole rows.
        pads: padding ids that are no other special tokens.
        first: number of rows that were read before this trace.
    """

    reader: TraceReader
    kernels: dict[str, AnyKernel]
    rule: Positions
    mask_name: str
    whole_rows: bool
    pads: tuple[int, ...]
    first: int

    def read(self) -> dict[str, Any]:
        """Read the current forward pass, and compute the sums of all kernels over its counted positions.

        Returns:
            The numbers of rows, of positions and of rows with attended padding; a hash of the tokens; and if any position
            counts, its sums.
        """
        try:
            return self._read()
        except Exception as error:
            # By name: a server need not have nnsight's class under the path that it has here.
            if type(error).__name__ == "OutOfOrderError":
                # The same object, because nnsight ends a loop over `tracer.iter` with it.
                error.args = (out_of_order(self.reader.names, str(error)),)
            raise

    def _read(self) -> dict[str, Any]:
        # No torch.no_grad here: the model would go on under it while a module's output is awaited.
        args, kwargs = self.reader.model.inputs
        has_cache = any(hasattr(value, "get_seq_length") for value in kwargs.values())
        # A sandboxed model would continue the generation with a copy of its cache.
        if self.reader.on_server and has_cache and next(self.reader.model._module.parameters()).device.type == "meta":
            raise LayersimError(
                "`probe.read()` cannot read cached generation on a sandboxed server, because reading would change later "
                "tokens. Pass use_cache=False, or trace the complete rows after generation."
            )
        ids = ids_of_inputs(args, kwargs, self.mask_name)
        if ids is None:
            self.rule.refuse_without_tokens()
            # As in `attach` of a torch module: without token ids, no position has a next token.
            tokens = torch.zeros(self.reader.positions_of_first_site(), dtype=torch.int64)
        else:
            tokens = ids.cpu().long()
        attended, continued = attended_positions(tokens.shape, kwargs, self.mask_name)
        has_positions = ids is not None or kwargs.get(self.mask_name) is not None
        counted = self.rule.select_rows(tokens, attended, continued)
        if self.whole_rows and (continued or tokens.shape[1] == 1):
            raise LayersimError(
                "The attached analyzer needs whole rows, but this forward pass continues from a cache or has a single "
                'position. Trace the complete rows after generation, or use CKA(level="token").'
            )
        keep = counted.reshape(-1).nonzero()[:, 0]
        width = tokens.shape[1]
        ends = tokens[:, [0, -1]]
        padding = torch.isin(ends, torch.tensor(self.pads, dtype=ends.dtype)) & attended[:, [0, -1]]
        output: dict[str, Any] = {
            "rows": 0 if continued else int(counted.any(1).sum()),
            "tokens": len(keep),
            "padded": int(padding.any(1).sum()) if width > 1 and ids is not None else 0,
            "hash": mixed(tokens[counted] * 8191 + torch.arange(len(keep))).sum(),
        }
        if not len(keep):
            return output
        buffer = SiteBuffer(self.reader.names, keep, (len(tokens), width), self.rule.pooled, has_positions)
        has_next_tokens = ids is not None and not self.rule.pooled
        following = next_tokens(tokens, attended) if has_next_tokens else torch.full_like(tokens, NO_LABEL)
        row = buffer.samples // width + self.first
        tokens_of_samples = tokens.reshape(-1)[buffer.samples]
        labels = following.reshape(-1)[buffer.samples]
        view = self.reader.read(buffer, {"tokens": tokens_of_samples, "next_token": labels, "row": row}, False)
        number = buffer.samples // width
        first_rows = counted[:FIRST_TEXTS]
        density = float(first_rows.sum()) / len(first_rows)
        plan = plan_batch(view_of_tokens(tokens_of_samples, number, row), (0, len(tokens)), LEAF, density, self.kernels)
        stack: list[Any] = []
        add_leaves(stack, LEAF, None, plan.finish([reduce(plan.kernels_of(0), view)]), True)
        return output | {"sums": fold(stack, add_batch_sums), "dtype": str(buffer.activations.dtype)}


def out_of_order(names: tuple[str, ...], reason: str) -> str:
    """Message of nnsight's `OutOfOrderError` for a trace that ran past the sites before a probe read them.

    Args:
        names: names of the sites that the probe reads.
        reason: nnsight's message, which names the module.
    """
    return (
        f"`probe.read()` cannot read its {len(names)} sites, {names[0]} to {names[-1]}: {reason}. Call it once for each "
        "forward pass, in an empty invoke (`with tracer.invoke(): probe.read()`) of a trace that runs to the end of the model."
    )


def ids_of_inputs(args: Any, kwargs: Any, mask_name: str) -> Tensor | None:
    """Token ids of a forward pass (`batch pos`); None if the model was called without.

    Args:
        args: positional arguments of the model's forward.
        kwargs: keyword arguments of the model's forward.
        mask_name: see `PassReader`.
    """
    if kwargs.get("inputs_embeds") is not None:
        # Other integers are then positions or segments.
        return None
    named = [value for name, value in kwargs.items() if name != mask_name]
    matrices = [value for value in (*args, *named) if isinstance(value, Tensor) and value.dim() == 2]
    integers = [value for value in matrices if not value.is_floating_point()]
    ids: Tensor | None = kwargs.get("input_ids", integers[0] if integers else None)
    return ids


def attended_positions(shape: Any, kwargs: Any, mask_name: str) -> tuple[Tensor, bool]:
    """Attended positions of a forward pass (bool `batch pos`, on the CPU), and whether rows continue from a cache.

    Args:
        shape: `batch pos` of the forward pass.
        kwargs: keyword arguments of the model's forward.
        mask_name: see `PassReader`.

    Raises:
        LayersimError: the mask has another shape.
    """
    mask = kwargs.get(mask_name)
    pos = shape[1]
    caches = [value for value in kwargs.values() if hasattr(value, "get_seq_length")]
    continued = any(int(cache.get_seq_length()) > 0 for cache in caches)
    if mask is None:
        return torch.ones(tuple(shape), dtype=torch.bool), continued
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[0] != shape[0] or mask.shape[1] < pos:
        shape_of_mask = tuple(getattr(mask, "shape", ()))
        raise LayersimError(f"`{mask_name}` has shape {shape_of_mask}; `probe.read()` needs shape {tuple(shape)}.")
    return mask[:, -pos:].bool().cpu(), continued or mask.shape[1] > pos


class ReceivingFunction:
    """Placeholder that unpickles as the function `receive`. Servers without this package can pickle the placeholder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pkgutil.resolve_name, ("tl_layersim.remote.probe_in_trace:receive",)


class ShippedProbe:
    """Stands in for a user's `Probe` on a server, and reads forward passes there.

    When nnsight loads the result, this object becomes the user's probe, with the sums.

    Args:
        key: key of the probe.
        ticket: ticket of the request.
        reader: the reader of forward passes.
    """

    def __init__(self, key: str, ticket: str, reader: PassReader) -> None:
        self.key = key
        self.ticket = ticket
        self.reader = reader
        self.passes: list[dict[str, Any]] = []

    def read(self) -> ShippedProbe:
        """Read the current forward pass, and keep its sums."""
        import nnsight

        self.passes.append(self.reader.read())
        # Steps of generation and further invokes call `read` again.
        self.reader.first += self.passes[-1]["rows"]
        saved: ShippedProbe = nnsight.save(self)
        return saved

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.call, (ReceivingFunction(), self.key, self.ticket, sealed(self.passes, self.ticket))


# Probes by key. `sent` of a probe holds the tickets of requests without a result so far; `add` takes an output of
# `PassReader.read`.
PROBES: WeakValueDictionary[str, Any] = WeakValueDictionary()


def receive(key: str, ticket: str, result: Any) -> Any:
    """Add a request's sums to the probe that sent the request; return the probe.

    nnsight calls this function when it loads a result. If the probe is gone, `result` is returned.

    Args:
        key: key of the probe.
        ticket: ticket of the request; a result that is loaded twice counts once.
        result: sealed outputs of `PassReader.read`.

    Raises:
        LayersimError: the outputs are not those that the trace computed.
    """
    probe = PROBES.get(key)
    if probe is None:
        # The process that sent the request has ended, or the probe was deleted.
        return result
    if ticket in probe.sent:
        outputs = _opened(result, ticket, probe.form)
        probe.sent.discard(ticket)
        for output in outputs:
            probe.add(output)
    return probe


def _opened(result: Any, ticket: str, form: FormOfSums) -> list[dict[str, Any]]:
    """The outputs of `PassReader.read` in a sealed result.

    Args:
        result: the sealed outputs.
        ticket: ticket of the request.
        form: form of the sums of one forward pass.

    Raises:
        LayersimError: the outputs are not those that the trace computed.
    """
    try:
        if not isinstance(result, (list, tuple)) or len(result) != 3 or not isinstance(result[2], list):
            raise UnsafeAnswer("must be sealed sums of forward passes; it has another form")
        result_ticket, checksum = result[:2]
        outputs: list[dict[str, Any]] = result[2]
        for output in outputs:
            _refuse_other_output(output, form)
        if type(checksum) is not int or result_ticket != ticket or checksum != seal_sum(outputs):
            raise UnsafeAnswer("has other numbers than the server computed, or belongs to another trace")
    except UnsafeAnswer as error:
        raise LayersimError(f"The result of a trace with probe.read() is refused, because it {error}.") from None
    return outputs


def _refuse_other_output(output: Any, form: FormOfSums) -> None:
    """Raise `UnsafeAnswer` if a value is no output of `PassReader.read`."""
    counts = [output.get(name) for name in ("rows", "tokens", "padded")] if isinstance(output, dict) else []
    if not counts or not all(type(count) is int and count >= 0 for count in counts):
        raise UnsafeAnswer("must count rows and tokens of each forward pass; it has another form")
    digest = output.get("hash")
    if not isinstance(digest, Tensor) or digest.dtype != torch.int64 or digest.dim():
        raise UnsafeAnswer("must hold a hash of the tokens; it has another form")
    if output["tokens"]:
        form([(1, output.get("sums"))])
