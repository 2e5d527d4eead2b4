"""Finds the output head of a model: the final norm and the modules from the norm to the logits."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import with_article
from .anatomy import Anatomy
from .blocks import existing_paths, final_norm, no_cache
from .layouts import HEADS, HEADS_BY_CLASS, SCALED_IF_TIED
from .module_paths import modules_by_path
from .unembed import Head, HeadModule, Tail, Unembed, head_parts, plain_linear, tensor_of

OF_BOXES = "bbox_predictor"
# Modules of which a head without a norm may consist.
WITHOUT_NORM = (
    *(torch.nn.Linear, torch.nn.Bilinear, torch.nn.Identity, torch.nn.Dropout, torch.nn.Sequential, torch.nn.ModuleList),
    *(torch.nn.Tanh, torch.nn.GELU, torch.nn.ReLU, torch.nn.SiLU, torch.nn.Sigmoid, torch.nn.Flatten),
)
# Classes of transformers that load a model with a head, for messages.
CLASSES_WITH_HEAD = "AutoModelForCausalLM, AutoModelForMaskedLM or AutoModelFor...Classification, as it was trained"


def find_head(module: torch.nn.Module, anatomy: Anatomy, unembed: list[str] | None) -> Head | None:
    """Paths of the final norm and the modules from there to the logits; None if unknown.

    Args:
        module: the model.
        anatomy: what lies where in it.
        unembed: the paths that the user names, in order, starting with the final norm if there is one; None to find them.

    Raises:
        LayersimError: a named path does not exist.
    """
    names = dict(modules_by_path(module))
    if unembed is not None:
        return _with_logit_scaling(_named_head(module, unembed, names), module)
    head = _head_in_table(module, anatomy, names)
    if head is not None:
        return _with_logit_scaling(head, module)
    first_block = anatomy.blocks[0]
    norm = _norm_beside_blocks(module, anatomy, names)
    parts, reads = _modules_to_logits(module, first_block, names)
    if not parts:
        return None
    hides_norm = False
    if not norm and not _has_no_final_norm(anatomy):
        hides_norm = any(_may_hide_norm(names[path]) for path in parts)
    # The 350M OPT projects the residual back to the width of its embedding.
    projection = ".".join([*first_block.split(".")[:-2], "project_out"])
    if projection in names:
        parts = [projection, *parts]
    return _with_logit_scaling(Head(norm, tuple(parts), reads, hides_norm=hides_norm), module)


def _named_head(module: torch.nn.Module, unembed: list[str], names: dict[str, torch.nn.Module]) -> Head:
    """The head whose paths the user names."""
    paths = existing_paths(module, unembed, "unembed")
    first_path = paths[0]
    starts_with_norm = has_name_of_norm(type(names[first_path])) or _is_norm_by_name(first_path, names)
    if len(paths) > 1 and starts_with_norm:
        return Head(first_path, tuple(paths[1:]))
    return Head("", tuple(paths), hides_norm=any(_may_hide_norm(names[path]) for path in paths))


def _head_in_table(module: torch.nn.Module, anatomy: Anatomy, names: dict[str, torch.nn.Module]) -> Head | None:
    """The head of the model in `HEADS_BY_CLASS`; None if it is missing there."""
    classes = {cls.__name__ for cls in type(module).__mro__}
    config = getattr(module, "config", None)
    for layout in HEADS_BY_CLASS:
        if not classes.intersection(layout.classes) or not layout.when(config):
            continue
        base: Any = getattr(module, "base_model_prefix", "")
        norm = _norm_beside_blocks(module, anatomy, names) if layout.norm is None else layout.norm.format(base=base)
        parts = tuple(norm if part == "{norm}" else part for part in layout.parts)
        pool = None if layout.pool is None else layout.pool(config)
        return Head(norm, parts, layout.reads, pool=pool)
    return None


def _has_no_final_norm(anatomy: Anatomy) -> bool:
    """Whether a norm ends each block, so that none follows the last one."""
    layout = anatomy.layouts[anatomy.blocks[0]]
    return anatomy.post_norm if layout is None else "ln_final" in layout.lacks


def _norm_beside_blocks(module: torch.nn.Module, anatomy: Anatomy, names: dict[str, torch.nn.Module]) -> str:
    """Path of the norm beside the list of blocks; "" if there is none."""
    first_block = anatomy.blocks[0]
    layout = anatomy.layouts[first_block]
    if _has_no_final_norm(anatomy):
        # A norm beside such blocks has another purpose, as the one of DeBERTa's relative positions.
        return ""
    norm_of_layout = None if layout is None else final_norm(module, first_block, layout)
    if norm_of_layout is not None:
        return norm_of_layout
    # On the lowest level above the blocks that has a norm; the final norm is registered last.
    for depth in range(first_block.count(".") - 1, -1, -1):
        parent = ".".join(first_block.split(".")[:depth])
        paths = [f"{parent}.{name}".lstrip(".") for name, _ in names[parent].named_children()]
        norms = [path for path in paths if _is_norm_by_name(path, names) and _has_width_of_stream(names[path], module)]
        if norms:
            return norms[-1]
    return ""


def _has_width_of_stream(norm: torch.nn.Module, module: torch.nn.Module) -> bool:
    """Whether a norm may have the width of the residual stream. True if one of both is unknown."""
    weight = getattr(norm, "weight", None)
    config = text_config(getattr(module, "config", None))
    width = getattr(config, "hidden_size", None)
    if not isinstance(weight, Tensor) or weight.dim() != 1 or not isinstance(width, int):
        return True
    return len(weight) == width


def possible_heads(module: torch.nn.Module, anatomy: Anatomy, head: Head | None) -> tuple[Head, ...]:
    """Heads that differ in the final norm: the likeliest, the same with another norm around the blocks, and without a norm.

    A forward pass decides between them.

    Args:
        module: the model.
        anatomy: what lies where in it.
        head: the likeliest head; None if the model has none.
    """
    if head is None:
        return ()
    # Norms beside the list of blocks, then beside each module around it.
    norms: list[str] = []
    parts = anatomy.blocks[0].split(".")[:-2]
    for depth in range(len(parts), -1, -1):
        parent = ".".join(parts[:depth])
        for name, child in module.get_submodule(parent).named_children():
            if is_norm(child):
                norms.append(f"{parent}.{name}".lstrip("."))
    heads = [head]
    for norm in (*norms, ""):
        if norm != head.norm and norm not in head.modules:
            heads.append(replace(head, norm=norm))
    return tuple(heads)


def norms_between_layers(module: torch.nn.Module) -> bool:
    """Whether a DETR applies its decoder norm after each layer.

    The norm is then applied twice after the last layer. transformers does so if `config.auxiliary_loss` is set, even without
    labels.
    """
    config: Any = getattr(module, "config", None)
    return is_detr(config) and bool(config.auxiliary_loss)


def is_detr(config: Any) -> bool:
    """Whether a configuration belongs to a DETR whose heads read only the decoder's output."""
    return getattr(config, "model_type", None) == "detr"


def _with_logit_scaling(head: Head, module: torch.nn.Module) -> Head:
    """Add logit scale and soft-cap to a head that predicts tokens."""
    if head.classifies:
        return head
    config: Any = getattr(module, "config", None)
    scale, soft_cap = logit_scaling(config)
    is_scaled_as_tied = getattr(config, "model_type", None) in SCALED_IF_TIED and config.tie_word_embeddings
    if getattr(config, "scale_decoder_outputs", False) or is_scaled_as_tied:
        # A T5 whose head is tied to the embedding.
        return replace(head, scale=scale * config.d_model**-0.5, soft_cap=soft_cap, scales_input=True)
    return replace(head, scale=scale, soft_cap=soft_cap)


def _modules_to_logits(module: torch.nn.Module, first_block: str, names: dict[str, torch.nn.Module]) -> tuple[list[str], str]:
    """Paths of the modules from the final norm to the logits, and the positions they read (`Head.reads`)."""
    get_output_embeddings: Any = getattr(module, "get_output_embeddings", lambda: None)
    output_embeddings = get_output_embeddings()
    for path, submodule in names.items():
        if output_embeddings is not None and submodule is output_embeddings:
            # BERT's and RoBERTa's heads transform before they decode, so the whole head is named.
            top = path.split(".")[0]
            return [path if first_block.startswith(f"{top}.") else top], "every"
    if "TokenClassification" in type(module).__name__:
        return ["score" if "score" in names else "classifier"], "every"
    if "score" in names:
        return ["score"], "last"
    if "classifier" in names:
        pooler = f"{getattr(module, 'base_model_prefix', '')}.pooler"
        return [pooler, "classifier"] if pooler in names else ["classifier"], "first"
    return [name for name in HEADS if name in names][:1], "every"


def has_name_of_norm(kind: type) -> bool:
    """Whether the name of a class of modules is that of a norm, such as LayerNorm or LlamaRMSNorm."""
    return "norm" in kind.__name__.lower()


def is_norm(module: torch.nn.Module) -> bool:
    """Whether a module is a norm: its class is named after one, and it holds no matrix.

    The parts of a model such as RobertaPreLayerNorm have the name of a norm too.
    """
    return has_name_of_norm(type(module)) and all(weight.dim() < 2 for weight in module.parameters())


def _is_norm_by_name(path: str, names: dict[str, torch.nn.Module]) -> bool:
    """Whether a module is a norm by its name or its class, and not the norm of an embedding."""
    name = path.split(".")[-1].lower()
    if "embed" in name:
        return False
    return has_name_of_norm(type(names[path])) or "norm" in name or name.startswith("ln_")


def _may_hide_norm(module: torch.nn.Module) -> bool:
    """Whether a part of a head may contain a norm: it is one, or contains one, or nothing is known about what it computes."""
    return any(not isinstance(part, WITHOUT_NORM) for part in module.modules())


def text_config(config: Any) -> Any:
    """The configuration of the text model inside a configuration, or the configuration itself."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def logit_scaling(config: Any) -> tuple[float, float | None]:
    """Scale and soft-cap of the logits in a configuration."""
    config = text_config(config)
    scale = 1.0
    factor = getattr(config, "logit_scale", None)  # Cohere
    if isinstance(factor, int | float):
        scale = float(factor)
    divisor = getattr(config, "logits_scaling", None)  # Granite
    if isinstance(divisor, int | float):
        scale = scale / divisor
    # Gemma 2 and 3; RecurrentGemma.
    soft_cap = getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_soft_cap", None)
    return scale, soft_cap


def _dtype_of(module: torch.nn.Module, paths: Sequence[str]) -> torch.dtype | None:
    """The dtype of the weights of modules; None for weights that are not floating-point."""
    for path in paths:
        for parameter in module.get_submodule(path).parameters():
            # The first weight decides.
            return parameter.dtype if parameter.is_floating_point() else None
    return None


def lens_of(module: torch.nn.Module, head: Head | None, module_at: Callable[[str], HeadModule] | None = None) -> Unembed | None:
    """The logit lens of a model; None if the model has no output head.

    Args:
        module: the model.
        head: paths of its modules.
        module_at: returns what to call in place of the module at a path, which moves inputs to its own device; None for the
            modules in this process, which are called without their hooks.
    """
    if head is None:
        return None
    if head.tail is not None and module_at is not None:
        # The rest of a forward pass runs on the modules of this process alone.
        return None
    is_in_this_process = module_at is None
    quiet_or_given = module_at or (lambda path: Quiet(module.get_submodule(path)))
    last_module = module.get_submodule(head.modules[-1])
    weight = next(last_module.parameters(), None)
    ends_in_one_module = head.tail is None and head.parts[-1] == head.modules[-1]
    return Unembed(
        norm=quiet_or_given(head.norm) if head.norm else None,
        parts=head_parts(head, quiet_or_given) if head.tail is None else (QuietTail(module, head.tail, head.norm),),
        reads=head.reads,
        scale=head.scale,
        soft_cap=head.soft_cap,
        scales_input=head.scales_input,
        dtype=_dtype_of(module, head.modules),
        # Modules that accelerate placed move their inputs by themselves; other heads may be on another device than the norm.
        device=weight.device if is_in_this_process and weight is not None and not weight.is_meta else None,
        norm_dtype=_dtype_of(module, (head.norm,)) if head.norm else None,
        pool=head.pool,
        linear=plain_linear(last_module) if is_in_this_process and ends_in_one_module else None,
    )


@dataclass(frozen=True)
class Quiet:
    """Calls a module without hooks and dropout.

    The logit lens is not part of a forward pass, so hooks must not see it. The module itself is not changed, because other
    threads may be running it.
    """

    module: torch.nn.Module

    def __call__(self, x: Tensor) -> Any:
        return without_hooks(self.module)(x)


def without_hooks(module: torch.nn.Module) -> torch.nn.Module:
    """A copy of a module without hooks, in evaluation mode, which shares its parameters and buffers."""
    return _copy_without_hooks(module, {})


@dataclass(frozen=True)
class QuietTail:
    """Runs a forward pass from behind the last block, on any residual, without hooks and dropout.

    Blocks are passed over, and the last one returns the residual. Each vector is a row of one position. The model itself is not
    changed.

    Attributes:
        module: the model.
        tail: how to enter the pass.
        norm: path of the final norm, which is left out, as the residual has been through it; "" if there is none.
    """

    module: torch.nn.Module
    tail: Tail
    norm: str

    def __call__(self, x: Tensor) -> Any:
        residual = x.reshape(-1, 1, x.shape[-1])
        stand_ins: dict[int, torch.nn.Module] = {}
        for path, length in zip(self.tail.blocks, self.tail.lengths, strict=True):
            block = self.module.get_submodule(path)
            block_output: Any = (residual, *[None] * (length - 1)) if length else residual
            stand_ins[id(block)] = _constant_module(block, block_output)
        if self.norm:
            norm = self.module.get_submodule(self.norm)
            stand_ins[id(norm)] = _constant_module(norm, residual)
        tokens = torch.full(residual.shape[:2], self.tail.token, device=x.device)
        model = _copy_without_hooks(self.module, stand_ins)
        output = model(**{self.tail.token_input: tokens}, **no_cache(self.module))
        logits = tensor_of(output)
        return logits.reshape(*x.shape[:-1], logits.shape[-1])


def _constant_module(module: torch.nn.Module, value: Any) -> torch.nn.Module:
    """A copy of a module, without hooks, whose forward returns a value whatever it is given."""
    stand_in = object.__new__(type(module))
    vars(stand_in).update(vars(module))
    vars(stand_in).update(_forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict(), forward=lambda *_, **__: value)
    return stand_in


def _copy_without_hooks(module: torch.nn.Module, shadows: dict[int, torch.nn.Module]) -> torch.nn.Module:
    """Copy a module without hooks, in evaluation mode; parameters and buffers are shared.

    Args:
        module: the module.
        shadows: copies of modules so far, by the `id` of the module; changed in place. A module that runs in two places has
            one copy.
    """
    if id(module) in shadows:
        return shadows[id(module)]
    shadow = object.__new__(type(module))
    shadows[id(module)] = shadow
    attributes = dict(vars(module))
    for name, value in attributes.items():
        # accelerate and others store on the instance a `forward` that is bound to the module itself.
        if isinstance(value, types.MethodType) and value.__self__ is module:
            attributes[name] = types.MethodType(value.__func__, shadow)
        elif isinstance(value, functools.partial) and any(argument is module for argument in value.args):
            args = [shadow if argument is module else argument for argument in value.args]
            attributes[name] = functools.partial(value.func, *args, **value.keywords)
    children: dict[str, torch.nn.Module | None] = {}
    for name, child in module._modules.items():
        children[name] = None if child is None else _copy_without_hooks(child, shadows)
    attributes["_modules"] = children
    attributes["_forward_hooks"] = OrderedDict()
    attributes["_forward_pre_hooks"] = OrderedDict()
    attributes["training"] = False
    # Into the instance's dict: the components of a TransformerBridge pass attributes on to the modules that they wrap.
    vars(shadow).update(attributes)
    return shadow


@dataclass(frozen=True)
class DetectionHeads:
    """The class head and the box head of a DETR, applied to every decoder layer.

    Below the last layer the outputs equal the model's `auxiliary_outputs`, at the last layer its outputs.

    Attributes:
        classes: maps the output of a decoder layer to class logits, the last of which is "no object".
        boxes: maps the output of a decoder layer to boxes before the sigmoid.
        norms_twice: whether the model applies the norm twice to the output of the last layer, see `norms_between_layers`.
    """

    classes: Unembed
    boxes: Unembed
    norms_twice: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compute class logits and boxes, both float64 on the CPU.

        Args:
            x: `layer query d_model`, outputs of all decoder layers.

        Returns:
            `layer query class`; and `layer query 4`, centre x, centre y, width and height as fractions of the image.
        """
        if self.norms_twice:
            x = torch.cat([x[:-1], self.classes.normed(x[-1:]).to(x)])
        return self.classes(x).cpu().double(), self.boxes(x).sigmoid().cpu().double()


def detection_heads(module: torch.nn.Module, unembed: Unembed | None) -> DetectionHeads:
    """The detection heads of a DETR.

    Args:
        module: the model.
        unembed: the logit lens, through the model's class head.

    Raises:
        LayersimError: the model is not a DETR, or has no class and box heads.
    """
    config = getattr(module, "config", None)
    if not is_detr(config):
        kind = str(getattr(config, "model_type", ""))
        reason = "its heads do not predict classes and boxes of object queries"
        if "detr" in kind:
            reason = "its boxes are offsets from reference points that a layer's output lacks, or its heads differ by layer"
        raise LayersimError(f"`model` is {with_article(type(module).__name__)}, which is not a plain DETR: {reason}.")
    if unembed is None:
        raise LayersimError(
            f"`model` is {with_article(type(module).__name__)} without a class head and a box head; load "
            "DetrForObjectDetection."
        )
    classes = replace(unembed, parts=unembed.parts[-1:])
    boxes = replace(classes, parts=(Quiet(module.get_submodule(OF_BOXES)),), linear=None)
    return DetectionHeads(classes, boxes, norms_between_layers(module))
