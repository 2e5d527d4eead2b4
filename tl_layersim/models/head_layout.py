"""Final norm and unembedding of a Hugging Face or plain torch model, by module path."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from .call_without_hooks import Quiet
from .head_layouts import known_head
from .layout import existing_paths, is_post_norm
from .unembed import Head, Unembed, head_parts, plain_linear

# Names of the unembedding in models without get_output_embeddings.
HEADS = ("lm_head", "embed_out", "unembed", "output")
# The class head of a DETR, which reads every object query.
OF_QUERIES = "class_labels_classifier"


def find_head(module: torch.nn.Module, blocks: list[str], unembed: list[str] | None) -> Head | None:
    """Paths of the final norm and of the modules from there to the logits; None where the model has no known head.

    Args:
        module: the model.
        blocks: paths of its blocks.
        unembed: the paths that the user names, in order, with the final norm first if there is one; None to find them.

    Raises:
        LayersimError: a named path does not exist.
    """
    names = dict(module.named_modules())
    if unembed is not None:
        paths = existing_paths(module, unembed, "unembed")
        norm = paths[0] if len(paths) > 1 and _is_norm(paths[0], names[paths[0]]) else ""
        return _scaled(Head(norm, tuple(paths[1:] if norm else paths)), module)
    head = _tabled(module, blocks, names)
    if head is not None:
        return _scaled(head, module)
    norm = _norm_beside(module, blocks, names)
    # The 350M OPT projects the residual back to the width of its embedding.
    project = ".".join([*blocks[0].split(".")[:-2], "project_out"])
    before = [project] if project in names else [norm] if norm and norms_between_layers(module) else []
    parts, reads = _classifier(module, blocks, names)
    return _scaled(Head(norm, (*before, *parts), reads), module) if parts else None


def _tabled(module: torch.nn.Module, blocks: list[str], names: dict[str, torch.nn.Module]) -> Head | None:
    """The head that the table of heads has for the model; None where it has none."""
    layout = known_head(module)
    if layout is None:
        return None
    base: Any = getattr(module, "base_model_prefix", "")
    norm = _norm_beside(module, blocks, names) if layout.norm is None else layout.norm.format(base=base)
    return Head(norm, layout.parts, layout.reads, pool=None if layout.pool is None else layout.pool(module.config))


def _norm_beside(module: torch.nn.Module, blocks: list[str], names: dict[str, torch.nn.Module]) -> str:
    """Path of the norm beside the list of blocks; "" where there is none."""
    if is_post_norm(module, blocks[0]) and not is_detr(getattr(module, "config", None)):
        # A norm beside such blocks has another purpose, as the one of DeBERTa's relative positions.
        return ""
    norms = [path for path in _above(blocks[0], names) if _is_norm(path, names[path])]
    # The final norm is registered last.
    return norms[-1] if norms else ""


def norms_between_layers(module: torch.nn.Module) -> bool:
    """Whether a DETR applies its decoder's norm to the output of each layer, and once more to that of the last.

    transformers does so where `config.auxiliary_loss` is set, also without labels.
    """
    config: Any = getattr(module, "config", None)
    return is_detr(config) and bool(config.auxiliary_loss)


def is_detr(config: Any) -> bool:
    """Whether a configuration is that of a DETR, whose heads read the output of its decoder alone."""
    return getattr(config, "model_type", None) == "detr"


def _scaled(head: Head, module: torch.nn.Module) -> Head:
    """The head with the scale and the soft-cap of the model's logits, which apply to logits of tokens, not of classes."""
    if head.classifies:
        return head
    config = getattr(module, "config", None)
    scale, soft_cap = logit_scaling(config)
    inner = _input_scale(config)
    return replace(head, scale=scale * inner, soft_cap=soft_cap, scales_input=inner != 1.0)


def _classifier(module: torch.nn.Module, blocks: list[str], names: dict[str, torch.nn.Module]) -> tuple[list[str], str]:
    """Paths of the modules from normed residual to logits, and which positions of a row they read."""
    find: Any = getattr(module, "get_output_embeddings", lambda: None)
    output = find()
    path = next((name for name, sub in names.items() if sub is output), None) if output is not None else None
    if path is not None:
        # BERT's and RoBERTa's heads transform before they decode, so the whole head is named.
        top = path.split(".")[0]
        return [path if blocks[0].startswith(f"{top}.") else top], "every"
    if is_detr(getattr(module, "config", None)):
        return [OF_QUERIES] if OF_QUERIES in names else [], "every"
    if "TokenClassification" in type(module).__name__:
        return ["score" if "score" in names else "classifier"], "every"
    if "score" in names:
        return ["score"], "last"
    if "classifier" in names:
        pooler = f"{getattr(module, 'base_model_prefix', '')}.pooler"
        return [*([pooler] if pooler in names else []), "classifier"], "first"
    return [name for name in HEADS if name in names][:1], "every"


def _above(block: str, names: dict[str, torch.nn.Module]) -> list[str]:
    """Paths of the modules on the lowest level above a block that contains a norm; empty if no level contains one."""
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
    """Factor and soft-cap of the logits in a configuration."""
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    times, over = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)  # Cohere; Granite
    scale = float(times) if isinstance(times, int | float) else 1.0
    scale = scale / over if isinstance(over, int | float) else scale
    # Gemma 2 and 3; RecurrentGemma.
    return scale, getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)


def _input_scale(config: Any) -> float:
    """Factor by which a T5 multiplies what its head reads, where the head shares the weights of the embedding."""
    tied = getattr(config, "model_type", None) in ("umt5", "switch_transformers") and config.tie_word_embeddings
    return float(config.d_model**-0.5) if getattr(config, "scale_decoder_outputs", False) or tied else 1.0


def head_dtype(parts: list[torch.nn.Module]) -> torch.dtype | None:
    """The dtype of a head's weights, None where it has none that are floats (as with 8-bit integers)."""
    first = next((p for part in parts for p in part.parameters()), None)
    return first.dtype if first is not None and first.is_floating_point() else None


def open_head(module: torch.nn.Module, head: Head) -> tuple[torch.nn.Module, Unembed]:
    """The module that gives logits (before scale and soft-cap), and the logit lens.

    Args:
        module: the model.
        head: paths of its modules.
    """
    parts = [module.get_submodule(path) for path in head.modules]
    norm = module.get_submodule(head.norm) if head.norm else None
    # Modules that accelerate placed move their inputs by themselves; other heads may be on another device than the norm.
    weight = next(parts[-1].parameters(), None)
    return parts[-1], Unembed(
        norm=None if norm is None else Quiet(norm),
        parts=head_parts(head, lambda path: Quiet(module.get_submodule(path))),
        reads=head.reads,
        scale=head.scale,
        soft_cap=head.soft_cap,
        scales_input=head.scales_input,
        dtype=head_dtype(parts),
        device=None if weight is None or weight.is_meta else weight.device,
        linear=plain_linear(parts[-1]) if head.parts[-1] == head.modules[-1] else None,
        norm_dtype=None if norm is None else head_dtype([norm]),
        pool=head.pool,
    )
