"""Finds the blocks of a model, their stacks, layouts and site names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, Literal

import torch

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from .layouts import BLOCKS, CROSS_ATTENTION, LAYOUTS, OF_ENCODER, OTHER_POST_NORM, POSITIONS_FIRST, TOWER_MODULES, BlockLayout
from .module_paths import modules_by_path

PRE_NORM = "raw weights, before the final norm"
MODULES = "raw weights; what the named modules give"
POST_NORM = "raw weights; post-norm: each block's output is after its layer norm"
NORMS_BETWEEN = ", and the decoder's norm follows it before the next block (config.auxiliary_loss)"


def find_blocks(module: torch.nn.Module, layers: list[str] | None) -> list[str]:
    """Module paths of one stack's blocks, in order.

    Args:
        module: the model.
        layers: the paths that the user names, which are checked; None to find the blocks by the layout (in an encoder-decoder,
            the decoder's).

    Raises:
        LayersimError: a path does not exist, is named twice or is out of order; or no path is named and the layout is unknown.
    """
    if layers is None:
        blocks = [] if has_both_towers(module) else _blocks_of(module)
        if not blocks:
            raise unsupported_blocks(module, f"its modules are {[name for name, _ in module.named_children()][:6]}")
        return blocks
    paths = existing_paths(module, layers, "layers")
    numbers = _block_numbers(module, paths)
    for place, (previous_path, path) in enumerate(pairwise(paths), start=1):
        is_repeated = path in paths[:place]
        is_out_of_order = numbers is not None and numbers[place] < numbers[place - 1]
        if is_repeated or is_out_of_order:
            raise LayersimError(
                f"`layers` has {path!r} after {previous_path!r}; name different modules, in the order in which the model runs "
                "them."
            )
    return paths


def find_stacks(module: torch.nn.Module, layers: list[str] | None) -> list[str]:
    """Module paths of all blocks of a model, in every stack, tower or stage.

    Args:
        module: the model.
        layers: the paths that the user names; None to find them by the layout.

    Raises:
        LayersimError: see `find_blocks`.
    """
    lists = lists_of_blocks(module)
    if layers is None and len(lists) > 1:
        blocks: list[str] = []
        for path in lists.values():
            blocks += blocks_in(module, path)
        return blocks
    return find_blocks(module, layers)


def refuse_paths(layers: list[str] | None, unembed: list[str] | None, models: str) -> None:
    """Raise an error if `layers` or `unembed` is given for a model that needs neither.

    Args:
        layers: the argument of the call.
        unembed: the argument of the call.
        models: the kind of model, for the message.

    Raises:
        LayersimError: `layers` or `unembed` is given.
    """
    for name, paths in (("layers", layers), ("unembed", unembed)):
        if paths is not None:
            raise LayersimError(
                f"`{name}` is {brief(paths)}, but cannot be given for {models}, whose blocks and head are known."
            )


def locate(
    module: torch.nn.Module, paths: list[str], named: bool
) -> tuple[tuple[str, ...], Literal["whole", "parts", "unknown", "none"]]:
    """Site names of modules, and whether the modules pass on a residual stream (`ModelDescription.stream`).

    Modules in the layout's list of blocks pass on the residual stream; modules inside a block do not. A forward pass tests all
    others.

    Args:
        module: the model.
        paths: module paths, as `find_blocks` returns them.
        named: whether the user named them.
    """
    stack = stack_of(module, paths)
    numbers = _block_numbers(module, paths) if named else list(range(len(paths)))
    if numbers is not None:
        names = tuple(f"{stack}.{name}" if stack else name for name in block_sites(numbers))
        # A list called `layers` holds the blocks of a Hugging Face model; in another model it may hold anything.
        is_hugging_face = hasattr(module, "base_model_prefix")
        if not is_hugging_face:
            return names, "unknown"
        is_consecutive = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        return names, "whole" if is_consecutive and not _has_convolution_between(module, paths) else "parts"
    prefixes_of_blocks = tuple(f"{block}." for block in _blocks_of(module, stack))
    lies_in_block = any(path.startswith(prefixes_of_blocks) for path in paths)
    # The input and the output of a single module cannot show a stream.
    return module_sites(paths), "none" if lies_in_block or len(paths) < 2 else "unknown"


def _block_list(module: torch.nn.Module) -> str | None:
    """Path of the list of blocks in a model with one stack; None if unknown."""
    names = modules_by_path(module)
    prefix = getattr(module, "base_model_prefix", "")
    bases = [prefix, "model", ""]
    # A model with one tower, such as CLIPForImageClassification, may have the prefix of the model with both.
    towers = [name for name in TOWER_MODULES.values() if name in names]
    if len(towers) == 1:
        bases += towers
    for base in bases:
        for list_path in BLOCKS:
            path = f"{base}.{list_path}" if base else list_path
            if _is_filled_list(names.get(path)):
                return path
    return None


def _is_filled_list(module: torch.nn.Module | None) -> bool:
    return isinstance(module, torch.nn.ModuleList) and len(module) > 0


def lists_of_blocks(module: torch.nn.Module) -> dict[str, str]:
    """Path of the list of blocks in each stack.

    Stacks are "encoder" and "decoder"; "text" and "vision" for the towers of a CLIP; "stages.0", ...; or "" if there is only
    one. A stage (as in Swin) has fewer positions and more channels than the stage before it, so each has its own residual
    stream.
    """
    sides = two_sides(module)
    if sides:
        lists: dict[str, str] = {}
        for side, side_path in sides.items():
            path_in_side = _block_list(module.get_submodule(side_path))
            if path_in_side is not None:
                lists[side] = f"{side_path}.{path_in_side}"
        return lists
    path = _block_list(module)
    if path is None:
        return {}
    names = modules_by_path(module)
    lists_in_stages = [f"{stage}.blocks" for stage in blocks_in(module, path)]
    if not all(_is_filled_list(names.get(list_path)) for list_path in lists_in_stages):
        return {"": path}
    return {f"stages.{number}": list_path for number, list_path in enumerate(lists_in_stages)}


def lists_by_stage(module: torch.nn.Module) -> dict[str, str]:
    """Path of the list of blocks in each stage (as in Swin); empty without stages."""
    return {stack: path for stack, path in lists_of_blocks(module).items() if stack.startswith("stages.")}


def stacks_with(module: torch.nn.Module, paths: list[str]) -> list[str]:
    """Names of the stacks that contain at least one module of `paths`."""
    roots = two_sides(module) or lists_of_blocks(module)
    stacks: list[str] = []
    for stack, root in roots.items():
        if any(f"{path}.".startswith(f"{root}.") for path in paths):
            stacks.append(stack)
    return stacks


def stack_of(module: torch.nn.Module, paths: list[str]) -> str:
    """Name of the only stack that contains modules of `paths`; "" if several do or none does."""
    stacks = stacks_with(module, paths)
    return stacks[0] if len(stacks) == 1 else ""


def is_last_stack(module: torch.nn.Module, paths: list[str]) -> bool:
    """Whether the model's final norm and head read the output of these blocks."""
    stack = stack_of(module, paths)
    stages = list(lists_by_stage(module))
    return stack == stages[-1] if stages else stack != "encoder"


def blocks_in(module: torch.nn.Module, path: str) -> list[str]:
    """Paths of the modules in a module list."""
    return [f"{path}.{name}" for name, _ in module.get_submodule(path).named_children()]


def two_sides(module: torch.nn.Module) -> dict[str, str]:
    """Paths of encoder and decoder, or of both towers; empty for other models."""
    return encoder_and_decoder(module) or (dict(TOWER_MODULES) if has_both_towers(module) else {})


def encoder_and_decoder(module: torch.nn.Module) -> dict[str, str]:
    """Paths of encoder and decoder in a Hugging Face model; empty without both."""
    if not getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return {}
    names = {id(submodule): name for name, submodule in module.named_modules() if name}
    paths: dict[str, str] = {}
    for side in ("encoder", "decoder"):
        with suppress(AttributeError, NotImplementedError):
            stack = getattr(module, f"get_{side}")()
            # Models without the stack return themselves.
            if id(stack) in names:
                paths[side] = names[id(stack)]
    if len(paths) < 2:
        return {}
    encoder = f"{paths['encoder']}."
    decoder = f"{paths['decoder']}."
    # One inside the other is no pair of stacks.
    if encoder.startswith(decoder) or decoder.startswith(encoder):
        return {}
    return paths


def in_both_stacks(module: torch.nn.Module) -> LayersimError:
    """The error for blocks in two stacks."""
    lists = lists_of_blocks(module)
    return LayersimError(
        f"`layers` names blocks in both stacks of {type(module).__name__}; it must name blocks of one stack "
        f"({' or '.join(two_sides(module))}), such as {next(reversed(lists.values()), 'decoder.block')}.0."
    )


def has_encoder_positions(path: str) -> bool:
    """Whether a module computes cross-attention keys or values, which have the encoder's positions."""
    parts = path.split(".")
    return any(part in CROSS_ATTENTION for part in parts) and parts[-1] in OF_ENCODER


def has_both_towers(module: torch.nn.Module) -> bool:
    """Whether a model has a vision tower and a text tower, like CLIP."""
    return all(hasattr(module, child) for child in TOWER_MODULES.values())


def _block_numbers(module: torch.nn.Module, paths: list[str]) -> list[int] | None:
    """Indices of blocks from their paths; None if a path is not a known block."""
    blocks = _blocks_of(module, stack_of(module, paths))
    if not set(paths) <= set(blocks):
        return None
    return [blocks.index(path) for path in paths]


def _has_convolution_between(module: torch.nn.Module, paths: list[str]) -> bool:
    """Whether a convolution lies between block 0 and block 1, as in the largest DeBERTa-v2."""
    list_path, _, number = paths[0].rpartition(".")
    parent = module.get_submodule(list_path.rpartition(".")[0]) if list_path else module
    reads_both = number == "0" and len(paths) > 1
    return reads_both and type(getattr(parent, "conv", None)).__name__ == "ConvLayer"


def _blocks_of(module: torch.nn.Module, stack: str = "") -> list[str]:
    """Paths of the blocks in a stack, by default the decoder or the last stage; empty if unknown."""
    lists = lists_of_blocks(module)
    if not stack:
        stack = "decoder" if encoder_and_decoder(module) else next(reversed(lists), "")
    path = lists.get(stack)
    return [] if path is None else blocks_in(module, path)


def unsupported_blocks(module: torch.nn.Module, reason: str) -> LayersimError:
    """The error for a model whose blocks are unknown.

    Args:
        module: the model.
        reason: the reason.
    """
    is_clip = has_both_towers(module)
    if is_clip:
        models_inside = list(TOWER_MODULES.values())
    else:
        # A detector inside a model of segments.
        models_inside = [name for name, child in module.named_children() if two_sides(child)]
    if models_inside:
        remedy = f"Pass {' or '.join(f'model.{name}' for name in models_inside)}."
    else:
        example = "path"
        for name, submodule in module.named_modules():
            if isinstance(submodule, torch.nn.ModuleList) and len(submodule) > 1:
                example = name
                break
        remedy = f"Name its blocks: layers=[f'{example}.{{i}}' for i in range(n)]."
    where = "lie in two towers" if is_clip else "are not known"
    return LayersimError(f"The layers of {type(module).__name__} {where} (`model`): {reason}. {remedy}")


def refuse_positions_first(module: torch.nn.Module, blocks: list[str]) -> None:
    """Raise an error if positions are the first axis of the blocks' outputs.

    Shapes alone do not show this if a batch has as many rows as positions.

    Args:
        module: the model.
        blocks: paths of its blocks.

    Raises:
        LayersimError: positions are the first axis.
    """
    block = module.get_submodule(blocks[0])
    torch_layers = torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer
    is_torch_layer = isinstance(block, torch_layers) and not block.self_attn.batch_first
    if is_torch_layer or getattr(nearest_config(module, blocks[0]), "model_type", None) in POSITIONS_FIRST:
        remedy = ", as with batch_first=True" if is_torch_layer else ""
        raise LayersimError(
            f"The blocks of {type(module).__name__} return pos x batch x width; blocks must return batch x pos x width{remedy}."
        )


def existing_paths(module: torch.nn.Module, paths: list[str], argument: str) -> list[str]:
    """Check the module paths in an argument and return them.

    Raises:
        LayersimError: the model has no module at a path, a list of modules is named as a block, or no path is given.
    """
    names = modules_by_path(module)
    for path in paths or [""]:
        is_list = argument == "layers" and isinstance(names.get(path), torch.nn.ModuleList)
        if is_list:
            kind = "a list of modules"
            examples = [f"{path}.0"]
        elif not path or path not in names:
            kind = "no module"
            # Without the path of the model itself, which is the first.
            examples = difflib.get_close_matches(path, names, n=3) or list(names)[1:4]
        else:
            continue
        raise LayersimError(
            f"`{argument}` is {brief(paths)}, but {path!r} is {kind} in {type(module).__name__}. Use a path such as "
            f"{', '.join(map(repr, examples))}."
        )
    return list(paths)


def find_embedding(module: torch.nn.Module) -> torch.nn.Module | None:
    """The token embedding; None if the model has none or does not expose it."""
    embedding: Any = None
    # Hugging Face models of images and models of several towers have the method, which raises.
    with suppress(AttributeError, NotImplementedError):
        embedding = module.get_input_embeddings()  # type: ignore[operator]  # a method of transformers
    return embedding if isinstance(embedding, torch.nn.Module) else None


def nearest_config(module: torch.nn.Module, path: str) -> Any:
    """The configuration of a module, or of its nearest parent with a configuration."""
    parts = path.split(".")
    # From the nearest parent to the model itself.
    for depth in range(len(parts) - 1, -1, -1):
        parent = module.get_submodule(".".join(parts[:depth]))
        config = getattr(parent, "config", None)
        if config is not None:
            return config
    return None


def setting(config: Any, *names: str) -> Any:
    """The first of some attributes that a configuration has and that is not None; None if there is none.

    A configuration whose layers differ raises an error of its own for an attribute that each layer has.
    """
    for name in names:
        with suppress(Exception):
            value = getattr(config, name, None)
            if value is not None:
                return value
    return None


def layout_of(block: torch.nn.Module, config: Any) -> BlockLayout | None:
    """The layout of a block in the table `LAYOUTS`; None if it is missing there.

    Args:
        block: a block of transformers, or of a class derived from one.
        config: its configuration.
    """
    if config is None:
        return None
    classes = {cls.__name__ for cls in type(block).__mro__}
    for layout in LAYOUTS:
        # Other libraries have blocks of the same name.
        if not classes.isdisjoint(layout.classes) and layout.when(block, config):
            with suppress(AttributeError):
                # Not by the names of modules, because components of a TransformerBridge pass attributes on.
                for tensor in layout.tensors.values():
                    block.get_submodule(tensor.path)
                return layout
    return None


def unknown_blocks(module: torch.nn.Module, paths: Sequence[str]) -> list[str]:
    """Paths of the blocks whose layout is missing in the table `LAYOUTS`."""
    unknown: list[str] = []
    for path in paths:
        if layout_of(module.get_submodule(path), nearest_config(module, path)) is None:
            unknown.append(path)
    return unknown


def is_post_norm(module: torch.nn.Module, path: str) -> bool:
    """Whether blocks are post-norm: they end in a layer norm.

    The output of such a block is not its input plus a branch.

    Args:
        module: the model.
        path: path of one of its blocks.
    """
    block = module.get_submodule(path)
    config = nearest_config(module, path)
    layout = layout_of(block, config)
    if layout is not None:
        return bool(layout.sums) and all(total != "resid_post" for total, _ in layout.sums)
    # Blocks with the modules of BERT's end in a layer norm. Other models have norms before attention and MLP, or in the branch.
    if hasattr(getattr(block, "output", None), "LayerNorm"):
        return True
    if getattr(config, "do_layer_norm_before", None) is False:
        return True
    return getattr(config, "model_type", None) in OTHER_POST_NORM


def final_norm(module: torch.nn.Module, block: str, layout: BlockLayout) -> str | None:
    """Path of the final norm; None if the model or its layout has none.

    Args:
        module: the model.
        block: path of one of its blocks.
        layout: layout of the block.
    """
    if "ln_final" in layout.lacks:
        return None
    modules = modules_by_path(module)
    # The path of what holds the list of blocks.
    parts = block.split(".")[:-2]
    for depth in range(len(parts), -1, -1):
        for name in layout.final:
            path = ".".join([*parts[:depth], name])
            # A BEiT that averages patches has no norm here, and a module of this name that changes nothing.
            if path in modules and not isinstance(modules[path], torch.nn.Identity):
                return path
    return None


def head_counts(config: Any, attribute: str = "num_attention_heads") -> tuple[int, int]:
    """Numbers of attention heads and key-value heads in a configuration; 0 if unknown.

    Args:
        config: configuration of a Hugging Face model.
        attribute: attribute with the number of heads.
    """
    heads = setting(config, attribute)
    if not isinstance(heads, int):
        return 0, 0
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return heads, 1
    key_value_heads = setting(config, "num_key_value_heads", "num_kv_heads")
    return heads, key_value_heads or heads


@typed
def layer_names(blocks: int) -> tuple[str, ...]:
    """TransformerLens names of the residual layers of a model with `blocks` blocks.

    Examples:
        >>> layer_names(2)
        ('blocks.0.hook_resid_pre', 'blocks.0.hook_resid_post', 'blocks.1.hook_resid_post')
    """
    return block_sites(range(blocks))


def block_sites(numbers: Sequence[int]) -> tuple[str, ...]:
    """TransformerLens names of the first block's input and of every block's output.

    Examples:
        >>> block_sites([1, 3])
        ('blocks.1.hook_resid_pre', 'blocks.1.hook_resid_post', 'blocks.3.hook_resid_post')
    """
    first = numbers[0] if numbers else 0
    outputs = [f"blocks.{number}.hook_resid_post" for number in numbers]
    return (f"blocks.{first}.hook_resid_pre", *outputs)


def entering(name: str) -> str:
    """Name of the site at a module's input, from the name at its output.

    Examples:
        >>> entering("blocks.3.hook_resid_post"), entering("layers.1.mlp")
        ('blocks.3.hook_resid_pre', 'layers.1.mlp.input')
    """
    end = ".hook_resid_post"
    return f"{name.removesuffix(end)}.hook_resid_pre" if name.endswith(end) else f"{name}.input"


def module_sites(paths: Sequence[str]) -> tuple[str, ...]:
    """Site names of some modules: the first module's input and every module's output.

    Examples:
        >>> module_sites(["layers.0.mlp", "layers.1.mlp"])
        ('layers.0.mlp.input', 'layers.0.mlp', 'layers.1.mlp')
    """
    return (f"{paths[0]}.input", *paths)
