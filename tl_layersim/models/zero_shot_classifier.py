"""A classifier of images whose classes are vectors of texts: the vision tower of a CLIP with a head made of prompts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..architectures.blocks import PRE_NORM, layer_names, refuse_paths
from ..architectures.layouts import Tower
from ..architectures.unembed import Head, tensor_of
from .hooked import HookedSource
from .model_description import processor_of

NORMALISE, CLASSIFIER = "normalise", "classifier"


class Normalise(torch.nn.Module):
    """Divides vectors by their norm."""

    def forward(self, x: Tensor) -> Tensor:
        """Vectors `... width` of norm 1."""
        return torch.nn.functional.normalize(x, dim=-1, eps=0.0)


class ZeroShotClassifier(torch.nn.Module):
    """The vision tower and projection of a CLIP, and a linear layer whose rows are the vectors of the classes.

    Args:
        clip: the model; its modules are shared, not copied.
        tower: its vision tower.
        vectors: `class width`, of norm 1.
        class_names: of the classes.
    """

    main_input_name = "pixel_values"

    def __init__(self, clip: torch.nn.Module, tower: Tower, vectors: Tensor, class_names: tuple[str, ...]) -> None:
        super().__init__()
        self.config: Any = clip.config.vision_config  # type: ignore[union-attr]  # a configuration
        self.clip_name = getattr(clip.config, "_name_or_path", "") or type(clip).__name__
        self.processor: Any = processor_of(clip)
        self.class_names = class_names
        for path in (tower.path, *tower.head.modules):
            self.add_module(path, clip.get_submodule(path))
        self.add_module(NORMALISE, Normalise())
        scale: Any = clip.logit_scale
        weight = scale.detach().exp() * vectors.to(scale.detach())
        self.classifier = torch.nn.Linear(weight.shape[1], len(weight), bias=False, device=weight.device, dtype=weight.dtype)
        self.classifier.weight = torch.nn.Parameter(weight, requires_grad=False)
        self._tower = tower
        self.training = clip.training

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Logits `batch class`: cosines of images and classes, times the model's scale.

        Args:
            pixel_values: `batch channel height width`.
        """
        x = self.get_submodule(self._tower.path)(pixel_values=pixel_values).pooler_output
        for path in (*self._tower.head.modules, NORMALISE, CLASSIFIER):
            x = self.get_submodule(path)(x)
        return tensor_of(x)

    def open_source(self, layers: list[str] | None, unembed: list[str] | None) -> ZeroShotSource:
        """The source by which `analyze` and `attach` read this model."""
        refuse_paths(layers, unembed, "a zero-shot classifier")
        path = f"{self._tower.path}.{self._tower.blocks}"
        count = len(self.get_submodule(path))  # type: ignore[arg-type]  # a list of modules
        return ZeroShotSource(self, [f"{path}.{number}" for number in range(count)])

    @property
    def head(self) -> Head:
        """The modules between the last block and the logits."""
        own = self._tower.head
        return replace(own, parts=(*own.parts, NORMALISE, CLASSIFIER))


class ZeroShotSource(HookedSource):
    """Source of a zero-shot classifier: the residual stream of the vision tower, and the classifier as its lens."""

    module: ZeroShotClassifier

    def _open(self, layers: list[str] | None, unembed: list[str] | None) -> None:
        super()._open(layers, unembed)
        self._model = replace(
            self._model,
            name=f"{self.module.clip_name}, zero-shot",
            source=f"{type(self.module).__name__} of {len(self.module.class_names)} classes",
            basis=PRE_NORM,
            layers=layer_names(len(self.paths)),
            stream="whole",
            head=self.module.head,
        )
