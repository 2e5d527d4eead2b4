"""Arguments of forward passes: inputs by name, a mask if there is padding, and no cache."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..architectures.blocks import forward_parameters, no_cache
from ..architectures.output_heads import text_config
from ..core.errors import LayersimError
from ..core.wording import first_line
from ..data.batches import Batch
from ..data.images_of_rows import joined_images
from ..data.input_names import EMBEDDINGS, PIXELS, ROW_AXES, TOKEN_IDS
from .model_description import ModelDescription
from .out_of_memory import is_out_of_memory

# Masks over positions that are known only inside a forward pass, by the stack of an encoder-decoder that they mask.
INNER_MASKS = {"encoder": "pixel_mask", "decoder": "decoder_attention_mask"}
# Inputs that mean nothing where all of their values are 0, also to a model that does not take them.
EMPTY_IF_ZERO = ("token_type_ids",)
# Number of frames of a recording where a model takes any number of them.
FRAMES = 64


def device_of(module: torch.nn.Module) -> torch.device:
    """The device of a module's first weight or buffer; else the CPU."""
    first = next(itertools.chain(module.parameters(), module.buffers()), None)
    return torch.device("cpu") if first is None else first.device


def call_on(device: torch.device, module: torch.nn.Module, args: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """Call a module with tensors that are moved to a device.

    Args:
        device: the device.
        module: the module.
        args: the positional arguments.
        options: the keyword arguments; those that are not tensors are unchanged.
    """
    moved_args = [value.to(device) for value in args]
    moved_options = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in options.items()}
    return module(*moved_args, **moved_options)


def fewest_logits(module: torch.nn.Module) -> dict[str, int]:
    """The keyword argument `logits_to_keep=1`; empty if the model's forward does not take it."""
    return {"logits_to_keep": 1} if "logits_to_keep" in forward_parameters(module) else {}


def with_padding_ids(module: torch.nn.Module, tokens: Tensor, attended: Tensor | None) -> Tensor:
    """Token ids (`batch pos`), with the padding id of the model's configuration at padding.

    Hugging Face classifiers find the last token of a row by the padding id and ignore the mask.

    Args:
        module: the model.
        tokens: the token ids.
        attended: `batch pos`, False at padding; None without padding.
    """
    pad = padding_id(module)
    if pad is None or attended is None:
        return tokens
    return torch.where(attended, tokens, pad)


def padding_id(module: torch.nn.Module) -> int | None:
    """The padding id of a model's configuration; None if there is none in the vocabulary."""
    config = getattr(module, "config", None)
    pad = getattr(config, "pad_token_id", None)
    vocabulary = getattr(text_config(config), "vocab_size", None)
    if not isinstance(pad, int) or pad < 0 or (isinstance(vocabulary, int) and pad >= vocabulary):
        return None
    return pad


def forward_arguments(
    module: torch.nn.Module, batch: Batch, model: ModelDescription
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Positional and keyword arguments of a forward pass over a batch.

    Token ids are positional, because modules name them differently; decoder tokens of an encoder-decoder and all other inputs
    are passed by name.

    Args:
        module: the model.
        batch: the rows.
        model: the description of the same model.

    Raises:
        LayersimError: the model does not accept an input of the batch, or accepts no mask and the batch is padded.
    """
    _refuse_masked_positions(batch, model)
    options: dict[str, Any] = {**no_cache(module)}
    parameters = forward_parameters(module)
    takes_mask = model.mask_input in parameters
    is_required = takes_mask and parameters[model.mask_input].default is inspect.Parameter.empty
    if batch.padded or is_required:
        takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        if not takes_mask and not takes_any_keyword:
            raise LayersimError(
                f"{type(module).__name__} takes no `{model.mask_input}`, but the rows of a batch have different lengths. Use "
                "batch_size=1."
            )
        options[model.mask_input] = batch.attention.long()
    if batch.has_tokens:
        main = TOKEN_IDS
    elif model.main_input in batch.inputs:
        main = model.main_input
    else:
        main = EMBEDDINGS
    for name, values in batch.inputs.items():
        if name in batch.images:
            # Models take no empty table.
            if any(batch.images[name]):
                options[name] = _in_dtype(joined_images(values, batch.images[name]), model)
        elif name == main or name in model.inputs:
            options[name] = _in_dtype(values, model)
        elif name not in EMPTY_IF_ZERO or bool(values.any()):
            takes = ", ".join(dict.fromkeys((model.main_input, *model.inputs)))
            raise LayersimError(f"`{name}` in the data is not an input of {model.name}, which takes {takes}.")
    if batch.has_tokens:
        if model.main_input in ROW_AXES:
            raise LayersimError(
                f"{model.name} takes `{model.main_input}`, but the data are tokens. Pass data={{'{model.main_input}': ...}}, "
                "or images with tokenizer=processor."
            )
        if model.token_input != TOKEN_IDS:
            return (), options | {model.token_input: batch.tokens}
        return (batch.tokens,), options
    if type(module).__name__ == "TransformerBridge":
        # A TransformerBridge has one argument for tokens, pixels and embeddings.
        return (options.pop(main),), options
    return (), options


def _refuse_masked_positions(batch: Batch, model: ModelDescription) -> None:
    """Raise an error if a mask hides positions that would be measured.

    Raises:
        LayersimError: a mask hides positions.
    """
    stack = model.layers[0].partition(".")[0]
    mask = INNER_MASKS.get(stack)
    if mask is not None and not batch.has_tokens and mask in batch.inputs and not bool(batch.inputs[mask].all()):
        hidden = int((batch.inputs[mask] == 0).sum())
        raise LayersimError(
            f"`{mask}` {tuple(batch.inputs[mask].shape)} has {hidden} zeros; it must be all ones, because "
            f"{model.layers[0]} would be measured at masked positions too. Give images without padding, or measure "
            "with lsim.attach."
        )


def _in_dtype(values: Tensor, model: ModelDescription) -> Tensor:
    """Convert floats to the dtype of the model's parameters; integers and bools are unchanged."""
    return values.to(model.torch_dtype) if values.is_floating_point() else values


def smallest_arguments(
    module: torch.nn.Module, model: ModelDescription, decodes: bool
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Arguments of a forward pass over the smallest input: one token, image or recording.

    Args:
        module: the model.
        model: the description of the same model.
        decodes: whether an encoder-decoder's decoder needs tokens too.

    Raises:
        LayersimError: the configuration does not give the size of the main input.
    """
    token = torch.zeros(1, 1, dtype=torch.long)
    decoder_options = {"decoder_input_ids": token} if decodes else {}
    # A decoder that is read has tokens for its main input; what the model as a whole takes is what its encoder takes.
    main = getattr(module, "main_input_name", model.main_input) if decodes else model.main_input
    if main not in ROW_AXES:
        return (token,), decoder_options
    row = torch.zeros(1, *shape_of_row(module, model, main))
    return (), {main: _in_dtype(row, model)} | decoder_options


def shape_of_row(module: torch.nn.Module, model: ModelDescription, name: str) -> tuple[int, ...]:
    """Shape of one input row of a model: an image or a recording.

    Args:
        module: the model.
        model: the description of the same model.
        name: name of the input.

    Raises:
        LayersimError: the configuration does not give the size.
    """
    config = getattr(module, "config", None)
    config = getattr(config, "vision_config", config) if name == PIXELS else config
    image_size = getattr(config, "image_size", None)
    mel_bins = getattr(config, "num_mel_bins", None)
    positions = getattr(config, "max_source_positions", None)
    if name == PIXELS and image_size is not None:
        height_and_width = image_size if isinstance(image_size, list | tuple) else (image_size, image_size)
        return (getattr(config, "num_channels", 3), *height_and_width)
    if name == "input_features" and mel_bins is not None and positions is not None:
        # A convolution of stride 2 makes one position of two frames.
        return (mel_bins, 2 * positions)
    frame_width = getattr(config, "feature_projection_input_dim", None)
    if name == "input_features" and frame_width is not None:
        return (FRAMES, frame_width)
    raise LayersimError(
        f"The size of `{name}` is unknown; the configuration of {model.name} must have image_size, num_mel_bins and "
        "max_source_positions, or feature_projection_input_dim."
    )


def refuse_no_weights(module: torch.nn.Module) -> None:
    """Raise an error if weights are on the meta device, unless accelerate has offloaded them."""
    missing = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if missing and not any(hasattr(sub, "_hf_hook") for sub in module.modules()):
        raise LayersimError(
            f"{type(module).__name__} has no weights: {missing[0]} is on the meta device. Load the model with "
            "from_pretrained(name), outside of torch.device('meta')."
        )


@contextmanager
def refusing_failed_forward(module: torch.nn.Module) -> Iterator[None]:
    """A context manager that adds the model's inputs to the message of a failed forward pass.

    Args:
        module: the model.

    Raises:
        LayersimError: the forward pass raised an exception.
    """
    try:
        yield
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, LayersimError) or is_out_of_memory(error):
            raise
        parameters = inspect.signature(type(module).forward).parameters.values()
        inputs = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"]
        models_inside = [f"model.{name}" for name, child in module.named_children() if hasattr(child, "base_model_prefix")]
        text = f"The forward pass of {type(module).__name__} fails on this data: {type(error).__name__}: {first_line(error)}."
        # Errors of shapes, dtypes and indices concern inputs that are there.
        if not isinstance(error, RuntimeError | IndexError):
            text += f" Give all inputs that the model needs by name ({', '.join(inputs[:6])})"
            if models_inside:
                text += f", or measure {' or '.join(models_inside)} alone"
            text += "."
        raise LayersimError(text) from error
