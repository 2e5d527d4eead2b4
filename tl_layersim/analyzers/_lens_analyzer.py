"""`LensAnalyzer`: base class of `LogitLens`, `ExitCurve`, `Saturation` and `TaskMetrics`."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from torch import Tensor

from ..core.arguments import PositiveFloat, typed
from ..core.sums import Sums
from ..data.labels import is_none, warn_of_unused
from ..lens.exit_heads import ExitHeads, as_heads, plain_heads
from ..sources.checks import refuse_bad_logits
from ..sources.model import Model
from .analyzer import LabelledAnalyzer, Run, need_head, need_tokens


@typed
@dataclass(frozen=True, eq=False)
class LensAnalyzer(LabelledAnalyzer):
    """Base class of analyzers that read the predictions of each layer, by the model's head or by heads of the layers.

    Args:
        norm: see `LogitLens`, as for all options.
        lens_memory_mb: see `LogitLens`.
        heads: see `LogitLens`.
    """

    needs_unembed: ClassVar[bool] = True
    optional_labels: ClassVar[bool] = True

    norm: Literal["final", "none"] = "final"
    lens_memory_mb: PositiveFloat = 128
    heads: ExitHeads | str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "heads", as_heads(self.heads, self.norm))

    def check(self, *models: Model) -> None:
        given = {"targets": not is_none(self.labels), "own_labels": bool(self.label_source)}
        need_head(models[0], type(self).__name__, **given, heads=self.heads)

    @property
    def lens(self) -> dict[str, Any]:
        """The options of the lens, in the form that kernels take."""
        return {
            "normed": self.norm == "final",
            "memory_mb": float(self.lens_memory_mb),
            "heads": plain_heads(self.heads),
        }

    def check_sums(self, sums: Sums, run: Run, count: int | Tensor, targets: int | Tensor = 1) -> None:
        """Raise an error for too few positions or targets and for logits that are not finite; warn of rows without a label.

        Args:
            sums: sums over all batches.
            run: the finished run.
            count: number of positions.
            targets: number of positions with a target.
        """
        warn_of_unused(self.labels, run.provenance)
        need_tokens(int(count), 1, type(self).__name__, "positions that the head reads")
        refuse_bad_logits(sums["bad"], run.layers)
        if not is_none(self.labels):
            need_tokens(int(targets), 1, type(self).__name__, "positions with a target")

    def unembedding(self, run: Run) -> str:
        """The map from the residual x to logits, as text; with `heads`, the map of the layers below the last."""
        if run.head is None:
            return ""
        head = run.head if self.heads is None else replace(run.head, parts=(*run.head.parts[:-1], "heads[layer]"))
        return head.written(self.norm == "final")
