"""Model: the description of a model from its modules and configuration, before it runs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from ..architectures.anatomy import Anatomy
from ..architectures.blocks import (
    MODULES,
    NORMS_BETWEEN,
    POST_NORM,
    PRE_NORM,
    anatomy_of,
    choose_blocks,
    forward_parameters,
    layer_names,
    locate,
    module_sites,
    refuse_positions_first,
    setting,
    unsupported_blocks,
)
from ..architectures.layouts import NUMBERED_FROM_PAD
from ..architectures.module_paths import modules_by_path
from ..architectures.output_heads import find_head, norms_between_layers, text_config
from ..architectures.transformer_lens import basis_of, head_of
from ..architectures.unembed import Head
from ..core.code_digests import UNKNOWN_CONTENTS, plain_config
from ..core.errors import LayersimError, without_secrets
from ..data.images_of_rows import PIXEL_TABLES
from ..data.input_names import PIXELS
from ..data.row import ModelInputs
from .identity import StoredWeights, hooks_on


@dataclass(frozen=True, kw_only=True)
class ModelDescription(ModelInputs):
    """Description of a model from its modules and configuration, before it runs.

    Attributes:
        name: name under which the model was loaded.
        config_hash: see `Provenance`; "" if there is no configuration.
        attention: see `Provenance`.
        weights: the weights, or their checksum as text; "" if the weights are not in this process.
        source: class of the model, and how it is reached.
        basis: basis of the residual stream: raw or processed weights, before or after a norm.
        dtype: dtype of its parameters.
        layers: names of the residual layers, starting with `blocks.0.hook_resid_pre`, or of other sites that are read.
        d_model: width of the residual stream, None if unknown.
        widths: width of each site; empty if all sites have width `d_model`, or the widths are not known before a forward pass.
        vocabulary: number of token ids, None if unknown.
        context: largest number of tokens in a row; None if unknown.
        tokenizer: the model's own, None if it has none.
        head: the modules between the last block and the logits; None if there is no known head.
        calls: how kernels may use `view.calls`: "none"; "values", blocks can be replayed; "gradients", blocks can also be
            differentiated.
        inputs: inputs of its forward besides token ids, attention mask and labels, each with the value that is equivalent to
            leaving it out; None if there is no such value.
        main_input: name of the first input of its forward, such as "input_ids" for language models.
        token_input: name of the input with the token ids of the stack that is read, such as "decoder_input_ids".
        mask_input: name of the attention mask of this stack; "" for a vision tower, which has none.
        processor: image processor; None if the model has none.
        pads: padding ids in its configuration.
        starts: BOS ids in its configuration.
        ends: EOS ids in its configuration.
        pixel_axes: number of axes of one row of `pixel_values`: 3 for images, 2 for patches; None if unknown.
        channels: number of channels of an image; None if unknown.
        image_tokens: id of the token that stands for a part of an image ("image") or of a video ("video").
        merged_patches: number of patches for which one such token stands.
        changes: changes to the model outside its weights, see `Provenance`.
        stream: whether the sites are the residual stream: "whole" for consecutive blocks, "parts" if blocks are left out or the
            stream is also read inside blocks, "none" for other sites, "unknown" until a forward pass has tested it.
    """

    config_hash: str
    weights: StoredWeights | str
    source: str
    basis: str
    dtype: str
    layers: tuple[str, ...]
    d_model: int | None
    head: Head | None = None
    calls: Literal["none", "values", "gradients"] = "none"
    stream: Literal["whole", "parts", "unknown", "none"] = "whole"
    widths: tuple[int, ...] = ()
    changes: str = ""
    attention: str = ""

    def inputs_with(self, other: ModelDescription) -> dict[str, Any]:
        """A dict of the fields `inputs`, `pads`, `starts` and `ends`, combined from both models."""
        inputs = {**self.inputs, **other.inputs}
        # A value must be equivalent to leaving the input out in both models.
        for name in self.inputs.keys() & other.inputs.keys():
            inputs[name] = self.inputs[name] if self.inputs[name] == other.inputs[name] else None
        combined: dict[str, Any] = {"inputs": inputs}
        for name in ("pads", "starts", "ends"):
            ids = getattr(self, name) + getattr(other, name)
            # Without repetition, in the order of the models.
            combined[name] = tuple(dict.fromkeys(ids))
        return combined

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of the parameters; float32 if there are none."""
        dtype: torch.dtype = getattr(torch, self.dtype.removeprefix("torch."), torch.float32)
        return dtype

    @property
    def weights_hash(self) -> str:
        """The checksum of the weights; "" if they are not in this process."""
        return str(self.weights)

    def as_it_is_now(self) -> ModelDescription:
        """This description with a new checksum of the weights, which may have changed."""
        return replace(self, weights=self.weights.again()) if isinstance(self.weights, StoredWeights) else self

    def identity(self, argument: str | None) -> dict[str, str]:
        """Texts that identify the model between runs: checksums, changes, class, basis, dtype and head.

        Args:
            argument: name of the argument that holds the run's file, for messages; None if no later run is compared with this
                one.

        Raises:
            LayersimError: the model has a change that cannot be compared with a later run.
        """
        unknown = [change for change in self.changes.split("; ") if change.endswith(UNKNOWN_CONTENTS)]
        if unknown and argument is not None:
            raise LayersimError(
                f"`{argument}` needs a model that a later run can recognise, but {', '.join(unknown)} cannot be compared. "
                "Write the hook or edit as a function that holds only numbers, texts and tensors."
            )
        return {
            # Another machine may have the same weights in another folder.
            "weights": self.weights_hash or self.name,
            "configuration": self.config_hash,
            "changes": self.changes,
            "source": self.source,
            "basis": self.basis,
            "dtype": self.dtype,
            "head": "" if self.head is None else str(self.head),
        }

    @property
    def reads_rows(self) -> bool:
        """Whether the head makes one prediction per row, as in text and image classifiers."""
        return self.head is not None and self.head.reads != "every"

    @property
    def widest(self) -> int | None:
        """Width of the widest site; None if unknown."""
        return max(self.widths, default=None) or self.d_model

    def __post_init__(self) -> None:
        # A name that is an address may contain a login, and names are written into messages and files.
        object.__setattr__(self, "name", without_secrets(self.name))


# Inputs of models that take the patches of images: which patches are padding, and in how many rows and columns they lie.
PATCH_MASK = "pixel_attention_mask"
PATCH_SHAPES = "spatial_shapes"
# Inputs that the data reader passes on, or that change no activation: targets, as are names that contain `label`.
HANDLED = ("tokens", "input", "text", "start_positions", "end_positions")


def describe(
    module: torch.nn.Module, anatomy: Anatomy, source: str, tokenizer: Any, unembed: list[str] | None
) -> ModelDescription:
    """Describe a Hugging Face or plain torch model by its modules and its configuration.

    Args:
        module: the model.
        anatomy: what lies where in it.
        source: class of the model, and how it is reached.
        tokenizer: the model's own, None if it has none.
        unembed: paths of final norm and head if the user names them; else None.

    Raises:
        LayersimError: the blocks lie in both stacks of an encoder-decoder, or pass on `pos batch width`.
    """
    refuse_positions_first(module, anatomy)
    has_two_sides = anatomy.kind in ("encoder-decoder", "towers")
    if has_two_sides and len(anatomy.stacks_with(anatomy.blocks)) > 1:
        raise anatomy.in_both_stacks()
    names, stream = locate(module, anatomy)
    basis = POST_NORM if anatomy.post_norm else PRE_NORM
    if anatomy.stack == "decoder" and norms_between_layers(module):
        basis += NORMS_BETWEEN
    config = getattr(module, "config", None)
    text = text_config(config)
    if config is not None and hasattr(config, "to_dict"):
        settings = plain_config(config)
    else:
        shapes = [(name, list(parameter.shape)) for name, parameter in module.named_parameters()]
        settings = {"class": type(module).__name__, "parameters": shapes}
    first_parameter = next(module.parameters(), None)
    return ModelDescription(
        name=getattr(config, "_name_or_path", "") or type(module).__name__,
        config_hash=hash_config(settings),
        weights=StoredWeights(module),
        changes=hooks_on(module),
        source=source,
        dtype=str(first_parameter.dtype) if first_parameter is not None else "unknown",
        d_model=getattr(text, "hidden_size", None),
        vocabulary=getattr(text, "vocab_size", None),
        context=_context(text),
        tokenizer=tokenizer,
        calls="gradients",
        attention=_head_sizes(module, text),
        basis=basis if names[0].endswith(".hook_resid_pre") else MODULES,
        layers=names,
        stream=stream,
        # The logits are computed from the decoder, or from the last stage.
        head=find_head(module, anatomy, unembed) if anatomy.is_last_stack(anatomy.blocks) else None,
        **data_fields(module, anatomy),
    )


def _context(config: Any) -> int | None:
    """Largest number of tokens in a row; None if the configuration of the text model does not give it."""
    positions: int | None = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if not positions:
        return None
    # Positions begin behind the padding id 1, so that the first two embeddings stand for no token.
    return positions - 2 if getattr(config, "model_type", None) in NUMBERED_FROM_PAD else positions


def data_fields(module: torch.nn.Module, anatomy: Anatomy) -> dict[str, Any]:
    """The fields of `ModelDescription` that determine how data is read.

    Args:
        module: the model.
        anatomy: what lies where in it.
    """
    config = getattr(module, "config", None)
    text = text_config(config)
    # Models with segments use segment 0 where none is given. GPT-2 instead adds an embedding for segment 0.
    zeros = 0 if getattr(text, "type_vocab_size", None) is not None else None
    names = _input_names(module, anatomy.blocks[0])
    main_input = _main_input(module)
    token_input = "input_ids"
    mask_input = "attention_mask"
    stack = anatomy.stack_of(anatomy.blocks[:1])
    if stack == "decoder" and "decoder_input_ids" in names:
        token_input = "decoder_input_ids"
        mask_input = "decoder_attention_mask"
        main_input = token_input
    if stack == "vision":
        main_input = PIXELS
        # An attention mask beside the pixels is that of the other tower's texts.
        mask_input = ""
    axes = _pixel_axes(module, names)
    if axes == 2 and PATCH_MASK in names:
        mask_input = PATCH_MASK
    inputs: dict[str, int | None] = {}
    for name in names:
        if name not in (token_input, mask_input):
            inputs[name] = zeros if name == "token_type_ids" else None
    return {
        "inputs": inputs,
        "main_input": main_input,
        "token_input": token_input,
        "mask_input": mask_input,
        "pads": tuple(_token_ids(config, text, "pad_token_id")),
        "starts": tuple(_token_ids(config, text, "bos_token_id")),
        "ends": tuple(_token_ids(config, text, "eos_token_id")),
        "processor": processor_of(module),
        "pixel_axes": axes,
        "channels": _image_channels(module) if axes == 3 else None,
        "image_tokens": _image_tokens(config),
        "merged_patches": _merged_patches(config),
    }


def _image_tokens(config: Any) -> dict[str, int]:
    """Ids of the tokens that stand for parts of images and of videos, from the configuration."""
    tokens: dict[str, int] = {}
    for kind in PIXEL_TABLES:
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            token = getattr(config, name, None)
            if isinstance(token, int):
                tokens[kind] = token
    return tokens


def _merged_patches(config: Any) -> int:
    """Number of patches that are joined to one image token: the square of `spatial_merge_size`."""
    size = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1)
    return size * size if isinstance(size, int) else 1


def _image_convolutions(module: torch.nn.Module) -> list[torch.nn.Module]:
    return [part for part in modules_by_path(module).values() if isinstance(part, torch.nn.Conv2d | torch.nn.Conv3d)]


def _pixel_axes(module: torch.nn.Module, names: list[str]) -> int | None:
    """Number of axes of one row of `pixel_values`: 3 for images, 2 for patches; None if the modules do not show it.

    Args:
        module: the model.
        names: names of its inputs.
    """
    if _image_convolutions(module):
        return 3
    # The numbers of rows and columns of an image whose patches are given.
    return 2 if PATCH_SHAPES in names else None


def _image_channels(module: torch.nn.Module) -> int | None:
    """Number of channels of the images that a model takes; None if unknown."""
    config = getattr(module, "config", None)
    vision_config = getattr(config, "vision_config", config)
    channels = getattr(vision_config, "num_channels", None)
    if isinstance(channels, int):
        return channels
    first_convolution: Any = _image_convolutions(module)[0]
    return int(first_convolution.in_channels)


def _main_input(module: torch.nn.Module) -> str:
    """Name of the main input: `main_input_name`, or the first argument of forward."""
    name = getattr(module, "main_input_name", None)
    if isinstance(name, str):
        return name
    # Without `self`.
    parameters = list(forward_parameters(module).values())[1:]
    for parameter in parameters:
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            return parameter.name
    return "input_ids"


def processor_of(model: Any) -> Any:
    """The model's image processor; None if it has none."""
    processor = getattr(model, "processor", None)
    if processor is None:
        processor = getattr(model, "image_processor", None)
    # A processor of images and texts holds one of images.
    return getattr(processor, "image_processor", processor)


def _input_names(module: torch.nn.Module, block: str) -> list[str]:
    """Argument names of the model's forward, and of inner modules that get its keyword arguments."""
    path = block.split(".")
    names: dict[str, None] = {}
    for depth in range(len(path)):
        owner = module.get_submodule(".".join(path[:depth]))
        if isinstance(owner, torch.nn.ModuleList):
            continue
        parameters = list(forward_parameters(owner).values())[1:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                names[parameter.name] = None
        passes_on_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        if not passes_on_keywords:
            break
    return [name for name in names if name not in HANDLED and "label" not in name]


def _token_ids(config: Any, text: Any, name: str) -> list[int]:
    """A list of the token ids under a name in a configuration; empty if there are none."""
    ids = getattr(text, name, None)
    if ids is None:
        ids = getattr(config, name, None)
    candidates = ids if isinstance(ids, list | tuple) else [ids]
    return [token for token in candidates if isinstance(token, int) and token >= 0]


def _head_sizes(module: torch.nn.Module, config: Any) -> str:
    """Head width and rotary dimensions as text, see `Provenance`.

    Args:
        module: the model; the frequencies of its rotary embeddings are half as many as the rotary dimensions.
        config: its configuration, with the names of Hugging Face or of TransformerLens.
    """
    width = setting(config, "hidden_size")
    heads = setting(config, "num_attention_heads")
    # A Swin has a list of numbers of heads, one for each stage.
    width_of_head = width // heads if isinstance(width, int) and isinstance(heads, int) and heads else 0
    d_head = setting(config, "d_head", "head_dim") or width_of_head
    frequencies = next((len(buffer) for name, buffer in module.named_buffers() if name.endswith("inv_freq")), 0)
    sizes = {"d_head": d_head, "rotary_dim": getattr(config, "rotary_dim", None) or 2 * frequencies}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size)


def hash_config(config: dict[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]


def settled(model: ModelDescription, module: torch.nn.Module, anatomy: Anatomy, strangers: list[str]) -> ModelDescription:
    """A copy of a model description with the `stream` and `basis` found in a forward pass.

    If the modules are not blocks, `layers` has the names of the modules.

    Args:
        model: the description before.
        module: the model.
        anatomy: what lies where in it.
        strangers: paths of the modules whose input is not the output of the module before, or whose output is a feature map
            or has another width.

    Raises:
        LayersimError: the modules are not blocks, and the user did not name them.
    """
    if not strangers:
        return replace(model, stream="whole", basis=POST_NORM if anatomy.post_norm else PRE_NORM)
    if anatomy.named:
        return replace(model, stream="none", layers=module_sites(anatomy.blocks), basis=MODULES)
    reason = f"{strangers[0]} does not take the output of the module before, or returns a feature map or another width"
    raise unsupported_blocks(module, reason)


def describe_transformer_lens(model: Any) -> ModelDescription:
    """Describe a TransformerLens model by its configuration.

    Raises:
        LayersimError: hook points of the residual stream are missing.
    """
    cfg = model.cfg
    names = layer_names(cfg.n_layers)
    missing = [name for name in names if name not in model.hook_dict]
    if missing:
        raise LayersimError(
            f"{cfg.model_name} lacks the hook point {missing[0]} of the residual stream. Pass the Hugging Face model itself."
        )
    wrapped_anatomy: Anatomy | None = None
    inputs: dict[str, Any] = {}
    if type(model).__name__ == "TransformerBridge":
        wrapped = model.original_model
        wrapped_anatomy = choose_blocks(wrapped, anatomy_of(wrapped), None)
        # A bridge has the inputs of its Hugging Face model.
        inputs = data_fields(wrapped, wrapped_anatomy)
    # Settings of a load, which do not change the architecture.
    left_out = ("model_name", "device", "dtype", "tokenizer_name")
    settings = {name: value for name, value in cfg.to_dict().items() if name not in left_out}
    return ModelDescription(
        name=str(cfg.model_name),
        config_hash=hash_config(settings),
        weights=StoredWeights(model),
        changes=hooks_on(model),
        source=type(model).__name__,
        basis=basis_of(model, wrapped_anatomy),
        dtype=str(cfg.dtype),
        layers=names,
        d_model=cfg.d_model,
        vocabulary=cfg.d_vocab,
        context=cfg.n_ctx,
        tokenizer=model.tokenizer,
        head=head_of(model),
        calls="gradients",
        attention=_head_sizes(model, cfg),
        **inputs,
    )
