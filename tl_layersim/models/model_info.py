"""Model: the description of a model before it runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..architectures.unembed import Head
from ..core.errors import without_secrets
from .model_changes import refuse_unknown
from .weights_hash import StoredWeights


@dataclass(frozen=True)
class Model:
    """Description of a model before it runs.

    Attributes:
        name: under which the model was loaded.
        config_hash: see `Provenance`; "" if there is no configuration.
        weights: whose checksum `weights_hash` is computed when it is first read; or that checksum, "" if the weights are not in
            this process.
        source: class of the model, and how it is reached.
        basis: in which its residual stream is measured: raw or processed weights, before or after a norm.
        dtype: of its parameters.
        layers: names of the residual layers, `blocks.0.hook_resid_pre` first; or of the other sites that an analyzer reads.
        d_model: width of the residual stream, None where unknown.
        widths: width of each site; empty where all have the width of the residual stream, or where the widths are not known
            before a forward pass.
        vocabulary: number of token ids, None where unknown.
        context: length of the longest row that the model takes, None where unknown.
        tokenizer: the model's own, None where it has none.
        head: the modules between the last block and the logits; None where there are none, or none that are known.
        calls: use of `view.calls` by a kernel: "none"; "values", blocks can be called again; "gradients", also differentiated.
        inputs: names of the inputs of its forward besides token ids, attention mask and labels, each with the value that is
            equivalent to leaving the input out; None where no value is.
        main_input: name of the first input of its forward, "input_ids" of models of tokens.
        token_input: name of the input that holds the token ids of the stack that is read, "decoder_input_ids" of the decoder in
            an encoder-decoder.
        mask_input: name of the attention mask of this stack; "" for a vision tower, which has none.
        processor: makes inputs of images, None where the model carries none.
        pads: padding ids that its configuration names.
        starts: ids that its configuration names as BOS.
        ends: ids that its configuration names as EOS.
        changes: of the model beside its weights, see `Provenance`.
        stream: whether the sites are the residual stream: "whole" for consecutive blocks, "parts" where blocks between them
            are left out or the stream is also read inside blocks, "none" for other sites; "unknown" until a forward pass has
            settled it.
    """

    name: str
    config_hash: str
    weights: StoredWeights | str
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
    main_input: str = "input_ids"
    token_input: str = "input_ids"
    mask_input: str = "attention_mask"
    processor: Any = None
    pads: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()

    def inputs_with(self, other: Model) -> dict[str, Any]:
        """The fields `inputs`, `pads`, `starts` and `ends` of two models that read the same data."""
        either = {**self.inputs, **other.inputs}
        # A value must be equivalent to leaving the input out in both models.
        for name in self.inputs.keys() & other.inputs.keys():
            either[name] = self.inputs[name] if self.inputs[name] == other.inputs[name] else None
        ids = {name: getattr(self, name) + getattr(other, name) for name in ("pads", "starts", "ends")}
        return {"inputs": either} | {name: tuple(dict.fromkeys(both)) for name, both in ids.items()}

    stream: Literal["whole", "parts", "unknown", "none"] = "whole"
    widths: tuple[int, ...] = ()
    changes: str = ""

    @property
    def weights_hash(self) -> str:
        """See `Provenance`; "" if the weights are not in this process. All copies of a description compute it once."""
        return str(self.weights)

    def as_it_is_now(self) -> Model:
        """The description with a checksum that will be computed of the weights as they are then."""
        return replace(self, weights=self.weights.again()) if isinstance(self.weights, StoredWeights) else self

    def identity(self, argument: str | None) -> tuple[str, ...]:
        """What must be equal for two runs of one model.

        Args:
            argument: that names the file of the run, for messages; None if no later call is compared with this one.

        Raises:
            LayersimError: the model has a change that cannot be compared with that of a later call.
        """
        if argument is not None:
            refuse_unknown(self.changes, argument)
        return (self.name, self.config_hash, self.weights_hash, self.changes, self.source, self.basis, self.dtype)

    @property
    def reads_rows(self) -> bool:
        """Whether the head reads a row as one, as that of a classifier of texts or images does."""
        return self.head is not None and self.head.reads != "every"

    @property
    def widest(self) -> int | None:
        """Width of the widest site, None where unknown."""
        return max(self.widths, default=None) or self.d_model

    def __post_init__(self) -> None:
        # A name that is an address may contain a login, and names are written into messages and files.
        object.__setattr__(self, "name", without_secrets(self.name))


@dataclass(frozen=True)
class ServerOffer:
    """What an NDIF server allows its users to do with one model.

    Attributes:
        server: its address.
        trusted: whether requests run in the process that holds the weights; else in a sandbox without weights, where no
            gradient flows through the model.
        dtype: of the model on the server.
        devices: of its blocks, as a kernel sees them.
        job_limit: seconds that a job may take, None where there is no limit or none is reported.
        running: names of the models that the server has loaded.
        versions: of Python, nnsight, transformers and torch on the server.
        differences: descriptions of versions that differ from those of this process.
    """

    server: str
    trusted: bool
    dtype: str
    devices: tuple[str, ...]
    job_limit: float | None
    running: tuple[str, ...]
    versions: Mapping[str, str]
    differences: tuple[str, ...]
