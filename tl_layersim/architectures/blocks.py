"""Blocks of a model, found by the tables of architectures: module paths, stacks, layouts and site names."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from .layouts import BLOCKS, CROSS_ATTENTION, LAYOUTS, OF_ENCODER, OTHER_POST_NORM, POSITIONS_FIRST, TOWER_MODULES, BlockLayout

PRE_NORM = "raw weights, before the final norm"
MODULES = "raw weights; what the named modules give"
POST_NORM = "raw weights; post-norm: each block's output is after its layer norm"
NORMS_BETWEEN = ", and the decoder's norm follows it before the next block (config.auxiliary_loss)"

Side = Literal["", "encoder", "decoder", "both"]
SIDES: tuple[Literal["encoder"], Literal["decoder"]] = ("encoder", "decoder")


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
        blocks = _blocks_of(module)
        if not blocks:
            children = [name for name, _ in module.named_children()][:6]
            sides = "an encoder-decoder whose decoder has no known list of blocks" if encoder_and_decoder(module) else ""
            raise unsupported_blocks(module, sides or f"modules {children}")
        return blocks
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
    """Raise an error if `layers` or `unembed` is given for a model whose blocks and head are known.

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


def modules_in_place_of_blocks(module: torch.nn.Module, at: Any) -> list[str] | None:
    """Module paths that `at` names in a model with unknown blocks; None if the blocks are known, or `at` names other sites.

    Args:
        module: the model.
        at: see `find_points`.
    """
    if lists_of_blocks(module) or encoder_and_decoder(module) or callable(at):
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
    """Site names of some modules, and whether these sites are the residual stream (`Model.stream`).

    Modules in the layout's list of blocks pass on the residual stream; modules inside a block do not. A forward pass tests all
    others.

    Args:
        module: the model.
        paths: module paths, as `find_blocks` returns them.
        named: whether the user named them.
    """
    tower = blocks_of_tower(module, paths)
    if tower is not None:
        consecutive = tower[1] == list(range(tower[1][0], tower[1][0] + len(tower[1])))
        return _prefixed(f"{tower[0]}.", block_sites(tower[1])), "whole" if consecutive else "parts"
    stack = stack_of(module, paths)
    prefix = f"{stack}." if stack else ""
    numbers = _numbers(module, paths) if named else list(range(len(paths)))
    if numbers is not None:
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers))) and not _has_convolution_between(module, paths)
        # A list called `layers` holds the blocks of a Hugging Face model; in another model it may hold anything.
        trusted = hasattr(module, "base_model_prefix")
        return _prefixed(prefix, block_sites(numbers)), ("whole" if whole else "parts") if trusted else "unknown"
    inside = any(path.startswith(f"{block}.") for path in paths for block in _blocks_of(module, stack))
    # The input and the output of a single module cannot show a stream.
    return module_sites(paths), "none" if inside or len(paths) < 2 else "unknown"


def _block_list(module: torch.nn.Module) -> str | None:
    """Path of the module list that holds the blocks of a one-stack model; None if the layout is unknown."""
    names = dict(module.named_modules())
    prefix = getattr(module, "base_model_prefix", "")
    # A model with one tower, such as CLIPForImageClassification, may have the prefix of the model with both.
    tower = [name for name in TOWER_MODULES.values() if name in names]
    for base in dict.fromkeys((prefix, "model", "", *(tower if len(tower) == 1 else ()))):
        for path in BLOCKS:
            full = f"{base}.{path}" if base else path
            blocks = names.get(full)
            if isinstance(blocks, torch.nn.ModuleList) and len(blocks):
                return full
    return None


def lists_of_blocks(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the module lists that hold blocks, by stack: "encoder" and "decoder", or "stages.0", ..., or "" for one stack.

    A stage (as in Swin) has fewer positions and more channels than the stage before it, so each has its own residual stream.
    """
    sides = encoder_and_decoder(module)
    if sides:
        inner = {side: _block_list(module.get_submodule(path)) for side, path in sides.items()}
        return {side: f"{sides[side]}.{path}" for side, path in inner.items() if path is not None}
    path = _block_list(module)
    if path is None:
        return {}
    names, stages = dict(module.named_modules()), [f"{stage}.blocks" for stage in blocks_in(module, path)]
    if not all(isinstance(names.get(one), torch.nn.ModuleList) and len(names[one]) for one in stages):
        return {"": path}
    return {f"stages.{number}": one for number, one in enumerate(stages)}


def lists_by_stack(module: torch.nn.Module) -> dict[str, str]:
    """`lists_of_blocks` of a model with several stacks (encoder and decoder, or stages); empty for other models."""
    return {stack: path for stack, path in lists_of_blocks(module).items() if stack}


def lists_by_stage(module: torch.nn.Module) -> dict[str, str]:
    """`lists_of_blocks` of a model with stages; empty for other models."""
    return {stack: path for stack, path in lists_of_blocks(module).items() if stack.startswith("stages.")}


def stack_of(module: torch.nn.Module, paths: list[str]) -> str:
    """The stack that contains some modules: "encoder", "decoder" or a stage; "" for one-stack models or several stages."""
    if encoder_and_decoder(module):
        return encoder_or_decoder(module, paths)
    stages = [name for name, path in lists_by_stage(module).items() if any(one.startswith(f"{path}.") for one in paths)]
    return stages[0] if len(stages) == 1 else ""


def is_last_stack(module: torch.nn.Module, paths: list[str]) -> bool:
    """Whether the model's final norm and head read the output of these blocks."""
    stages = list(lists_by_stage(module))
    return stack_of(module, paths) in (stages[-1:] or ("", "decoder", "both"))


def blocks_in(module: torch.nn.Module, path: str) -> list[str]:
    """Paths of the modules in a module list."""
    blocks = module.get_submodule(path)
    assert isinstance(blocks, torch.nn.ModuleList)
    return [f"{path}.{i}" for i in range(len(blocks))]


def encoder_and_decoder(module: torch.nn.Module) -> dict[str, str]:
    """Paths of the encoder and the decoder of a Hugging Face model; empty for models without both."""
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


def encoder_or_decoder(module: torch.nn.Module, paths: list[str]) -> Side:
    """The side of an encoder-decoder that contains some modules; "" for one-stack models and for modules outside both sides.

    Args:
        module: the model.
        paths: module paths; modules outside both sides are ignored.
    """
    stacks = encoder_and_decoder(module)
    sides = [side for side in SIDES if side in stacks and any(f"{path}.".startswith(f"{stacks[side]}.") for path in paths)]
    return "both" if len(sides) == 2 else sides[0] if sides else ""


def in_both_stacks(module: torch.nn.Module) -> LayersimError:
    """The error for blocks that do not all lie in one stack of an encoder-decoder."""
    lists = lists_of_blocks(module)
    return LayersimError(
        f"`layers` must all lie in the encoder or all in the decoder of {type(module).__name__}, such as "
        f"{lists.get('decoder', 'decoder.block')}.0."
    )


def has_encoder_positions(path: str) -> bool:
    """Whether a decoder module computes keys or values at the encoder's positions, judged by its path."""
    parts = path.split(".")
    return any(part in CROSS_ATTENTION for part in parts) and parts[-1] in OF_ENCODER


def has_both_towers(module: torch.nn.Module) -> bool:
    """Whether a model has a vision and a text tower, like CLIP and SigLIP."""
    return all(hasattr(module, child) for child in TOWER_MODULES.values())


def blocks_of_tower(module: torch.nn.Module, paths: list[str]) -> tuple[str, list[int]] | None:
    """The name of the tower whose blocks some modules are, and their block indices; None for other modules.

    Args:
        module: the model.
        paths: module paths.

    Raises:
        LayersimError: the modules lie in both towers.
    """
    if not has_both_towers(module):
        return None
    inside = [name for name, child in TOWER_MODULES.items() if any(path.startswith(f"{child}.") for path in paths)]
    if len(inside) == 2:
        raise two_towers(module, "`layers` with modules of both towers")
    parents = {path.rpartition(".")[0] for path in paths}
    numbers = [path.rpartition(".")[2] for path in paths]
    if not inside or len(parents) > 1 or not all(number.isdecimal() for number in numbers):
        return None
    return inside[0], [int(number) for number in numbers]


def two_towers(module: torch.nn.Module, given: str) -> LayersimError:
    """The error for a model with two towers if it is unclear which one to read.

    Args:
        module: the model.
        given: the argument that does not name a tower.
    """
    return LayersimError(
        f"{type(module).__name__} has a vision and a text tower, and a call reads only one of them: "
        f"{given}. Pass model.vision_model or model.text_model, or use tower_similarity(clip, pairs)."
    )


def _prefixed(prefix: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{prefix}{name}" for name in names)


def _numbers(module: torch.nn.Module, paths: list[str]) -> list[int] | None:
    """Block indices of the modules at these paths; None if a module is not a block, or the layout is unknown."""
    blocks = _blocks_of(module, stack_of(module, paths))
    return [blocks.index(path) for path in paths] if set(paths) <= set(blocks) else None


def _has_convolution_between(module: torch.nn.Module, paths: list[str]) -> bool:
    """Whether a convolution lies between block 0 and block 1, as in the largest DeBERTa-v2."""
    blocks, _, number = paths[0].rpartition(".")
    beside = module.get_submodule(blocks.rpartition(".")[0]) if blocks else module
    is_first = number == "0" and len(paths) > 1
    return is_first and type(getattr(beside, "conv", None)).__name__ == "ConvLayer"


def _blocks_of(module: torch.nn.Module, stack: str = "") -> list[str]:
    """Paths of all blocks in one stack, by default the decoder or the last stage; empty if the layout is unknown."""
    lists = lists_of_blocks(module)
    path = lists.get(stack or ("decoder" if encoder_and_decoder(module) else next(reversed(lists), "")))
    return [] if path is None else blocks_in(module, path)


def unsupported_blocks(module: torch.nn.Module, given: str) -> LayersimError:
    """The error for a model whose blocks are unknown.

    Args:
        module: the model.
        given: the reason.
    """
    if has_both_towers(module):
        return two_towers(module, f"{type(module).__name__} without layers=")
    lists = [name for name, sub in module.named_modules() if isinstance(sub, torch.nn.ModuleList) and len(sub) > 1][:3]
    # A detector inside a model of segments, for example.
    inner = [f"model.{name}" for name, part in module.named_children() if lists_of_blocks(part).keys() & set(SIDES)][:1]
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


def refuse_positions_first(module: torch.nn.Module, blocks: list[str]) -> None:
    """Raise an error if blocks pass on `pos batch width`.

    Shapes alone do not show this if a batch has as many rows as positions.

    Args:
        module: the model.
        blocks: paths of its blocks.

    Raises:
        LayersimError: positions are the first axis.
    """
    block = module.get_submodule(blocks[0])
    layers = torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer
    first = isinstance(block, layers) and not block.self_attn.batch_first
    if first or getattr(nearest_config(module, blocks[0]), "model_type", None) in POSITIONS_FIRST:
        raise LayersimError(
            f"The blocks of {type(module).__name__} pass on pos x batch x width; they must pass on batch x pos x width"
            + (", as with batch_first=True." if first else ".")
        )


def existing_paths(module: torch.nn.Module, paths: list[str], argument: str) -> list[str]:
    """Check the module paths in an argument and return them.

    Raises:
        LayersimError: the model has no module at a path, or no path is given.
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
    """The token embedding; None if the model has none or does not expose it."""
    find: Any = getattr(module, "get_input_embeddings", None)
    try:
        embedding = None if find is None else find()
    except (AttributeError, NotImplementedError):
        # Hugging Face models of images and models of several towers have the method, which raises.
        return None
    return embedding if isinstance(embedding, torch.nn.Module) else None


def nearest_config(module: torch.nn.Module, path: str) -> Any:
    """The configuration of a module, or of the nearest module around it that has one."""
    parts = path.split(".")
    for depth in range(len(parts) - 1, -1, -1):
        config = getattr(module.get_submodule(".".join(parts[:depth])), "config", None)
        if config is not None:
            return config
    return None


def layout_of(block: torch.nn.Module, config: Any) -> BlockLayout | None:
    """The layout of a block; None if the table has none.

    Args:
        block: a block of transformers, or of a class derived from one.
        config: its configuration.
    """
    names = {cls.__name__ for cls in type(block).__mro__}
    for layout in LAYOUTS:
        if names.isdisjoint(layout.classes) or config is None:
            continue
        # Other libraries have blocks of the same name.
        if layout.when(block, config) and all(_has(block, tensor.path) for tensor in layout.tensors.values()):
            return layout
    return None


def _has(block: torch.nn.Module, path: str) -> bool:
    try:
        block.get_submodule(path)
    except AttributeError:
        return False
    return True


def is_post_norm(module: torch.nn.Module, path: str) -> bool:
    """Whether the blocks are post-norm: they end in a layer norm, so the output is not the input plus a branch.

    Args:
        module: the model.
        path: path of one of its blocks.
    """
    block, config = module.get_submodule(path), nearest_config(module, path)
    layout = layout_of(block, config)
    if layout is not None:
        return bool(layout.sums) and all(total != "resid_post" for total, _ in layout.sums)
    # Blocks with the modules of BERT's end in a layer norm. Other models have norms before attention and MLP, or in the branch.
    before = getattr(config, "do_layer_norm_before", None)
    return (
        hasattr(getattr(block, "output", None), "LayerNorm")
        or before is False
        or getattr(config, "model_type", None) in OTHER_POST_NORM
    )


def final_norm(module: torch.nn.Module, block: str, layout: BlockLayout) -> str | None:
    """Path of the final norm, beside the list of blocks or above it; None if the layout or the model has none.

    Args:
        module: the model.
        block: path of one of its blocks.
        layout: layout of the block.
    """
    if "ln_final" in layout.lacks:
        return None
    names = dict(module.named_modules())
    parts = block.split(".")[:-2]
    while True:
        for name in layout.final:
            path = ".".join([*parts, name])
            # A BEiT that averages patches has no norm here, and a module of this name that changes nothing.
            if path in names and not isinstance(names[path], torch.nn.Identity):
                return path
        if not parts:
            return None
        parts.pop()


def head_counts(config: Any, attribute: str = "num_attention_heads") -> tuple[int, int]:
    """Number of heads and of key-value heads in a configuration; zero if it has none.

    Args:
        config: configuration of a Hugging Face model.
        attribute: attribute with the number of heads.
    """
    heads = getattr(config, attribute, None)
    if not isinstance(heads, int):
        return 0, 0
    if getattr(config, "multi_query", False) and not getattr(config, "new_decoder_architecture", False):
        return heads, 1
    fewer = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None)
    return heads, fewer or heads


@typed
def layer_names(blocks: int) -> tuple[str, ...]:
    """TransformerLens names of the residual layers of a model with `blocks` blocks.

    Examples:
        >>> layer_names(2)
        ('blocks.0.hook_resid_pre', 'blocks.0.hook_resid_post', 'blocks.1.hook_resid_post')
    """
    return block_sites(range(blocks))


def block_sites(numbers: Sequence[int]) -> tuple[str, ...]:
    """TransformerLens names of the residual layers of some blocks: the first block's input and every block's output.

    Examples:
        >>> block_sites([1, 3])
        ('blocks.1.hook_resid_pre', 'blocks.1.hook_resid_post', 'blocks.3.hook_resid_post')
    """
    return (f"blocks.{numbers[0] if numbers else 0}.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in numbers))


def entering(name: str) -> str:
    """Name of the input site that belongs to an output site.

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
