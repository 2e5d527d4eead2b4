"""Opening of a model as a source or a split model, in this process, in nnsight's simulation of a server or on a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ..core.errors import LayersimError
from ..core.server_addresses import shown
from ..models.activation_checks import need_stream
from ..models.hooked import HookedSource
from ..models.layout import modules_in_place_of_blocks
from ..models.model_changes import refuse_edits
from ..models.nnsight import NNsightSource
from ..models.open import ACCEPTED_MODELS, is_nnsight, open_local
from ..models.source import Source
from ..models.split_model import LocalSplitModel, SplitModel
from ..models.transformer_lens import is_transformer_lens
from .source import RemoteSource
from .split_model import RemoteSplitModel


def open_source(
    model: Any,
    *,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
    tokens_per_request: int | None = None,
    either_stack: bool = False,
    at: Any = None,
) -> Source:
    """The source for a model.

    Args:
        model: the model, or a source.
        layers: paths of its blocks, None to find them by the layout.
        unembed: paths of its final norm and head, None to find them.
        remote: False for this process, "local" for nnsight's simulation of a server, True or an address for an NDIF server.
        tokens_per_request: number of positions that one request may hold; None to choose it by time.
        either_stack: whether the caller reads encoder-decoders too, whose decoder is read where `layers` names no blocks.
        at: the sites that the caller reads; modules among them take the place of blocks that are not known.

    Raises:
        LayersimError: the type of the model is not supported, or does not fit the other arguments.
    """
    module = model._module if is_nnsight(model) else model
    if layers is None and at is not None and isinstance(module, torch.nn.Module) and not is_transformer_lens(module):
        layers = modules_in_place_of_blocks(module, at)
    if tokens_per_request is not None and remote in (False, "local"):
        raise LayersimError(
            "`tokens_per_request` applies only to a model on a server.",
            given=f"tokens_per_request={tokens_per_request} with remote={shown(remote)}",
            expected="remote=True, or the address of an NDIF server",
            do="batch_size= for the rows of a forward pass in this process",
        )
    on_server = remote not in (False, "local")
    source: Source
    if on_server and is_nnsight(model):
        source = RemoteSource(model, layers, unembed, remote, tokens_per_request)
    else:
        source = open_local(model, layers=layers, unembed=unembed, remote=remote)
    if not either_stack and layers is None and source.has_two_stacks:
        raise LayersimError(
            f"{source.model.name} is an encoder-decoder, of which this function cannot choose one of the two stacks.",
            given=source.model.source,
            expected="a model with one residual stream, or `layers` with the blocks of one stack",
            do="lsim.analyze(model, data, analyzers, at='encoder.resid_post'); or layers=[...] with the encoder's blocks",
        )
    return source


def on_server(source: Source) -> RemoteSource:
    """Check that a source sends requests to an NDIF server, and return it.

    Raises:
        LayersimError: its model runs in this process.
    """
    if not isinstance(source, RemoteSource):
        raise LayersimError(
            "`remote` must be an NDIF server: the model runs in this process.",
            given=f"{source.model.name}, {source.model.source}",
            expected="True, or the address of an NDIF server",
            do="remote=True; without a server, analyze(model, data, analyzers) runs every analyzer",
        )
    return source


def open_split_model(model: Any, layers: list[str] | None, remote: bool | str) -> SplitModel:
    """The split model of a model: `LocalSplitModel` where its modules run in this process, else `RemoteSplitModel`.

    Args:
        model: the model.
        layers: paths of its blocks, None to find them by the layout.
        remote: as in `open_source`.

    Raises:
        LayersimError: as `open_source`; or the source cannot run parts of its model.
    """
    source = open_source(model, layers=layers, remote=remote, either_stack=not remote)
    need_stream(source.model, "Stitching")
    refuse_edits(source.model.changes, "Stitching")
    if isinstance(source, HookedSource):
        return LocalSplitModel(source, source.model)
    if not isinstance(source, NNsightSource):
        raise LayersimError(
            "`model` cannot be stitched: its source cannot run a part of the model.",
            given=type(source).__name__,
            expected=ACCEPTED_MODELS,
            do="pass the model itself",
        )
    if remote:
        return RemoteSplitModel(source)
    # A model that nnsight runs in this process has its modules in this process.
    hooked = HookedSource(source.module, source.paths if layers else None)
    return LocalSplitModel(hooked, replace(source.model, calls=hooked.model.calls))
