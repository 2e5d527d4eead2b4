"""Blocks of a Hugging Face or plain torch model: their module paths, and the names and the basis of their sites."""

from __future__ import annotations

import difflib
import fnmatch
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief, first_line
from .block_layouts import layout_of
from .block_lists import block_list, blocks_in, encoder_and_decoder, lists_by_side, lists_by_stage, stack_of
from .model_info import Model, block_sites, layer_names, module_sites
from .out_of_memory import is_out_of_memory
from .towers import blocks_of_tower, has_both_towers, two_towers

PRE_NORM = "raw weights, before the final norm"
MODULES = "raw weights; what the named modules give"
POST_NORM = "raw weights; post-norm: each block's output is after its layer norm"
NORMS_BETWEEN = ", and the decoder's norm follows it before the next block (config.auxiliary_loss)"
FAMILIES = (
    "Llama, Mistral, Mixtral, Qwen2, Gemma 1 to 3, Phi, OLMo, GPT-2, GPT-J, GPT-NeoX, Falcon, Bloom, OPT, MPT, Mamba, BERT, "
    "RoBERTa, DistilBERT, ELECTRA, DeBERTa, ModernBERT, MPNet, ViT, DeiT, DINOv2, BEiT, Swin, one tower of CLIP or SigLIP, T5, "
    "BART and DETR layouts by themselves; "
    "any other decoder or encoder by layers=[paths of its blocks]"
)


def find_blocks(module: torch.nn.Module, layers: list[str] | None) -> list[str]:
    """Module paths of the blocks of one stack, in order.

    Args:
        module: the model.
        layers: the paths that the user names, which are checked; None to find them by the layout, those of the decoder in a
            model with encoder and decoder.

    Raises:
        LayersimError: a path does not exist, is named twice or out of order; or no path is named and the layout is not known.
    """
    if layers is None:
        return _known(module)
    paths = existing_paths(module, layers, "layers")
    numbers = _numbers(module, paths)
    for place, (before, path) in enumerate(pairwise(paths), start=1):
        if path in paths[:place] or (numbers is not None and numbers[place] < numbers[place - 1]):
            raise LayersimError(
                f"`layers` has {path!r} after {before!r}; it must name different modules, in the order in which the model "
                "runs them."
            )
    return paths


def refuse_paths(layers: list[str] | None, unembed: list[str] | None, models: str) -> None:
    """Refuse `layers` and `unembed` for models whose blocks and head are known.

    Args:
        layers: the argument of the call.
        unembed: the argument of the call.
        models: the kind of model, for the message.

    Raises:
        LayersimError: one of the two is given.
    """
    for name, paths in (("layers", layers), ("unembed", unembed)):
        if paths is not None:
            raise LayersimError(
                f"`{name}` is {brief(paths)}, but cannot be given for {models}, whose blocks and head are known."
            )


def modules_in_place_of_blocks(module: torch.nn.Module, at: Any) -> list[str] | None:
    """Paths of the modules that `at` names in a model whose blocks are not known; None where they are, or `at` names others.

    Args:
        module: the model.
        at: as in `find_points`.
    """
    if block_list(module) is not None or encoder_and_decoder(module) or callable(at):
        return None
    own = [
        name for name, sub in module.named_modules() if name and not isinstance(sub, torch.nn.ModuleList | torch.nn.ModuleDict)
    ]
    found: list[str] = []
    for item in [at] if isinstance(at, int | str) else at:
        if not isinstance(item, str):
            return None
        matches = [name for name in own if fnmatch.fnmatchcase(name, item.removesuffix(".input"))]
        if not matches:
            return None
        found += matches
    return list(dict.fromkeys(found))


def locate(
    module: torch.nn.Module, paths: list[str], named: bool
) -> tuple[tuple[str, ...], Literal["whole", "parts", "unknown", "none"]]:
    """Names of the sites at which modules are read, and whether these sites are the residual stream (`Model.stream`).

    Modules of the layout's list of blocks pass on the residual stream. Modules inside a block do not. All others are tested in
    a forward pass.

    Args:
        module: the model.
        paths: of its modules, as `find_blocks` gives them.
        named: whether the user named them.
    """
    tower = blocks_of_tower(module, paths)
    if tower is not None:
        consecutive = tower[1] == list(range(tower[1][0], tower[1][0] + len(tower[1])))
        return _prefixed(f"{tower[0]}.", block_sites(tower[1])), "whole" if consecutive else "parts"
    stack = stack_of(module, paths)
    prefix = f"{stack}." if stack else ""
    if not named:
        # A list called `layers` holds the blocks of a Hugging Face model; in another model it may hold anything.
        trusted = hasattr(module, "base_model_prefix")
        whole = not _has_convolution_between(module, paths)
        return _prefixed(prefix, layer_names(len(paths))), ("whole" if whole else "parts") if trusted else "unknown"
    numbers = _numbers(module, paths)
    if numbers is not None:
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and not _has_convolution_between(module, paths)
        trusted = hasattr(module, "base_model_prefix")
        return _prefixed(prefix, block_sites(numbers)), ("whole" if whole else "parts") if trusted else "unknown"
    inside = any(path.startswith(f"{block}.") for path in paths for block in _known_or_none(module, stack))
    # The input and the output of a single module cannot show a stream.
    return module_sites(paths), "none" if inside or len(paths) < 2 else "unknown"


def settled(model: Model, module: torch.nn.Module, paths: list[str], named: bool, strangers: list[str]) -> Model:
    """The description of a model after a forward pass has tested whether its modules pass on the residual stream.

    Args:
        model: the description before.
        module: the model.
        paths: of its modules.
        named: whether the user named them.
        strangers: paths of modules whose input is not the output of the module before them, or whose output is a feature map.

    Raises:
        LayersimError: the modules are not blocks, and the user did not name them.
    """
    if not strangers:
        post = is_post_norm(module, paths[0])
        return replace(model, stream="whole", basis=POST_NORM if post else PRE_NORM)
    if named:
        return replace(model, stream="none", layers=module_sites(paths), basis=MODULES)
    given = f"{strangers[0]} does not take the output of the module before it in its list, or gives a feature map: no blocks"
    raise _unsupported(module, given)


def same_stream(given: Tensor, before: Tensor) -> bool:
    """Whether the input of a module equals the output of the module before it."""
    # NaNs are reported elsewhere.
    return given.shape == before.shape and torch.equal(given.nan_to_num(), before.to(given).nan_to_num())


def _prefixed(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names)


def _numbers(module: torch.nn.Module, paths: list[str]) -> list[int] | None:
    """Block numbers of the modules at these paths; None if a module is not a block, or the layout is not known."""
    blocks = _known_or_none(module, stack_of(module, paths))
    return [blocks.index(path) for path in paths] if set(paths) <= set(blocks) else None


def _has_convolution_between(module: torch.nn.Module, paths: list[str]) -> bool:
    """Whether a convolution follows block 0, as in the largest DeBERTa-v2: block 1 does not receive what block 0 returns."""
    blocks, _, number = paths[0].rpartition(".")
    beside = module.get_submodule(blocks.rpartition(".")[0]) if blocks else module
    is_first = number == "0" and len(paths) > 1
    return is_first and type(getattr(beside, "conv", None)).__name__ == "ConvLayer"


def _known_or_none(module: torch.nn.Module, stack: str) -> list[str]:
    try:
        return _known(module, stack)
    except LayersimError:
        return []


def _known(module: torch.nn.Module, stack: str = "") -> list[str]:
    """Paths of all blocks; in a model of several stacks of one of them, by default of the decoder or of the last stage.

    Raises:
        LayersimError: the layout is not known.
    """
    if encoder_and_decoder(module):
        path = lists_by_side(module).get(stack or "decoder")
        if path is None:
            raise _unsupported(module, "an encoder-decoder whose decoder has no known list of blocks")
        return blocks_in(module, path)
    stages = lists_by_stage(module)
    path = stages[stack or list(stages)[-1]] if stages else block_list(module)
    if path is not None:
        return blocks_in(module, path)
    raise _unsupported(module, f"modules {[name for name, _ in module.named_children()][:6]}")


def _unsupported(module: torch.nn.Module, given: str) -> LayersimError:
    if has_both_towers(module):
        return two_towers(module, f"{type(module).__name__} without layers=")
    lists = [name for name, sub in module.named_modules() if isinstance(sub, torch.nn.ModuleList) and len(sub) > 1][:3]
    # A detector inside a model of segments, for example.
    inner = [f"model.{name}" for name, part in module.named_children() if lists_by_side(part)][:1]
    return LayersimError(
        f"The layers of {type(module).__name__} are not known: {given}. "
        + (
            f"Pass {inner[0]}, whose layers are known."
            if inner
            else f"Name its blocks, such as layers=[f'{lists[0]}.{{i}}' for i in range(n)]."
            if lists
            else "Name its blocks, layers=['path.of.block.0', 'path.of.block.1', ...]."
        )
    )


def existing_paths(module: torch.nn.Module, paths: list[str], argument: str) -> list[str]:
    """Check the paths that the user gave for an argument, and return them.

    Raises:
        LayersimError: the model has no module at a path, or none is named.
    """
    names = dict(module.named_modules())
    for path in paths:
        if path not in names:
            near = difflib.get_close_matches(path, names, n=3)
            lists = [name for name, sub in names.items() if isinstance(sub, torch.nn.ModuleList) and len(sub)]
            raise LayersimError(
                f"`{argument}` is [..., {path!r}, ...], and {type(module).__name__} has no such module; "
                + (
                    f"did you mean {' or '.join(map(repr, near))}?"
                    if near
                    else f"it has modules such as {', '.join([f'{name}.0' for name in lists[:3]] or list(names)[1:4])}."
                )
            )
        if argument == "layers" and isinstance(names[path], torch.nn.ModuleList):
            raise LayersimError(
                f"`layers` names {path!r}, a list of modules; name the modules in it, [f'{path}.{{i}}' for i in "
                f"range({len(names[path])})]."
            )
    if not paths:
        raise LayersimError(f"`{argument}` is empty; it must name a module.")
    return list(paths)


def find_embedding(module: torch.nn.Module) -> torch.nn.Module | None:
    """The token embedding; None where the model has none, or does not name it."""
    find: Any = getattr(module, "get_input_embeddings", None)
    try:
        embedding = None if find is None else find()
    except (AttributeError, NotImplementedError):
        # Hugging Face models of images and models of several towers have the method, which raises.
        return None
    return embedding if isinstance(embedding, torch.nn.Module) else None


def nearest_config(module: torch.nn.Module, path: str) -> Any:
    """The configuration of a module of a model: that of the nearest module around it that has one."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        config = getattr(module.get_submodule(".".join(parts[:depth])), "config", None)
        if config is not None:
            return config
    return None


def is_post_norm(module: torch.nn.Module, path: str) -> bool:
    """Whether the blocks end in a layer norm, so that their output is not the sum of their input and a branch.

    Args:
        module: the model.
        path: of one of its blocks.
    """
    block, config = module.get_submodule(path), nearest_config(module, path)
    layout = layout_of(block, config)
    if layout is not None:
        return bool(layout.sums) and all(total != "resid_post" for total, _ in layout.sums)
    # Blocks with the modules of BERT's, and those of the first GPT, end in a layer norm. Other models have norms before
    # attention and feed-forward, or inside the branch.
    first_gpt = getattr(config, "model_type", None) == "openai-gpt"
    before = getattr(config, "do_layer_norm_before", None)
    return hasattr(getattr(block, "output", None), "LayerNorm") or before is False or first_gpt


def refuse_no_weights(module: torch.nn.Module) -> None:
    """Refuse a model whose weights were never loaded. Weights that accelerate has offloaded are loaded when they are needed."""
    brought = [name for name, sub in module.named_modules() if hasattr(sub, "_hf_hook")]
    for name, sub in module.named_modules():
        if any(p.is_meta for p in sub.parameters(recurse=False)):
            if any(holder in ("", name) or name.startswith(f"{holder}.") for holder in brought):
                continue
            raise LayersimError(
                f"{type(module).__name__} has no weights: {name or 'its parameter'} is on the meta device. Load it with "
                "from_pretrained(name), outside of torch.device('meta')."
            )


@contextmanager
def refusing_failed_forward(module: torch.nn.Module, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """A context of a forward pass, in which an exception that the inputs cause becomes the error of `no_forward`.

    Args:
        module: the model.
        inputs: of the forward pass, by name.

    Raises:
        LayersimError: the forward pass raised an exception.
    """
    try:
        yield
    except (AttributeError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, LayersimError) or is_out_of_memory(error):
            raise
        raise no_forward(module, error, inputs) from error


def no_forward(module: torch.nn.Module, error: Exception, inputs: Mapping[str, Tensor]) -> LayersimError:
    """The error for a model whose forward pass fails on the data.

    Args:
        module: the model.
        error: of the forward pass.
        inputs: of the batch, by name.
    """
    images = inputs.get("pixel_values")
    if images is not None and (other := _other_size(module, images, error)) is not None:
        return other
    reads = [
        p.name
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]
    parts = [f"model.{name}" for name, part in module.named_children() if hasattr(part, "base_model_prefix")]
    return LayersimError(
        f"The forward pass of {type(module).__name__} fails on this data: {type(error).__name__}: {first_line(error)}. Give "
        f"all inputs that the model needs by name ({', '.join(reads[:6])})"
        + (f", or measure {' or '.join(parts)} alone." if parts else ".")
    )


def _other_size(module: torch.nn.Module, images: Tensor, error: Exception) -> LayersimError | None:
    """The error for images of another size than the model's configuration names; None where it names none, or theirs."""
    config = getattr(module, "config", None)
    config = getattr(config, "vision_config", config)
    channels, size = getattr(config, "num_channels", None), getattr(config, "image_size", None)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    found = tuple(images.shape[1:])
    wanted = tuple(own if own is None else int(own) for own in (channels, *sides))
    if len(found) == 3 and all(own in (None, given) for own, given in zip(wanted, found, strict=True)):
        return None
    name, last = type(module).__name__, found[-1:] == wanted[:1] != found[:1]
    return LayersimError(
        f"`pixel_values` has images of {' x '.join(map(str, found))}; {name} takes "
        f"{' x '.join('any' if own is None else str(own) for own in wanted)}, channels x height x width."
        + (
            " Use pixel_values.movedim(-1, 1), which puts channels first."
            if last
            else " Give the images with tokenizer=processor."
        )
    )


def classes_with_head(name: str) -> str:
    """Names of the transformers classes that load a model of this class with a head, for a message.

    Examples:
        >>> classes_with_head("BertModel")
        'AutoModelForMaskedLM or AutoModelForSequenceClassification'
        >>> classes_with_head("LlamaModel")
        'AutoModelForCausalLM'
    """
    from transformers.models.auto import modeling_auto as auto

    stem = name.removesuffix("Model")
    # Encoders first: most of them also have a causal class, for which no trained weights exist.
    if stem and f"{stem}ForMaskedLM" in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return "AutoModelForMaskedLM or AutoModelForSequenceClassification"
    if stem and f"{stem}ForObjectDetection" in auto.MODEL_FOR_OBJECT_DETECTION_MAPPING_NAMES.values():
        return "AutoModelForObjectDetection"
    if stem and f"{stem}ForImageClassification" in str(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()):
        return "AutoModelForImageClassification"
    if stem and {f"{stem}ForCausalLM", f"{stem}LMHeadModel"} & set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return "AutoModelForCausalLM"
    return "AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSequenceClassification, as it was trained"
