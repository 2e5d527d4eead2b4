"""Model: what is known of a model before it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..core.errors import without_secrets
from ..core.typed import named, typed
from .unembed import Head

if TYPE_CHECKING:
    pass


@named
@dataclass(frozen=True)
class Model:
    """What is known of a model before it runs.

    Attributes:
        name: as it was loaded.
        config_hash: see `Provenance`; "" if there is no configuration.
        weights_hash: see `Provenance`; "" if the weights are not here.
        source: class of the model, and how it is reached.
        basis: what its residual stream is written in.
        dtype: of its parameters.
        layers: names of the residual layers, `blocks.0.hook_resid_pre` first.
        d_model: width of the residual stream, None where the configuration does not say.
        vocabulary: how many token ids there are, None where unknown.
        context: the longest row it takes, None where unknown.
        tokenizer: the model's own, None where it has none.
        head: what stands between the last block and the logits; None where there is nothing, or nothing that is known.
        calls: what a kernel can do with `view.calls`: nothing, call blocks again for their values, or differentiate them too.
        inputs: names of what its forward takes besides token ids, attention mask and labels, each with the value that equals
            leaving the input out; None where no value does.
        pads: padding ids that its configuration names.
        ends: ids that its configuration names as BOS or EOS.
        stream: whether the layers are the residual stream: "whole" for blocks that follow one another, "parts" for blocks with
            others left out between them, "none" for modules that are no blocks; "unknown" until `Source.settle` has seen a
            forward pass.
    """

    name: str
    config_hash: str
    weights_hash: str
    source: str
    basis: str
    dtype: str
    layers: tuple[str, ...]
    d_model: int | None
    vocabulary: int | None
    context: int | None
    tokenizer: Any
    head: Head | None = None
    calls: Literal["none", "values", "gradients"] = "none"
    inputs: Mapping[str, int | None] = field(default_factory=dict)
    pads: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def inputs_with(self, other: Model) -> dict[str, Any]:
        """The fields `inputs`, `pads` and `ends` of two models that are given the same data."""
        either = {**self.inputs, **other.inputs}
        # A value that equals leaving out has to do so in every model that takes the input.
        for name in self.inputs.keys() & other.inputs.keys():
            either[name] = self.inputs[name] if self.inputs[name] == other.inputs[name] else None
        pads, ends = (tuple(dict.fromkeys(getattr(self, k) + getattr(other, k))) for k in ("pads", "ends"))
        return {"inputs": either, "pads": pads, "ends": ends}

    stream: Literal["whole", "parts", "unknown", "none"] = "whole"

    def __post_init__(self) -> None:
        # A name that is an address may hold a login; it goes into messages and files.
        object.__setattr__(self, "name", without_secrets(self.name))


@named
@dataclass(frozen=True)
class ServerOffer:
    """What a server lets its users do with one model.

    Attributes:
        server: its address.
        trusted: whether requests run beside the weights; else in a sandbox, where weights are out of reach and nothing can be
            differentiated through the model.
        dtype: of the model there.
        devices: that its blocks are on, as a kernel sees them.
        job_limit: seconds a job may take, None where there is no limit that it tells.
        running: names of the models it has loaded.
        versions: of Python, nnsight, transformers and torch there.
        differences: where they are not those here, in words.
    """

    server: str
    trusted: bool
    dtype: str
    devices: tuple[str, ...]
    job_limit: float | None
    running: tuple[str, ...]
    versions: Mapping[str, str]
    differences: tuple[str, ...]


@typed
def layer_names(blocks: int) -> tuple[str, ...]:
    """TransformerLens names of the residual layers of a model with that many blocks.

    >>> layer_names(2)
    ('blocks.0.hook_resid_pre', 'blocks.0.hook_resid_post', 'blocks.1.hook_resid_post')
    """
    return block_sites(range(blocks))


def block_sites(numbers: Sequence[int]) -> tuple[str, ...]:
    """TransformerLens names of what enters the first of these blocks, and of what each of them gives.

    >>> block_sites([1, 3])
    ('blocks.1.hook_resid_pre', 'blocks.1.hook_resid_post', 'blocks.3.hook_resid_post')
    """
    return (f"blocks.{numbers[0] if numbers else 0}.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in numbers))


def entering(name: str) -> str:
    """The name of what enters the block or module that gives the site `name`.

    >>> entering("blocks.3.hook_resid_post"), entering("layers.1.mlp")
    ('blocks.3.hook_resid_pre', 'layers.1.mlp.input')
    """
    end = ".hook_resid_post"
    return f"{name.removesuffix(end)}.hook_resid_pre" if name.endswith(end) else f"{name}.input"


def module_sites(paths: Sequence[str]) -> tuple[str, ...]:
    """Names of what enters the first of these modules, and of what each of them gives: their own paths.

    >>> module_sites(["layers.0.mlp", "layers.1.mlp"])
    ('layers.0.mlp.input', 'layers.0.mlp', 'layers.1.mlp')
    """
    return (f"{paths[0]}.input", *paths)
