"""`AlignedTraining`: the settings of aligned fine-tuning."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from ..core.arguments import FilePath, Limit, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Seed, typed
from ..core.errors import LayersimError
from ..core.training_loop import refuse_long_warmup
from .losses import Norm, Weights
from .objectives import OBJECTIVES


@typed
@dataclass(frozen=True)
class AlignedTraining:
    r"""Settings of aligned fine-tuning.

    The defaults are for short runs; `paper_gpt2` and `paper_bert` are the settings of the paper's experiments.

    $CE_l$ is the cross-entropy of layer l's residual under the model's own final norm and head. The objectives are:

    - `"aligned"`: $\sum_l w_l CE_l$ (equation 5);
    - `"cosine-reg"`: $CE_L + \beta \sum_l w_l (1 - \cos(x^l, x^L))$ at positions with a target (appendix B.3);
    - `"cka-reg"`: $CE_L + \beta \sum_l w_l (1 - \mathrm{CKA}(x^l, x^L))$, with the CKA of equation 3 over the positions with a
      target of each forward pass, whose number of rows therefore matters (appendix B.3, in words);
    - `"multi-head"`: $\sum_l w_l CE'_l$ with a separate head for each layer below the last, initialised as a copy of the
      model's, plus $\kappa \sum_l w_l KL(p^L \| p^l)$ if `kl` is given, without gradient through $p^L$;
    - `"standard"`: $CE_L$ alone, for comparison at the same budget.

    Args:
        objective: name of the objective, see above.
        schedule: "alternating" trains $CE_L$ at odd optimiser steps and the objective at even ones, which protects the last
            layer; "always" trains the objective at each step. Default, as in the paper: "always" for "cosine-reg" and
            "cka-reg", else "alternating".
        weights: $w_l$: "linear" is 2 l / (L (L + 1)), "uniform" 1 / L; or one number for each layer, which must sum to 1.
        norm: "final" applies the model's final norm at every layer, "none" only at the last.
        beta: $\beta$ of "cosine-reg" and "cka-reg".
        cosine_over: positions of the cosines in "cosine-reg": "targets", those of $CE_L$, as in the paper; or "attended", all
            attended positions.
        kl: $\kappa$ of "multi-head".
        steps: number of optimiser steps.
        lr: peak learning rate of AdamW; small models need a higher one.
        warmup: steps over which the rate rises linearly from 0, before it falls linearly to 0 at the end.
        weight_decay: weight decay of tensors with two or more dimensions; biases and norms have none.
        clip: largest Euclidean norm of a step's gradient; infinite for no limit.
        accumulation: number of batches in a step. Every token has the same weight, as in a single larger batch.
        layers_per_step: number of layers drawn at random at each step; None for all. The expected loss is the same, with more
            noise. A step computes fewer unembeddings, and no blocks above the highest drawn layer.
        eval_every: steps between evaluations on held-out data; None for one before and one after.
        mixed_precision: "bf16" for autocast; the loss itself is computed in float32.
        gradient_checkpointing: recompute activations in the backward pass to save memory (Hugging Face models).
        lora: a `peft.LoraConfig`. Only its adapters are trained; they are merged into the weights at the end.
        save_to: folder for the trained Hugging Face model, which `from_pretrained` loads.
        seed: seed of the row order, the drawn layers and dropout.

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
    schedule: Literal["alternating", "always"] | None = None
    weights: Weights = "linear"
    norm: Norm = "final"
    beta: NonNegativeFloat = 1.0
    cosine_over: Literal["targets", "attended"] = "targets"
    kl: NonNegativeFloat = 0.0
    steps: PositiveInt = 1000
    lr: PositiveFloat = 2e-5
    warmup: NonNegativeInt = 0
    weight_decay: NonNegativeFloat = 0.01
    clip: Limit = 1.0
    accumulation: PositiveInt = 1
    layers_per_step: PositiveInt | None = None
    eval_every: PositiveInt | None = None
    mixed_precision: Literal["no", "bf16"] = "no"
    gradient_checkpointing: bool = False
    lora: Any = None
    save_to: FilePath | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        refuse_long_warmup(self.warmup, self.steps)
        own_settings = OBJECTIVES.named(self.objective).own_settings
        fields = type(self).__dataclass_fields__
        for objective in OBJECTIVES.all().values():
            for setting in objective.own_settings:
                value = getattr(self, setting)
                if setting not in own_settings and value != fields[setting].default:
                    raise LayersimError(f"`{setting}` is {value}, which has no effect with objective={self.objective!r}.")

    @classmethod
    def paper_gpt2(cls) -> AlignedTraining:
        """The settings of AlignedGPT in Jiang, Zhou and Zhu 2024: GPT-2 on WikiText-103.

        Batches of 8 rows of 256 tokens are options of the data: `Data(texts, batch_size=8, seq_len=256)`.

        | setting | value | source |
        | --- | --- | --- |
        | `objective`, `weights`, `norm` | aligned, linear, none | section 3, equation 5: CE(W h), without a norm between |
        | `schedule` | alternating | appendix B.3, "Setup for Aligned Training in ViT" |
        | `steps` | 40,000 | appendix C.2, "Setup in AlignedGPT" |
        | `lr` | 2e-5, of AdamW | appendix C.2, "Setup in AlignedBERT" |
        | `clip` | infinite | no clipping is named |
        | `weight_decay`, `warmup`, linear fall of the rate | 0.01, 0, yes | not named: torch's AdamW, "initial learning rate" |

        Examples:
            >>> training = AlignedTraining.paper_gpt2()
            >>> training.steps, training.lr
            (40000, 2e-05)
        """
        return cls(schedule="alternating", weights="linear", norm="none", steps=40_000, lr=2e-5, clip=math.inf)

    @classmethod
    @typed
    def paper_bert(cls, rows: PositiveInt) -> AlignedTraining:
        """The settings of AlignedBERT in Jiang, Zhou and Zhu 2024: BERT on a task of GLUE.

        Batches of 32 rows of 256 tokens are options of the data: `Data(texts, batch_size=32, seq_len=256)`. The
        number of steps is three epochs (appendix C.2, "Setup in AlignedBERT"); all other settings are those of `paper_gpt2`.

        Args:
            rows: number of training rows, without the held-out rows.

        Examples:
            >>> AlignedTraining.paper_bert(rows=2490).steps
            234
        """
        return replace(cls.paper_gpt2(), steps=3 * math.ceil(rows / 32))

    def rate(self, step: int) -> float:
        """The learning rate at a step, counted from 0."""
        if step < self.warmup:
            return self.lr * ((step + 1) / self.warmup)
        return self.lr * ((self.steps - step) / (self.steps - self.warmup))

    def is_standard(self, step: int) -> bool:
        """Whether the loss at a step, counted from 0, is the cross-entropy of the last layer alone."""
        return OBJECTIVES.named(self.objective).is_standard(self, step)

    def terms(self, step: int, n_layers: int) -> dict[int, float]:
        """Dict from each trained layer, counted from 1, to the weight of its cross-entropy at a step."""
        objective = OBJECTIVES.named(self.objective)
        if objective.is_standard(self, step):
            return {n_layers: 1.0}
        return objective.terms(self, step, n_layers)

    def options(self) -> dict[str, Any]:
        """Dict of the settings that affect the results, for the provenance."""
        options = {name: value for name, value in asdict(self).items() if name not in ("lora", "save_to")}
        options["schedule"] = self.schedule or OBJECTIVES.named(self.objective).schedule
        lora = self.lora.to_dict() if hasattr(self.lora, "to_dict") else self.lora
        if lora is not None:
            options["lora"] = {name: str(value) for name, value in sorted(lora.items())}
        return options
