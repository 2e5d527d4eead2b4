"""Opening of a model in this process: `open_local` returns the source that fits the type of the model."""

from __future__ import annotations

from typing import Any

from ..core.errors import LayersimError
from ..core.server_addresses import shown
from .source import Source

ACCEPTED_MODELS = (
    "a TransformerLens HookedTransformer or TransformerBridge, an nnsight TransformersModel or NNsight(module), "
    "a Hugging Face model or another torch module with layers=[...]"
)


def open_local(
    model: Any,
    *,
    layers: list[str] | None = None,
    unembed: list[str] | None = None,
    remote: bool | str = False,
) -> Source:
    """The source for a model that is already loaded.

    Args:
        model: the model, or a source.
        layers: paths of its blocks, None to find them by the layout.
        unembed: paths of its final norm and head, None to find them.
        remote: False, or "local" for nnsight's simulation of a server.

    Raises:
        LayersimError: the type of the model is not supported, or does not fit the other arguments.
    """
    import torch

    if isinstance(model, Source):
        if layers is not None or unembed is not None or remote:
            raise LayersimError(
                "`layers`, `unembed` and `remote` cannot be given for a Source, which already defines them.",
                given=f"{type(model).__name__} with layers={layers}, unembed={unembed} and remote={shown(remote)}",
                expected="none of them",
                do="leave them out",
            )
        return model
    if isinstance(remote, str) and not remote.strip():
        # An unset environment variable gives an empty string, which would otherwise run in this process.
        raise LayersimError(
            "`remote` is an empty string.",
            given=f"remote={remote!r}",
            expected='True, the address of an NDIF server, or "local"; False to run here',
            do="remote=True for the server that nnsight is set to",
        )
    if is_nnsight(model):
        from .nnsight import NNsightSource

        return NNsightSource(model, layers, unembed, remote)
    if remote:
        raise LayersimError(
            "`remote` requires an nnsight model.",
            given=f"{type(model).__name__} with remote={shown(remote)}",
            expected="an nnsight TransformersModel",
            do="nnsight.TransformersModel('org/name', task='text-generation', tokenizer=tokenizer)",
        )
    # A model that is made of others, or whose copies are elsewhere, opens itself.
    opens_itself: Any = getattr(model, "open_source", None)
    if opens_itself is not None:
        source: Source = opens_itself(layers, unembed)
        return source
    if isinstance(model, torch.nn.Module):
        from .hooked import HookedSource

        return HookedSource(model, layers, unembed)
    raise unsupported_model(model)


def is_nnsight(model: Any) -> bool:
    """Whether a model is nnsight's, without importing nnsight."""
    return any(cls.__module__.split(".")[0] == "nnsight" for cls in type(model).__mro__)


def unsupported_model(model: Any) -> LayersimError:
    """The error for an object that is not a supported model."""
    given = f"the text {model!r}" if isinstance(model, str) else type(model).__name__
    return LayersimError(
        "`model` is not a model of a supported type.",
        given=given,
        expected=ACCEPTED_MODELS,
        do="load the model first: AutoModelForCausalLM.from_pretrained(name), or AutoModelForMaskedLM for an encoder",
    )
