"""Where the residual stream of a Hugging Face or plain torch model is, and what turns its end into logits, by module path."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
from typing import Any

import torch

from .data import Batch
from .errors import LayersimError
from .source import Model, layer_names
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
        LayersimError: a named path does not exist, or none were named and the layout is not known.
    """
    names = dict(module.named_modules())
    if layers is not None:
        return _named(module, layers, "layers")
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


def describe(module: torch.nn.Module, blocks: list[str], source: str, tokenizer: Any, unembed: list[str] | None) -> Model:
    """What a Hugging Face module and its configuration say about it."""
    config = getattr(module, "config", None)
    text = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
    if config is not None and hasattr(config, "to_dict"):
        # Name and version say where a configuration was loaded, not what the model is.
        plain = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    else:
        plain = {"class": type(module).__name__, "parameters": [(n, list(p.shape)) for n, p in module.named_parameters()]}
    first = next(module.parameters(), None)
    return Model(
        name=getattr(config, "_name_or_path", "") or type(module).__name__,
        config_hash=hash_config(plain),
        weights_hash=hash_weights(module),
        source=source,
        basis=POST_NORM if is_post_norm(module.get_submodule(blocks[0]), config) else "raw weights, before the final norm",
        dtype=str(first.dtype) if first is not None else "unknown",
        layers=layer_names(len(blocks)),
        d_model=getattr(text, "hidden_size", None),
        vocabulary=getattr(text, "vocab_size", None),
        context=_context(text),
        tokenizer=tokenizer,
        head=find_head(module, blocks, unembed),
        calls="gradients",
    )


def call_options(module: torch.nn.Module, batch: Batch) -> dict[str, Any]:
    """What a forward call needs besides tokens: a mask where there is padding, and no cache to fill."""
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
        if parameter.is_meta:
            return ""
        flat = parameter.detach().reshape(-1)
        picked.append(flat[:: max(1, flat.numel() // 64)][:64].float().cpu())
    return hashlib.sha256(torch.cat(picked).numpy().tobytes()).hexdigest()[:12] if picked else ""


def hash_config(config: dict[str, Any]) -> str:
    """First 12 hex digits of the SHA-256 of a configuration."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:12]
