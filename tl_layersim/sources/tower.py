"""TowerSource: source of one tower of a CLIP, which takes the tower's inputs from rows of images and texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..activations.view import View
from ..architectures.blocks import POST_NORM, PRE_NORM, is_post_norm, layer_names
from ..architectures.layouts import Tower
from ..architectures.output_heads import open_head
from ..architectures.towers import find_towers, text_starts_anew
from ..architectures.unembed import Unembed, rounding
from ..core.errors import LayersimError
from ..data.batches import Batch
from ..data.inputs import PIXELS, refuse_integers
from ..data.positions import Positions
from .hooked import HookedSource
from .identity import StoredWeights, hooks_on
from .model import Model, hash_config, processor_of


class TowerSource(HookedSource):
    """Source of one tower of a CLIP.

    Args:
        clip: the model with both towers.
        tower: the tower to read.
    """

    def __init__(self, clip: torch.nn.Module, tower: Tower) -> None:
        self.clip, self.tower = clip, tower
        self._positions: dict[tuple[int, ...], int] = {}
        module = clip.get_submodule(tower.path)
        count = len(module.get_submodule(tower.blocks))  # type: ignore[arg-type]  # a list of modules
        super().__init__(module, [f"{tower.blocks}.{number}" for number in range(count)])

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        super()._open(layers, unembed)
        config: Any = self.clip.config
        own = self._model
        # A model may carry its tokenizer, or the processor of both.
        carrier = self.clip if hasattr(self.clip, "tokenizer") else getattr(self.clip, "processor", None)
        self._model = replace(
            own,
            name=f"{getattr(config, '_name_or_path', '') or type(self.clip).__name__}, {self.tower.name} tower",
            config_hash=hash_config(config.to_dict() | {"transformers_version": None, "_name_or_path": None}),
            weights=StoredWeights(self.clip),
            changes=hooks_on(self.clip),
            basis=POST_NORM if is_post_norm(self.module, self.paths[0]) else PRE_NORM,
            layers=tuple(f"{self.tower.name}.{name}" for name in layer_names(len(self.paths))),
            stream="whole",
            d_model=getattr(getattr(self.module, "config", None), "hidden_size", own.d_model),
            tokenizer=getattr(carrier, "tokenizer", None),
            processor=processor_of(self.clip),
        )

    def collect(self, batch: Batch) -> View:
        return super().collect(self._own(batch))

    def projected(self) -> Unembed:
        """The tower's final norm and projection, a map from residuals to the shared embedding space."""
        return open_head(self.clip, self.tower.head)[1]

    def _own(self, batch: Batch) -> Batch:
        """The batch with only this tower's inputs, and only the position at which the tower is read counted."""
        if self.tower.name == "text":
            text_starts_anew([start for _, start in batch.origins], self.model.context)
            inputs = {name: values for name, values in batch.inputs.items() if name in self.model.inputs}
            return replace(batch, inputs=inputs, positional=batch.positional & inputs.keys())
        pixels = batch.inputs.get(PIXELS)
        if pixels is None:
            raise LayersimError(
                f"`data` has texts without images; it must have `{PIXELS}` beside `input_ids`, or a column of images with "
                "tokenizer=processor."
            )
        refuse_integers(PIXELS, pixels)
        rows = torch.zeros(len(pixels), 1, dtype=torch.int64)
        alone = Batch(rows, rows == 0, rows == 0, batch.first, None, batch.origins, inputs={PIXELS: pixels}, has_tokens=False)
        key = tuple(pixels.shape[1:])
        if key not in self._positions:
            self._positions[key] = self.count_positions(alone.first_row)
        return alone.with_positions(self._positions[key], Positions("first"))


def open_towers(clip: Any) -> tuple[TowerSource, TowerSource]:
    """Open the vision and the text tower as two sources.

    Args:
        clip: the model with both towers.

    Raises:
        LayersimError: the model is of another kind.
    """
    vision, text = find_towers(clip)
    return TowerSource(clip, vision), TowerSource(clip, text)


def pair_model(vision: Model, text: Model) -> Model:
    """A description that combines the inputs of both towers, to read rows of images and texts."""
    name = text.name.removesuffix(", text tower")
    return replace(text, name=name, inputs={**text.inputs, **vision.inputs, PIXELS: None}, processor=vision.processor)


def verify_projections(sources: tuple[TowerSource, TowerSource], batch: Batch) -> None:
    """Raise an error if the projected last layers differ from the model's embeddings of the first image and text.

    Args:
        sources: the vision and the text tower.
        batch: rows of images and texts.

    Raises:
        LayersimError: the two differ by more than rounding.
    """
    row, clip = batch.first_row, sources[0].clip
    device, dtype = next((p.device, p.dtype) for p in clip.parameters())
    own = [unit(source.projected()(source.collect(row).activations[-1])) for source in sources]
    inputs = {name: x.to(device, dtype if x.is_floating_point() else None) for name, x in row.inputs.items()}
    with torch.no_grad():
        output: Any = clip(input_ids=row.tokens.to(device), **inputs)
    for source, ours, name in zip(sources, own, ("image_embeds", "text_embeds"), strict=True):
        # Vectors that are zero on both sides are refused with the result.
        gap = float((ours.nan_to_num() - unit(getattr(output, name)).nan_to_num()).norm())
        if not gap <= rounding(dtype):
            raise LayersimError(
                f"The last layer of the {source.tower.name} tower, projected, differs from `{name}` of {type(clip).__name__} "
                f"by {gap:.2g} on the first row. Compare the towers with tower_similarity(..., projected=False)."
            )


def unit(x: Tensor) -> Tensor:
    """Normalise vectors to norm 1, in float64; a zero vector becomes NaN."""
    x = x.detach().double()
    return torch.nn.functional.normalize(x, dim=-1, eps=0.0)
