"""Opens models in this process, lists their sites, and makes untrained models."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ..architectures.blocks import find_stacks, refuse_paths, unknown_blocks
from ..architectures.hook_points import Site
from ..architectures.layouts import BlockLayout
from ..architectures.site_selection import site_map
from ..architectures.transformer_lens import is_transformer_lens
from ..core.arguments import Seed, typed
from ..core.errors import LayersimError, shown
from ..core.wording import brief, with_article
from .forward_arguments import refuse_no_weights
from .hooked_module import HookedSource
from .identity import edits_of, hooks_on
from .nnsight import NNsightSource
from .source import CanReadSites, Source

if TYPE_CHECKING:
    import pandas

ACCEPTED_MODELS = (
    "a TransformerLens HookedTransformer or TransformerBridge, an nnsight TransformersModel or NNsight(module), "
    "a Hugging Face model or another torch module with layers=[...]"
)


@dataclass(frozen=True, eq=False, repr=False)
class OpenedModel:
    """A model with the options of `open_model`, accepted by all functions that take a model.

    Attributes:
        model: the model.
        layers: paths of its blocks; None to find them.
        unembed: paths of its final norm and head; None to find them.
        remote: where the model runs, see `open_model`.
        verify: the reference for its residual stream, see `open_model`.
        tokens_per_request: largest number of positions in one request to a server, see `open_model`.
        argument: the argument of the public function that holds the model, for messages; see `as_argument`.
        given: the model as it was passed, such as a `PeftModel`, of which `model` is the base model; None for `model` itself.
    """

    model: Any
    layers: list[str] | None = None
    unembed: list[str] | None = None
    remote: bool | str = False
    verify: Any = None
    tokens_per_request: int | None = None
    argument: str = "model"
    given: Any = None

    def __post_init__(self) -> None:
        if self.given is None:
            object.__setattr__(self, "given", self.model)
        original = getattr(self.model, "_orig_mod", None)
        if isinstance(original, torch.nn.Module):
            # Imported here, because a user's trace that names an opened model ships this class by value, with what it names.
            from ..core.errors import warn

            warn(
                f"`{self.argument.split(' ')[0]}` comes from torch.compile; its original module {type(original).__name__} is "
                "used, because compiled graphs have no place for hooks."
            )
            self._replace_by_inner(original, "_orig_mod.")
        base = adapted_model(self.model)
        if base is not None:
            self._replace_by_inner(base, "base_model.model.")

    def _replace_by_inner(self, inner: torch.nn.Module, prefix: str) -> None:
        """Put a module inside the model in place of the model, whose paths begin with `prefix`."""
        object.__setattr__(self, "model", inner)
        for name in ("layers", "unembed"):
            paths = getattr(self, name)
            if paths is not None:
                object.__setattr__(self, name, [path.removeprefix(prefix) for path in paths])

    @classmethod
    def of(cls, model: Any, argument: str | None = None) -> OpenedModel:
        """Convert the argument `model` to an `OpenedModel`; a plain model gets the default options.

        Args:
            model: an `OpenedModel`, or a model.
            argument: the argument that holds the model; None for "model", or the one that an `OpenedModel` has.
        """
        if not isinstance(model, cls):
            return cls(model, argument=argument or "model")
        return model if argument is None else replace(model, argument=argument)

    @property
    def on_server(self) -> bool:
        """Whether the model is on a server."""
        return self.remote not in (False, "local")

    def record(self) -> dict[str, Any]:
        """The options `layers`, `unembed` and `verify`, for the provenance."""
        return {"layers": self.layers, "unembed": self.unembed, "verify": None if self.verify is None else "hf"}

    def __repr__(self) -> str:
        parts = [type(self.model).__name__]
        for field in fields(self):
            if field.name in ("model", "argument", "given"):
                continue
            value = getattr(self, field.name)
            if value not in (None, False):
                parts.append(f"{field.name}={brief(value)}")
        return f"OpenedModel({', '.join(parts)})"


def adapted_model(model: Any) -> Any:
    """The base model inside a `PeftModel`, whose forward pass includes the adapters; None for other models.

    It is None also for adapters that act outside of the base model's modules, such as soft prompts.
    """
    if type(model).__module__.split(".")[0] != "peft" or not isinstance(model, torch.nn.Module):
        return None
    wrapper: Any = model
    for config in wrapper.peft_config.values():
        kind = str(getattr(config, "peft_type", "")).rpartition(".")[2]
        acts_outside = getattr(config, "is_prompt_learning", False) or kind in ("XLORA", "POLY")
        # Adapters of these act from a token on, which the wrapper finds.
        starts_at_token = getattr(config, "alora_invocation_tokens", None) is not None
        if acts_outside or starts_at_token:
            return None
    return wrapper.base_model.model


def records_of(opened: Sequence[OpenedModel]) -> dict[str, Any]:
    """The options `layers` and `verify` of several models, as a dict for the provenance.

    Each value is a list with one item per model; None if no model has the option.

    Args:
        opened: the models.
    """
    records = [opened_model.record() for opened_model in opened]
    combined: dict[str, Any] = {}
    for name in ("layers", "verify"):
        values = [record[name] for record in records]
        combined[name] = None if all(value is None for value in values) else values
    return combined


def open_local(
    model: Any,
    *,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
) -> Source:
    """Open a loaded model as a source.

    Args:
        model: the model, or a source.
        layers: paths of its blocks, None to find them by the layout.
        unembed: paths of its final norm and head, None to find them.
        remote: False, or "local" for nnsight's simulation of a server.

    Raises:
        LayersimError: the type of the model is not supported, or does not fit the other arguments.
    """
    if isinstance(model, Source) and not remote:
        refuse_paths(layers, unembed, "sources")
        if isinstance(model, CanReadSites):
            model.renew_description()
        return model
    if isinstance(remote, str) and not remote.strip():
        # An unset environment variable gives an empty string, which would otherwise run in this process.
        raise LayersimError(f"`remote` is {remote!r}; it must be True, the address of an NDIF server, 'local', or False.")
    if is_nnsight(model):
        return NNsightSource(model, layers, unembed, remote)
    if remote:
        raise LayersimError(
            f"`remote` is {shown(remote)}, but {type(model).__name__} is no nnsight model. Use "
            "nnsight.TransformersModel('org/name', task='text-generation', tokenizer=tokenizer)."
        )
    # A model that is made of others, or whose copies are elsewhere, opens itself.
    opens_itself: Any = getattr(model, "open_source", None)
    if opens_itself is not None:
        source: Source = opens_itself(layers, unembed)
        return source
    if isinstance(model, torch.nn.Module):
        refuse_no_weights(model)
        return HookedSource(model, layers, unembed)
    raise unsupported_model(model)


def is_nnsight(model: Any) -> bool:
    """Whether a model is an nnsight model, without importing nnsight."""
    return any(cls.__module__.split(".")[0] == "nnsight" for cls in type(model).__mro__)


def only_on_servers(model: Any) -> bool:
    """Whether an nnsight model has no weights here and is named as on a hub, so that its traces run on a server.

    The weights of a folder are loaded when they are needed.

    Args:
        model: an nnsight model.
    """
    name = getattr(model, "repo_id", None)
    return not getattr(model, "dispatched", True) and isinstance(name, str) and not os.path.isdir(name)


def unsupported_model(model: Any) -> LayersimError:
    """The error for an object that is not a supported model."""
    return LayersimError(
        f"`model` is {brief(model) if isinstance(model, str) else with_article(type(model).__name__)}; it must be "
        f"{ACCEPTED_MODELS}. Load it first, such as AutoModelForCausalLM.from_pretrained(name)."
    )


@typed
def sites(model: Any) -> pandas.DataFrame:
    """List the sites of a model, in the order of computation.

    A site is a place where activations are read. `at=` selects sites: `at="attn_out"` selects all sites of a family,
    `at=["blocks.0.hook_attn_out"]` one site by its name. Other hook points of a TransformerLens model (`model.hook_dict`) and
    the modules of any model (`model.named_modules()`) can be named in `at=` too; they are not in the table.

    Args:
        model: a TransformerLens, Hugging Face, nnsight or other torch model; or what `open_model` returns. A model whose
            blocks are not in the table of layouts runs on one short synthetic row, which shows its sublayers.

    Returns:
        A pandas table with the columns `name`; `family`; `block`, the index of the block; `module`, the module that is read,
        and whether its input or output; and `heads`, the number of heads into which `per_head=True` splits the site, 0 if it
        has none. The family `resid_post` begins with the first site of `resid_pre`.

    Raises:
        LayersimError: the type of the model is not supported, or its blocks are unknown.

    Examples:
        >>> import tl_layersim as lsim
        >>> table = lsim.sites(lsim.demo_model())
        >>> print(table[table.family == "z"].head(2).to_string(index=False))
                        name family  block                                  module  heads
        blocks.0.attn.hook_z      z      0 model.layers.0.self_attn.o_proj (input)      4
        blocks.1.attn.hook_z      z      1 model.layers.1.self_attn.o_proj (input)      4
    """
    import pandas

    opened = OpenedModel.of(model)
    model = opened.model
    module = model._module if is_nnsight(model) else model
    if not isinstance(module, torch.nn.Module):
        raise unsupported_model(model)
    blocks = [] if is_transformer_lens(module) else find_stacks(module, opened.layers)
    model_sites = site_map(module, blocks, _watched_layouts(opened, module, blocks)).sites
    rows = [(site.point.name, site.family, site.block, _module_and_side_text(site), len(site.heads)) for site in model_sites]
    table = pandas.DataFrame(rows, columns=["name", "family", "block", "module", "heads"])
    return table.astype({"block": "Int64"})


def _watched_layouts(opened: OpenedModel, module: torch.nn.Module, blocks: Sequence[str]) -> Mapping[str, BlockLayout]:
    """Layouts of blocks that are missing in the table, from a forward pass; empty if the model is on a server."""
    if is_transformer_lens(module) or opened.on_server or not unknown_blocks(module, blocks):
        return {}
    if any(weight.is_meta for weight in module.parameters()):
        return {}
    source = open_local(opened.model, layers=opened.layers, unembed=opened.unembed)
    return source.watched_layouts if isinstance(source, CanReadSites) else {}


def _module_and_side_text(site: Site) -> str:
    """Describe the module that a site reads, and whether it reads the input or the output."""
    side = "input" if site.point.incoming else "output"
    if site.point.part is not None:
        side = f"part of the {side}"
    return f"{site.point.module} ({side})"


@typed
def untrained(model: Any, seed: Seed = 0) -> Any:
    """Make a model of the same architecture with fresh weights, as its class initialises them.

    Two trained models are similar because of their training, and because they read the same tokens with the same architecture.
    Untrained models show only the second effect.

    Args:
        model: a Hugging Face model, a HookedTransformer, a TransformerBridge, or an nnsight model in this process; or what
            `open_model` returns.
        seed: seed of the weights. The state of torch's random numbers is left as it is.

    Returns:
        The model in evaluation mode, with the dtype, the device and the tokenizer of `model`. For an nnsight model it is a
        Hugging Face model.

    Raises:
        LayersimError: the model cannot be made from a configuration, or its configuration gives other shapes; or it has hooks
            or nnsight edits, which the twin would lack.

    Examples:
        >>> import tl_layersim as lsim
        >>> from tl_layersim.sources import untrained
        >>> model = lsim.demo_model()
        >>> twin = untrained(model)
        >>> twin.config.hidden_size == model.config.hidden_size, untrained(model, seed=1) is twin
        (True, False)
    """
    model = OpenedModel.of(model).model
    refuse_changed(model)
    if is_nnsight(model):
        twin = untrained(model._module, seed)
        twin.tokenizer = getattr(model, "tokenizer", None)
        return twin
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        twin = _model_from_config(model)
    weight = next(model.parameters())
    twin = twin.to(device=weight.device, dtype=weight.dtype).eval()
    shapes = _weight_shapes(model)
    twin_shapes = _weight_shapes(twin)
    if shapes != twin_shapes:
        different = next(name for name in shapes | twin_shapes if shapes.get(name) != twin_shapes.get(name))
        raise LayersimError(
            f"`model` does not fit its configuration: {different} has shape {shapes.get(different)}, but an untrained model "
            f"has {twin_shapes.get(different)}."
        )
    if hasattr(model, "tokenizer") and not hasattr(twin, "tokenizer"):
        twin.tokenizer = model.tokenizer
    return twin


def _weight_shapes(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter and buffer, by name."""
    return {name: tuple(value.shape) for name, value in module.state_dict().items()}


def refuse_changed(model: Any) -> None:
    """Raise an error if a model has hooks or edits, which an untrained model would lack.

    Args:
        model: any model; only torch modules can have hooks.

    Raises:
        LayersimError: names the changes.
    """
    module = model
    changes: list[str] = []
    if is_nnsight(model):
        module = model._module
        changes.append(edits_of(model))
    if isinstance(module, torch.nn.Module):
        changes.append(hooks_on(module))
    if any(changes):
        raise LayersimError(
            f"`model` has hooks or edits, which an untrained model would lack: {'; '.join(filter(None, changes))}. "
            "Make untrained(model) first, and register the hooks on both models."
        )


def _model_from_config(model: Any) -> Any:
    """Make a model of the same class from a model's configuration."""
    if is_transformer_lens(model):
        original = getattr(model, "original_model", None)
        if original is None:
            cfg = copy.deepcopy(model.cfg)
            cfg.init_weights = True
            # A seed of the configuration would take the place of the caller's.
            cfg.seed = None
            return type(model)(cfg, tokenizer=model.tokenizer)
        if not getattr(model, "compatibility_mode", False):
            from transformer_lens.model_bridge.sources import build_bridge_from_module

            fresh = type(original)(copy.deepcopy(original.config))
            architecture = type(original).__name__
            return build_bridge_from_module(fresh, architecture, hf_config=fresh.config, tokenizer=model.tokenizer)
    elif hasattr(type(model), "_from_config") and getattr(model, "config", None) is not None:
        return type(model)(copy.deepcopy(model.config))
    raise LayersimError(
        f"`model` is {with_article(type(model).__name__)}, which cannot be made from a configuration; it must be a Hugging "
        "Face model, a HookedTransformer, or a TransformerBridge without compatibility mode."
    )
