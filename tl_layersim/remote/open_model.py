"""`open_model`, and functions that open models for forward passes and for stitching."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch

from ..architectures.anatomy import Anatomy
from ..architectures.blocks import anatomy_of
from ..architectures.module_paths import modules_remembered
from ..architectures.site_selection import blocks_to_read
from ..core.arguments import PositiveInt, typed
from ..core.errors import LayersimError, as_argument, shown
from ..core.wording import with_article
from ..sources.activation_checks import need_stream, verify_on_first_row
from ..sources.hooked_module import HookedSource
from ..sources.identity import refuse_edits
from ..sources.nnsight import NNsightSource
from ..sources.open_local import ACCEPTED_MODELS, OpenedModel, is_nnsight, open_local
from ..sources.partial_forward import LocalSplitModel, SplitModel
from ..sources.source import CanReadSites, HasModule, Source
from .partial_forward import RemoteSplitModel
from .source import RemoteSource


@typed
def open_model(
    model: Any,
    *,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
    verify: Literal["hf"] | torch.nn.Module | None = None,
    tokens_per_request: PositiveInt | None = None,
) -> OpenedModel:
    """Set where a model runs, and which modules are its blocks and its head. Pass the result to any function as the model.

    Args:
        model: HookedTransformer, TransformerBridge, nnsight `TransformersModel` or `NNsight(module)`, a Hugging Face model,
            or any torch module with `layers`.
        layers: module paths of the blocks, for unknown layouts, or to choose some blocks. Blocks of known layouts keep their
            numbers; others are numbered in the given order.
        unembed: module paths from the final norm (if there is one) to the logits, for unknown layouts.
        remote: for nnsight models: True for nnsight's default NDIF server, the address of another server, or "local" for
            nnsight's simulation of a server. Only sums return from the server.
        verify: "hf" compares the residual stream of a TransformerBridge or a HookedTransformer with that of the
            Hugging Face model on the first row at every site, and raises an error if they differ by more than rounding. The
            checkpoint of the model is loaded a second time, from its folder or the hub's cache. To load nothing, pass the
            Hugging Face model itself, untouched by a bridge.
        tokens_per_request: on a server, the maximum number of positions in a request, padding included. Default: the number of
            forward passes that run in about 10 s, or in a quarter of the operator's time limit. The default is lowered if the
            server ends a job because of its time limit.

    Returns:
        An `OpenedModel`.

    Raises:
        LayersimError: the type of the model is not supported, or the other arguments do not apply to it.

    Examples:
        >>> import tl_layersim as lsim
        >>> model = lsim.open_model(lsim.demo_model(), layers=[f"model.layers.{i}" for i in (0, 1, 2, 3)])
        >>> lsim.analyze(model, lsim.demo_text()[:4], lsim.CKA())["cka"].values.shape
        torch.Size([5, 5])
    """
    opened = OpenedModel(model, layers, unembed, remote, verify, tokens_per_request)
    if layers is not None and not opened.on_server:
        # Errors are raised here, before data is read. A server is asked by the first call, whose `at` may name the blocks.
        open_source(replace(opened, verify=None), either_stack=True)
    return opened


def open_source(model: Any, *, either_stack: bool = False, at: Any = None) -> Source:
    """Open a model as a `Source`, which runs forward passes and computes sums over activations.

    Args:
        model: the model, an `OpenedModel`, or a source.
        either_stack: whether the caller accepts encoder-decoders. If `layers` names no blocks, their decoder is read.
        at: the sites that the caller reads, which may choose the blocks, see `blocks_to_read`.

    Raises:
        LayersimError: the type of the model is not supported, or the other arguments do not apply to it.
    """
    opened = OpenedModel.of(model)
    with as_argument("model", opened.argument), modules_remembered():
        return _opened_source(opened, either_stack, at)


def _opened_source(opened: OpenedModel, either_stack: bool, at: Any) -> Source:
    """Open a model; see `open_source`."""
    model = opened.model
    layers = opened.layers
    module = model._module if is_nnsight(model) else model
    anatomy: Anatomy | None = None
    if isinstance(module, torch.nn.Module):
        anatomy = anatomy_of(module)
        layers = blocks_to_read(module, anatomy, layers, at)
    if opened.tokens_per_request is not None and not opened.on_server:
        raise LayersimError(
            f"`tokens_per_request` is {opened.tokens_per_request}; it must be None if remote={shown(opened.remote)}. Use "
            "batch_size= instead."
        )
    source: Source
    if opened.on_server and is_nnsight(model):
        source = RemoteSource(model, layers, opened.unembed, opened.remote, opened.tokens_per_request, anatomy)
    else:
        source = open_local(model, layers=layers, unembed=opened.unembed, remote=opened.remote, anatomy=anatomy)
    if not either_stack and layers is None and _is_encoder_decoder(source):
        raise LayersimError(
            f"{source.model.name} is an encoder-decoder ({source.model.source}); this function reads one stack. Name the "
            "blocks of one stack: open_model(model, layers=[...])."
        )
    verify_on_first_row(source, opened.verify)
    return source


def _is_encoder_decoder(source: Source) -> bool:
    """Whether a source runs an encoder-decoder."""
    if isinstance(source, CanReadSites):
        return source.anatomy.kind == "encoder-decoder"
    # A source of the user's own.
    return isinstance(source, HasModule) and anatomy_of(source.module).kind == "encoder-decoder"


def on_server(source: Source) -> RemoteSource:
    """Check that a source sends requests to an NDIF server, and return the source.

    Raises:
        LayersimError: the model runs in this process.
    """
    if not isinstance(source, RemoteSource):
        raise LayersimError(
            f"`remote` must be an NDIF server, but {source.model.name} ({source.model.source}) runs in this process. Use "
            "open_model(model, remote=True)."
        )
    return source


def open_split_model(model: Any) -> SplitModel:
    """Open a model, here or on a server, so that its lower or upper part can run alone.

    Args:
        model: the model, or an `OpenedModel`.

    Raises:
        LayersimError: see `open_source`; or the source cannot run a part of its model.
    """
    opened = OpenedModel.of(model)
    with as_argument("model", opened.argument):
        return _split(opened)


def _split(opened: OpenedModel) -> SplitModel:
    """Open a model as a split model; see `open_split_model`."""
    source = open_source(opened, either_stack=not opened.remote)
    need_stream(source.model, "Stitching")
    refuse_edits(source.model.changes, "Stitching")
    if isinstance(source, HookedSource):
        return LocalSplitModel(source, source.model)
    if not isinstance(source, NNsightSource):
        raise LayersimError(
            f"`model` is {with_article(type(source).__name__)}, which cannot run only some of its blocks; stitching needs "
            f"{ACCEPTED_MODELS}."
        )
    if opened.remote:
        return RemoteSplitModel(source)
    # nnsight runs this model here, so its modules can be hooked.
    hooked = HookedSource(source.module, source.paths if opened.layers else None, anatomy=source.anatomy)
    return LocalSplitModel(hooked, replace(source.model, calls=hooked.model.calls))
