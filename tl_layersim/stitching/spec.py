"""What a stitch is to be: the adapter, how it is fitted, and between which layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..core.errors import LayersimError, warn
from ..models.adapter import KINDS, Adapter
from ..models.model_info import Model, entering
from ..models.source import refuse_inference_weights
from ..models.split_model import LocalSplitModel, SplitModel
from .fitting import StitchTraining


@dataclass(frozen=True)
class StitchSpec:
    """What is fitted, and how."""

    kind: str
    given: Adapter | None
    fit: str
    training: StitchTraining
    ridge: float
    seed: int

    @staticmethod
    def of(
        adapter: Any, fit: str | None, training: StitchTraining | None, ridge: float, seed: int, backs: list[SplitModel]
    ) -> StitchSpec:
        given = adapter if isinstance(adapter, Adapter) else None
        kind = given.kind if given is not None else adapter
        nothing = given is not None or kind == "identity"
        if nothing and (fit is not None or training is not None or ridge):
            raise LayersimError(
                "There is nothing to fit in this adapter.",
                given=f"fit={fit!r}, ridge={ridge} with {'an adapter that is done' if given is not None else 'identity'}",
                expected="none of fit=, training= and ridge=",
                do="leave them out, or adapter='affine'",
            )
        chosen = fit or ("lstsq+sgd" if all(back.model.calls == "gradients" for back in backs) else "lstsq")
        if not nothing and training is not None and "sgd" not in chosen:
            raise LayersimError(
                "Nothing is trained by gradients here.",
                given=f"training= with fit={chosen!r}",
                expected="fit='sgd' or 'lstsq+sgd'",
                do="leave training= out",
            )
        if not 0 <= ridge < math.inf or (ridge and not nothing and "lstsq" not in chosen):
            raise LayersimError(
                "ridge belongs to least squares.",
                given=f"ridge={ridge} with fit={chosen!r}",
                expected="0 or more, with fit='lstsq' or 'lstsq+sgd'",
                do="ridge=1e-4",
            )
        return StitchSpec(kind, given, "" if nothing else chosen, training or StitchTraining(), float(ridge), seed)

    def options(self) -> dict[str, Any]:
        """For the record."""
        which = self.kind if self.given is None else f"{self.kind} {self.given.digest()}"
        found: dict[str, Any] = {"adapter": which, "fit": self.fit}
        found |= {"ridge": self.ridge} if "lstsq" in self.fit else {}
        return found | ({"training": asdict(self.training)} if "sgd" in self.fit else {})

    def refuse(self, front: SplitModel, back: SplitModel, at: tuple[int, ...]) -> None:
        """Refuse what cannot be done between these two, before anything runs."""
        widths = (front.model.d_model, back.model.d_model)
        if self.kind == "identity" and None not in widths and widths[0] != widths[1]:
            raise LayersimError(
                "Between streams of different widths there is no identity.",
                given=f"{front.model.name} of width {widths[0]} and {back.model.name} of width {widths[1]}",
                expected=f"an adapter that is fitted, one of {', '.join(KINDS[1:])}",
                do="adapter='affine'",
            )
        shape = None if self.given is None or self.given.weight is None else tuple(reversed(self.given.weight.shape))
        if shape is not None and None not in widths and shape != widths:
            raise LayersimError(
                "The adapter does not fit between these models.",
                given=f"an adapter from width {shape[0]} to {shape[1]}",
                expected=f"from {widths[0]} to {widths[1]}",
                do="adapter='affine' to fit one",
            )
        known = "unknown" not in (front.model.stream, back.model.stream)
        if self.kind == "identity" and known and front.model.basis != back.model.basis:
            warn(
                f"The two residual streams are written in different bases ({front.model.basis}; {back.model.basis}): identity "
                "measures that difference too."
            )
        if "sgd" not in self.fit:
            return
        if back.model.calls != "gradients":
            raise LayersimError(
                "Training through the back needs its gradients, and this server runs requests in a sandbox that "
                "weights stay out of.",
                given=f"fit={self.fit!r} and {back.model.source}",
                expected="a trusted server, or a fit from sums",
                do="fit='lstsq'",
            )
        if isinstance(back, LocalSplitModel):
            refuse_inference_weights(back.module)
        if back.model.dtype == "torch.float16":
            raise LayersimError(
                "Gradients through a float16 model vanish: its smallest number is 6e-8.",
                given=f"{back.model.name} in float16 with fit={self.fit!r}",
                expected="float32, or bfloat16, which has float32's range",
                do="fit='lstsq', or back.to(torch.bfloat16)",
            )


def layer_number(model: Model, layer: int | str) -> int:
    """Which residual layer of the model is meant."""
    count = len(model.layers)
    if isinstance(layer, int) and not isinstance(layer, bool) and 0 <= layer < count:
        return layer
    if isinstance(layer, str):
        # What enters block i is what left block i - 1.
        names = {name: number for number, name in enumerate(model.layers)}
        names |= {entering(name): number for number, name in enumerate(model.layers[1:])}
        if layer in names:
            return names[layer]
    raise LayersimError(
        f"{model.name} has no such layer.",
        given=repr(layer),
        expected=f"0 to {count - 1}: 0 is what enters block 0, {count - 1} what leaves the last block; or a name as "
        f"{model.layers[-1]}",
        do=f"{count // 2}; at=(layer of the front, layer of the back)",
    )


def seams_of(halves: Mapping[str, SplitModel], layers: Any) -> dict[str, list[int]]:
    """The layers that are joined, by model."""
    if layers is None:
        depths = {name: len(half.model.layers) for name, half in halves.items()}
        if len(set(depths.values())) > 1:
            raise LayersimError(
                "These models are not of one depth, so it is not clear which layers to join.",
                given=", ".join(f"{name}: {depth - 1} blocks" for name, depth in depths.items()),
                expected="layers= with a list for each model, of one length",
                do=f"layers={ {name: [1, depth - 1] for name, depth in depths.items()} }",
            )
        layers = list(range(1, next(iter(depths.values()))))
    by_name = layers if isinstance(layers, dict) else dict.fromkeys(halves, layers)
    if set(by_name) != set(halves) or len({len(own) for own in by_name.values()}) > 1 or not next(iter(by_name.values())):
        raise LayersimError(
            "The seams do not fit the models.",
            given=f"{ {name: len(own) for name, own in by_name.items()} } layers",
            expected=f"one list of layers for each of {', '.join(halves)}, all of one length",
            do="layers=[1, 2, 3], or a list for each model by name",
        )
    return {name: [layer_number(half.model, layer) for layer in by_name[name]] for name, half in halves.items()}


def seam_label(halves: Mapping[str, SplitModel], seams: Mapping[str, list[int]], s: int) -> str:
    """One layer's name where all models are joined at it, else each model's layer."""
    names = {name: halves[name].model.layers[seams[name][s]] for name in halves}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} {names[name]}" for name in halves)
