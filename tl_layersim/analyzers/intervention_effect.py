"""Effect of an intervention on each layer: the clean and the edited run of one model, compared token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.norms import norms, unit_vectors
from ..activations.view import Kernel, View
from ..core import LayersimError, Result, Sums, ValuesAlias, axes, result_class, typed, warn, without_nan
from ..core.arguments import PositiveFloat
from ..core.cross_entropy import on_float64_device
from ..core.intervals import with_margin
from ..core.site_names import site_in_words
from ..lens.statistics import compare_lenses, first_final
from ..sources.activation_checks import refuse_bad_logits
from ..sources.model_description import ModelDescription
from .analyzer import Analyzer, Run, need_head, omitted_at
from .needs import Needs

LENS_SOURCE = "of the logit lens (nostalgebraist 2020), as McGrath et al. 2023 follow an ablation through later layers."


@result_class
class InterventionEffectResult(Result):
    """Difference between the edited and the clean run at each layer, as means over tokens. All tensors are float64.

    Attributes:
        values: `residual`, the same as `cosine`: mean cosine between the clean and the edited activation of a token; 1 where
            nothing changes. A token has no cosine at a site where either activation is zero, and is omitted there; NaN if no
            token is left. A `LayersimWarning` names such sites.
        relative_change: `residual`, mean of |x_edited - x_clean| / |x_clean|; 0 where nothing changes. Tokens with a clean
            activation of zero are omitted.
        kl_divergence: `layer`, mean KL(clean || edited) of the lens's predictions at each block. NaN for `lens=False`, as all
            fields below.
        top_changed: `layer`, fraction of positions whose most likely token differs.
        saturation_shift: mean saturation layer (see `Saturation`) of the edited run minus that of the clean run, in blocks;
            positive if predictions become final later.
        positions: number of positions that the head reads; 0 for `lens=False`.
        unembedding: the map from the residual x to logits; "" for `lens=False`.
    """

    cosine = ValuesAlias()
    values: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Cosine similarity",
        title="Cosine of clean and edited activations",
        scale="free",
        caption="Mean over tokens of the cosine between a token's activations in the clean and in the edited run; 1 where the "
        "intervention changes no direction, such as at earlier layers (compare Csordás, Manning and Potts 2025, section 3, for "
        "skipped layers).",
        within=(-1, 1),
    )
    relative_change: Float64[Tensor, " residual"] = axes(
        "residual",
        label="Relative change",
        title="Relative change of the activations",
        caption="|x edited - x clean| / |x clean|, mean over tokens (compare Csordás, Manning and Potts 2025, figure 3, for "
        "skipped layers). The curve falls where later layers undo the change.",
        within=(0, math.inf),
    )
    kl_divergence: Float64[Tensor, " layer"] = axes(
        "layer",
        label="KL divergence",
        unit="nats",
        title="KL divergence from the clean prediction",
        caption=f"KL(clean || edited) in nats, mean over positions, {LENS_SOURCE}",
        within=(0, math.inf),
    )
    top_changed: Float64[Tensor, " layer"] = axes(
        "layer",
        label="Changed predictions",
        unit="fraction",
        title="Positions with another most likely token",
        caption=f"Fraction of positions whose most likely token is not that of the clean run, {LENS_SOURCE}",
        within=(0, 1),
        by_chance=(0, 1),
    )
    saturation_shift: Float64[Tensor, ""] = axes(label="Shift of the saturation layer", unit="blocks")
    positions: int
    unembedding: str

    def headline(self) -> dict[str, float]:
        if not self.positions:
            # Heads and other sites have no last one.
            means = {"cosine of clean and edited": self.values, "relative change": self.relative_change}
            return {f"{name}, mean over sites": float(values.nanmean()) for name, values in means.items()}
        return without_nan(
            {
                "cosine of clean and edited at the last layer": self.values[-1],
                "relative change at the last layer": self.relative_change[-1],
                "KL divergence of the output (nats)": self.kl_divergence[-1],
                "changed predictions of the output (fraction)": self.top_changed[-1],
                "shift of the saturation layer (blocks)": self.saturation_shift,
            }
        )

    def finding(self) -> str:
        changed = (self.relative_change > 0).nonzero()[:, 0]
        if not len(changed):
            return "The intervention changes none of the activations that were measured."
        first = f"The first change is at {site_in_words(self.layers[int(changed[0])])}"
        if not self.positions:
            most = int(self.relative_change.nan_to_num(0).argmax())
            size = with_margin(self, lambda result: result.relative_change[most])
            return f"{first}, the largest relative change, {size}, at {site_in_words(self.layers[most])}."
        share = with_margin(self, lambda result: result.top_changed[-1], percent=True)
        kl = with_margin(self, lambda result: result.kl_divergence[-1])
        return f"{first}; {share} of the predictions change, by a KL divergence of {kl} nats on average."


@typed
@dataclass(frozen=True)
class InterventionEffect(Analyzer):
    r"""Effect of an intervention on each layer: the clean and the edited run compared token by token.

    $$\cos^{(l)} = \operatorname{mean}_t \frac{\langle x^l_t, \tilde x^l_t \rangle}{|x^l_t| \, |\tilde x^l_t|}, \qquad
    \Delta^{(l)} = \operatorname{mean}_t \frac{|\tilde x^l_t - x^l_t|}{|x^l_t|}, \qquad
    \mathrm{KL}^{(l)} = \operatorname{mean}_t \sum_v p^l_{tv} \ln \frac{p^l_{tv}}{\tilde p^l_{tv}}$$

    with x and p of the clean run, and x~ and p~ of the edited run on the same tokens. `compare` takes the clean model first,
    and the edited one second: an nnsight model after `model.edit()`, or a copy of a Hugging Face or TransformerLens model with
    hooks or other weights. p is the logit lens with the final norm, see `LogitLens`; each run is read by the norm and head of
    its own model. An edit of what these two modules return raises an error, because the lens does not follow it. Of two edits
    of one model on a server, both run in each request.

    Args:
        lens: whether to read the predictions of each layer. False is for models without a head, and for other sites than the
            residual stream (`at=`).
        lens_memory_mb: megabytes for the logits of one chunk of tokens.

    Source:
        Csordás, Manning and Potts 2025 (arXiv 2505.13898), section 3, for the relative change; nostalgebraist 2020 for the
        lens; McGrath et al. 2023 (arXiv 2307.15771) for the lens of later layers after an ablation; Geva et al. 2022 for the
        saturation layer.

    Examples:
        Without the MLP of block 2, all layers before it are as they were.

        >>> import copy
        >>> import tl_layersim as lsim
        >>> model = lsim.demo_model()
        >>> edited = copy.deepcopy(model)
        >>> _ = edited.model.layers[2].mlp.down_proj.weight.data.zero_()
        >>> effect = lsim.compare(model, edited, lsim.demo_text()[:4], lsim.InterventionEffect())
        >>> effect.cosine[:3].tolist(), effect.kl_divergence[:2].tolist(), bool(effect.kl_divergence[2] > 0)
        ([1.0, 1.0, 1.0], [0.0, 0.0], True)
    """

    name: ClassVar[str] = "intervention_effect"

    lens: bool = True
    lens_memory_mb: PositiveFloat = 128

    @property
    def needs(self) -> Needs:
        return Needs(
            models="two",
            sites="every_block" if self.lens else "any",
            head="logits" if self.lens else "none",
            dominance=("power",),
        )

    def check(self, *models: ModelDescription) -> None:
        clean = models[0]
        edited = models[-1]
        for clean_value, edited_value, noun in (
            (clean.layers, edited.layers, "sites"),
            (clean.widest, edited.widest, "widths"),
            (clean.vocabulary, edited.vocabulary, "vocabularies"),
        ):
            if None not in (clean_value, edited_value) and clean_value != edited_value:
                raise LayersimError(
                    f"`model_b` is {edited.name}, whose {noun} differ from those of {clean.name}; InterventionEffect compares "
                    "two runs of one model."
                )
        if self.lens:
            for model in (clean, edited):
                need_head(model, "InterventionEffect(lens=True)")

    def kernel(self, first: Sums) -> Kernel:
        return partial(effect_kernel, memory_mb=float(self.lens_memory_mb) if self.lens else None)

    def compute(self, sums: Sums, run: Run) -> InterventionEffectResult:
        count = int(sums["count"])
        omitted = omitted_at(run.layers, count - sums["cosine known"], count)
        if omitted:
            warn(
                "The cosine is not defined for tokens whose clean or edited activation is zero. These tokens are omitted: "
                f"{omitted}."
            )
        positions = int(sums["positions"])
        if self.lens:
            refuse_bad_logits(sums["bad"], run.layers)
        return InterventionEffectResult(
            # 0 / 0 is NaN, at sites where no token has a cosine or a relative change, and without a lens.
            values=(sums["cosine"] / sums["cosine known"]).clamp(-1, 1),
            relative_change=sums["change"] / sums["change known"],
            kl_divergence=sums["kl"] / positions,
            top_changed=sums["changed"].double() / positions,
            saturation_shift=sums["shift"].double() / positions,
            positions=positions,
            unembedding=run.head.written(True) if self.lens and run.head is not None else "",
            layers=run.layers,
            provenance=run.provenance,
        )


def effect_kernel(clean: View, edited: View, *, memory_mb: float | None) -> dict[str, Tensor]:
    """Sum cosines, relative changes and changes of lens predictions over the tokens of a batch.

    Args:
        clean: activations of one batch in the clean run.
        edited: activations of the same tokens in the edited run.
        memory_mb: megabytes for logits; None for no lens.
    """
    sites, tokens = clean.activations.shape[:2]
    sums: dict[str, list[Tensor]] = {name: [] for name in ("cosine", "cosine known", "change", "change known")}
    # One site at a time, because its float64 copies are large.
    for clean_site, edited_site in zip(clean.activations, edited.activations, strict=True):
        x = on_float64_device(clean_site).double()
        y = edited_site.to(x)
        unit_x, norm_x = unit_vectors(x)
        unit_y, norm_y = unit_vectors(y)
        has_change = norm_x > 0
        has_cosine = (norm_x > 0) & (norm_y > 0)
        # Equal to the product of unit vectors, but exactly 1 for equal vectors, and exact to 1e-16 near 1.
        cosine = 1 - (unit_x - unit_y).square().sum(-1) / 2
        change = norms(y - x) / norm_x
        sums["cosine"].append(cosine[has_cosine].sum())
        sums["cosine known"].append(has_cosine.sum())
        sums["change"].append(change[has_change].sum())
        sums["change known"].append(has_change.sum())
    out = {name: torch.stack(values) for name, values in sums.items()}
    out["count"] = torch.tensor(tokens)
    if memory_mb is None:
        zeros = torch.zeros(sites - 1, dtype=torch.int64)
        return out | {
            "positions": torch.tensor(0),
            "kl": zeros.double(),
            "changed": zeros,
            "shift": torch.tensor(0),
            "bad": zeros,
        }
    lens = compare_lenses(clean, edited, memory_mb)
    clean_ids, edited_ids = lens["best"]
    return out | {
        "positions": torch.tensor(clean_ids.shape[1]),
        "kl": lens["kl"].sum(1),
        "changed": (clean_ids != edited_ids).sum(1),
        "shift": (first_final(edited_ids) - first_final(clean_ids)).sum(),
        "bad": lens["bad"],
    }
