"""Checks of activations: finite values, the logit lens, stream sums, and equality with Hugging Face.

Bridges and converted weights of new architectures have silently given other activations than the original model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..activations.view import View
from ..architectures.hook_points import HookPoint, distinct_points
from ..architectures.transformer_lens import norms_are_folded, stream_processing
from ..architectures.unembed import rounding
from ..core.errors import LayersimError, excerpt
from ..core.wording import WHY_NOT_FINITE, first_line, with_article
from ..data.batches import Batch
from ..data.positions import Positions
from .hooked_module import HookedSource
from .model_description import ModelDescription
from .out_of_memory import is_out_of_memory
from .source import CanCountPositions, CanReadSites, CanUnembed, Source


def check_lens(source: Source, batch: Batch) -> None:
    """Raise an error if the logit lens does not reproduce the model's logits on one row.

    Raises:
        LayersimError: the lens differs, the head cannot be called, or the source cannot compare them.
    """
    if not isinstance(source, CanUnembed):
        raise LayersimError(
            f"The model of {type(source).__name__} has the head {source.model.head}, so the source must inherit from "
            "`CanUnembed`, whose `unembed_gap` checks the logit lens."
        )
    refuse_other_logits(lambda: source.unembed_gap(batch), source.model)


def refuse_other_logits(measure: Callable[[], Tensor], model: ModelDescription, computed: torch.dtype = torch.float32) -> None:
    """Raise an error if a lens does not reproduce the model's logits at the last layer.

    Args:
        measure: function that returns the output of `unembed_gap`.
        model: the model.
        computed: the coarsest dtype in which the model's logits were computed, if it is not the dtype of its weights.

    Raises:
        LayersimError: the lens differs, or the head cannot be called.
    """
    try:
        difference, size = measure().tolist()
    except (RuntimeError, TypeError, ValueError) as error:
        # A LayersimError is about the data, not about the head.
        if isinstance(error, LayersimError) or is_out_of_memory(error):
            raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _other_logits(model, f"fails: {excerpt(lines[-1], 160)}") from error
    allowed = rounding(model.torch_dtype, computed)
    if difference <= allowed * max(size, 1e-3):
        return
    if math.isnan(size):
        raise _other_logits(model, "gives logits of another shape")
    raise _other_logits(model, f"differs by {difference / max(size, 1e-3):.2g} of the norm of the model's logits")


def _other_logits(model: ModelDescription, reason: str) -> LayersimError:
    """The error for a lens that does not give the model's logits. The reason is what its head does."""
    return LayersimError(
        f"The logit lens at the last layer does not give the model's own logits: {model.head} {reason}. Without `unembed=`, a "
        "forward pass shows the head of a model in this process; with it, name the final norm and every module behind it, as "
        "unembed=['path.of.norm', 'path.of.head']. Other causes are hooks on the head, and blocks that layers= leaves out."
    )


def refuse_not_finite(counts: Sequence[Tensor], layers: Sequence[tuple[str, ...]], where: str) -> None:
    """Raise an error that names the layers if activations are not finite.

    Args:
        counts: for each model `layer`, the number of activations that are not finite.
        layers: for each model, the names of its layers.
        where: description of the batch, for the message.
    """
    for number, (names, counts_of_model) in enumerate(zip(layers, counts, strict=True), start=1):
        bad_layers = {name: int(count) for name, count in zip(names, counts_of_model, strict=True) if count}
        if bad_layers:
            model = f", model {number}" if len(layers) > 1 else ""
            examples = [f"{count} values at {name}" for name, count in list(bad_layers.items())[:4]]
            raise LayersimError(f"Activations are NaN or infinite in {where}{model}: {', '.join(examples)}. {WHY_NOT_FINITE}")


def refuse_bad_logits(bad: Tensor, layers: Sequence[str]) -> None:
    """Raise an error that names the layers if logits are not finite.

    Args:
        bad: `layer`, the number of positions with non-finite logits.
        layers: the residual layers, starting with the input of block 0.
    """
    bad_layers = {name: int(count) for name, count in zip(layers[1:], bad, strict=True) if count}
    if bad_layers:
        examples = [f"at {count} positions of {name}" for name, count in list(bad_layers.items())[:4]]
        raise LayersimError(f"Logits are NaN or infinite, {', '.join(examples)}. {WHY_NOT_FINITE}")


def need_stream(model: ModelDescription, what: str, parts: bool = False) -> None:
    """Raise an error if the model's layers are not the whole residual stream.

    Args:
        model: the description of the model.
        what: the analyzer or function that needs the residual stream, for the message.
        parts: whether blocks may be left out between the layers.
    """
    named = ", ".join(model.layers[1:4]) + (", ..." if len(model.layers) > 4 else "")
    if model.stream == "none":
        raise LayersimError(
            f"{what} needs the residual stream: at least two blocks that each take the output of the block before and keep its "
            f"width. The modules {named} are not such blocks. Leave out layers=, or name whole blocks."
        )
    if model.stream == "parts" and not parts:
        raise LayersimError(f"{what} needs every block of the residual stream, but layers= names {named}.")


def need_known_norm(model: ModelDescription) -> None:
    """Raise an error if a lens without the final norm is asked of a head whose norm is not known.

    Raises:
        LayersimError: a part of the head may be or contain the norm.
    """
    if model.head is not None and model.head.hides_norm:
        if model.head.tail is not None:
            raise LayersimError(
                f"`norm` is 'none', but no norm of {model.name} reads the output of its last block; `norm` must be 'final'."
            )
        raise LayersimError(
            f"`norm` is 'none', but it is not known which part of the head {list(model.head.modules)} is the final norm to "
            "leave out. Name the norm as the first path of unembed=[...], or use norm='final'."
        )


def need_equal_width(model: ModelDescription, what: str) -> None:
    """Raise an error if the sites have different widths.

    Args:
        model: the description of the model.
        what: the analyzer that needs one width, for the message.
    """
    if len(set(model.widths)) > 1:
        other_site = next(site for site, width in enumerate(model.widths) if width != model.widths[0])
        raise LayersimError(
            f"{what} needs sites of equal width: {model.layers[0]} has width {model.widths[0]} and {model.layers[other_site]} "
            f"has width {model.widths[other_site]}. CKA takes sites of different widths."
        )


def check_stream_sums(source: CanReadSites, batch: Batch) -> None:
    """Raise an error if sublayers do not add up to the residual stream on one row.

    Args:
        source: the model.
        batch: a batch of the data.

    Raises:
        LayersimError: names the first block at which a sum is not the stream.
    """
    sums = source.stream_sums()
    if not sums:
        return
    all_points: list[HookPoint] = []
    for stream_sum in sums:
        all_points += [stream_sum.total, *stream_sum.terms]
    points = distinct_points(all_points)
    sites = {point.name: site for site, point in enumerate(points)}
    groups: list[tuple[int, tuple[int, ...]]] = []
    for stream_sum in sums:
        term_sites = tuple(sites[term.name] for term in stream_sum.terms)
        groups.append((sites[stream_sum.total.name], term_sites))
    row = batch.short_row
    with source.reading_at(points):
        if not row.has_positions:
            # These sites may have another number of positions than the first one of the run, which lies in another stage.
            assert isinstance(source, CanCountPositions)
            row = row.with_positions(source.count_positions(row), Positions())
        source.settle(row)
        _, out = source.run(row, {"sums": partial(stream_gaps, groups=tuple(groups))})
    if not out:
        # Activations that are not finite are refused where the batch is measured.
        return
    gap = out["sums"]["gap"]
    size = out["sums"]["size"]
    wrong_sums = (gap > rounding(source.model.torch_dtype) * size.clamp(min=1e-6)).nonzero()[:, 0]
    if len(wrong_sums):
        number = int(wrong_sums[0])
        wrong_sum = sums[number]
        raise LayersimError(
            f"The hook points of {source.model.name} do not add up to its residual stream: "
            f"{' + '.join(term.name for term in wrong_sum.terms)} differs from {wrong_sum.total.name} by "
            f"{float(gap[number] / size[number]):.2g} of the largest norm. Name modules by paths in at= instead."
        )


def stream_gaps(view: View, *, groups: tuple[tuple[int, tuple[int, ...]], ...]) -> dict[str, Tensor]:
    """The error ("gap") and the largest norm ("size") of each stream sum, as a dict of two tensors.

    An error is the norm of the summed terms minus the total. The largest norm is that of a term or of the total.

    Args:
        view: the view of one row.
        groups: for each sum, the index of its total's site and the indices of its terms' sites.
    """
    x = view.activations.double()
    gaps = [(x[list(terms)].sum(0) - x[total]).norm() for total, terms in groups]
    # Terms that cancel leave a small total with the rounding of large terms.
    sizes = [x[[total, *terms]].norm(dim=(1, 2)).max() for total, terms in groups]
    return {"gap": torch.stack(gaps).cpu(), "size": torch.stack(sizes).cpu()}


def verify_on_first_row(source: Source, verify: str | torch.nn.Module | None) -> None:
    """Compare the residual stream with the Hugging Face model before the first measurement.

    Args:
        source: the model.
        verify: "hf" for the checkpoint that the model was loaded from; or the Hugging Face model itself; None for no check.

    Raises:
        LayersimError: the model has no Hugging Face counterpart, or its weights were processed; or `verify` is not an unchanged
            model.
    """
    if verify is None:
        return
    if not isinstance(source, HookedSource) or source.anatomy.library != "transformer_lens":
        raise LayersimError(
            f"`verify` cannot be given for {source.model.name} ({source.model.source}); it needs a TransformerLens model in "
            "this process."
        )
    processing = stream_processing(source.module)
    if processing:
        change, remedy = processing
        raise LayersimError(
            f"`verify` cannot be given for a {type(source.module).__name__} {change}: its residual stream has another "
            f"basis than the Hugging Face model. Pass {remedy}."
        )
    if not isinstance(verify, torch.nn.Module):
        load = _checkpoint_of(source)
        source.check_first_row(lambda batch: check_residuals(source, load(), batch))
        return
    # A bridge changes the modules of its Hugging Face model, which would be compared with itself.
    for path, submodule in verify.named_modules():
        if type(submodule).__module__.split(".")[0] == "transformer_lens":
            raise LayersimError(
                f"`verify` is {with_article(type(verify).__name__)} with modules of TransformerLens, such as {path!r}; it "
                "must be the Hugging Face model without a bridge. Pass copy.deepcopy(model), made before the bridge."
            )
    source.check_first_row(lambda batch: check_residuals(source, verify, batch))


def check_residuals(source: HookedSource, model: torch.nn.Module, batch: Batch) -> None:
    """Raise an error if the residual streams of a model and its Hugging Face model differ.

    Args:
        source: the model.
        model: the Hugging Face model.
        batch: a batch of the data.

    Raises:
        LayersimError: names the first site that differs.
    """
    row = _without_padding(batch.first_row)
    reference = HookedSource(model)
    with source.evaluating(), reference.evaluating(), source.reading_at(source.residual.points):
        residuals = source.collect(row).activations
        reference_residuals = reference.collect(row).activations
    if len(residuals) != len(reference_residuals):
        counts = f"{len(residuals) - 1} blocks, and {len(reference_residuals) - 1} in the Hugging Face model"
        raise _other_residuals(source, reference, counts)
    pairs = list(zip(source.model.layers, residuals, reference_residuals, strict=True))
    if source.unembed is not None and reference.unembed is not None and not norms_are_folded(source.module):
        normed = source.unembed.normed(residuals[-1])
        reference_normed = reference.unembed.normed(reference_residuals[-1])
        pairs.append((f"the final norm of {pairs[-1][0]}", normed, reference_normed))
    allowed = rounding(source.model.torch_dtype, reference.model.torch_dtype)
    cancellation = _cancellation(reference_residuals)
    for number, (site, x, reference_x) in enumerate(pairs):
        # The pair of the final norm belongs to the last layer.
        layer = min(number, len(residuals) - 1)
        gap = _gap(x, reference_x, cancellation[layer]) if x.shape == reference_x.shape else math.nan
        # The rounding of each block adds to that of the blocks before it, as in a random walk. NaN is a difference too.
        if not gap <= allowed * (1 + layer) ** 0.5:
            widths = ""
            if x.shape != reference_x.shape:
                widths = f", whose widths are {x.shape[-1]} and {reference_x.shape[-1]}"
            raise _other_residuals(source, reference, f"{site} differs by {gap:.2g} of its norm{widths}")


def _without_padding(row: Batch) -> Batch:
    """Remove the padding of a row, because TransformerBridges restart position ids after padding."""
    attended = row.attention[0]
    tokens = row.tokens[:, attended]
    attention = torch.ones_like(tokens, dtype=torch.bool)
    inputs: dict[str, Tensor] = {}
    for name, value in row.inputs.items():
        inputs[name] = value[:, attended] if name in row.positional else value
    return replace(row, tokens=tokens, attention=attention, counted=attention, labels=None, pooled=False, inputs=inputs)


def _gap(x: Tensor, reference: Tensor, cancellation: Tensor) -> float:
    """Relative difference of two residuals.

    It is the root mean square over positions of |x - reference| / |reference|.

    Each position has the same weight, because massive activations at the first position would hide other differences.

    Args:
        x: `pos width`.
        reference: `pos width`.
        cancellation: for each position, the factor by which the residual was larger in an earlier layer, and so its rounding
            error.
    """
    x = x.detach().double().cpu()
    reference = reference.detach().double().cpu()
    # Where both are infinite, they agree.
    x = torch.where(x.isfinite() | reference.isfinite(), x, 0.0)
    reference = torch.where(reference.isfinite(), reference, 0.0)
    size = (reference.norm(dim=-1) * cancellation).clamp(min=torch.finfo(torch.float32).tiny)
    return float(((x - reference).norm(dim=-1) / size).square().mean().sqrt())


def _cancellation(residuals: Tensor) -> Tensor:
    """The maximum residual norm up to a layer, divided by the norm at that layer (`layer pos`)."""
    norms: Tensor = residuals.double().cpu().norm(dim=-1).nan_to_num()
    return (norms.cummax(0).values / norms.clamp(min=torch.finfo(torch.float32).tiny)).clamp(min=1)


def _other_residuals(source: HookedSource, reference: HookedSource, difference: str) -> LayersimError:
    """The error for a model whose residual stream is not that of its Hugging Face model."""
    kind = type(source.module).__name__
    return LayersimError(
        f"The residual stream of {source.model.name} ({kind}) differs from {type(reference.module).__name__}'s: {difference}. "
        f"If the weights of the {kind} were changed on purpose, pass verify=model, a Hugging Face model with the same weights."
    )


def _checkpoint_of(source: HookedSource) -> Callable[[], torch.nn.Module]:
    """A function that reloads the Hugging Face checkpoint of a TransformerLens model.

    Raises:
        LayersimError: the checkpoint is unknown.
    """
    import transformers

    wrapped: Any = vars(source.module).get("original_model")
    cfg: Any = source.module.cfg
    options: dict[str, Any] = {}
    if wrapped is not None:
        kind = type(wrapped)
        config = getattr(wrapped, "config", None)
        name = getattr(config, "_name_or_path", "")
        options = {
            "revision": getattr(config, "_commit_hash", None),
            "device_map": getattr(wrapped, "hf_device_map", None),
            "attn_implementation": getattr(config, "_attn_implementation", None),
        }
    else:
        kind = getattr(transformers, str(cfg.original_architecture), None)  # type: ignore[assignment]  # None without a class
        # Of a configuration written by hand, the name of the tokenizer is not that of the weights; the revision of a training
        # checkpoint is not kept.
        is_known = str(cfg.tokenizer_name).split("/")[-1] == cfg.model_name and not cfg.from_checkpoint
        name = cfg.tokenizer_name if is_known else ""
    if not name or not hasattr(kind, "from_pretrained"):
        raise LayersimError(
            f"`verify` is 'hf', but the checkpoint that {cfg.model_name!r} was loaded from is not known. Copy the "
            "Hugging Face model before it is bridged, hf_model = copy.deepcopy(model), and pass verify=hf_model."
        )
    arguments: dict[str, Any] = {"attn_implementation": "eager"}
    for option, value in options.items():
        if value is not None:
            arguments[option] = value

    def load() -> torch.nn.Module:
        try:
            dtype = source.model.torch_dtype
            model: torch.nn.Module = kind.from_pretrained(name, dtype=dtype, local_files_only=True, **arguments)
        except (OSError, ValueError) as error:
            raise LayersimError(
                f"`verify` is 'hf', but the checkpoint {name!r} could not be loaded again: {first_line(error)}. Pass "
                "verify=model, a Hugging Face model with the same weights."
            ) from error
        return model if "device_map" in arguments else model.to(next(source.module.parameters()).device)

    return load
