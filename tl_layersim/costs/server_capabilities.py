"""`capabilities`: features of an NDIF server for one model, and the analyzers that can run there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..analyzers import find_analyzers
from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.wording import brief
from ..remote.open_model import on_server, open_source
from ..remote.server_status import ServerStatus
from ..sources.open_local import OpenedModel, is_nnsight


@dataclass(frozen=True)
class Capabilities:
    """Features of an NDIF server for one model; `print` shows them as text.

    Attributes:
        model: the model's name.
        layers: names of its residual layers.
        offer: description of the server and the model, as the server publishes it.
        analyzers: by name, why an analyzer with default options cannot run on the server; "" if it can.
    """

    model: str
    layers: tuple[str, ...]
    offer: ServerStatus
    analyzers: Mapping[str, str]

    def __str__(self) -> str:
        offer = self.offer
        if offer.trusted:
            place = "trusted: requests run beside the weights"
        else:
            place = "sandboxed: requests run in a process of their own, which receives layers and logits, but no gradients"
        runnable = [name for name, reason in self.analyzers.items() if not reason]
        job_limit = f"{offer.job_limit:g} s" if offer.job_limit else "not published"
        versions = ", ".join(f"{name} {version}" for name, version in offer.versions.items())
        lines = [
            f"{self.model} on {offer.server}",
            f"  {place}",
            f"  weights:    {offer.dtype}, {len(self.layers) - 1} blocks on {', '.join(offer.devices)}",
            f"  job limit:  {job_limit}",
            f"  versions:   {versions}",
            f"  differs:    {'; '.join(offer.differences) or 'in nothing'}",
            f"  running:    {', '.join(offer.running) or 'no model'}",
            f"  can run:    {', '.join(runnable)}",
        ]
        lines += [f"  cannot run: {name}: {reason}" for name, reason in self.analyzers.items() if reason]
        return "\n".join(lines)


@typed
def capabilities(model: Any) -> Capabilities:
    """List the features of an NDIF server for one model.

    The call sends three queries and a request of one token.

    Args:
        model: an nnsight model, for example `TransformersModel("org/name", task="text-generation", tokenizer=tokenizer)`, on
            the server that nnsight is set to; or `open_model(model, remote=...)` with the address of another server.

    Raises:
        LayersimError: the server cannot be reached, rejects the key, or does not run the model.

    Examples:
        >>> print(lsim.costs.capabilities(lsim.open_model(model, remote="http://127.0.0.1:8001")))  # doctest: +SKIP
    """
    if not isinstance(model, OpenedModel) and not is_nnsight(model):
        raise LayersimError(f"`model` is {brief(model)}; it must be an nnsight model, or `open_model(model, remote=...)`.")
    opened = model if isinstance(model, OpenedModel) else OpenedModel(model, remote=True)
    source = on_server(open_source(opened, either_stack=True))
    reasons = {}
    for name, cls in sorted(find_analyzers().items()):
        reasons[name] = ""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                analyzer = cls()
                models = [source.model] * (2 if analyzer.needs.models == "two" else 1)
                analyzer.check_sites(*models)
                analyzer.check(*models)
        except LayersimError as error:
            reasons[name] = str(error)
    return Capabilities(source.model.name, source.model.layers, source.offer, reasons)
