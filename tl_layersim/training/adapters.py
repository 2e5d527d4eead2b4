"""`AlignedAdapters`: the result of `train_adapters`, low-rank adapters in the residual stream of a frozen model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from ..core.arguments import typed
from ..core.results import Result, axes
from ..remote.low_rank_adapters import Patch
from .finetune_results import rows_in_words

STAGES = ("before", "after")


@typed
@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class AlignedAdapters(Result):
    """Low-rank adapters trained with the aligned loss; each changes the output h of a block to h + (h A') B'.

    Losses are in nats per target. Tensors are float64; only the adapters have the dtype in which they were trained.

    Attributes:
        values: `stage layer`, the same as `losses`: held-out cross-entropy of each layer's residual, read by the model's own
            final norm and head, without the adapters and with them.
        curve: `step`, aligned loss of each step's batch, before the step.
        curves: `step layer`, cross-entropy of each layer on that batch.
        down: `adapter direction dim`, the matrix A of each adapter.
        up: `adapter dim direction`, the matrix B of each adapter.
        weights: weights of the layers in the aligned loss.
        blocks: indices of the blocks with an adapter.
        paths: module paths of these blocks.
    """

    file_kind: ClassVar[str] = "aligned_adapters"
    values_name = "losses"
    values: Float64[Tensor, "stage layer"] = axes(
        "stage",
        "layer",
        label="Held-out cross-entropy",
        unit="nats",
        title="Held-out loss by layer, before and after",
        caption="Cross-entropy of each layer under the model's head, without the adapters and with them (Jiang et al. 2024, "
        "equation 5, for each layer).",
        better="lower",
        within=(0, math.inf),
    )
    curve: Float64[Tensor, " step"] = axes(
        "step",
        label="Aligned loss",
        unit="nats",
        title="Aligned loss while training",
        caption="The aligned loss of each step's batch.",
        within=(0, math.inf),
    )
    curves: Float64[Tensor, "step layer"] = axes(
        "step",
        "layer",
        label="Cross-entropy of the batch",
        unit="nats",
        title="Cross-entropy while training, of each layer",
        within=(0, math.inf),
    )
    down: Float[Tensor, "adapter direction dim"] = axes("adapter", "direction", "dim")
    up: Float[Tensor, "adapter dim direction"] = axes("adapter", "dim", "direction")
    weights: tuple[float, ...]
    blocks: tuple[int, ...]
    paths: tuple[str, ...]

    def measured_on(self, field: str) -> str:
        return rows_in_words(self.provenance, field in ("curve", "curves"))

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the two stages: without and with the adapters."""
        return STAGES

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the layers with an adapter."""
        return tuple(self.layers[block + 1] for block in self.blocks)

    @property
    def directions(self) -> tuple[int, ...]:
        """Indices of an adapter's rank-one directions."""
        return tuple(range(self.down.shape[1]))

    @property
    def losses(self) -> Tensor:
        """Held-out cross-entropies in nats, `stage layer`, the same as `values`."""
        return self.values

    def aligned(self, stage: str) -> float:
        """The held-out aligned loss without adapters (`"before"`) or with them (`"after"`)."""
        return float(self.values[STAGES.index(stage)] @ torch.tensor(self.weights, dtype=torch.float64))

    def apply(self, model: Any) -> None:
        """Apply the adapters to an nnsight model, inside a trace in this process or on a server.

        Modules that are read afterwards in the same trace must lie above the last adapter, because nnsight runs the model once.
        A further `tracer.invoke()` can read all modules.

        Args:
            model: the traced model.

        Raises:
            LayersimError: the model has another width than the adapters, or lacks their blocks.

        Examples:
            >>> import nnsight, tl_layersim as lsim
            >>> from tl_layersim.training import train_adapters
            >>> demo = lsim.demo_model()
            >>> model = nnsight.TransformersModel(demo, task="text-generation", tokenizer=demo.tokenizer)
            >>> adapters = train_adapters(model, lsim.demo_text()[:8], steps=2)
            >>> with model.trace("Once upon a time"):
            ...     adapters.apply(model)
            ...     logits = model.lm_head.output.save()
        """
        Patch(self.paths, self.down, self.up).apply(model)

    def __reduce__(self) -> Any:
        # nnsight pickles what a trace on a server refers to. A server can make neither this class nor its base, and needs
        # `apply` alone.
        import nnsight

        # By value: servers do not have this package.
        nnsight.register("tl_layersim")
        return Patch, (self.paths, self.down, self.up)

    def __copy__(self) -> AlignedAdapters:
        return self

    def __deepcopy__(self, memo: Any) -> AlignedAdapters:
        return self

    def __repr__(self) -> str:
        rank, width = self.down.shape[1:]
        lines = [f"AlignedAdapters({len(self.blocks)} of rank {rank} and width {width}, {self.provenance.model})"]
        return "\n".join(lines + [f"  {key} = {value:.4g}" for key, value in self.headline().items()])

    def headline(self) -> dict[str, float]:
        numbers = {}
        for number, stage in enumerate(STAGES):
            numbers[f"aligned loss {stage}"] = self.aligned(stage)
            numbers[f"loss of the last layer {stage}"] = float(self.values[number, -1])
        return numbers
