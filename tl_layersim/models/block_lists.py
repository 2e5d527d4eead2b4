"""Lists of blocks inside Hugging Face and plain torch models: of one stack, of encoder and decoder, or of stages.

A new layout is one entry in the table `BLOCKS`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from ..core.errors import LayersimError

# Paths of the list of blocks, from the base model (`model.model`, `model.transformer`, `model.gpt_neox`, `model.bert`, ...).
BLOCKS = (
    "layers",  # Llama, Qwen2, Mistral, Mixtral, Gemma 1 to 3, Phi, OLMo, GPT-NeoX, Mamba, ModernBERT, ViT, DeiT, BEiT
    "h",  # GPT-2, GPT-J, Falcon, Bloom
    "language_model.layers",  # Gemma 3 and others with a vision tower
    "decoder.layers",  # OPT
    "encoder.layer",  # BERT, RoBERTa, ELECTRA, DeBERTa, MPNet, DINOv2
    "encoder.layers",  # CLIP and SigLIP towers; the stages of a Swin
    "encoder.block",  # the encoder of a T5 alone
    "block",  # one stack of a T5
    "transformer.layer",  # DistilBERT
    "blocks",  # MPT, and TransformerLens models as plain modules
)
Side = Literal["", "encoder", "decoder", "both"]
SIDES: tuple[Literal["encoder"], Literal["decoder"]] = ("encoder", "decoder")
# Keys and values of attention to the encoder have the encoder's positions, although they are computed in the decoder.
CROSS_ATTENTION = ("EncDecAttention", "encoder_attn", "crossattention", "cross_attn")
# Children that hold one tower of a model of images and texts.
TOWER_MODULES = ("text_model", "vision_model")
OF_ENCODER = ("k", "v", "key", "value", "k_proj", "v_proj")


def block_list(module: torch.nn.Module) -> str | None:
    """Path of the list of blocks of a model of one stack; None where the layout is not known."""
    names = dict(module.named_modules())
    prefix = getattr(module, "base_model_prefix", "")
    # A model with one tower, such as CLIPForImageClassification, may have the prefix of the model with both.
    tower = [name for name in TOWER_MODULES if name in names]
    for base in dict.fromkeys((prefix, "model", "", *(tower if len(tower) == 1 else ()))):
        for path in BLOCKS:
            full = f"{base}.{path}" if base else path
            blocks = names.get(full)
            if isinstance(blocks, torch.nn.ModuleList) and len(blocks):
                return full
    return None


def lists_by_stage(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the lists of blocks of a model whose blocks lie in stages, such as Swin, by stage; empty for any other model.

    The stages are named `stages.0`, `stages.1`, ... A stage begins with fewer positions and more channels than the one before
    it, so that each has a residual stream of its own.
    """
    path = block_list(module)
    inner = [] if path is None else [f"{stage}.blocks" for stage in blocks_in(module, path)]
    names = dict(module.named_modules())
    if not all(isinstance(names.get(one), torch.nn.ModuleList) and len(names[one]) for one in inner):
        return {}
    return {f"stages.{number}": one for number, one in enumerate(inner)}


def lists_by_stack(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the lists of blocks of a model of several stacks, by stack: encoder and decoder, or stages."""
    return lists_by_side(module) or lists_by_stage(module)


def stack_of(module: torch.nn.Module, paths: list[str]) -> str:
    """The one stack in which modules lie: a side, see `side_of`, or a stage; "" where there is none, or several stages."""
    if encoder_and_decoder(module):
        return side_of(module, paths)
    stages = [name for name, path in lists_by_stage(module).items() if any(one.startswith(f"{path}.") for one in paths)]
    return stages[0] if len(stages) == 1 else ""


def is_last_stack(module: torch.nn.Module, paths: list[str]) -> bool:
    """Whether the final norm and the head of a model read the output of these blocks, those of one stack."""
    stages = list(lists_by_stage(module))
    return stack_of(module, paths) in (stages[-1:] or ("", "decoder", "both"))


def blocks_in(module: torch.nn.Module, path: str) -> list[str]:
    """Paths of the modules in a list."""
    blocks = module.get_submodule(path)
    assert isinstance(blocks, torch.nn.ModuleList)
    return [f"{path}.{i}" for i in range(len(blocks))]


def encoder_and_decoder(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the encoder and the decoder of a Hugging Face model with both, by side; empty for any other model."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return {}
    names = {id(sub): name for name, sub in module.named_modules() if name}
    found: dict[str, str] = {}
    for side in SIDES:
        find: Any = getattr(module, f"get_{side}", None)
        try:
            stack = None if find is None else find()
        except (AttributeError, NotImplementedError):
            stack = None
        # Models without the stack return themselves.
        if id(stack) in names:
            found[side] = names[id(stack)]
    first, second = found.get("encoder", ""), found.get("decoder", "")
    apart = len(found) == 2 and not f"{first}.".startswith(f"{second}.") and not f"{second}.".startswith(f"{first}.")
    return found if apart else {}


def lists_by_side(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the lists of blocks of a model with encoder and decoder, by side, those that are known."""
    found = {}
    for side, path in encoder_and_decoder(module).items():
        inner = block_list(module.get_submodule(path))
        if inner is not None:
            found[side] = f"{path}.{inner}"
    return found


def side_of(module: torch.nn.Module, paths: list[str]) -> Side:
    """The side, encoder or decoder, in which modules lie: "" for models of one stack and for modules outside both.

    Args:
        module: the model.
        paths: of its modules; those outside of both stacks are not considered.
    """
    stacks = encoder_and_decoder(module)
    sides = [side for side in SIDES if side in stacks and any(f"{path}.".startswith(f"{stacks[side]}.") for path in paths)]
    return "both" if len(sides) == 2 else sides[0] if sides else ""


def in_both_stacks(module: torch.nn.Module) -> LayersimError:
    """The error for blocks of both stacks of an encoder-decoder, or of none."""
    lists = lists_by_side(module)
    return LayersimError(
        f"`layers` must all lie in the encoder or all in the decoder of {type(module).__name__}, such as "
        f"{lists.get('decoder', 'decoder.block')}.0."
    )


def has_encoder_positions(path: str) -> bool:
    """Whether a module of a decoder computes keys or values of the encoder's positions, as far as its path tells."""
    parts = path.split(".")
    return any(part in CROSS_ATTENTION for part in parts) and parts[-1] in OF_ENCODER
