"""Arguments of a model's forward pass: the inputs of a batch by name, a mask where there is padding, and no cache."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.inputs import EMBEDDINGS, PIXELS, ROW_AXES, TOKEN_IDS
from .model_info import Model
from .source import Source

# Masks over positions that are known only inside a forward pass, by the stack of an encoder-decoder that they mask.
INNER_MASKS = {"encoder": "pixel_mask", "decoder": "decoder_attention_mask"}
# Inputs that mean nothing where all of their values are 0, also to a model that does not take them.
EMPTY_IF_ZERO = ("token_type_ids",)


def device_of(module: torch.nn.Module) -> torch.device:
    """The device of a module's first weight or buffer; the CPU for a module without either."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def forward_arguments(module: torch.nn.Module, batch: Batch, model: Model) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments of a forward pass over a batch.

    Token ids are positional, because modules give them different names; those of a decoder beside an encoder, and all other
    inputs, are passed by name.

    Args:
        module: the model.
        batch: the rows.
        model: the description of the same model.

    Raises:
        LayersimError: the model does not take an input of the batch, or takes no mask and the batch is padded.
    """
    _refuse_masked_positions(batch, model)
    options: dict[str, Any] = {}
    if hasattr(getattr(module, "config", None), "use_cache"):
        options["use_cache"] = False
    if batch.padded:
        options[model.mask_input] = _attention_mask(module, batch, model.mask_input)
    main = TOKEN_IDS if batch.has_tokens else model.main_input if model.main_input in batch.inputs else EMBEDDINGS
    for name, values in batch.inputs.items():
        if name == main or name in model.inputs:
            options[name] = _in_dtype(values, model)
        elif name not in EMPTY_IF_ZERO or bool(values.any()):
            raise _not_taken(name, model)
    if batch.has_tokens:
        if model.main_input in ROW_AXES:
            raise _not_tokens(model)
        if model.token_input != TOKEN_IDS:
            return (), options | {model.token_input: batch.tokens}
        return (batch.tokens,), options
    # A TransformerBridge has one argument for tokens, pixels and embeddings.
    return ((options.pop(main),), options) if type(module).__name__ == "TransformerBridge" else ((), options)


def _refuse_masked_positions(batch: Batch, model: Model) -> None:
    """Refuse rows without token ids of which a mask hides positions of the stack that is read, which would be counted.

    Raises:
        LayersimError: it hides some.
    """
    mask = INNER_MASKS.get(model.layers[0].partition(".")[0])
    if mask is not None and not batch.has_tokens and mask in batch.inputs and not bool(batch.inputs[mask].all()):
        hidden = int((batch.inputs[mask] == 0).sum())
        raise LayersimError(
            f"`{mask}` {tuple(batch.inputs[mask].shape)} hides positions of the stack that is read: it has {hidden} zeros, "
            f"and positions of {model.layers[0]} are masked only inside a forward pass. Give images without padding, or "
            "measure with lsim.attach."
        )


def _attention_mask(module: torch.nn.Module, batch: Batch, name: str) -> Tensor:
    """The attention mask of a padded batch.

    Raises:
        LayersimError: the model takes none.
    """
    accepts = inspect.signature(type(module).forward).parameters.values()
    if not any(p.name == name or p.kind is p.VAR_KEYWORD for p in accepts):
        raise LayersimError(
            f"{type(module).__name__} takes no `{name}`, and these rows are of different lengths. Use batch_size=1."
        )
    return batch.attention.long()


def _in_dtype(values: Tensor, model: Model) -> Tensor:
    """Floats in the dtype of the model's parameters; whole numbers and truth values as they are."""
    dtype = getattr(torch, model.dtype.removeprefix("torch."), None)
    return values.to(dtype) if values.is_floating_point() and isinstance(dtype, torch.dtype) else values


def _not_taken(name: str, model: Model) -> LayersimError:
    return LayersimError(
        f"`{name}` in the data is no input of {model.name}, which takes "
        f"{', '.join(dict.fromkeys((model.main_input, *model.inputs)))}."
    )


def _not_tokens(model: Model) -> LayersimError:
    return LayersimError(
        f"{model.name} takes `{model.main_input}`, and the data are tokens. Pass data={{'{model.main_input}': ...}}, or "
        "images with tokenizer=processor."
    )


def smallest_arguments(module: torch.nn.Module, model: Model, decodes: bool) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a forward pass over as little as the model takes: one token, or one image or recording of zeros.

    Args:
        module: the model.
        model: the description of the same model.
        decodes: whether a decoder beside the encoder takes tokens of its own.

    Raises:
        LayersimError: the size of its main input is not known from its configuration.
    """
    token = torch.zeros(1, 1, dtype=torch.long)
    more = {"decoder_input_ids": token} if decodes else {}
    # A decoder that is read has tokens for its main input; what the model as a whole takes is what its encoder takes.
    main = getattr(module, "main_input_name", model.main_input) if decodes else model.main_input
    if main not in ROW_AXES:
        return (token,), more
    return (), {main: _in_dtype(torch.zeros(1, *shape_of_row(module, model, main)), model)} | more


def shape_of_row(module: torch.nn.Module, model: Model, name: str) -> tuple[int, ...]:
    """Shape of one image or recording that a model takes.

    Args:
        module: the model.
        model: the description of the same model.
        name: of the input.

    Raises:
        LayersimError: the size is not known from the configuration.
    """
    config = getattr(module, "config", None)
    config = getattr(config, "vision_config", config) if name == PIXELS else config
    size, bins = getattr(config, "image_size", None), getattr(config, "num_mel_bins", None)
    length = getattr(config, "max_source_positions", None)
    if name == PIXELS and size is not None:
        return (getattr(config, "num_channels", 3), *(size if isinstance(size, list | tuple) else (size, size)))
    if name == "input_features" and bins is not None and length is not None:
        return (bins, 2 * length)
    raise LayersimError(f"The configuration of {model.name} does not give the size of `{name}`.")


def shared_positions(sources: Sequence[Source], batch: Batch) -> int:
    """The number of positions that rows without token ids have in every model.

    Args:
        sources: the models.
        batch: one row.

    Raises:
        LayersimError: the models give the row different numbers of positions.
    """
    counts = [source.count_positions(batch) for source in sources]
    # The mean of a row is one sample in each of them.
    if len(set(counts)) > 1 and not batch.pooled:
        raise LayersimError(
            "The models have different numbers of positions for the same row, so their samples do not match: "
            + ", ".join(f"{count} in {source.model.name}" for source, count in zip(sources, counts, strict=True))
            + ". positions='mean' compares one sample of each row."
        )
    return counts[0]
