"""Sources of the two towers of a CLIP, and their projections to the shared space."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..activations.view import View
from ..architectures.blocks import POST_NORM, PRE_NORM, anatomy_of, layer_names
from ..architectures.layouts import CLASSES, TOWERS_BY_TYPE, Tower
from ..architectures.output_heads import lens_of
from ..architectures.unembed import Unembed, rounding
from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.batches import Batch
from ..data.columns import refuse_integers
from ..data.input_names import PIXELS
from ..data.positions import PositionRule, Positions
from ..data.tokenization import DEFAULT_SEQ_LEN
from .hooked_module import HookedSource
from .identity import StoredWeights, hooks_on
from .model_description import ModelDescription, hash_config, processor_of


class TowerSource(HookedSource):
    """Source of one tower of a CLIP.

    Args:
        clip: the model with both towers.
        tower: the tower to read.
    """

    def __init__(self, clip: torch.nn.Module, tower: Tower) -> None:
        self.clip = clip
        self.tower = tower
        self._positions: dict[tuple[int, ...], int] = {}
        module = clip.get_submodule(tower.path)
        count = len(module.get_submodule(tower.blocks))  # type: ignore[arg-type]  # a list of modules
        super().__init__(module, [f"{tower.blocks}.{number}" for number in range(count)])

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        super()._open(layers, unembed)
        config: Any = self.clip.config
        model_name = getattr(config, "_name_or_path", "") or type(self.clip).__name__
        # The name of a folder and the version of transformers do not change the architecture.
        settings = config.to_dict() | {"transformers_version": None, "_name_or_path": None}
        # A model may carry its tokenizer, or the processor of both.
        carrier = self.clip if hasattr(self.clip, "tokenizer") else getattr(self.clip, "processor", None)
        self._model = replace(
            self._model,
            name=f"{model_name}, {self.tower.name} tower",
            config_hash=hash_config(settings),
            weights=StoredWeights(self.clip),
            changes=hooks_on(self.clip),
            basis=POST_NORM if self.anatomy.post_norm else PRE_NORM,
            layers=tuple(f"{self.tower.name}.{name}" for name in layer_names(len(self.paths))),
            stream="whole",
            d_model=getattr(getattr(self.module, "config", None), "hidden_size", self._model.d_model),
            tokenizer=getattr(carrier, "tokenizer", None),
            processor=processor_of(self.clip),
        )

    def settle(self, batch: Batch) -> None:
        # The check compares both towers, and so needs the inputs of both.
        self.run_check(batch)
        super().settle(self._batch_of_tower(batch))

    def collect(self, batch: Batch) -> View:
        return super().collect(self._batch_of_tower(batch))

    def projected(self) -> Unembed:
        """An `Unembed` of the tower's final norm and projection to the shared space."""
        lens = lens_of(self.clip, self.tower.head)
        assert lens is not None
        return lens

    def _batch_of_tower(self, batch: Batch) -> Batch:
        """The batch of this tower's inputs, from a batch of image-text pairs."""
        if self.tower.name == "text":
            # The first part of a longer text fills the context, but for a BOS of its own.
            latest = max(start for _, start in batch.origins)
            context = self.model.context
            if latest >= min(DEFAULT_SEQ_LEN, context or DEFAULT_SEQ_LEN) - 1:
                raise LayersimError(
                    f"`data` has a text of more than {latest} tokens; the context of the text tower has {context}. Cut the "
                    "texts with tokenizer(texts, padding=True, truncation=True)."
                )
            inputs = {name: values for name, values in batch.inputs.items() if name in self.model.inputs}
            return replace(batch, inputs=inputs, positional=batch.positional & inputs.keys())
        pixels = batch.inputs.get(PIXELS)
        if pixels is None:
            raise LayersimError(
                f"`data` has texts without images; it must have `{PIXELS}` beside `input_ids`, or a column of images with "
                "tokenizer=processor."
            )
        refuse_integers(PIXELS, pixels)
        placeholders = torch.zeros(len(pixels), 1, dtype=torch.int64)
        attention = placeholders == 0
        images = Batch(
            placeholders,
            attention,
            attention,
            batch.first,
            origins=batch.origins,
            texts=batch.texts,
            inputs={PIXELS: pixels},
            has_tokens=False,
        )
        size = tuple(pixels.shape[1:])
        if size not in self._positions:
            self._positions[size] = self.count_positions(images.first_row)
        return images.with_positions(self._positions[size], Positions("first"))


def open_towers(clip: Any) -> tuple[TowerSource, TowerSource]:
    """Open the vision and the text tower as two sources.

    Args:
        clip: the model with both towers.

    Raises:
        LayersimError: the model is of another kind.
    """
    kind = str(getattr(getattr(clip, "config", None), "model_type", None))
    if kind not in TOWERS_BY_TYPE or anatomy_of(clip).kind != "towers":
        reason = ", which pools all positions of an image by attention" if kind.startswith("siglip") else ""
        raise LayersimError(f"`clip` is {brief(clip)}{reason}; it must be {CLASSES}.")
    vision, text = TOWERS_BY_TYPE[kind]
    return TowerSource(clip, vision), TowerSource(clip, text)


def pair_model(vision: ModelDescription, text: ModelDescription) -> ModelDescription:
    """A model description with the inputs of both towers, for data of images and texts."""
    name = text.name.removesuffix(", text tower")
    inputs = {**text.inputs, **vision.inputs, PIXELS: None}
    return replace(text, name=name, inputs=inputs, processor=vision.processor)


def verify_projections(sources: tuple[TowerSource, TowerSource], batch: Batch) -> None:
    """Raise an error if projected last layers differ from the model's embeddings of the first row.

    Args:
        sources: the vision and the text tower.
        batch: rows of images and texts.

    Raises:
        LayersimError: the two differ by more than rounding.
    """
    row = batch.first_row
    clip = sources[0].clip
    first_parameter = next(clip.parameters())
    device = first_parameter.device
    dtype = first_parameter.dtype
    projections: list[Tensor] = []
    for source in sources:
        last_layer = source.collect(row).activations[-1]
        projections.append(unit(source.projected()(last_layer)))
    inputs: dict[str, Tensor] = {}
    for name, values in row.inputs.items():
        inputs[name] = values.to(device, dtype if values.is_floating_point() else None)
    with torch.no_grad():
        output: Any = clip(input_ids=row.tokens.to(device), **inputs)
    for source, projection, name in zip(sources, projections, ("image_embeds", "text_embeds"), strict=True):
        embedding = unit(getattr(output, name))
        # Vectors that are zero on both sides are refused with the result.
        gap = float((projection.nan_to_num() - embedding.nan_to_num()).norm())
        if not gap <= rounding(dtype):
            raise LayersimError(
                f"The projected last layer of the {source.tower.name} tower must equal `{name}` of {type(clip).__name__}, but "
                f"differs from it by {gap:.2g} on the first row."
            )


def unit(x: Tensor) -> Tensor:
    """Normalise vectors to norm 1, in float64; a zero vector becomes NaN."""
    x = x.detach().double()
    return torch.nn.functional.normalize(x, dim=-1, eps=0.0)


def text_position(model: torch.nn.Module, tower: Tower) -> PositionRule:
    """The position that a text tower's head reads: "first", or a function that finds the end-of-text token.

    Args:
        model: the model.
        tower: its text tower.
    """
    if not tower.end_of_text:
        return "first"
    text = model.get_submodule(tower.path)
    eos: Any = getattr(text, "eos_token_id", None)
    # Configurations of OpenAI's models name a wrong id, 2. For these CLIP reads the highest id of a row.
    highest = eos == 2 and getattr(getattr(text, "config", None), "model_type", "") == "clip_text_model"
    return partial(end_of_text, eos=None if highest else int(eos))


def end_of_text(tokens: Tensor, *, eos: int | None) -> Tensor:
    """Index of the first end-of-text token in a row.

    Args:
        tokens: `pos`, the token ids of the row.
        eos: id of the end-of-text token; None for the highest id in the row.

    Raises:
        LayersimError: the row has no such token.

    Examples:
        >>> end_of_text(torch.tensor([1, 5, 9, 9]), eos=9), end_of_text(torch.tensor([1, 5, 7, 3]), eos=None)
        (tensor(2), tensor(2))
    """
    if eos is None:
        return tokens.argmax()
    end_positions = (tokens == eos).nonzero()[:, 0]
    if not len(end_positions):
        raise LayersimError(
            f"`data` has a text of {len(tokens)} tokens without the end-of-text token {eos}, at which the text tower is read. "
            "Give texts with tokenizer=processor, or cut them with tokenizer(texts, truncation=True)."
        )
    return end_positions[0]
