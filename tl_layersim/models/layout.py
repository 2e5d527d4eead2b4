"""Blocks of a Hugging Face or plain torch model: their module paths, and how such a model is called.

A new layout is one entry in the table `BLOCKS`.
"""

from __future__ import annotations

import difflib
import inspect
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batch
from .model_info import Model, block_sites, layer_names, module_sites

# Paths of the list of blocks, from the base model (`model.model`, `model.transformer`, `model.gpt_neox`, `model.bert`, ...).
BLOCKS = (
    "layers",  # Llama, Qwen2, Mistral, Mixtral, Gemma 1 to 3, Phi, OLMo, GPT-NeoX, Mamba
    "h",  # GPT-2, GPT-J, Falcon, Bloom
    "language_model.layers",  # Gemma 3 and others with a vision tower
    "decoder.layers",  # OPT
    "encoder.layer",  # BERT, RoBERTa, MPNet, ViT
    "encoder.layers",
    "blocks",  # MPT, and TransformerLens models as plain modules
)
PRE_NORM = "raw weights, before the final norm"
MODULES = "raw weights; what the named modules give"
POST_NORM = "raw weights; post-norm: each block's output is after its layer norm"
FAMILIES = (
    "Llama, Mistral, Mixtral, Qwen2, Gemma 1 to 3, Phi, OLMo, GPT-2, GPT-J, GPT-NeoX, Falcon, Bloom, OPT, MPT, Mamba, BERT, "
    "RoBERTa and MPNet layouts by themselves; any other decoder or encoder by layers=[paths of its blocks]"
)


def find_blocks(module: torch.nn.Module, layers: list[str] | None) -> list[str]:
    """Dotted paths of the blocks, in order.

    Args:
        module: the model.
        layers: the paths, where the user names them; checked.

    Raises:
        LayersimError: a named path does not exist, stands twice or out of order; or none are named and the layout is not known.
    """
    if layers is None:
        return _known(module)
    paths = existing_paths(module, layers, "layers")
    twice = [path for path in dict.fromkeys(paths) if paths.count(path) > 1]
    if twice:
        raise LayersimError(
            "`layers` names a module twice, which runs once.",
            given=f"layers={paths}",
            expected="different modules",
            do=f"{twice[0]!r} once",
        )
    numbers = _numbers(module, paths)
    if numbers is not None and numbers != sorted(numbers):
        raise LayersimError(
            "`layers` names the blocks in another order than that in which the model runs them.",
            given=f"layers={paths}",
            expected="the model's own order",
            do=f"layers={[path for _, path in sorted(zip(numbers, paths, strict=True))]}",
        )
    return paths


def locate(
    module: torch.nn.Module, paths: list[str], named: bool
) -> tuple[tuple[str, ...], Literal["whole", "parts", "unknown", "none"]]:
    """Names of the sites that modules are read at, and whether these are the residual stream, as `Model` says it.

    Blocks are those of the list that the layout says. Others must be seen to hand on one stream: a module inside one of these
    blocks does not, of others a forward pass shows it.

    Args:
        module: the model.
        paths: as `find_blocks` gives them.
        named: whether the user named them.
    """
    if not named:
        # A list called `layers` says where the blocks are in Hugging Face's models, and may hold anything elsewhere.
        return layer_names(len(paths)), "whole" if hasattr(module, "base_model_prefix") else "unknown"
    numbers = _numbers(module, paths)
    if numbers is not None:
        whole = numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        trusted = hasattr(module, "base_model_prefix")
        return block_sites(numbers), ("whole" if whole else "parts") if trusted else "unknown"
    inside = any(path.startswith(f"{block}.") for path in paths for block in _known_or_none(module))
    # What one module is given and gives shows nothing of a stream.
    return module_sites(paths), "none" if inside or len(paths) < 2 else "unknown"


def settled(model: Model, module: torch.nn.Module, paths: list[str], named: bool, strangers: list[str]) -> Model:
    """What is known of a model once a forward pass has shown which of its modules are given something of their own.

    Args:
        model: what was known before.
        module: the model.
        paths: of its modules.
        named: whether the user named them.
        strangers: those that are not given what the one before them gives.

    Raises:
        LayersimError: nobody named them, and they are no blocks.
    """
    if not strangers:
        post = is_post_norm(module.get_submodule(paths[0]), getattr(module, "config", None))
        return replace(model, stream="whole", basis=POST_NORM if post else PRE_NORM)
    if named:
        return replace(model, stream="none", layers=module_sites(paths), basis=MODULES)
    raise _unsupported(module, f"{strangers[0]} is not given what the module before it in its list gives: they are no blocks")


def same_stream(given: Tensor, before: Tensor) -> bool:
    """Whether what a module is given is what another one gave."""
    # NaNs are found by others.
    return given.shape == before.shape and torch.equal(given.nan_to_num(), before.to(given).nan_to_num())


def _numbers(module: torch.nn.Module, paths: list[str]) -> list[int] | None:
    """Which of the model's blocks these are; None if any is not one of them, or the layout is not known."""
    blocks = _known_or_none(module)
    return [blocks.index(path) for path in paths] if set(paths) <= set(blocks) else None


def _known_or_none(module: torch.nn.Module) -> list[str]:
    try:
        return _known(module)
    except LayersimError:
        return []


def _known(module: torch.nn.Module) -> list[str]:
    """Paths of all blocks of a layout that is known."""
    names = dict(module.named_modules())
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        raise _unsupported(module, "an encoder-decoder: two stacks, two residual streams")
    prefix = getattr(module, "base_model_prefix", "")
    for base in dict.fromkeys((prefix, "model", "")):
        for path in BLOCKS:
            full = f"{base}.{path}" if base else path
            found = names.get(full)
            if isinstance(found, torch.nn.ModuleList) and len(found):
                return [f"{full}.{i}" for i in range(len(found))]
    raise _unsupported(module, f"modules {[name for name, _ in module.named_children()][:6]}")


def _unsupported(module: torch.nn.Module, given: str) -> LayersimError:
    lists = [name for name, sub in module.named_modules() if isinstance(sub, torch.nn.ModuleList) and len(sub) > 1][:3]
    return LayersimError(
        f"The layers of {type(module).__name__} are not known.",
        given=given,
        expected=FAMILIES,
        do=f"layers=[f'{lists[0]}.{{i}}' for i in range(n)]" if lists else "layers=['path.of.block.0', 'path.of.block.1', ...]",
    )


def existing_paths(module: torch.nn.Module, paths: list[str], argument: str) -> list[str]:
    """Paths that the user named, if the model has modules there."""
    names = dict(module.named_modules())
    for path in paths:
        if path not in names:
            near = difflib.get_close_matches(path, names, n=3)
            lists = [name for name, sub in names.items() if isinstance(sub, torch.nn.ModuleList) and len(sub)]
            raise LayersimError(
                f"{type(module).__name__} has no module at this path.",
                given=f"{argument}=[..., {path!r}, ...]",
                expected="paths that model.named_modules() lists",
                do=f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else f"module paths such as {[f'{name}.0' for name in lists[:3]] or list(names)[1:4]}",
            )
        if argument == "layers" and isinstance(names[path], torch.nn.ModuleList):
            raise LayersimError(
                "`layers` names a list of modules, which is never run itself.",
                given=f"{path!r}, a list of {len(names[path])}",
                expected="paths of the modules in it",
                do=f"layers=[f'{path}.{{i}}' for i in range({len(names[path])})]",
            )
    if not paths:
        raise LayersimError(
            f"No {argument} were named.", given=f"{argument}=[]", expected="at least one path", do=f"{argument}=None"
        )
    return list(paths)


def find_embedding(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that embeds tokens; None where there is none, or the model does not say."""
    find: Any = getattr(module, "get_input_embeddings", None)
    try:
        found = None if find is None else find()
    except (AttributeError, NotImplementedError):
        # Hugging Face's models of images, and those of several towers, have the method and no answer.
        return None
    return found if isinstance(found, torch.nn.Module) else None


def is_post_norm(block: torch.nn.Module, config: Any) -> bool:
    """Whether blocks end in a layer norm, and so are no sum of what enters and a branch."""
    # BERT's block ends in a layer norm, so do the first GPT's and the 350M OPT's; elsewhere norms stand before attention and
    # feed-forward, or inside the branch.
    first_gpt = getattr(config, "model_type", None) == "openai-gpt"
    before = getattr(config, "do_layer_norm_before", None)
    return hasattr(getattr(block, "output", None), "LayerNorm") or before is False or first_gpt


def refuse_no_weights(module: torch.nn.Module) -> None:
    """Refuse a model whose weights were never loaded; those that accelerate keeps elsewhere come when they are needed."""
    brought = [name for name, sub in module.named_modules() if hasattr(sub, "_hf_hook")]
    for name, sub in module.named_modules():
        if any(p.is_meta for p in sub.parameters(recurse=False)):
            if any(holder in ("", name) or name.startswith(f"{holder}.") for holder in brought):
                continue
            raise LayersimError(
                f"{type(module).__name__} has no weights: its parameters are on the meta device.",
                given=f"{name or type(module).__name__} on device meta",
                expected="a model with weights",
                do="AutoModelForCausalLM.from_pretrained(name), outside of torch.device('meta'); to_empty() gives no weights",
            )


def no_forward(module: torch.nn.Module, error: Exception) -> LayersimError:
    """The refusal of a model whose forward pass fails on the data."""
    reads = [
        p.name
        for p in inspect.signature(type(module).forward).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD and p.name != "self"
    ]
    parts = [f"model.{name}" for name, part in module.named_children() if hasattr(part, "base_model_prefix")]
    said = (str(error).strip().splitlines() or [""])[0][:200]
    return LayersimError(
        f"The forward pass of {type(module).__name__} fails on this data.",
        given=f"tokens, and {type(error).__name__}: {said}",
        expected=f"a model that runs on tokens and an attention mask alone; this one takes {', '.join(reads[:4])}",
        do=(f"one of its parts alone, {' or '.join(parts)}; or " if parts else "")
        + "with lsim.attach(model, analyzers, layers=...) as probe: model(...) with all that it takes",
    )


def call_options(module: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    """What a forward call needs besides tokens: a mask where there is padding, and no cache to fill."""
    reads = getattr(module, "main_input_name", "input_ids")
    if reads != "input_ids":
        raise LayersimError(
            f"{type(module).__name__} reads `{reads}`, and the data are tokens.",
            given="tokens",
            expected="a model of tokens",
            do=f"with lsim.attach(model, analyzers) as probe: model({reads}={reads}); probe.results()",
        )
    options: dict[str, Any] = {}
    if hasattr(getattr(module, "config", None), "use_cache"):
        options["use_cache"] = False
    if batch.padded:
        accepts = inspect.signature(type(module).forward).parameters.values()
        if not any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in accepts):
            raise LayersimError(
                f"{type(module).__name__} takes no attention mask, and these rows are of different lengths.",
                given="a padded batch",
                expected="a forward with attention_mask=, or rows of one length",
                do="batch_size=1, or cut rows with seq_len=",
            )
        options["attention_mask"] = batch.attention.long()
    return options


def classes_with_head(name: str) -> str:
    """The transformers classes that load a model of that class with a head, as a message names them.

    >>> classes_with_head("BertModel")
    'AutoModelForMaskedLM or AutoModelForSequenceClassification'
    >>> classes_with_head("LlamaModel")
    'AutoModelForCausalLM'
    """
    from transformers.models.auto import modeling_auto as auto

    stem = name.removesuffix("Model")
    # Encoders first: most of them have a causal class too, which nobody trained.
    if stem and f"{stem}ForMaskedLM" in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.values():
        return "AutoModelForMaskedLM or AutoModelForSequenceClassification"
    if stem and f"{stem}ForImageClassification" in str(auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()):
        return "AutoModelForImageClassification"
    if stem and {f"{stem}ForCausalLM", f"{stem}LMHeadModel"} & set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()):
        return "AutoModelForCausalLM"
    return "AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelForSequenceClassification, as it was trained"
