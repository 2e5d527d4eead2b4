"""Fitting of adapters, by least squares and by gradient descent on the back model's loss.

`cross_moments` is sent to NDIF servers as source, so it needs torch and the standard library alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from tqdm.auto import tqdm

from ..core.arguments import Limit, NonNegativeInt, OpenFraction, PositiveFloat, PositiveInt, Seed, typed
from ..core.errors import LayersimError, warn
from ..core.resumable_file import ResumableFile, Snapshot
from ..core.sums import Sums
from ..core.training_loop import Descent, Shuffle, refuse_long_warmup, run_steps
from ..core.wording import WHY_NOT_FINITE
from ..sources.partial_forward import SplitModel, attended
from .activation_store import ActivationStore
from .adapters import Adapter, AdapterKind


class Progress:
    """Checkpoint of one call: the state of each stitch, and the file that stores the states.

    Args:
        path: path of the file; None to keep no state.
        identity: models, data and settings of the call. A file with another identity raises an error.

    Attributes:
        states: by name of the stitch, its notes and its tensors. The notes say whether it is `done`; its tensors are then
            those in `TEXT_SUMS`, the `curve`, and the `weight` and `bias` of the adapter.
    """

    def __init__(self, path: str | os.PathLike[str] | None, identity: Mapping[str, Any]) -> None:
        self.file = ResumableFile(path, "stitches", identity)
        self.states: dict[str, Snapshot] = self.file.resume(_states_in_file) or {}

    def done(self, key: str) -> bool:
        return key in self.states and bool(self.states[key][0]["done"])

    def save(self) -> None:
        state = self.snapshot()
        if state is not None:
            self.file.save(*state)

    def saved_on_interrupt(self) -> AbstractContextManager[None]:
        """Write all states if an exception (Ctrl-C included) ends the `with` block."""
        return self.file.saved_on_interrupt(self.snapshot, lambda: "The state of the stitches is")

    def snapshot(self) -> Snapshot | None:
        """State of all stitches as the file stores it: metadata and tensors. None if no stitch has a state."""
        if not self.states:
            return None
        notes = {}
        tensors = {}
        for key, (note, tensors_of_stitch) in self.states.items():
            notes[key] = note
            for name, tensor in tensors_of_stitch.items():
                tensors[f"{key}/{name}"] = tensor
        return {"stitches": notes}, tensors


def _states_in_file(header: Mapping[str, Any], tensors: dict[str, Tensor]) -> dict[str, Snapshot]:
    states = dict[str, Snapshot]()
    for key, note in header["stitches"].items():
        prefix = f"{key}/"
        tensors_of_stitch = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
        states[key] = (note, tensors_of_stitch)
    return states


Features = Callable[[Tensor], Tensor]
# Eigenvalues below this fraction of the largest eigenvalue are rounding errors.
RANK = 1e-13


def feature_moments(features: Features, hidden: Tensor) -> dict[str, Tensor]:
    """Sums over tokens of the features and of their outer products.

    Args:
        features: see `AdapterKind.features`.
        hidden: `token d_front`, the front's residuals.

    Returns:
        `count`; `u`, `d_front`, the sum of the features; `uu`, `d_front d_front`, the sum of their outer products.
    """
    u = features(hidden.double())
    return {"count": torch.tensor(u.shape[0]), "u": u.sum(0), "uu": u.T @ u}


def cross_moments(
    features: Features, adds_residual: Callable[[int, int], bool], hidden: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Sums over tokens of the targets, the feature-target products and the squared targets.

    Args:
        features: see `AdapterKind.features`.
        adds_residual: see `AdapterKind.adds_residual`. If True, the front model's residual is subtracted from the target.
        hidden: `token d_front`, the front's residuals.
        target: `token d_back`, the back's residuals.

    Returns:
        `t`, `d_back`, the sum of the targets; `ut`, `d_front d_back`, the sum of the outer products; `tt`, the sum of squares.
    """
    hidden = hidden.double()
    target = target.double()
    u = features(hidden)
    if adds_residual(hidden.shape[-1], target.shape[-1]):
        target = target - hidden
    return {"t": target.sum(0), "ut": u.T @ target, "tt": target.square().sum()}


def solve(moments: Mapping[str, Tensor], ridge: float, bias: bool) -> tuple[Tensor, Tensor | None, float]:
    """Solve the least-squares problem. Returns weight, bias and R².

    Args:
        moments: sums of `feature_moments` and `cross_moments` over all tokens.
        ridge: the diagonal of X'X is raised by this fraction of itself.
        bias: whether the adapter has a bias. If True, features and targets are centred.

    Returns:
        The weight `d_back d_front`, the bias `d_back` or None, and R² over the tokens of the fit. For an adapter that adds the
        residual, R² is that of the target minus the residual.
    """
    n = float(moments["count"])
    uu = moments["uu"]
    ut = moments["ut"]
    if bias:
        uu = uu - torch.outer(moments["u"], moments["u"]) / n
        ut = ut - torch.outer(moments["u"], moments["t"]) / n
    # Features are scaled to equal size, because massive activations would cost digits.
    size = uu.diagonal().clamp(min=0).sqrt()
    size = torch.where(size > 0, size, 1.0)
    damped = uu / size / size[:, None]
    values, vectors = torch.linalg.eigh(damped + ridge * torch.diag(damped.diagonal()))
    # Weights are zero in directions without variance.
    inverse = torch.where(values > RANK * values[-1], 1.0 / values, 0.0)
    weight = ((vectors * inverse) @ (vectors.T @ (ut / size[:, None]))).T / size
    offset = (moments["t"] - weight @ moments["u"]) / n if bias else None
    # With a bias, R² is relative to the variance of the targets, else to their squares.
    total = moments["tt"] - (moments["t"].square().sum() / n if bias else 0.0)
    unexplained = total - 2 * (weight.T * ut).sum() + ((weight @ uu) * weight).sum()
    explained = float(1.0 - unexplained / total) if total > 0 else float("nan")
    return weight, offset, explained


Fit = Literal["lstsq", "sgd", "lstsq+sgd"]
# Number of steps in a mean loss, by which the best adapter is chosen.
WINDOW = 25
# Number of batches on which the last adapter is compared with the initial adapter.
COMPARED_BATCHES = 8


@typed
@dataclass(frozen=True)
class StitchTraining:
    """Settings of gradient descent for an adapter.

    Attributes:
        steps: number of optimiser steps, each on one batch.
        lr: learning rate as tuned-lens defines it: torch's SGD gets `lr * (1 - momentum)`, because torch sums gradients in its
            momentum without averaging. A rate of 1.0 in torch is ten times higher, and diverges on some models.
        momentum: momentum of Nesterov's method.
        warmup: steps over which the rate rises from 0, before it falls linearly to 0 at the last step; default: a tenth of the
            steps.
        clip: largest Euclidean norm of a step's gradient, as in tuned-lens.
        relative: whether biases are learnt in units of the back model's residual, and weights in units of that residual over
            the front model's features (`typical_size` of each). Residual streams of models differ in size a hundredfold; with
            False, steps can be a hundredfold too small or too large.
        seed: seed of the order of batches.
    """

    steps: PositiveInt = 2000
    lr: PositiveFloat = 1.0
    momentum: OpenFraction = 0.9
    warmup: NonNegativeInt | None = None
    clip: Limit = 1.0
    relative: bool = True
    seed: Seed = 0

    def __post_init__(self) -> None:
        refuse_long_warmup(self.warmup, self.steps)

    @classmethod
    def paper(cls) -> StitchTraining:
        """The settings of Brown et al. 2023 (arXiv 2310.14993), for `stitch(..., adapter="affine-norm", fit="sgd")`.

        | setting | value | source |
        | --- | --- | --- |
        | `adapter` of `stitch` | affine-norm | appendix C.1: "an affine transformation (along with an additional LayerNorm)" |
        | `fit` of `stitch` | sgd | appendix C.1: SGD with Nesterov momentum on the cross-entropy |
        | `steps`, `warmup` | 2,000, None: a tenth of them, 200 | appendix C.1 |
        | `lr` | 1.0 | appendix C.1, counted as in tuned-lens, whose code the paper adapts: times 1 - momentum |
        | `momentum`, `clip`, linear fall of the rate | 0.9, 1.0, yes | not named: those of tuned-lens |
        | `relative` | False | plain weights, as in tuned-lens |

        tuned-lens has a weight decay of 1e-3 by default, which the paper does not name and this package does not have.

        Examples:
            >>> StitchTraining.paper().relative
            False
        """
        return cls(steps=2000, lr=1.0, momentum=0.9, warmup=None, clip=1.0, relative=False)

    def rate(self, step: int) -> float:
        """The learning rate of torch's SGD at a step, counted from 0.

        Examples:
            >>> rates = [StitchTraining(steps=10, warmup=2).rate(step) for step in (0, 1, 2, 9)]
            >>> [round(rate, 4) for rate in rates]
            [0.05, 0.1, 0.1, 0.0125]
        """
        warmup = self.steps // 10 if self.warmup is None else self.warmup
        peak = self.lr * (1 - self.momentum)
        if step < warmup:
            return peak * ((step + 1) / warmup)
        return peak * ((self.steps - step) / (self.steps - warmup))


def least_squares(
    kind: AdapterKind, acts: ActivationStore, back: SplitModel, layer: int, ridge: float
) -> tuple[Adapter, float]:
    """Fit an adapter by least squares on all attended tokens. Returns the adapter and its R².

    Args:
        kind: the kind of adapter.
        acts: the front model's activations.
        back: the model whose residual is the target.
        layer: layer of the back model.
        ridge: the diagonal of X'X is raised by this fraction of itself.

    Raises:
        LayersimError: activations are not finite.
    """
    total = Sums()
    moments_of = partial(cross_moments, kind.features, kind.adds_residual)
    for index in tqdm(range(len(acts)), desc="least squares", unit="batch", disable=None, leave=False):
        batch = acts.batches[index]
        hidden = acts[index]
        front_moments = feature_moments(kind.features, attended(batch, hidden).cpu())
        total = total + Sums.of(front_moments | back.moments(batch, layer, moments_of, hidden))
    for name, split_model, number in (("u", acts.front, acts.layer), ("tt", back, layer)):
        if not bool(total[name].isfinite().all()):
            raise LayersimError(
                f"Activations of {split_model.model.name} at {split_model.model.layers[number]} are not finite, so least "
                f"squares has no solution. {WHY_NOT_FINITE}"
            )
    tokens = int(total["count"])
    width = len(total["u"])
    if tokens < 2 * width:
        warn(
            f"Least squares has {tokens} tokens for {width} features, so the adapter overfits these tokens. Pass more data, or "
            "ridge=."
        )
    weight, bias, explained = solve(total.fields, ridge, kind.has_bias)
    return Adapter(kind.name, weight, bias), explained


def identity_adapter(kind: AdapterKind, d_front: int, d_back: int) -> Adapter:
    """Identity adapter from which gradient descent starts.

    Raises:
        LayersimError: the widths differ.
    """
    if d_front != d_back:
        raise LayersimError(
            f"`fit` is 'sgd', which needs residual streams of equal width; the widths are {d_front} and {d_back}. Use "
            "fit='lstsq+sgd'."
        )
    weight = torch.zeros(d_back, d_front) if kind.adds_residual(d_front, d_back) else torch.eye(d_back)
    bias = torch.zeros(d_back).double() if kind.has_bias else None
    return Adapter(kind.name, weight.double(), bias)


class StitchDescent(Descent):
    """Steps of gradient descent that train an adapter on the back model's loss.

    A step runs only the layers above the stitch point. The parameters are changes to the initial weight and bias, in
    the units of `StitchTraining.relative`.

    Args:
        start: the initial adapter.
        explained: R² of its least squares, for the file.
        acts: the front model's activations.
        back: the back model.
        layer: layer of the back model at which activations enter.
        targets: targets of each batch.
        training: settings of the training.
        progress: keeps the states of all stitches of the call.
        key: name of the stitch in `progress`.

    Attributes:
        best: the lowest mean loss over a window of steps.
        stopped: the step, from 0, at which the loss exploded; -1 if it did not.
    """

    nested = True
    moments = ("momentum_buffer",)

    def __init__(
        self,
        start: Adapter,
        explained: float,
        acts: ActivationStore,
        back: SplitModel,
        layer: int,
        targets: list[Tensor],
        training: StitchTraining,
        progress: Progress,
        key: str,
    ) -> None:
        assert start.weight is not None
        self.start = start
        self.explained = explained
        self.acts = acts
        self.back = back
        self.layer = layer
        self.targets = targets
        self.training = training
        self.progress = progress
        self.key = key
        self.dtype = start.weight.dtype
        # Initial weight and bias by name.
        self.initial = {name: part.to(back.device) for name, part in start.named_buffers()}
        # Units of the learnt weight and bias, measured on the first batch.
        self.units = {"weight": 1.0, "bias": 1.0}
        if training.relative:
            batch = acts.batches[0]
            # Apple's GPUs have no float64.
            features = start.definition.features(attended(batch, acts[0]).cpu())
            back_size = typical_size(attended(batch, back.hidden(batch, layer)).cpu())
            self.units = {"weight": back_size / typical_size(features), "bias": back_size}
        changes = {name: nn.Parameter(torch.zeros_like(part)) for name, part in self.initial.items()}
        optimiser = torch.optim.SGD(changes.values(), lr=training.rate(0), momentum=training.momentum, nesterov=True)
        title = f"{acts.front.model.layers[acts.layer]} into {back.model.layers[layer]}"
        super().__init__(title, changes, optimiser, training)
        self.best = math.inf
        self.stopped = -1
        self._best_changes: dict[str, Tensor] = {}
        self._shuffle = Shuffle(len(acts), training.seed)

    def restore(self, note: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.curve = tensors["curve"].tolist()
        self.best = note["best"]
        self.stopped = note["stopped"]
        self.load(tensors)
        self._best_changes = {name: tensors[f"best/{name}"] for name in self.initial if f"best/{name}" in tensors}

    def snapshot(self) -> Snapshot | None:
        # In the middle of a step, the file keeps the state before.
        if self.consistent:
            note = {"done": False, "kind": self.start.kind, "best": self.best, "stopped": self.stopped}
            # Copies: a later step changes parameters in place.
            tensors = {name: value.clone() for name, value in self.tensors().items()}
            tensors |= {f"start {name}": part for name, part in self.start.named_buffers()}
            tensors |= {f"best/{name}": part for name, part in self._best_changes.items()}
            tensors["curve"] = torch.tensor(self.curve, dtype=torch.float64)
            self.progress.states[self.key] = note | {"explained": self.explained}, tensors
        return self.progress.snapshot()

    def weight_and_bias(self, changes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Dict of the adapter's weight and bias. Each is the initial value plus `changes` times `units`."""
        return {name: part + changes[name] * self.units[name] for name, part in self.initial.items()}

    def entering(self, index: int, changes: Mapping[str, Tensor]) -> Tensor:
        """The adapter's output for a batch (`batch pos d_back`)."""
        hidden = self.acts[index].to(self.back.device, self.dtype)
        x: Tensor = functional_call(self.start, self.weight_and_bias(changes), hidden)
        return x

    def loss_and_gradients(self) -> float:
        index = self._shuffle.row(self.step)
        with torch.enable_grad():
            x = self.entering(index, self.parameters)
            loss, gradient = self.back.loss_and_gradient(self.acts.batches[index], self.targets[index], self.layer, x)
        torch.autograd.backward(x, gradient.to(x))
        return loss

    def diverges(self, losses: Sequence[float]) -> bool:
        first = (*self.curve, *losses)[0]
        # A loss that is NaN is not below the limit, either.
        return not all(loss <= 1.5 * first + 3 for loss in losses)

    def on_divergence(self, losses: Sequence[float]) -> None:
        self.stopped = self.step
        self.curve += losses

    def apply(self) -> None:
        super().apply()
        if self.step % WINDOW == 0:
            recent = sum(self.curve[-WINDOW:]) / WINDOW
            if recent < self.best:
                self.best = recent
                self._best_changes = self._current_changes()

    def status(self) -> str:
        recent = self.curve[-WINDOW:]
        return f"loss {sum(recent) / len(recent):.3f}"

    def _current_changes(self) -> dict[str, Tensor]:
        return {name: part.detach().clone() for name, part in self.parameters.items()}

    def run(self) -> Adapter:
        """Train to the last step. Returns the best adapter if the loss exploded or rose, else the last.

        A warning says which adapter is kept if it is not the last.
        """
        if self.stopped < 0:
            run_steps(self, self.progress.file)
        self.snapshot()
        last = "the last adapter"
        best = "the best adapter"
        initial = "the initial adapter"
        # Changes to the initial weight and bias, by name of the adapter.
        candidates = {}
        if self.stopped < 0:
            candidates[last] = self._current_changes()
        if self._best_changes:
            candidates[best] = {name: part.to(self.initial[name]) for name, part in self._best_changes.items()}
        candidates[initial] = {name: torch.zeros_like(part) for name, part in self.initial.items()}
        losses = {name: self._loss_of(candidates[name]) for name in (last, initial) if name in candidates}
        chosen = last
        # A loss that is NaN is not lower, either.
        if last not in candidates or not losses[last] <= losses[initial]:
            reason = "Training ended with a higher loss than it began with"
            if self.stopped >= 0:
                reason = f"The loss exploded at step {self.stopped + 1} of {self.steps}"
            if best in candidates:
                losses[best] = self._loss_of(candidates[best])
            ranked = {name: math.inf if math.isnan(losses[name]) else losses[name] for name in candidates}
            chosen = min(ranked, key=lambda name: ranked[name])
            losses_in_words = ", ".join(f"{losses[name]:.4g} ({name})" for name in candidates)
            rate = min(1.0, self.training.lr / 10)
            warn(
                f"{reason}. Losses on training batches: {losses_in_words}. The result holds {chosen}. Try "
                f"StitchTraining(lr={rate:g})."
            )
        parts = {name: part.cpu() for name, part in self.weight_and_bias(candidates[chosen]).items()}
        return Adapter(self.start.kind, **parts)

    def _loss_of(self, changes: Mapping[str, Tensor]) -> float:
        """Mean loss on a few evenly spaced batches, for the adapter with these changes."""
        total = 0.0
        count = 0.0
        stride = max(1, len(self.acts) // COMPARED_BATCHES)
        for index in range(0, len(self.acts), stride):
            with torch.no_grad():
                x = self.entering(index, changes)
            scores = self.back.score(self.acts.batches[index], self.targets[index], self.layer, x)
            total += float(scores["loss"].sum())
            count += float(scores["count"].sum())
        return total / count


def typical_size(hidden: Tensor) -> float:
    """Geometric mean over tokens of the root mean square of residuals (`token d_model`)."""
    sizes = hidden.double().square().mean(-1).sqrt()
    # The logarithm of 0 would make the mean 0.
    sizes = sizes[sizes > 0]
    return float(sizes.log().mean().exp()) if len(sizes) else 1.0
