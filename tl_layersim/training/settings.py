"""Settings of a fine-tune: objective, schedule, optimiser."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..core.argument_checks import typed
from ..core.errors import LayersimError
from ..core.storage import refuse_unwritable_folder, resolved
from .aligned_loss import Norm
from .losses import Weights, layer_weights
from .objectives import find_objectives, objective_named
from .objectives.base import Objective


@typed
@dataclass(frozen=True)
class AlignedTraining:
    r"""The settings of aligned fine-tuning, which trains every layer to predict the targets.

    $CE_l$ is the cross-entropy of layer l's residual under the model's own final norm and head. The objectives are:

    - `"aligned"`: $\sum_l w_l CE_l$ (equation 5);
    - `"cosine-reg"`: $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$ over the positions that are attended to (appendix B.3);
    - `"multi-head"`: $\sum_l w_l CE'_l$ with a head of its own for each layer below the last, copied from the model's at the
      start, plus $\kappa \sum_l w_l KL(p^L \| p^l)$ if `kl` is given, through which no gradient reaches $p^L$;
    - `"standard"`: $CE_L$ alone, for comparison at the same budget.

    Args:
        objective: name of the objective, see above; each is one file in `training/objectives/`.
        schedule: "alternating": $CE_L$ at odd optimiser steps, the objective at even ones, as in the paper, which
            protects the last layer; "always": the objective at each. A step is one step of the optimiser.
        weights: $w_l$: "linear" is 2 l / (L (L + 1)), "uniform" 1 / L; or one number for each layer, which must sum to 1.
        norm: "final" applies the model's final norm at every layer, "none" at the last alone.
        beta: of "cosine-reg".
        kl: $\kappa$ of "multi-head".
        steps: of the optimiser.
        lr: the highest learning rate of AdamW. The default is the paper's; small models need a higher one.
        warmup: steps over which the rate rises from 0, before it falls linearly to 0 at the end.
        weight_decay: on weights of two or more dimensions, not on biases and norms.
        clip: largest Euclidean norm of a step's gradient.
        accumulation: batches in a step. All their tokens have one weight: a step equals that of a single larger batch.
        layers_per_step: number of layers drawn at random at each step, None for all; the expected loss is the same, its noise
            larger. A step then costs fewer unembeddings, and nothing above the highest layer drawn.
        eval_every: steps between evaluations on held-out data; None for one before and one after.
        mixed_precision: "bf16" for autocast; the loss itself is computed in float32.
        gradient_checkpointing: compute activations again in the backward pass instead of holding them (Hugging Face models).
        lora: a `peft.LoraConfig`: only its adapters are trained, and merged into the weights at the end.
        save_to: a folder for the trained model, as `from_pretrained` loads it.
        seed: of the order of the rows, of drawn layers and of dropout.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), equation 5, appendices B.3 and C.2.

    Examples:
        >>> import tl_layersim as lsim
        >>> training = lsim.AlignedTraining(steps=4, warmup=2, lr=1e-3)
        >>> [training.rate(step) for step in range(4)]
        [0.0005, 0.001, 0.001, 0.0005]
        >>> [training.is_standard(step) for step in range(4)]
        [True, False, True, False]
    """

    objective: str = "aligned"
    schedule: Literal["alternating", "always"] = "alternating"
    weights: Weights = "linear"
    norm: Norm = "final"
    beta: int | float = 1.0
    kl: int | float = 0.0
    steps: int = 1000
    lr: int | float = 2e-5
    warmup: int = 0
    weight_decay: int | float = 0.01
    clip: int | float = 1.0
    accumulation: int = 1
    layers_per_step: int | None = None
    eval_every: int | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    gradient_checkpointing: bool = False
    lora: Any = None
    save_to: str | os.PathLike[str] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        wrong = {
            "steps": self.steps < 1,
            "lr": not 0 < self.lr < math.inf,
            "warmup": not 0 <= self.warmup < self.steps,
            "weight_decay": not 0 <= self.weight_decay < math.inf,
            "clip": not self.clip > 0,
            "accumulation": self.accumulation < 1,
            "eval_every": self.eval_every is not None and self.eval_every < 1,
            "seed": not 0 <= self.seed < 2**31,
        }
        for name in (name for name, bad in wrong.items() if bad):
            raise LayersimError(
                f"`{name}` is out of range.",
                given=f"{name}={getattr(self, name)}",
                expected="steps, accumulation and eval_every of 1 or more; lr and clip above 0; warmup below steps; "
                "weight_decay of 0 or more; a seed of 0 to 2^31",
                do="AlignedTraining(), the settings of the paper",
            )
        if not isinstance(self.weights, str) or self.weights not in ("linear", "uniform"):
            # Whatever the model: as many as there are sum to 1.
            layer_weights(self.weights, max(1, len(self.weights)))
        objective = objective_named(self.objective)
        self._refuse_unused(objective)
        objective.check_settings(self)

    def _refuse_unused(self, objective: type[Objective]) -> None:
        """Refuse settings of other objectives."""
        owners: dict[str, list[str]] = {}
        for name, other in find_objectives().items():
            for setting in other.own_settings:
                owners.setdefault(setting, []).append(repr(name))
        for setting in (name for name in owners if name not in objective.own_settings and self._set(name)):
            raise LayersimError(
                f"`{setting}` has no effect with objective={self.objective!r}.",
                given=f"{setting}={getattr(self, setting)}",
                expected=", ".join(f"{name} with {' or '.join(names)}" for name, names in owners.items()),
                do=f"leave {setting} out",
            )

    def _set(self, name: str) -> bool:
        return bool(getattr(self, name) != type(self).__dataclass_fields__[name].default)

    def rate(self, step: int) -> float:
        """The learning rate at a step, counted from 0."""
        fraction = (step + 1) / self.warmup if step < self.warmup else (self.steps - step) / (self.steps - self.warmup)
        return self.lr * fraction

    def is_standard(self, step: int) -> bool:
        """Whether a step, counted from 0, trains with the loss of the last layer alone."""
        return objective_named(self.objective).is_standard(self, step)

    def terms(self, step: int, n_layers: int) -> dict[int, float]:
        """Weights of the layers whose cross-entropies a step sums, by layer from 1."""
        objective = objective_named(self.objective)
        return {n_layers: 1.0} if objective.is_standard(self, step) else objective.terms(self, step, n_layers)

    def options(self) -> dict[str, Any]:
        """All settings that affect the results, for the provenance."""
        options = {name: value for name, value in asdict(self).items() if name not in ("lora", "save_to")}
        lora = self.lora.to_dict() if hasattr(self.lora, "to_dict") else self.lora
        return options if lora is None else options | {"lora": {name: str(value) for name, value in sorted(lora.items())}}

    def check_folder(self) -> None:
        """Refuse a `save_to` folder that cannot be created, before anything is computed."""
        folder = None if self.save_to is None else resolved(self.save_to, "save_to")
        if folder is not None and (folder.is_file() or not folder.parent.is_dir()):
            raise LayersimError(
                "`save_to` must be an existing folder, or a new folder inside an existing one.",
                given=f"save_to={self.save_to}",
                expected="a folder that exists or whose parent does, and no file",
                do=f"mkdir -p {folder.parent}" if not folder.is_file() else "another name",
            )
        if folder is not None:
            refuse_unwritable_folder(folder if folder.is_dir() else folder.parent, "save_to")
