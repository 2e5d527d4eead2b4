"""Every source: one file for each way in which a model can be run."""

from __future__ import annotations

from typing import Any

from ..errors import LayersimError
from ..source import Source
from .address import shown

ACCEPTED = (
    "a TransformerLens HookedTransformer or TransformerBridge, an nnsight TransformersModel or NNsight(module), "
    "a Hugging Face model or another torch module with layers=[...]"
)


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
    import torch

    if isinstance(model, Source):
        if layers is not None or unembed is not None or remote:
            raise LayersimError(
                "A source has its own layers and its own place.",
                given=f"{type(model).__name__} with layers={layers}, unembed={unembed} and remote={shown(remote)}",
                expected="none of them",
                do="leave them out",
            )
        return model
    if tokens_per_request is not None and remote in (False, "local"):
        raise LayersimError(
            "Only a server is sent requests.",
            given=f"tokens_per_request={tokens_per_request} with remote={shown(remote)}",
            expected="remote=True, or the address of an NDIF server",
            do="batch_size= for the rows of a forward pass here",
        )
    if any(cls.__module__.split(".")[0] == "nnsight" for cls in type(model).__mro__):
        if remote not in (False, "local"):
            from .remote import RemoteSource

            return RemoteSource(model, layers, unembed, remote, tokens_per_request)
        from .nnsight import NNsightSource

        return NNsightSource(model, layers, unembed, remote)
    if remote:
        raise LayersimError(
            "Only nnsight models can be run elsewhere.",
            given=f"{type(model).__name__} with remote={shown(remote)}",
            expected="an nnsight TransformersModel",
            do="nnsight.TransformersModel('org/name', task='text-generation', tokenizer=tokenizer)",
        )
    if isinstance(model, torch.nn.Module):
        from .hooked import HookedSource
        from .stitched import StitchedModel, StitchedSource

        if isinstance(model, StitchedModel):
            return StitchedSource(model, layers, unembed)

        return HookedSource(model, layers, unembed)
    raise no_model(model)


def open_half(model: Any, layers: list[str] | None, remote: bool | str) -> Any:
    """A model as one side of a stitch: `LocalHalf` where its modules are in this process, else `FarHalf`.

    Raises:
        LayersimError: as `open_source`.
    """
    from dataclasses import replace

    from .halves import LocalHalf
    from .hooked import HookedSource

    source = open_source(model, layers=layers, remote=remote)
    if isinstance(source, HookedSource):
        return LocalHalf(source, source.model)
    from .far_halves import FarHalf
    from .nnsight import NNsightSource

    if not isinstance(source, NNsightSource):
        raise LayersimError(
            "A stitch runs parts of models, which this source does not offer.",
            given=type(source).__name__,
            expected=ACCEPTED,
            do="pass the model itself",
        )
    if remote:
        return FarHalf(source)
    # What nnsight runs here is a module of this process.
    hooked = HookedSource(source.module, source.paths)
    return LocalHalf(hooked, replace(source.model, calls=hooked.model.calls))


def no_model(model: Any) -> LayersimError:
    """The refusal of what is no model."""
    given = f"the text {model!r}" if isinstance(model, str) else type(model).__name__
    return LayersimError(
        "This is no model that can be read.",
        given=given,
        expected=ACCEPTED,
        do="load the model first, for example AutoModelForCausalLM.from_pretrained(name)",
    )
