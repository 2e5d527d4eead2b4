"""Where the residual stream of a Hugging Face or plain torch model is, and what turns its end into logits, by module path."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..data.batches import Batch
from .model_info import Model, block_sites, layer_names, module_sites
from .unembed import CLASSIFIERS, Head

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
# Where a model does not say by get_output_embeddings what gives its logits.
HEADS = ("lm_head", "embed_out", "unembed", "output")
# What the data reader hands on, or what changes no activation: answers, of which a name with `label` in it is one too.
READ = ("input_ids", "tokens", "input", "text", "attention_mask", "start_positions", "end_positions")
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
    paths = _named(module, layers, "layers")
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


def find_embedding(module: torch.nn.Module) -> torch.nn.Module | None:
    """The module that embeds tokens; None where there is none, or the model does not say."""
    find: Any = getattr(module, "get_input_embeddings", None)
    try:
        found = None if find is None else find()
    except (AttributeError, NotImplementedError):
        # Hugging Face's models of images, and those of several towers, have the method and no answer.
        return None
    return found if isinstance(found, torch.nn.Module) else None


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


def _named(module: torch.nn.Module, paths: list[str], argument: str) -> list[str]:
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


def find_head(module: torch.nn.Module, blocks: list[str], unembed: list[str] | None) -> Head | None:
    """The final norm and what follows it up to the logits; None where the model has no head, or none that is known.

    Args:
        module: the model.
        blocks: paths of its blocks.
        unembed: the paths, in order, where the user names them: the final norm first, if there is one.

    Raises:
        LayersimError: a named path does not exist.
    """
    names = dict(module.named_modules())
    scale, soft_cap = logit_scaling(getattr(module, "config", None))
    if unembed is not None:
        paths = _named(module, unembed, "unembed")
        scale, soft_cap = (1.0, None) if paths[-1] in CLASSIFIERS else (scale, soft_cap)
        norm = paths[0] if len(paths) > 1 and _is_norm(paths[0], names[paths[0]]) else ""
        return Head(norm, tuple(paths[1:] if norm else paths), "every", scale, soft_cap)
    norms = [path for path in _above(blocks[0], names) if _is_norm(path, names[path])]
    # Where there are several, the final one is registered last.
    norm = norms[-1] if norms else ""
    # The 350M OPT leaves its narrow embedding's width behind and comes back to it.
    project = ".".join([*blocks[0].split(".")[:-2], "project_out"])
    before = [project] if project in names else []
    parts, reads = _classifier(module, blocks, names)
    # Scaling and soft-caps are of words.
    scale, soft_cap = (1.0, None) if parts and parts[-1] in CLASSIFIERS else (scale, soft_cap)
    return Head(norm, (*before, *parts), reads, scale, soft_cap) if parts else None


def _classifier(module: torch.nn.Module, blocks: list[str], names: dict[str, torch.nn.Module]) -> tuple[list[str], str]:
    """What gives logits, and of which positions."""
    find: Any = getattr(module, "get_output_embeddings", lambda: None)
    output = find()
    path = next((name for name, sub in names.items() if sub is output), None) if output is not None else None
    if path is not None:
        # BERT's and RoBERTa's heads transform before they decode: the whole head is what the model calls.
        top = path.split(".")[0]
        return [path if blocks[0].startswith(f"{top}.") else top], "every"
    if "TokenClassification" in type(module).__name__:
        return ["score" if "score" in names else "classifier"], "every"
    if "score" in names:
        return ["score"], "last"
    if "classifier" in names:
        pooler = f"{getattr(module, 'base_model_prefix', '')}.pooler"
        return [*([pooler] if pooler in names else []), "classifier"], "first"
    return [name for name in HEADS if name in names][:1], "every"


def _above(block: str, names: dict[str, torch.nn.Module]) -> list[str]:
    """Modules beside the list of blocks, or where there is no norm among them, beside what holds it."""
    parts = block.split(".")[:-1]
    while parts:
        parent = ".".join(parts[:-1])
        beside = [f"{parent}.{name}" if parent else name for name, _ in names[parent].named_children()]
        if any(_is_norm(path, names[path]) for path in beside):
            return beside
        parts = parts[:-1]
    return []


def _is_norm(path: str, module: torch.nn.Module) -> bool:
    name = path.split(".")[-1].lower()
    return "embed" not in name and ("norm" in type(module).__name__.lower() or "norm" in name or name.startswith("ln_"))


def logit_scaling(config: Any) -> tuple[float, float | None]:
    """What logits are multiplied with, and their soft-cap, as a configuration says."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    times, over = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)  # Cohere; Granite
    scale = float(times) if isinstance(times, int | float) else 1.0
    scale = scale / over if isinstance(over, int | float) else scale
    # Gemma 2 and 3; RecurrentGemma.
    return scale, getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


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


def head_dtype(parts: list[torch.nn.Module]) -> torch.dtype | None:
    """The dtype of a head's weights, None where it has none that are floats (as with 8-bit integers)."""
    first = next((p for part in parts for p in part.parameters()), None)
    return first.dtype if first is not None and first.is_floating_point() else None


def _unsupported(module: torch.nn.Module, given: str) -> LayersimError:
    lists = [name for name, sub in module.named_modules() if isinstance(sub, torch.nn.ModuleList) and len(sub) > 1][:3]
    return LayersimError(
        f"The layers of {type(module).__name__} are not known.",
        given=given,
        expected=FAMILIES,
        do=f"layers=[f'{lists[0]}.{{i}}' for i in range(n)]" if lists else "layers=['path.of.block.0', 'path.of.block.1', ...]",
    )


def describe(
    module: torch.nn.Module, blocks: list[str], source: str, tokenizer: Any, unembed: list[str] | None, named: bool
) -> Model:
    """What a Hugging Face module and its configuration say about it; `named` where the user named the blocks."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if config is not None and hasattr(config, "to_dict"):
        # Name and version say where a configuration was loaded, not what the model is.
        plain = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    else:
        plain = {"class": type(module).__name__, "parameters": [(n, list(p.shape)) for n, p in module.named_parameters()]}
    first = next(module.parameters(), None)
    names, stream = locate(module, blocks, named)
    basis = POST_NORM if is_post_norm(module.get_submodule(blocks[0]), config) else PRE_NORM
    return Model(
        name=getattr(config, "_name_or_path", "") or type(module).__name__,
        config_hash=hash_config(plain),
        weights_hash=hash_weights(module),
        source=source,
        basis=basis if names[0].endswith(".hook_resid_pre") else MODULES,
        dtype=str(first.dtype) if first is not None else "unknown",
        layers=names,
        d_model=getattr(text, "hidden_size", None),
        vocabulary=getattr(text, "vocab_size", None),
        context=_context(text),
        tokenizer=tokenizer,
        head=find_head(module, blocks, unembed),
        calls="gradients",
        **data_fields(module, blocks[0]),
        stream=stream,
    )


def data_fields(module: torch.nn.Module, block: str) -> dict[str, Any]:
    """The fields of `Model` that say how data is read for a Hugging Face model: `inputs`, `pads` and `ends`.

    Args:
        module: the model.
        block: path of its first block.
    """
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    # Models of this kind read segment 0 where they are given no segments; GPT-2 adds an embedding for segment 0.
    zeros = 0 if getattr(text, "type_vocab_size", None) is not None else None
    inputs = {name: zeros if name == "token_type_ids" else None for name in _forward_names(module, block)}
    pads, ends = _ids(config, text, "pad_token_id"), [*_ids(config, text, "bos_token_id"), *_ids(config, text, "eos_token_id")]
    return {"inputs": inputs, "pads": tuple(pads), "ends": tuple(dict.fromkeys(ends))}


def _forward_names(module: torch.nn.Module, block: str) -> list[str]:
    """Names of what the model's forward takes; of the modules inside it that hold the block too, where it passes names on."""
    path = block.split(".")
    names: dict[str, None] = {}
    for depth in range(len(path)):
        owner = module.get_submodule(".".join(path[:depth]))
        if isinstance(owner, torch.nn.ModuleList):
            continue
        parameters = list(inspect.signature(type(owner).forward).parameters.values())[1:]
        names |= dict.fromkeys(p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL))
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            break
    return [name for name in names if name not in READ and "label" not in name]


def _ids(config: Any, text: Any, name: str) -> list[int]:
    """Token ids of that name in a configuration, which gives one, several or none."""
    found = getattr(text, name, None)
    found = getattr(config, name, None) if found is None else found
    return [i for i in (found if isinstance(found, list | tuple) else [found]) if isinstance(i, int) and i >= 0]


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


def is_post_norm(block: torch.nn.Module, config: Any) -> bool:
    """Whether blocks end in a layer norm, and so are no sum of what enters and a branch."""
    # BERT's block ends in a layer norm, so do the first GPT's and the 350M OPT's; elsewhere norms stand before attention and
    # feed-forward, or inside the branch.
    first_gpt = getattr(config, "model_type", None) == "openai-gpt"
    before = getattr(config, "do_layer_norm_before", None)
    return hasattr(getattr(block, "output", None), "LayerNorm") or before is False or first_gpt


def _context(config: Any) -> int | None:
    """How many positions the model was made for."""
    length = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    # These count positions from the padding index on.
    offset = 2 if getattr(config, "model_type", None) in ("roberta", "mpnet", "xlm-roberta") else 0
    return length - offset if length else None


def hash_weights(module: torch.nn.Module) -> str:
    """First 12 hex digits of the SHA-256 of 64 numbers from each parameter; empty if the weights are elsewhere.

    A fine-tune changes nearly all numbers of nearly all parameters: a sample tells two checkpoints apart, and costs nothing.
    """
    picked = []
    for parameter in module.parameters():
        if parameter.is_meta or hasattr(parameter, "placements"):
            # Nowhere, or spread over processes.
            return ""
        flat = parameter.detach().reshape(-1)
        picked.append(flat[:: max(1, flat.numel() // 64)][:64].float().cpu())
    return hashlib.sha256(torch.cat(picked).numpy().tobytes()).hexdigest()[:12] if picked else ""


def hash_config(config: dict[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
