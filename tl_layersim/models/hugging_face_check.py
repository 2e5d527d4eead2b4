"""Check on the first row that a TransformerLens model has the residual stream of its Hugging Face model.

Bridges and converted weights of new architectures have given other activations than the model that they were made from,
without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..architectures.transformer_lens import is_transformer_lens, norms_are_folded, stream_processing
from ..architectures.unembed import rounding, tensor_of
from ..core.errors import LayersimError
from ..core.wording import first_line, with_article
from ..data.batches import Batch
from .hooked import HookedSource
from .hooks import on_tensor, temporary_hooks
from .source import Source

PROBLEMS = (ImportError, OSError, RuntimeError, ValueError)


@dataclass(frozen=True)
class HiddenStates:
    """Residual stream that a Hugging Face model computes for one row.

    Attributes:
        names: for each residual layer, which of the model's `hidden_states` it is, or the block that computes it.
        residuals: input of the first block and output of every block, `pos d_model` each.
        end: which tensor the last of `hidden_states` is: "stream", the output of the last block; "normed", the output of the
            final norm; "unknown", another tensor.
        last: the last of `hidden_states`.
        logits: `pos vocabulary`; None for a model without a head.
    """

    names: tuple[str, ...]
    residuals: Sequence[Tensor]
    end: str
    last: Tensor
    logits: Tensor | None


class Pair(NamedTuple):
    """Two tensors that are compared.

    Attributes:
        site: name of the first.
        counterpart: name of the second, in the Hugging Face model.
        layer: number of the residual layer that they belong to.
        own: `pos width`.
        other: `pos width`.
    """

    site: str
    counterpart: str
    layer: int
    own: Tensor
    other: Tensor


def verify_on_first_row(source: Source, verify: str | torch.nn.Module | None) -> None:
    """Let a source compare its residual stream with the Hugging Face model's hidden states, before it measures its first row.

    Args:
        source: the model.
        verify: "hf" for the checkpoint that the model was loaded from; or the Hugging Face model itself; None for no check.

    Raises:
        LayersimError: the model has no Hugging Face model, or its weights were processed; or `verify` is no untouched model.
    """
    if verify is None:
        return
    if not isinstance(source, HookedSource) or not is_transformer_lens(source.module):
        raise LayersimError(
            f"`verify` is given for {source.model.name} ({source.model.source}), which is no TransformerLens model in this "
            "process."
        )
    processing = stream_processing(source.module)
    if processing:
        what, instead = processing
        raise LayersimError(
            f"`verify` cannot be given for a {type(source.module).__name__} {what}: its residual stream has another basis. "
            f"Pass {instead}."
        )
    if isinstance(verify, torch.nn.Module):
        _refuse_other_modules(verify)
        source.check_first_row(lambda batch: check_residuals(source, verify, batch))
    else:
        load = _checkpoint_of(source)
        source.check_first_row(lambda batch: check_residuals(source, load(), batch))


def check_residuals(source: HookedSource, model: torch.nn.Module, batch: Batch) -> None:
    """Refuse a model whose residual stream differs from the Hugging Face model's hidden states on the batch's first row.

    Args:
        source: the model.
        model: the Hugging Face model.
        batch: of the data.

    Raises:
        LayersimError: names the first site that differs.
    """
    row = _attended(batch.first_row)
    reference = HookedSource(model)
    theirs = _hidden_states(reference, row)
    with source.evaluating(), source.reading_at(source.residual_points):
        ours = source.collect(row).activations
    if len(ours) != len(theirs.residuals):
        given = f"{len(ours) - 1} blocks, and {len(theirs.residuals) - 1} in the Hugging Face model"
        raise _differ(source, reference, given)
    allowed = rounding(_dtype(source), _dtype(reference))
    cancelled = _cancellation(theirs.residuals)
    for pair in _compared_tensors(source, row, ours, theirs):
        if pair.own.shape != pair.other.shape:
            given = f"{pair.site} has width {pair.own.shape[-1]}, {pair.counterpart} has {pair.other.shape[-1]}"
            raise _differ(source, reference, given)
        gap = _gap(pair.own, pair.other, cancelled[pair.layer])
        # The rounding of each block adds to that of the blocks before it, as in a random walk.
        limit = allowed * (1 + pair.layer) ** 0.5
        # A gap of NaN is a difference too.
        if not gap <= limit:
            given = f"{pair.site} differs from {pair.counterpart} by {gap:.2g} of its norm"
            raise _differ(source, reference, given)


def _compared_tensors(source: HookedSource, row: Batch, ours: Tensor, theirs: HiddenStates) -> Iterator[Pair]:
    """What is compared, in the order in which a forward pass computes it."""
    names, end = source.model.layers, len(ours) - 1
    # The final norm hides a wrong scale, so the residual before the norm is compared too.
    for i, (name, other) in enumerate(zip(theirs.names, theirs.residuals, strict=True)):
        yield Pair(names[i], name, i, ours[i], other)
    if theirs.end == "normed" and source.unembed is not None and not norms_are_folded(source.module):
        normed = source.unembed.normed(ours[end])
        yield Pair(f"the final norm of {names[end]}", "the last of hidden_states", end, normed, theirs.last)
    if theirs.end == "unknown" and theirs.logits is not None:
        with source.evaluating(), torch.no_grad():
            logits = tensor_of(source.call(row))[0]
        # TransformerLens may centre the logits of a position.
        yield Pair(
            "the output of the model",
            "the logits of the Hugging Face model",
            end,
            _minus_mean(logits),
            _minus_mean(theirs.logits),
        )


def _hidden_states(reference: HookedSource, row: Batch) -> HiddenStates:
    seen: dict[str, Tensor] = {}

    def note(name: str, tensor: Tensor) -> None:
        # A copy, because additions in place change outputs.
        seen[name] = tensor.detach()[0].clone()

    blocks, head = reference.blocks, reference.model.head
    with reference.evaluating(), temporary_hooks() as handles, torch.no_grad():
        handles.append(on_tensor(blocks[0], True, partial(note, "input of block 0")))
        for number, block in enumerate(blocks):
            handles.append(on_tensor(block, False, partial(note, f"output of block {number}")))
        if head is not None and head.norm:
            norm = reference.module.get_submodule(head.norm)
            handles.append(on_tensor(norm, False, partial(note, "normed")))
        output = reference.call(row, output_hidden_states=True)
    states, logits = [state[0] for state in getattr(output, "hidden_states", None) or ()], getattr(output, "logits", None)
    if not states:
        raise LayersimError(f"`verify` is {with_article(type(reference.module).__name__)}, which gives no hidden states.")
    normed = seen.pop("normed", None)
    residuals, last = list(seen.values()), states[-1]
    # Which tensors `hidden_states` holds depends on the class: the last is after the final norm in most, and Mamba leaves out
    # the input of block 0. So the tensors decide.
    names = tuple(_name_in(states, name, tensor) for name, tensor in seen.items())
    end = "stream" if torch.equal(residuals[-1], last) else "unknown"
    end = "normed" if normed is not None and torch.equal(normed, last) else end
    return HiddenStates(names, residuals, end, last, None if logits is None else logits[0])


def _name_in(states: Sequence[Tensor], name: str, tensor: Tensor) -> str:
    equal = [number for number, state in enumerate(states) if torch.equal(state, tensor)]
    return f"hidden_states[{equal[0]}]" if equal else f"the {name} of the Hugging Face model"


def _attended(row: Batch) -> Batch:
    """The attended positions of a row as a batch without padding, because bridges number positions after padding anew."""
    kept = row.attention[0]
    tokens = row.tokens[:, kept]
    every = torch.ones_like(tokens, dtype=torch.bool)
    inputs = {name: value[:, kept] if name in row.positional else value for name, value in row.inputs.items()}
    return replace(row, tokens=tokens, attention=every, counted=every, labels=None, pooled=False, inputs=inputs)


def _gap(own: Tensor, other: Tensor, cancelled: Tensor) -> float:
    """Root mean square over positions of the norm of the difference, relative to the norm of `other`.

    Each position counts alike, because massive activations at the first one would hide differences at the others.

    Args:
        own: `pos width`.
        other: `pos width`.
        cancelled: factor by which the residual of each position was larger before, whose rounding it keeps.
    """
    own, other = own.detach().double().cpu(), other.detach().double().cpu()
    # Where both are infinite, they agree.
    own = torch.where(own.isfinite() | other.isfinite(), own, 0.0)
    other = torch.where(other.isfinite(), other, 0.0)
    size = (other.norm(dim=-1) * cancelled).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((own - other).norm(dim=-1) / size).square().mean().sqrt())


def _cancellation(states: Sequence[Tensor]) -> Tensor:
    """Norm of the largest residual of each position up to each layer, relative to the residual there; `layer pos`."""
    norms = torch.stack([state.double().cpu().norm(dim=-1).nan_to_num() for state in states])
    return (norms.cummax(0).values / norms.clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1)


def _minus_mean(logits: Tensor) -> Tensor:
    logits = logits.double()
    return logits - logits.mean(-1, keepdim=True)


def _dtype(source: HookedSource) -> torch.dtype:
    known: torch.dtype = getattr(torch, source.model.dtype.removeprefix("torch."), torch.float32)
    return known


def _differ(source: HookedSource, reference: HookedSource, given: str) -> LayersimError:
    kind = type(source.module).__name__
    return LayersimError(
        f"The residual stream of {source.model.name} ({kind}) is not that of {type(reference.module).__name__}: {given}. If "
        f"the weights of the {kind} were changed on purpose: verify=model, a Hugging Face model with the same weights."
    )


def _refuse_other_modules(module: torch.nn.Module) -> None:
    """Refuse a module that is no Hugging Face model, or that a TransformerBridge has changed."""
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        raise LayersimError(
            f"`verify` is {with_article(type(module).__name__)}; it must be 'hf' or a transformers PreTrainedModel."
        )
    bridged = [path for path, sub in module.named_modules() if type(sub).__module__.split(".")[0] == "transformer_lens"]
    if bridged:
        raise LayersimError(
            f"`verify` is a {type(module).__name__} that a TransformerBridge wraps, and {bridged[0]} is TransformerLens's. "
            "Pass copy.deepcopy(model), made before the bridge."
        )


def _checkpoint_of(source: HookedSource) -> Callable[[], torch.nn.Module]:
    """A function that loads the checkpoint that a TransformerLens model was loaded from, as it was loaded there.

    Raises:
        LayersimError: the checkpoint is not known.
    """
    import transformers

    wrapped: Any = vars(source.module).get("original_model")
    cfg: Any = source.module.cfg
    if wrapped is not None:
        kind, config = type(wrapped), getattr(wrapped, "config", None)
        name = getattr(config, "_name_or_path", "")
        options = {"revision": getattr(config, "_commit_hash", None), "device_map": getattr(wrapped, "hf_device_map", None)}
        attention = getattr(config, "_attn_implementation", None)
    else:
        kind = getattr(transformers, str(cfg.original_architecture), None)  # type: ignore[assignment]  # None without a class
        # Of a configuration written by hand, the name of the tokenizer is not that of the weights.
        name = cfg.tokenizer_name if str(cfg.tokenizer_name).split("/")[-1] == cfg.model_name else ""
        # The revision of a training checkpoint is not kept.
        name, options, attention = "" if cfg.from_checkpoint else name, {}, None
    if not name or not hasattr(kind, "from_pretrained"):
        raise LayersimError(
            f"`verify` is 'hf', but the checkpoint that {cfg.model_name!r} was loaded from is not known. Pass verify=model, "
            "a Hugging Face model with the same weights: copy.deepcopy(model) before it is bridged."
        )
    given = {key: value for key, value in options.items() if value is not None}
    return partial(_load_checkpoint, source, kind, name, given | {"attn_implementation": attention or "eager"})


def _load_checkpoint(source: HookedSource, kind: Any, name: str, options: dict[str, Any]) -> torch.nn.Module:
    """Load a checkpoint from a folder or from the hub's cache, in the dtype and on the device of the source."""
    try:
        model: torch.nn.Module = kind.from_pretrained(name, dtype=_dtype(source), local_files_only=True, **options)
    except torch.OutOfMemoryError:
        raise
    except PROBLEMS as error:
        raise LayersimError(
            f"`verify` is 'hf', but the Hugging Face model could not be loaded again: {first_line(error)}. Pass "
            f"verify={kind.__name__}.from_pretrained({name!r})."
        ) from error
    return model if "device_map" in options else model.to(next(source.module.parameters()).device)
