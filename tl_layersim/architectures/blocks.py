"""Finds the anatomy of a model from its modules and its configuration: stacks, blocks and their layouts; and names of sites."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import torch

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from .anatomy import Anatomy, Stack
from .hook_points import has_convolution
from .layouts import BLOCKS, CROSS_ATTENTION, LAYOUTS, OF_ENCODER, OTHER_POST_NORM, POSITIONS_FIRST, TOWER_MODULES, BlockLayout
from .module_paths import modules_by_path

PRE_NORM = "raw weights, before the final norm"
MODULES = "raw weights; what the named modules give"
POST_NORM = "raw weights; post-norm: each block's output is after its layer norm"
NORMS_BETWEEN = ", and the decoder's norm follows it before the next block (config.auxiliary_loss)"


def anatomy_of(module: torch.nn.Module) -> Anatomy:
    """What lies where in a model, from its modules and its configuration, before it runs.

    No blocks are chosen yet, see `choose_blocks`.

    Args:
        module: a TransformerLens, Hugging Face or other torch model.

    Examples:
        >>> import tl_layersim as lsim
        >>> anatomy = anatomy_of(lsim.demo_model())
        >>> anatomy.kind, [len(stack.blocks) for stack in anatomy.stacks]
        ('one stack', [8])
    """
    sides = _encoder_and_decoder(module)
    kind: Literal["encoder-decoder", "towers", "stages", "one stack"] = "one stack"
    if sides:
        kind = "encoder-decoder"
    elif _has_both_towers(module):
        kind = "towers"
        sides = dict(TOWER_MODULES)
    stacks: list[Stack] = []
    for side, side_path in sides.items():
        list_path = _block_list(module.get_submodule(side_path))
        stacks.append(_stack_of_list(module, side, "" if list_path is None else f"{side_path}.{list_path}", side_path))
    if not sides:
        stacks = _stacks_of_one_side(module)
        if len(stacks) > 1 or (stacks and stacks[0].name):
            kind = "stages"
    library: Literal["transformer_lens", "transformers", "torch"] = "torch"
    if is_transformer_lens(module):
        library = "transformer_lens"
    elif hasattr(module, "base_model_prefix"):
        library = "transformers"
    anatomy = Anatomy(
        model=type(module).__name__,
        library=library,
        kind=kind,
        stacks=tuple(stacks),
        embedding=_embedding(module),
        has_convolution=has_convolution(module),
        without_cache=no_cache(module),
        configs={},
        layouts={},
    )
    return _with_layouts(module, anatomy, anatomy.every_block)


def _stacks_of_one_side(module: torch.nn.Module) -> list[Stack]:
    """The only stack of a model, or its stages; empty if its list of blocks is unknown."""
    path = _block_list(module)
    if path is None:
        return []
    names = modules_by_path(module)
    lists_in_stages = [f"{stage}.blocks" for stage in _blocks_in(module, path)]
    if not all(_is_filled_list(names.get(list_path)) for list_path in lists_in_stages):
        return [_stack_of_list(module, "", path, path)]
    return [_stack_of_list(module, f"stages.{number}", path, path) for number, path in enumerate(lists_in_stages)]


def _stack_of_list(module: torch.nn.Module, name: str, list_path: str, root: str) -> Stack:
    """The stack whose blocks are in a list of modules, see `Stack`."""
    return Stack(name, root, list_path, tuple(_blocks_in(module, list_path)) if list_path else ())


def _blocks_in(module: torch.nn.Module, path: str) -> list[str]:
    """Paths of the modules in a module list."""
    return [f"{path}.{name}" for name, _ in module.get_submodule(path).named_children()]


def _with_layouts(module: torch.nn.Module, anatomy: Anatomy, paths: Sequence[str]) -> Anatomy:
    """An anatomy with the configurations and the layouts of further blocks."""
    configs = dict(anatomy.configs)
    layouts = dict(anatomy.layouts)
    for path in paths:
        if path not in configs:
            configs[path] = _nearest_config(module, path)
            layouts[path] = layout_of(module.get_submodule(path), configs[path])
    return replace(anatomy, configs=configs, layouts=layouts)


def choose_blocks(module: torch.nn.Module, anatomy: Anatomy, layers: Sequence[str] | None) -> Anatomy:
    """Choose the blocks of one stack that are measured.

    Args:
        module: the model.
        anatomy: what lies where in it.
        layers: the paths that the user names, which are checked; None to choose by the layout (in an encoder-decoder, the
            decoder's).

    Raises:
        LayersimError: a path does not exist, is named twice or is out of order; or no path is named and the layout is unknown.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> choose_blocks(model, anatomy_of(model), ["model.layers.0", "model.layers.1"]).blocks
        ('model.layers.0', 'model.layers.1')
    """
    if layers is None:
        blocks = () if anatomy.kind == "towers" else anatomy.blocks_of()
        if not blocks:
            raise unsupported_blocks(module, f"its modules are {[name for name, _ in module.named_children()][:6]}")
        return with_blocks(module, anatomy, blocks, named=False)
    paths = existing_paths(module, layers, "layers")
    numbers = anatomy.numbers(paths)
    for place, (previous_path, path) in enumerate(pairwise(paths), start=1):
        is_repeated = path in paths[:place]
        is_out_of_order = numbers is not None and numbers[place] < numbers[place - 1]
        if is_repeated or is_out_of_order:
            raise LayersimError(
                f"`layers` has {path!r} after {previous_path!r}; name different modules, in the order in which the model runs "
                "them."
            )
    return with_blocks(module, anatomy, paths, named=True)


def with_blocks(module: torch.nn.Module, anatomy: Anatomy, blocks: Sequence[str], named: bool) -> Anatomy:
    """An anatomy with other measured blocks, which are not checked.

    Args:
        module: the model.
        anatomy: what lies where in it.
        blocks: paths of the blocks; empty for a TransformerLens model, which describes its own.
        named: whether the user named them.
    """
    anatomy = _with_layouts(module, anatomy, blocks)
    post_norm = bool(blocks) and anatomy.library != "transformer_lens" and _is_post_norm(module, anatomy, blocks[0])
    return replace(anatomy, blocks=tuple(blocks), named=named, post_norm=post_norm)


def find_stacks(module: torch.nn.Module, layers: list[str] | None) -> list[str]:
    """Module paths of all blocks of a model, in every stack, tower or stage.

    Args:
        module: the model.
        layers: the paths that the user names; None to find them by the layout.

    Raises:
        LayersimError: a path does not exist, is named twice or is out of order; or no path is named and the layout is unknown.
    """
    return list(choose_stacks(module, anatomy_of(module), layers).blocks)


def choose_stacks(module: torch.nn.Module, anatomy: Anatomy, layers: Sequence[str] | None) -> Anatomy:
    """Choose the blocks of every stack of a model; see `choose_blocks`."""
    if layers is None and len(anatomy.known_stacks) > 1:
        return with_blocks(module, anatomy, anatomy.every_block, named=False)
    return choose_blocks(module, anatomy, layers)


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


def locate(module: torch.nn.Module, anatomy: Anatomy) -> tuple[tuple[str, ...], Literal["whole", "parts", "unknown", "none"]]:
    """Site names of the measured blocks, and whether they pass on a residual stream (`ModelDescription.stream`).

    Modules in the layout's list of blocks pass on the residual stream; modules inside a block do not. A forward pass tests all
    others.

    Args:
        module: the model.
        anatomy: what lies where in it.
    """
    paths = anatomy.blocks
    stack = anatomy.stack
    numbers = anatomy.numbers(paths) if anatomy.named else list(range(len(paths)))
    if numbers is not None:
        names = tuple(f"{stack}.{name}" if stack else name for name in block_sites(numbers))
        # A list called `layers` holds the blocks of a Hugging Face model; in another model it may hold anything.
        if anatomy.library != "transformers":
            return names, "unknown"
        is_consecutive = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        return names, "whole" if is_consecutive and not _has_convolution_between(module, paths) else "parts"
    prefixes_of_blocks = tuple(f"{block}." for block in anatomy.blocks_of(stack))
    lies_in_block = any(path.startswith(prefixes_of_blocks) for path in paths)
    # The input and the output of a single module cannot show a stream.
    return module_sites(paths), "none" if lies_in_block or len(paths) < 2 else "unknown"


def is_transformer_lens(model: Any) -> bool:
    """Whether a model is a HookedTransformer or a TransformerBridge, without importing TransformerLens."""
    for cls in type(model).__mro__:
        is_of_package = cls.__module__.split(".")[0] == "transformer_lens"
        if is_of_package and cls.__name__ in ("HookedTransformer", "TransformerBridge"):
            return True
    return False


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


def _encoder_and_decoder(module: torch.nn.Module) -> dict[str, str]:
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


def has_encoder_positions(path: str) -> bool:
    """Whether a module computes cross-attention keys or values, which have the encoder's positions."""
    parts = path.split(".")
    return any(part in CROSS_ATTENTION for part in parts) and parts[-1] in OF_ENCODER


def _has_both_towers(module: torch.nn.Module) -> bool:
    """Whether a model has a vision tower and a text tower, like CLIP."""
    return all(isinstance(getattr(module, child, None), torch.nn.Module) for child in TOWER_MODULES.values())


def _has_convolution_between(module: torch.nn.Module, paths: Sequence[str]) -> bool:
    """Whether a convolution lies between block 0 and block 1, as in the largest DeBERTa-v2."""
    list_path, _, number = paths[0].rpartition(".")
    parent = module.get_submodule(list_path.rpartition(".")[0]) if list_path else module
    reads_both = number == "0" and len(paths) > 1
    return reads_both and type(getattr(parent, "conv", None)).__name__ == "ConvLayer"


def unsupported_blocks(module: torch.nn.Module, reason: str) -> LayersimError:
    """The error for a model whose blocks are unknown.

    Args:
        module: the model.
        reason: the reason.
    """
    is_clip = _has_both_towers(module)
    if is_clip:
        models_inside = list(TOWER_MODULES.values())
    else:
        # A detector inside a model of segments.
        models_inside = []
        for name, child in module.named_children():
            if _encoder_and_decoder(child) or _has_both_towers(child):
                models_inside.append(name)
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


def refuse_positions_first(module: torch.nn.Module, anatomy: Anatomy) -> None:
    """Raise an error if positions are the first axis of the blocks' outputs.

    Shapes alone do not show this if a batch has as many rows as positions.

    Args:
        module: the model.
        anatomy: what lies where in it.

    Raises:
        LayersimError: positions are the first axis.
    """
    block = module.get_submodule(anatomy.blocks[0])
    torch_layers = torch.nn.TransformerEncoderLayer | torch.nn.TransformerDecoderLayer
    is_torch_layer = isinstance(block, torch_layers) and not block.self_attn.batch_first
    if is_torch_layer or getattr(anatomy.config, "model_type", None) in POSITIONS_FIRST:
        remedy = ", as with batch_first=True" if is_torch_layer else ""
        raise LayersimError(
            f"The blocks of {type(module).__name__} return pos x batch x width; blocks must return batch x pos x width{remedy}."
        )


def existing_paths(module: torch.nn.Module, paths: Sequence[str], argument: str) -> list[str]:
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


def _embedding(module: torch.nn.Module) -> torch.nn.Module | None:
    """The token embedding; None if the model has none or does not expose it."""
    embedding: Any = None
    if is_transformer_lens(module):
        embedding = getattr(module, "embed", None)
    else:
        # Hugging Face models of images and models of several towers have the method, which raises.
        with suppress(AttributeError, NotImplementedError):
            embedding = module.get_input_embeddings()  # type: ignore[operator]  # a method of transformers
    return embedding if isinstance(embedding, torch.nn.Module) else None


def _nearest_config(module: torch.nn.Module, path: str) -> Any:
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


def _is_post_norm(module: torch.nn.Module, anatomy: Anatomy, path: str) -> bool:
    """Whether a block is post-norm: it ends in a layer norm.

    The output of such a block is not its input plus a branch.

    Args:
        module: the model.
        anatomy: what lies where in it.
        path: path of the block.
    """
    layout = anatomy.layouts[path]
    if layout is not None:
        return bool(layout.sums) and all(total != "resid_post" for total, _ in layout.sums)
    # Blocks with the modules of BERT's end in a layer norm. Other models have norms before attention and MLP, or in the branch.
    if hasattr(getattr(module.get_submodule(path), "output", None), "LayerNorm"):
        return True
    config = anatomy.configs[path]
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


def forward_parameters(module: torch.nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of a module's forward, `self` included, by name."""
    function = type(module).forward
    # A notebook that reloads changed code may replace the code of a function in place.
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _parameters_of(function, code)


# Each forward pass asks for them, and the signature inside decorators takes as long to find as a small model to run.
@functools.lru_cache(maxsize=128)
def _parameters_of(function: Callable[..., Any], code: object) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


def no_cache(module: torch.nn.Module) -> dict[str, bool]:
    """Keyword arguments that turn off the cache; empty if the configuration or the model's forward has no `use_cache`."""
    if not hasattr(getattr(module, "config", None), "use_cache"):
        return {}
    parameters = forward_parameters(module)
    takes_any_keyword = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {"use_cache": False} if takes_any_keyword or "use_cache" in parameters else {}


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
