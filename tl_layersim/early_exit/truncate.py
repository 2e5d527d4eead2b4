"""`truncate`: a copy of a model with its first blocks only."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..architectures.anatomy import Anatomy
from ..architectures.unembed import Unembed, rounding
from ..core.arguments import FilePath, PositiveInt, typed
from ..core.distributed import weight_peers
from ..core.errors import LayersimError, warn
from ..core.file_format import replacing_model
from ..core.wording import first_line
from ..sources.identity import refuse_quantised
from ..sources.open_local import OpenedModel
from ..sources.out_of_memory import is_out_of_memory
from ..sources.partial_forward import LocalSplitModel, logits_of, read_residuals
from .exit_decisions import ExitCheck, ExitLens
from .segments import FullSequence
from .supported_models import not_hugging_face, open_for_early_exit, positions_read, relative_gap, synthetic_inputs

# Names of lists in configurations that do not have one entry per block, and endings of such names.
NO_BLOCKS = ("architectures", "id2label", "pos_att_type")
NO_BLOCKS_ENDS = ("_token_id", "_ids", "_only_layers", "_indices")


@typed
def truncate(model: Any, n_layers: PositiveInt, *, save_to: FilePath | None = None) -> Any:
    """Copy the first `n_layers` blocks, the final norm and the head of a model.

    The blocks are those of the decoder in an encoder-decoder, and those of the last stage in a Swin. The logits of the copy are
    those that `LogitLens` reads after that block. The copy is an ordinary Hugging Face model: it generates, trains and is saved
    like any other.

    Args:
        model: a Hugging Face model, in this process; or what `open_model` returns.
        n_layers: number of blocks that are kept.
        save_to: a folder for `from_pretrained`; the tokenizer is saved with it if the model has one as `.tokenizer`.

    Returns:
        A model of the same class, dtype and device. The given model is not changed and shares no weights with the copy.

    Raises:
        LayersimError: the model has fewer blocks or cannot be built with fewer; or the residuals of the copy differ from the
            model's, or its logits from those of the logit lens.
        OSError: the copy cannot be written; `save_to` is unchanged.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3; nostalgebraist 2020 for the logit lens.

    Examples:
        >>> import tl_layersim as lsim
        >>> lsim.truncate(lsim.demo_model(), 5).config.num_hidden_layers
        5
    """
    opened = OpenedModel.of(model)
    model = opened.model
    if not hasattr(type(model), "_from_config"):
        raise not_hugging_face(model)
    split_model, unembed = open_for_early_exit(opened, either_stack=True)
    refuse_quantised(
        model,
        "`model` has quantised weights, which cannot be copied into a shorter model",
        do="truncate(..., save_to=folder) on the model without quantization_config=, and load that folder with it",
    )
    if peers := weight_peers(model):
        raise LayersimError(
            f"`model` is sharded over the ranks {sorted(peers)}, but a truncated copy needs all weights in one process. Load "
            "the model without tp_plan=, a DeviceMesh or FSDP."
        )
    blocks = len(split_model.blocks)
    if n_layers > blocks:
        raise LayersimError(f"`n_layers` is {n_layers}; it must be at most {blocks}, the number of blocks.")
    # Weights from torch.inference_mode() could not be trained.
    with torch.inference_mode(False), _refusing_failures(model, n_layers):
        short = _first_blocks(model, split_model, n_layers)
        paths = None if opened.layers is None else opened.layers[:n_layers]
        _verify(split_model, unembed, replace(opened, model=short, layers=paths), n_layers)
    tokenizer = getattr(short, "tokenizer", None)
    if save_to is not None:
        with _refusing_failures(model, n_layers), replacing_model(save_to) as folder:
            short.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return short


@contextmanager
def _refusing_failures(model: Any, n_layers: int) -> Iterator[None]:
    """A context manager that turns an exception of the model or its configuration into a `LayersimError`.

    Raises:
        LayersimError: the shorter model could not be built or run.
    """
    try:
        yield
    except (LayersimError, OSError):
        raise
    # Configurations and models of any library raise errors of any class.
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise LayersimError(
            f"`n_layers` is {n_layers}, but {type(model).__name__} cannot be built or run with so many blocks: "
            f"{type(error).__name__}: {first_line(error)}."
        ) from error


def _first_blocks(model: Any, split_model: LocalSplitModel, n_layers: int) -> Any:
    """A copy of a model with its first blocks, final norm and head.

    Args:
        model: a Hugging Face model.
        split_model: the same model.
        n_layers: number of blocks that are kept.
    """
    config = shortened(model, split_model.source.anatomy, n_layers)
    _refuse_changed_on_loading(model.config, config, n_layers)
    # The random weights are replaced below.
    with torch.random.fork_rng(devices=[]):
        short = type(model)._from_config(config, dtype=model.dtype, attn_implementation=model.config._attn_implementation)
    _copy_weights(model, short)
    short.to(split_model.device).train(model.training)
    if getattr(model, "generation_config", None) is not None:
        short.generation_config = copy.deepcopy(model.generation_config)
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        short.tokenizer = tokenizer
    return short


def _refuse_changed_on_loading(whole: Any, config: Any, n_layers: int) -> None:
    """Raise an error if the configuration of a truncated model is another one when it is loaded again.

    Gemma 4 makes its last block one of full attention, whatever `layer_types` says.

    Args:
        whole: configuration of the whole model, whose own changes on loading are no matter.
        config: configuration of the truncated model.
        n_layers: number of blocks that are kept.
    """
    changed = _changed_on_loading(config)
    if changed:
        changed_without_truncation = _changed_on_loading(whole)
        changed = [name for name in changed if name not in changed_without_truncation]
    if changed:
        raise LayersimError(
            f"`n_layers` is {n_layers}, but a {type(config).__name__} with so many blocks changes {', '.join(changed)} when it "
            "is loaded, so that the truncated model would compute something else. Keep another number of blocks."
        )


def _changed_on_loading(config: Any) -> list[str]:
    """Names of the settings of a configuration that are others after it is written and read."""
    before = copy.deepcopy(config.to_dict())
    # Reading may change the lists of the dict that is read.
    after = type(config).from_dict(copy.deepcopy(before)).to_dict()
    return [name for name in before if before[name] != after.get(name)]


def shortened(model: Any, anatomy: Anatomy, n_layers: int) -> Any:
    """Copy of a model's configuration, with `n_layers` blocks.

    Args:
        model: a Hugging Face model.
        anatomy: what lies where in it.
        n_layers: number of blocks that are kept.
    """
    config = copy.deepcopy(model.config)
    if anatomy.kind == "stages" and anatomy.stack:
        config.depths[int(anatomy.stack.rpartition(".")[2])] = n_layers
        return config
    blocks = len(anatomy.blocks)
    # CLIP and similar models have a configuration for each tower.
    config_class = type(anatomy.config)
    sub_configs = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    tower_config = next((sub_config for sub_config in sub_configs if type(sub_config) is config_class), config)
    for name, value in list(vars(tower_config).items()):
        has_entry_per_block = isinstance(value, list) and len(value) == blocks
        if has_entry_per_block and name not in NO_BLOCKS and not name.endswith(NO_BLOCKS_ENDS):
            setattr(tower_config, name, getattr(tower_config, name)[:n_layers])
    _cut_shared_layers(tower_config, blocks, n_layers)
    # Encoder-decoders have a setting for each stack.
    decoder_settings = ("num_decoder_layers", "decoder_layers")
    counts = [name for name in decoder_settings if isinstance(getattr(tower_config, name, None), int)]
    for name in counts or ["num_hidden_layers"]:
        setattr(tower_config, name, n_layers)
    _cut_stages(tower_config, blocks, n_layers)
    return config


def _cut_stages(config: Any, blocks: int, n_layers: int) -> None:
    """Cut the stages of a backbone, such as DINOv2, whose outputs its configuration names: the stem, and one for each block.

    Args:
        config: the configuration of the shorter model, changed in place.
        blocks: number of blocks of the whole model.
        n_layers: number of blocks that are kept.
    """
    stages = getattr(config, "stage_names", None)
    if not isinstance(stages, list) or len(stages) != blocks + 1:
        return
    config.stage_names = stages[: n_layers + 1]
    out_features = [name for name in config.out_features if name in config.stage_names]
    config.set_output_features_output_indices(out_features=out_features or config.stage_names[-1:], out_indices=None)


def _cut_shared_layers(config: Any, blocks: int, n_layers: int) -> None:
    """Change the settings of a configuration that are counted from the last block, or depend on the number of blocks.

    Args:
        config: the configuration of the shorter model, changed in place.
        blocks: number of blocks of the whole model.
        n_layers: number of blocks that are kept.
    """
    # The attribute itself gives whole configurations; a dict has only what differs from layer to layer.
    by_layer = config.to_dict().get("per_layer_config")
    if isinstance(by_layer, Mapping):
        config.per_layer_config = {layer: part for layer, part in by_layer.items() if int(layer) < n_layers}
    shared = getattr(config, "num_kv_shared_layers", None)
    if isinstance(shared, int):
        # Gemma 3n and 4: the last blocks use keys and values of earlier ones.
        config.num_kv_shared_layers = max(0, n_layers - (blocks - shared))
    if isinstance(getattr(config, "scale_depth", None), float | int):
        # MiniCPM multiplies what sublayers add by scale_depth / sqrt(number of blocks).
        config.scale_depth *= (n_layers / blocks) ** 0.5


def _copy_weights(model: Any, short: Any) -> None:
    # A TransformerBridge that was made of the model wraps its modules in place.
    original = {name.replace("._original_component", ""): x for name, x in _parameters_and_buffers(model).items()}
    copied = _parameters_and_buffers(short)
    missing = [name for name, x in copied.items() if name not in original or _first_layers(original[name], x) is None]
    if missing:
        raise LayersimError(
            f"`model` lacks the weight {missing[0]} that its truncated copy needs. Load it without adapters or quantization."
        )
    with torch.no_grad():
        for name, x in copied.items():
            weights = _first_layers(original[name], x)
            assert weights is not None
            x.data = weights.detach().clone().to(x.device)
            x.requires_grad_(original[name].requires_grad)


def _parameters_and_buffers(model: Any) -> dict[str, Tensor]:
    """Parameters and buffers by name. Those with several names, such as tied weights, have an entry for each."""
    parameters: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return parameters | dict(model.named_buffers(remove_duplicate=False))


def _verify(split_model: LocalSplitModel, unembed: Unembed, short: OpenedModel, n_layers: int) -> None:
    """Raise an error if the copy does not compute the residual stream of the model, and the logits of the logit lens."""
    inputs = synthetic_inputs(split_model, 2, 6)
    positions = positions_read(split_model, unembed.reads, inputs)
    short_split, _ = open_for_early_exit(short, either_stack=True)
    if len(short_split.blocks) != n_layers:
        raise LayersimError(
            f"`n_layers` is {n_layers}, but {type(short.model).__name__} has {len(short_split.blocks)} blocks if it is built "
            "with so many; its configuration counts other blocks too."
        )
    model = split_model.module
    description = split_model.model
    options = inputs | split_model.source.anatomy.without_cache
    with split_model.evaluating(), short_split.evaluating(), torch.no_grad():
        layers = range(n_layers + 1)
        residuals = read_residuals(split_model.blocks, layers, lambda: model(**options))
        short_residuals = read_residuals(short_split.blocks, layers, lambda: short.model(**options))
        _run_with_cache(short_split, inputs)
        short_logits = logits_of(short.model(**options))
        check = ExitCheck(ExitLens(unembed, n_layers), torch.full((positions.numel(),), n_layers))
        passes = FullSequence(split_model, (n_layers,), check, inputs, positions)
        passes.run()
        lens_logits = passes.logits if unembed.reads == "every" else passes.logits[positions]
    for layer in layers:
        _refuse_different(f"Residuals at {description.layers[layer]}", short_residuals[layer], residuals[layer])
    _refuse_different(f"Logits after block {n_layers - 1}", short_logits, lens_logits)


def _first_layers(original: Tensor, copied: Tensor) -> Tensor | None:
    """The part of a weight that the first layers use, with the shape of the copy; None if no axis is divided by layers.

    Gemma 3n and 4 hold an embedding of each layer side by side in one weight. Whether the part is the right one is verified by
    the residuals of the copy.
    """
    if original.shape == copied.shape:
        return original
    if original.dim() != copied.dim():
        return None
    changed_axes = [axis for axis in range(original.dim()) if original.shape[axis] != copied.shape[axis]]
    if len(changed_axes) != 1:
        return None
    axis = changed_axes[0]
    if copied.shape[axis] > original.shape[axis]:
        return None
    return original.narrow(axis, 0, copied.shape[axis])


def _run_with_cache(split_model: LocalSplitModel, inputs: dict[str, Tensor]) -> None:
    """Turn off the cache of a truncated model that does not run with it, and warn.

    The cache of a hybrid model needs a block of attention, and the first blocks may have none.
    """
    model: Any = split_model.module
    try:
        model(**inputs)
    # transformers raises errors of any class.
    except Exception as error:
        if is_out_of_memory(error) or not split_model.source.anatomy.without_cache:
            raise
        model.config.use_cache = False
        if getattr(model, "generation_config", None) is not None:
            model.generation_config.use_cache = False
        warn(
            f"The truncated {type(model).__name__} runs without a cache of keys and values only, so its configuration has "
            f"use_cache=False now: {first_line(error)}."
        )


def _refuse_different(quantity: str, of_copy: Tensor, of_model: Tensor) -> None:
    """Raise an error if a tensor of the truncated model differs from that of the model.

    Args:
        quantity: description of the tensors, for the message.
        of_copy: the tensor of the truncated model.
        of_model: the tensor of the model.
    """
    gap = relative_gap(of_copy, of_model)
    # A gap that is NaN is refused, too.
    if not gap <= rounding(of_model.dtype):
        raise LayersimError(
            f"{quantity} differ by {gap:.3g} of their norm between the truncated and the whole model. The model cannot be "
            "truncated, because its blocks depend on the number of blocks."
        )
