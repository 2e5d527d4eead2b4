"""`tower_similarity`: cosine similarity and CKA between the vision layers and the text layers of a CLIP."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.row_pools import PoolKernel
from ..activations.view import Kernel, View
from ..analyzers.analyzer import Analyzer, Run
from ..analyzers.cka import CKA
from ..analyzers.needs import Needs
from ..architectures.unembed import Unembed
from ..core.arguments import FilePath, typed
from ..core.errors import LayersimError, warn
from ..core.result_declarations import result_class
from ..core.results import Result, axes
from ..core.sums import Sums
from ..core.wording import amount
from ..data.batches import Batches
from ..data.data import Data
from ..engine.analyze_and_compare import run_analysis
from ..engine.run_arguments import with_tokenizer
from ..engine.run_description import Analysis
from ..engine.site_plan import plan_sites, refuse_selection
from ..sources.model_description import ModelDescription
from ..sources.open_local import OpenedModel
from ..sources.tower import open_towers, pair_model, text_position, unit, verify_projections

OF_FIGURE = "(Jiang, Zhou and Zhu 2024, appendix D, figure {})."


@result_class
class TowerSimilarity(Result):
    """Similarity between the layers of a CLIP's two towers, and within each tower. All tensors are float64.

    A layer of a tower is one vector for each image or text: its residual at the position that the model reads, through the
    tower's own final norm and projection. Layer 0 is what enters block 0.

    Attributes:
        values: `vision_layer text_layer`, cosine between the image's and the text's vector, mean over pairs.
        std: `vision_layer text_layer`, standard deviation of this cosine over pairs (divided by N).
        mismatched: `vision_layer text_layer`, cosine between an image and the text of another pair, mean over all N (N - 1)
            such combinations of the data, not only of a batch; NaN for one pair. Two rows with the same text count as different
            pairs.
        vision: `vision_layer other_vision_layer`, cosine between two layers of the vision tower, mean over images.
        text: `text_layer other_text_layer`, cosine between two layers of the text tower, mean over texts.
        cka: `vision_layer text_layer`, linear CKA between residuals of images and of their texts, without norms and projections
            (unbiased, averaged over minibatches, see `CKA`). NaN at layers whose vectors are all equal, and everywhere if no
            batch has four pairs.
        vision_to_last: `comparison vision_layer`, cosine of each vision layer with the last vision layer, with the last text
            layer of the same pair, and with the last text layer of other pairs.
        text_to_last: `comparison text_layer`, the same for each text layer, with the towers exchanged.
        text_layers: names of the layers of the text tower; `layers` has the names of the vision tower.
        comparisons: labels of the axis `comparison`.
        pairs: number of pairs N.
    """

    values: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Cosine similarity",
        title="Cosine similarity between the towers",
        caption="Mean over pairs of the cosine between an image at a vision layer and its text at a text layer, each through "
        "the final norm and the projection of its tower " + OF_FIGURE.format("23 c"),
        within=(-1, 1),
    )
    std: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Standard deviation of the cosine",
        title="Spread of the cosine between towers over samples",
        within=(0, 1),
    )
    mismatched: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Cosine similarity",
        title="Cosine similarity between the towers, other pairs",
        caption="The same between an image and the text of another pair: the baseline for the cosine of pairs.",
        within=(-1, 1),
    )
    vision: Float64[Tensor, "vision vision"] = axes(
        "vision_layer",
        "other_vision_layer",
        label="Cosine similarity",
        title="Cosine similarity within the vision tower",
        caption="Mean over images " + OF_FIGURE.format("23 a"),
        within=(-1, 1),
    )
    text: Float64[Tensor, "text text"] = axes(
        "text_layer",
        "other_text_layer",
        label="Cosine similarity",
        title="Cosine similarity within the text tower",
        caption="Mean over texts " + OF_FIGURE.format("23 b"),
        within=(-1, 1),
    )
    cka: Float64[Tensor, "vision text"] = axes(
        "vision_layer",
        "text_layer",
        label="Linear CKA",
        title="Linear CKA between the towers",
        caption="Similarity of the geometry of images and of their texts, without projections, up to rotation and scale: 1 for "
        "equal, 0 for unrelated (Kornblith et al. 2019; unbiased HSIC of Song et al. 2012).",
        within=(-1, 1),
    )
    vision_to_last: Float64[Tensor, "comparison vision"] = axes(
        "comparison",
        "vision_layer",
        label="Cosine similarity",
        title="Cosine of vision layers to the last layers",
        caption="Cosine of each vision layer with the last layer of either tower " + OF_FIGURE.format(22),
        within=(-1, 1),
    )
    text_to_last: Float64[Tensor, "comparison text"] = axes(
        "comparison",
        "text_layer",
        label="Cosine similarity",
        title="Cosine of text layers to the last layers",
        caption="Cosine of each text layer with the last layer of either tower " + OF_FIGURE.format(22),
        within=(-1, 1),
    )
    text_layers: tuple[str, ...]
    comparisons: tuple[str, ...]
    pairs: int

    def coordinates(self, axis: str) -> tuple[Any, ...]:
        if axis in ("vision_layer", "other_vision_layer"):
            return self.layers
        if axis == "other_text_layer":
            return self.text_layers
        return super().coordinates(axis)

    def measured_on(self, field: str) -> str:
        return amount(self.pairs, {"vision": "image", "text": "text"}.get(field, "pair"))

    def headline(self) -> dict[str, float]:
        return {
            "COS(last vision layer, last text layer)": float(self.values[-1, -1]),
            "the same with the texts of other pairs": float(self.mismatched[-1, -1]),
            f"COS({self.first_layer()}, last) of the vision tower": float(self.vision[0, -1]),
            "COS(embedding, last) of the text tower": float(self.text[0, -1]),
            "CKA(last vision layer, last text layer)": float(self.cka[-1, -1]),
        }


# Rows in a forward pass of raw data.
BATCH_SIZE = 64
COMPARISONS = ("last layer of the same tower", "last layer of the other tower", "other tower, mismatched pairs")


@dataclass(frozen=True)
class TowerComparison(Analyzer):
    """The analyzer that `tower_similarity` runs: cosines of projected residuals, and CKA of residuals before projection.

    Args:
        minibatch: number of samples in a minibatch of CKA.
        seed: random seed of the shuffle into minibatches of CKA.
        projections: projections of both towers.
        norm: see `tower_similarity`.
    """

    name: ClassVar[str] = "tower_similarity"
    needs = Needs(models="one_or_two")

    minibatch: int
    seed: int
    projections: tuple[Unembed, Unembed]
    norm: Literal["before", "after"]

    def options(self) -> dict[str, Any]:
        return {"minibatch": self.minibatch, "seed": self.seed, "norm": self.norm}

    def kernel(self, first: Sums) -> Kernel:
        return partial(tower_kernel, projections=self.projections, norm=self.norm)

    def pool_kernel(self, first: Sums) -> PoolKernel | None:
        return self._cka().kernel(first)  # type: ignore[return-value]  # of the estimator in minibatches

    def pool_need(self, density: float) -> int:
        return self._cka().pool_need(density)

    def _cka(self) -> CKA:
        return CKA(minibatch=self.minibatch, seed=self.seed)

    def compute(self, sums: Sums, run: Run) -> TowerSimilarity:
        count = int(sums["count"])
        _refuse_zeros(sums, run)
        values = sums["matched"] / count
        # The cosines of all pairs of an image and a text, without those that belong together.
        mismatched_sums = sums["vision units"] @ sums["text units"].T - sums["matched"]
        mismatched = torch.full_like(mismatched_sums, math.nan)
        if count > 1:
            mismatched = mismatched_sums / (count * (count - 1))
        vision = _symmetric(sums["vision"] / count)
        text = _symmetric(sums["text"] / count)
        return TowerSimilarity(
            values=values.clamp(-1, 1),
            std=(sums["square"] / count - values.square()).clamp(min=0).sqrt(),
            mismatched=mismatched,
            vision=vision,
            text=text,
            cka=self._cka_of_layers(sums, run),
            vision_to_last=torch.stack([vision[:, -1], values[:, -1], mismatched[:, -1]]),
            text_to_last=torch.stack([text[:, -1], values[-1], mismatched[-1]]),
            text_layers=run.column_layers,
            comparisons=COMPARISONS,
            pairs=count,
            layers=run.layers,
            provenance=run.provenance,
        )

    def _cka_of_layers(self, sums: Sums, run: Run) -> Tensor:
        """CKA between layers; NaN for layers whose vectors are equal in all rows."""
        cka = torch.full_like(sums["matched"], math.nan)
        fields = dict(sums.fields)
        if "samples" not in fields:
            warn("`cka` is NaN, because CKA needs at least four pairs of an image and a text. Pass more data.")
            return cka
        # Layers whose vectors vary.
        rows = (fields["xx"] > 0).nonzero()[:, 0]
        columns = (fields["yy"] > 0).nonzero()[:, 0]
        if not len(rows) or not len(columns):
            return cka
        for name in ("xx", "r_x", "r_x^2"):
            fields[name] = fields[name][rows]
        for name in ("yy", "r_y", "r_y^2"):
            fields[name] = fields[name][columns]
        fields["xy"] = fields["xy"][rows][:, columns]
        models = (_restricted_to_layers(run.models[0], rows), _restricted_to_layers(run.models[-1], columns))
        cka[rows[:, None], columns] = self._cka().compute(Sums(fields), replace(run, models=models)).values
        return cka


def _restricted_to_layers(model: ModelDescription, numbers: Tensor) -> ModelDescription:
    """Description of a model of which only some layers are measured."""
    return replace(model, layers=tuple(model.layers[number] for number in numbers))


def tower_kernel(vision: View, text: View, *, projections: tuple[Unembed, Unembed], norm: str) -> dict[str, Tensor]:
    """A dict of sums over image-text pairs: cosines between layers, and projected residuals of norm 1.

    Args:
        vision: activations of the images, one sample for each row.
        text: activations of the texts in the same rows, one sample for each row.
        projections: projections of both towers.
        norm: see `tower_similarity`.
    """
    vision_projection, text_projection = projections
    images = unit(_projected(vision_projection, vision.activations, norm))
    texts = unit(_projected(text_projection, text.activations, norm))
    # A vector of zeros has no direction: divided by its norm, it is NaN.
    images_defined = images.isfinite().all(-1)
    texts_defined = texts.isfinite().all(-1)
    images = images.nan_to_num()
    texts = texts.nan_to_num().to(images.device)
    cosine = torch.einsum("vnd,tnd->nvt", images, texts)
    return {
        "count": torch.tensor(images.shape[1]),
        "vision zeros": (~images_defined).sum(1),
        "text zeros": (~texts_defined).sum(1),
        "matched": cosine.sum(0),
        "square": cosine.square().sum(0),
        "vision": torch.einsum("and,bnd->ab", images, images),
        "text": torch.einsum("and,bnd->ab", texts, texts),
        "vision units": images.sum(1),
        "text units": texts.sum(1),
    }


def _projected(projection: Unembed, x: Tensor, norm: str) -> Tensor:
    """Residuals projected into the shared space (`... width`). The length of each vector is arbitrary."""
    if norm == "before":
        return projection(x)
    # A norm without weights subtracts the mean of the coordinates; its scale does not change a cosine.
    projected = projection(x, normed=False).double()
    return projected - projected.mean(-1, keepdim=True)


def _symmetric(values: Tensor) -> Tensor:
    """Cosines within a tower, corrected for rounding: at most 1, and exactly 1 for a layer with itself."""
    return values.clamp(-1, 1).fill_diagonal_(1.0)


def _refuse_zeros(sums: Sums, run: Run) -> None:
    for tower, names in (("vision", run.layers), ("text", run.column_layers)):
        zero_counts = zip(names, sums[f"{tower} zeros"].tolist(), strict=True)
        layers_in_words = [f"{name} in {count} rows" for name, count in zero_counts if count]
        if layers_in_words:
            raise LayersimError(
                f"The cosine is not defined: vectors of the {tower} tower are zero, at {', '.join(layers_in_words[:4])}."
            )


@typed
def tower_similarity(
    clip: Any,
    data: Any,
    *,
    norm: Literal["before", "after"] = "before",
    minibatch: int = 256,
    seed: int = 0,
    checkpoint: FilePath | None = None,
) -> TowerSimilarity:
    r"""Similarity between every vision layer and every text layer of a CLIP, in one pass over pairs.

    An image is read at [CLS], a text at the token that the model reads, for CLIP its end-of-text token. Each layer goes through
    its tower's own final norm and projection, as the last layer does in the model:

    $$v^{(l)} = W_\mathrm{vision} \, \mathrm{LN}_\mathrm{vision}(\hat v^{(l)}), \qquad
    t^{(l)} = W_\mathrm{text} \, \mathrm{LN}_\mathrm{text}(\hat t^{(l)}), \qquad
    \mathrm{COS}(l, l') = \frac{1}{N} \sum_i \frac{\langle v_i^{(l)}, t_i^{(l')} \rangle}{|v_i^{(l)}| \, |t_i^{(l')}|}$$

    Equation 23 of the paper writes the norm after the projection, where CLIP has none: `norm="after"`. On the first row, the
    projected last layers are checked against the model's own `image_embeds` and `text_embeds`.

    Args:
        clip: `CLIPModel`, `MetaClip2Model`, `ChineseCLIPModel` or `AltCLIPModel` of transformers.
        data: a `Data`, or raw data, which is read in batches of 64: pairs of an image and a text, one in each row. A mapping
            with `pixel_values`, `input_ids` and `attention_mask`; batches of these; or rows with a column of images and a
            column of texts, with the model's processor as `Data(rows, tokenizer=processor)`.
        norm: "before" applies each tower's own norm before the projection, as CLIP does; "after" applies a layer norm without
            weights after it in place of the own norm, as equation 23 is printed.
        minibatch: number of samples in a minibatch of CKA, see `CKA`.
        seed: random seed of the shuffle into minibatches.
        checkpoint: a file for partial sums, see `analyze`.

    Returns:
        A `TowerSimilarity`; its `values` are `vision_layer text_layer`.

    Raises:
        LayersimError: the model has no two towers or lacks a projection; a row has no image or no end of text; the images have
            another size than the model takes; or a text is longer than the text tower's context.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix D, equation 23, figures 22 and 23.

    Examples:
        >>> import tl_layersim as lsim, torch
        >>> from tl_layersim.vision import tower_similarity
        >>> from transformers import CLIPConfig, CLIPModel
        >>> tiny = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
        >>> text = tiny | dict(vocab_size=20, eos_token_id=19)
        >>> vision = tiny | dict(image_size=8, patch_size=4)
        >>> clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).eval()
        >>> tokens = torch.cat([torch.randint(3, 19, (8, 5)), torch.full((8, 1), 19)], 1)
        >>> pairs = {"input_ids": tokens, "pixel_values": torch.randn(8, 3, 8, 8)}
        >>> found = tower_similarity(clip, pairs)
        >>> found.values.shape, found.pairs
        (torch.Size([3, 3]), 8)
    """
    clip = OpenedModel.of(clip).model
    data = Data.of(data, batch_size=BATCH_SIZE)
    sources = open_towers(clip)
    vision, text = sources
    refuse_selection(data, "each tower is read where the model reads it", "positions", "skip_first")
    projections = (vision.projected(), text.projected())
    analyzers: dict[str, Analyzer] = {TowerComparison.name: TowerComparison(minibatch, seed, projections, norm)}
    vision.check_first_row(partial(verify_projections, sources))
    description = with_tokenizer(pair_model(vision.model, text.model), data.tokenizer)
    batches = Batches(data.counting(text_position(clip, text.tower)), description)
    plan = plan_sites(sources, analyzers)
    plan.start_reading()
    report = run_analysis(Analysis(plan, batches, analyzers), checkpoint)
    similarity: TowerSimilarity = report[TowerComparison.name]
    return similarity
