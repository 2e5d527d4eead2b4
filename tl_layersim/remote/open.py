"""Open a model wherever it is: in this process, in nnsight's simulation of a server, or on an NDIF server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..core.addresses import shown
from ..core.errors import LayersimError
from ..models.hooked import HookedSource
from ..models.nnsight import NNsightSource
from ..models.open import ACCEPTED, open_local
from ..models.source import Source
from ..models.split_model import LocalSplitModel, SplitModel
from ..models.validation import need_stream
from .source import RemoteSource
from .split_model import RemoteSplitModel


def open_source(
    model: Any,
    *,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
    tokens_per_request: int | None = None,
) -> Source:
    """The source for a model that is already loaded.

    Raises:
        LayersimError: the model is of no kind that can be read, or cannot be reached as asked.
    """
    if tokens_per_request is not None and remote in (False, "local"):
        raise LayersimError(
            "Only a server is sent requests.",
            given=f"tokens_per_request={tokens_per_request} with remote={shown(remote)}",
            expected="remote=True, or the address of an NDIF server",
            do="batch_size= for the rows of a forward pass here",
        )
    on_server = remote not in (False, "local")
    if on_server and any(cls.__module__.split(".")[0] == "nnsight" for cls in type(model).__mro__):
        return RemoteSource(model, layers, unembed, remote, tokens_per_request)
    return open_local(model, layers=layers, unembed=unembed, remote=remote)


def on_server(source: Source) -> RemoteSource:
    """The source as one that sends requests to an NDIF server.

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
    """A model as one side of a stitch: `LocalSplitModel` where its modules are in this process, else `RemoteSplitModel`.

    Raises:
        LayersimError: as `open_source`.
    """
    source = open_source(model, layers=layers, remote=remote)
    need_stream(source.model, "Stitching")
    if isinstance(source, HookedSource):
        return LocalSplitModel(source, source.model)
    if not isinstance(source, NNsightSource):
        raise LayersimError(
            "A stitch runs parts of models, which this source does not offer.",
            given=type(source).__name__,
            expected=ACCEPTED,
            do="pass the model itself",
        )
    if remote:
        return RemoteSplitModel(source)
    # What nnsight runs here is a module of this process.
    hooked = HookedSource(source.module, source.paths if layers else None)
    return LocalSplitModel(hooked, replace(source.model, calls=hooked.model.calls))
