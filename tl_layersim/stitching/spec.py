"""Specification of a stitch: the adapter, its fit, and the stitch points."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..architectures.blocks import entering
from ..architectures.chosen_hook_points import block_number
from ..core.errors import LayersimError, warn
from ..core.wording import brief, counted
from ..sources.model import Model
from ..sources.source import refuse_inference_weights
from ..sources.split_model import SplitModel
from .adapter import Adapter
from .adapters import ADAPTER_KINDS
from .adapters.kind import AdapterKind
from .fitting import StitchTraining


@dataclass(frozen=True)
class StitchSpec:
    """The adapter of a stitch and how it is fitted.

    Attributes:
        kind: the kind of adapter.
        given: a finished adapter, which is only evaluated; None if an adapter is fitted.
        fit: `"lstsq"`, `"sgd"`, `"lstsq+sgd"`, or "" if nothing is fitted.
        training: settings of `"sgd"`.
        ridge: regularisation of `"lstsq"`: the diagonal of X'X is raised by this fraction of itself.
    """

    kind: AdapterKind
    given: Adapter | None
    fit: str
    training: StitchTraining
    ridge: float

    @staticmethod
    def of(
        adapter: str | Adapter,
        fit: str | None,
        training: StitchTraining | None,
        ridge: float,
        backs: list[SplitModel],
    ) -> StitchSpec:
        """The specification from the arguments of `stitch`.

        Raises:
            LayersimError: the arguments contradict one another.
        """
        given = adapter if isinstance(adapter, Adapter) else None
        kind = kind_of_adapter(adapter)
        fitted = given is None and kind.has_weight
        if not fitted and (fit is not None or training is not None or ridge):
            raise LayersimError(
                "`fit`, `training` and `ridge` do not apply to "
                f"{f'adapter={kind.name!r}' if given is None else 'a finished adapter'}, which is not fitted."
            )
        chosen = fit or ("lstsq+sgd" if all(back.model.calls == "gradients" for back in backs) else "lstsq")
        if fitted and training is not None and "sgd" not in chosen:
            raise LayersimError(f"`training` needs a fit by gradients; `fit` is {chosen!r}.")
        if ridge and "lstsq" not in chosen:
            raise LayersimError(f"`ridge` needs a fit by least squares; `fit` is {chosen!r}.")
        return StitchSpec(kind, given, chosen if fitted else "", training or StitchTraining(), float(ridge))

    def options(self) -> dict[str, Any]:
        """The options for the provenance."""
        which = self.kind.name if self.given is None else f"{self.kind.name} {self.given.digest()}"
        recorded: dict[str, Any] = {"adapter": which, "fit": self.fit}
        recorded |= {"ridge": self.ridge} if "lstsq" in self.fit else {}
        # Provenance and checkpoints have the seed under a name of their own.
        training = {name: value for name, value in asdict(self.training).items() if name != "seed"}
        return recorded | ({"training": training} if "sgd" in self.fit else {})

    def refuse(self, front: SplitModel, back: SplitModel) -> None:
        """Raise an error if this adapter and fit cannot join two models.

        Raises:
            LayersimError: the widths, the dtype or the sandbox of a server does not allow it.
        """
        self._refuse_widths(front.model, back.model)
        known = "unknown" not in (front.model.stream, back.model.stream)
        if not self.kind.has_weight and known and front.model.basis != back.model.basis:
            warn(
                f"The residual streams have different bases ({front.model.basis}; {back.model.basis}). The penalty of "
                f"{self.kind.name} includes this difference."
            )
        if "sgd" in self.fit:
            self._refuse_training(back)

    def _refuse_widths(self, front: Model, back: Model) -> None:
        widths = (front.d_model, back.d_model)
        if self.kind.needs_equal_widths and None not in widths and widths[0] != widths[1]:
            raise LayersimError(
                f"`adapter` is {self.kind.name!r}, which needs residual streams of equal width; {front.name} has width "
                f"{widths[0]} and {back.name} {widths[1]}."
            )
        shape = None if self.given is None or self.given.weight is None else tuple(reversed(self.given.weight.shape))
        if shape is not None and None not in widths and shape != widths:
            raise LayersimError(f"`adapter` maps width {shape[0]} to {shape[1]}; the models need {widths[0]} to {widths[1]}.")

    def _refuse_training(self, back: SplitModel) -> None:
        if back.model.calls != "gradients":
            raise LayersimError(
                f"`fit` is {self.fit!r}, which needs gradients through {back.model.name}; the sandbox of this server computes "
                "no gradients. Use fit='lstsq'."
            )
        if (local := back.local) is not None:
            refuse_inference_weights(local.module)
        if back.model.dtype == "torch.float16":
            raise LayersimError(
                f"`fit` is {self.fit!r}, but gradients vanish in float16, the dtype of {back.model.name}; use fit='lstsq' or "
                "bfloat16."
            )


def kind_of_adapter(adapter: str | Adapter) -> AdapterKind:
    """The kind of the argument `adapter`.

    Raises:
        LayersimError: the argument is not the name of a kind.
    """
    return adapter.definition if isinstance(adapter, Adapter) else ADAPTER_KINDS.named(adapter, "adapter")()


def point_number(model: Model, layer: int | str, argument: str) -> int:
    """Index of a point of the residual stream: 0 before block 0, 1 after it, and so on.

    Args:
        model: description of the model.
        layer: the block before the point, as in `block_number`; or the name of the point.
        argument: name of the argument, for the message.

    Raises:
        LayersimError: the model has no such layer.
    """
    # The residual that enters block i is the one that left block i - 1.
    names = {name: number for number, name in enumerate(model.layers)}
    names |= {entering(name): number for number, name in enumerate(model.layers[1:])}
    return names[layer] if layer in names else block_number(layer, model.layers[1:], argument) + 1


def stitch_points_of(models: Mapping[str, SplitModel], layers: Any) -> dict[str, list[int]]:
    """Layer indices of each model at the stitch points, by model name.

    Args:
        models: models by name.
        layers: see `stitch_grid`.

    Raises:
        LayersimError: there are no models, or the lists do not fit them or name a stitch point twice.
    """
    if not models:
        raise LayersimError("`models` is empty; it must hold a model.")
    if layers is None:
        depths = {name: len(each.model.layers) for name, each in models.items()}
        if len(set(depths.values())) > 1:
            raise LayersimError(
                "`layers` must be given for models of different depths "
                f"({', '.join(f'{name}: {depth - 1} blocks' for name, depth in depths.items())})."
            )
        layers = {name: each.model.layers[1:] for name, each in models.items()}
    by_name = layers if isinstance(layers, Mapping) else dict.fromkeys(models, layers)
    if set(by_name) != set(models) or len({len(own) for own in by_name.values()}) > 1 or not next(iter(by_name.values())):
        given = ", ".join(f"{counted(len(own), 'layer')} for {name}" for name, own in by_name.items()) or "no lists"
        raise LayersimError(
            f"`layers` has {given}; it must have a nonempty list for each model ({', '.join(models)}), all of one length."
        )
    points = {name: [point_number(each.model, layer, "layers") for layer in by_name[name]] for name, each in models.items()}
    together = list(zip(*points.values(), strict=True))
    if len(set(together)) < len(together):
        raise LayersimError(f"`layers` is {brief(layers)}; it must not name a stitch point twice.")
    return points


def stitch_point_label(models: Mapping[str, SplitModel], points: Mapping[str, list[int]], s: int) -> str:
    """The label of stitch point `s`: the layer's name if it is the same in all models, else the name in each model."""
    names = {name: models[name].model.layers[points[name][s]] for name in models}
    if len(set(names.values())) == 1:
        return next(iter(names.values()))
    return ", ".join(f"{name} {names[name]}" for name in models)
