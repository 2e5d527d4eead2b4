"""Split models: run the lower part up to a layer, or the upper part from a layer on."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..activations.block_call import as_positions, first_tensor
from ..architectures.output_heads import CLASSES_WITH_HEAD
from ..architectures.unembed import rounding, tensor_of
from ..core.cross_entropy import cross_entropy, cross_entropy_slopes
from ..core.errors import LayersimError
from ..core.wording import WHY_NOT_FINITE, first_line
from ..data.batches import Batch
from ..data.labels import NO_LABEL
from .activation_checks import need_stream
from .forward_arguments import with_padding_ids
from .hooked_module import HookedSource
from .hooks import ForwardRun, eval_mode, frozen_weights, on_enter, on_leave, on_tensor, temporary_hooks
from .model_description import ModelDescription
from .out_of_memory import is_out_of_memory
from .source import CanReadSites

Moments = Callable[[Tensor, Tensor], dict[str, Tensor]]
# Function from the residual at a layer to tensors by name. It is shipped to servers as source.
Reading = Callable[[Tensor], dict[str, Tensor]]
# Function from the residual that the model computes at a layer to the residual that replaces it.
Replacement = Callable[[Tensor], Tensor]


def score_of(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """A dict of sums over the positions with a target, for each row: "loss", "correct" and "count" (`row`, float64, CPU).

    "loss" is the cross-entropy, "correct" the number of correct top-1 predictions, "count" the number of targets.

    Args:
        logits: see `predictions`.
        targets: see `predictions`.
    """
    predicted, ids = predictions(logits, targets)
    row_of_target = (targets != NO_LABEL).nonzero()[:, 0].cpu()
    scores = {
        "loss": cross_entropy(predicted, ids),
        "correct": predicted.argmax(-1) == ids,
        "count": torch.ones_like(ids),
    }
    sums: dict[str, Tensor] = {}
    for name, values in scores.items():
        # On the CPU, where sums have one order.
        zeros = torch.zeros(len(targets), dtype=torch.float64)
        sums[name] = zeros.index_add(0, row_of_target, values.cpu().double())
    return sums


def loss_and_gradient_of(logits: Tensor, targets: Tensor, x: Tensor) -> dict[str, Tensor]:
    """A dict of the mean cross-entropy, "loss", and its "gradient" with respect to `x`.

    Args:
        logits: logits that were computed from `x`; see `predictions`.
        targets: see `predictions`.
        x: the residual.
    """
    predicted, ids = predictions(logits, targets)
    predicted = predicted if predicted.dtype == torch.float64 else predicted.float()
    weight = torch.full_like(ids, 1 / max(1, len(ids)), dtype=predicted.dtype)
    losses, slopes = cross_entropy_slopes(predicted, ids, weight)
    (gradient,) = torch.autograd.grad(predicted, x, slopes)
    return {"loss": losses.mean(), "gradient": gradient}


def predictions(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The logits (`target vocabulary`) at positions with a target, and these targets.

    Args:
        logits: `batch pos vocabulary`, or `batch classes` of a classifier.
        targets: `batch pos` or `batch`, NO_LABEL where there is no target.

    Raises:
        LayersimError: the shapes do not fit, or an id lies outside the vocabulary.
    """
    targets = targets.to(logits.device)
    if logits.dim() == 2 and targets.dim() == 2 and targets.shape[1] == 1:
        # Rows of one position each, such as those of a model of single vectors.
        targets = targets[:, 0]
    if logits.dim() != targets.dim() + 1:
        raise LayersimError(
            f"`labels` has shape {tuple(targets.shape)}, which does not fit logits of shape {tuple(logits.shape)}: a "
            "language model needs a label for each position, a classifier one for each row."
        )
    has_target = targets != NO_LABEL
    ids = targets[has_target]
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < logits.shape[-1]:
        raise LayersimError(
            f"`labels` holds ids from {int(ids.min())} to {int(ids.max())}; the model's classes are 0 to "
            f"{logits.shape[-1] - 1}."
        )
    # Not logits[has_target], because the backward pass of that adds one entry at a time.
    positions = has_target.flatten().nonzero()[:, 0]
    return logits.flatten(0, -2).index_select(0, positions), ids


def logits_of(output: Any) -> Tensor:
    """The logits in the output of a model.

    Raises:
        LayersimError: the model has no head.
    """
    has_residual = getattr(output, "last_hidden_state", None) is not None
    if has_residual and getattr(output, "logits", None) is None:
        raise LayersimError(
            f"`model` has no head: its output has {', '.join(output.keys())} and no logits. Load the model by "
            f"{CLASSES_WITH_HEAD}."
        )
    return tensor_of(output)


def no_known_head(model: ModelDescription) -> LayersimError:
    """The error for a model without a known head."""
    return LayersimError(
        f"{model.name} has no known head. Load it by {CLASSES_WITH_HEAD}, or name the head by open_model(model, "
        "unembed=[final norm, head])."
    )


class SplitModel(ABC):
    """A model that is split at a layer into a lower and an upper part.

    The lower part computes the residual at the layer, and the upper part starts from a residual.

    Layers are numbered as residual layers: 0 is the input of block 0, i is the output of the i-th block.

    Attributes:
        model: the description of the model.
        module: the torch module; for a model on a server its modules without weights.
        source: the source that runs the model.
    """

    model: ModelDescription
    module: nn.Module
    source: CanReadSites

    @property
    def device(self) -> torch.device:
        """Device on which inputs to the upper part must be created."""
        return torch.device("cpu")

    def settle(self, batch: Batch) -> None:
        """Raise an error if the modules are not blocks of one residual stream.

        Args:
            batch: a batch of the data; its first row is run.
        """
        if self.source.is_settled:
            return
        self.source.settle(batch)
        need_stream(self.source.model, "Stitching")
        verified = self.source.model
        self.model = replace(self.model, stream=verified.stream, basis=verified.basis, head=verified.head)

    def refuse_dependent_rows(self, batches: Sequence[Batch]) -> None:  # noqa: B027 (not known of a model on a server)
        """Raise an error if rows of a batch that run together change one another.

        Args:
            batches: the batches; one of each kind is run.

        Raises:
            LayersimError: they do.
        """

    @abstractmethod
    def evaluating(self) -> AbstractContextManager[None]:
        """A context manager that turns off dropout and the gradients of the weights."""

    @abstractmethod
    def lower(self, batch: Batch, layer: int, read: Reading) -> dict[str, Tensor]:
        """Run the lower part and return `read(residual)`. `read` runs in the process of the model."""

    @abstractmethod
    def upper(self, batch: Batch, targets: Tensor, layer: int, x: Tensor | None, gradient: bool = False) -> dict[str, Tensor]:
        """Run the upper part on the residual `x` and compare its logits with the targets.

        The whole model runs if `x` is None.

        Returns:
            The output of `score_of`; with `gradient`, of `loss_and_gradient_of`.
        """

    def hidden(self, batch: Batch, layer: int) -> Tensor:
        """The residual at a layer (`batch pos d_model`), padding included."""
        return self.lower(batch, layer, _as_hidden)["hidden"]

    def score(self, batch: Batch, targets: Tensor, layer: int = 0, x: Tensor | None = None) -> dict[str, Tensor]:
        """A dict of sums over the targets of each row: "loss", "correct" and "count" (`score_of`).

        If given, `x` replaces the residual at the layer.
        """
        sums = self.upper(batch, targets, layer, x)
        return {name: value.cpu() for name, value in sums.items()}

    def loss_and_gradient(self, batch: Batch, targets: Tensor, layer: int, x: Tensor) -> tuple[float, Tensor]:
        """The mean cross-entropy with `x` as the residual at a layer, and its gradient with respect to `x`."""
        output = self.upper(batch, targets, layer, x, gradient=True)
        return float(output["loss"]), output["gradient"].to(x.dtype)

    def moments(self, batch: Batch, layer: int, moments_of: Moments, h: Tensor) -> dict[str, Tensor]:
        """Apply `moments_of` to the residuals of two stitched models at attended tokens.

        `moments_of` runs in the process of this model.

        Args:
            batch: the tokens.
            layer: the layer of this model.
            moments_of: function from residuals `token d_front` and `token d_back` to sums. It is shipped to servers as source.
            h: residual of the front model, which runs before this model, `batch pos d_front`.
        """
        read = partial(_moments_with, moments_of=moments_of, h=h, attention=batch.attention)
        sums = self.lower(batch, layer, read)
        return {name: value.cpu() for name, value in sums.items()}

    def padded(self, batch: Batch) -> Batch:
        """The batch, with the padding id of this model's configuration at padding positions."""
        return replace(batch, tokens=with_padding_ids(self.module, batch.tokens, batch.attention))

    @contextmanager
    def _refusing_failures(self, layer: int) -> Iterator[None]:
        """A context manager that turns an exception of the model into a `LayersimError`.

        Raises:
            LayersimError: the model raised an exception.
        """
        try:
            yield
        except LayersimError:
            raise
        # Blocks that need results of blocks below them fail in any way.
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise LayersimError(
                f"{self.model.name} cannot be split at {self.model.layers[layer]}: a forward pass from there fails with "
                f"{type(error).__name__}: {first_line(error)}."
            ) from error

    def check(self, batch: Batch, targets: Tensor, layer: int) -> None:
        """Raise an error if the upper part does not reproduce the loss from the residual.

        Raises:
            LayersimError: the model cannot be split at this layer, or its loss is NaN.
        """
        with self._refusing_failures(layer):
            whole_score = self.score(batch, targets)
            x = self.hidden(batch, layer)
            split_score = self.score(batch, targets, layer, x)
            # Reversed coordinates give another direction of the same norm.
            changed_score = self.score(batch, targets, layer, x.flip(-1))
        whole_loss = float(whole_score["loss"].sum())
        split_loss = float(split_score["loss"].sum())
        changed_loss = float(changed_score["loss"].sum())
        if math.isnan(split_loss) and math.isnan(whole_loss):
            raise LayersimError(
                f"The loss of {self.model.name} in {self.model.dtype} on the first row is NaN, before anything is stitched. "
                f"{WHY_NOT_FINITE}"
            )
        tolerance = rounding(x.dtype if x.is_floating_point() else torch.float32) * (1.0 + abs(whole_loss))
        if not abs(split_loss - whole_loss) <= tolerance:
            reason = (
                f"the loss of the model is {whole_loss:.6g}, but the later blocks give {split_loss:.6g} from the same residual"
            )
        elif changed_loss == whole_loss:
            reason = f"a change of the residual at this layer leaves the loss at {whole_loss:.6g}"
        else:
            return
        raise LayersimError(
            f"{self.model.name} cannot be split at {self.model.layers[layer]}: {reason}. layers=[...] must name blocks that "
            "run one after the other."
        )


def _as_hidden(x: Tensor) -> dict[str, Tensor]:
    return {"hidden": x}


def _moments_with(x: Tensor, moments_of: Moments, h: Tensor, attention: Tensor) -> dict[str, Tensor]:
    """Apply `moments_of` to the residuals `h` and `x` at attended tokens."""
    # Apple's GPUs have no float64.
    device = torch.device("cpu") if x.device.type == "mps" else x.device
    attention = attention.to(device)
    return moments_of(h.to(device)[attention], x.to(device)[attention])


def attended(batch: Batch, x: Tensor) -> Tensor:
    """Select activations at attended positions: from (`batch pos d_model`) to (`token d_model`)."""
    return x[batch.attention.to(x.device)]


def read_residuals(
    blocks: Sequence[nn.Module],
    layers: Collection[int],
    call: Callable[[], Any],
    whole: bool = False,
    above: nn.Module | None = None,
) -> dict[int, Tensor]:
    """The residuals at some layers, from a forward pass that ends at the highest layer.

    Layers that the forward pass does not reach are missing.

    Args:
        blocks: the blocks of the model.
        layers: indices of residual layers.
        call: function that starts the forward pass.
        whole: whether the forward pass runs to its end.
        above: a module after the blocks, at whose input the forward pass ends in place of the layer itself.
    """
    residuals: dict[int, Tensor] = {}
    highest = max(layers)

    def read(layer: int, hidden: Tensor) -> None:
        residuals.setdefault(layer, hidden)
        if layer == highest and not whole and above is None:
            forward.stop()

    def stop(_: Tensor) -> None:
        if highest in residuals:
            forward.stop()

    # Forward passes of other threads go on to their end.
    with temporary_hooks() as handles, ForwardRun() as forward:
        for layer in layers:
            # Layer 0 is the input of the first block, layer i the output of the i-th one.
            block = blocks[max(layer, 1) - 1]
            handles.append(on_tensor(block, layer == 0, partial(read, layer)))
        if above is not None and not whole:
            handles.append(on_tensor(above, True, stop))
        call()
    return residuals


class LocalSplitModel(SplitModel):
    """A split model whose modules are in this process.

    Args:
        source: the source that runs the model.
        model: the description of the model.
    """

    source: HookedSource

    def __init__(self, source: HookedSource, model: ModelDescription) -> None:
        self.source = source
        self.model = model
        self.module = source.module
        self.blocks = source.blocks
        self._tuples: list[int] | None = None
        self._example: Batch | None = None

    def settle(self, batch: Batch) -> None:
        self._example = batch.first_row
        super().settle(batch)

    def refuse_dependent_rows(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            self.source.refuse_dependent_rows(batch)

    @property
    def device(self) -> torch.device:
        """Device of the model's first weights that are not offloaded."""
        devices = (p.device for p in self.module.parameters() if not p.is_meta)
        return next(devices, torch.device("cpu"))

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        autocast = torch.autocast(device_type=self.device.type, enabled=False)
        with frozen_weights(self.module), autocast, eval_mode(self.module):
            yield

    def lower(self, batch: Batch, layer: int, read: Reading) -> dict[str, Tensor]:
        with torch.no_grad():
            residual = self.read(layer, lambda: self.source.call(self.padded(batch)))
            return read(as_positions(residual.detach()))

    def upper(self, batch: Batch, targets: Tensor, layer: int, x: Tensor | None, gradient: bool = False) -> dict[str, Tensor]:
        with torch.set_grad_enabled(gradient):
            if x is None:
                return score_of(self._logits(batch), targets)
            x = x.detach().requires_grad_(gradient)
            with self.entered(layer, lambda _: x):
                logits = self._logits(batch)
            return loss_and_gradient_of(logits, targets, x) if gradient else score_of(logits, targets)

    def _logits(self, batch: Batch) -> Tensor:
        return logits_of(self.source.call(self.padded(batch)))

    def read(self, layer: int, call: Callable[[], Any]) -> Tensor:
        """The residual at a layer in a forward pass, which ends at this layer.

        Args:
            layer: index of the residual layer.
            call: function that starts the forward pass.

        Raises:
            LayersimError: the forward pass did not reach the layer.
        """
        residuals = read_residuals(self.blocks, [layer], call)
        if not residuals:
            raise LayersimError(
                f"The forward pass of {self.model.name} ({type(self.module).__name__}) did not reach "
                f"{self.model.layers[layer]}. Pass the model before torch.compile, or compile only its blocks."
            )
        return residuals[layer]

    @contextmanager
    def entered(self, layer: int, give: Replacement) -> Iterator[None]:
        """A context in which every forward pass starts at a layer, from a given residual.

        The model's own forward pass computes masks, positions and arguments of the blocks, the final norm and the head. Blocks
        below the layer do not run. Hooks on the model see the new residual as the model's own.

        Args:
            layer: index of the residual layer.
            give: function that returns the residual. Its argument is the tensor that the residual replaces, and whose dtype and
                device it gets.
        """
        tuples = self.tuples()
        blocks_below = self.blocks[:layer]
        # What stands in a block's own dict: None, or a forward that a library or the user put there.
        original_forwards = [vars(block).get("forward") for block in blocks_below]

        def replacement_of(hidden: Tensor) -> Tensor:
            x = give(hidden).to(device=hidden.device, dtype=hidden.dtype)
            return x[:, 0] if hidden.dim() == 2 else x

        def enter(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            hidden = first_tensor((*args, *kwargs.values()))
            x = replacement_of(hidden)
            new_args = tuple(x if value is hidden else value for value in args)
            new_kwargs = {name: x if value is hidden else value for name, value in kwargs.items()}
            return new_args, new_kwargs

        with temporary_hooks() as handles:
            if layer == 0:
                handles.append(on_enter(self.blocks[0], enter, first=True))
            try:
                for number, (block, length) in enumerate(zip(blocks_below, tuples, strict=False)):
                    # The last block below the layer returns the new residual; the others return their input.
                    replace_residual = replacement_of if number == layer - 1 else None
                    runs_for_bias = number == 0 and length > 1 and self._shares_bias()
                    block_forward = block.forward if runs_for_bias else None
                    # Written into the instance's dict, because the components of a TransformerBridge pass attributes on to the
                    # modules they wrap.
                    vars(block)["forward"] = _pass_on(length, replace_residual, block_forward)
                yield
            finally:
                for block, original_forward in zip(blocks_below, original_forwards, strict=True):
                    if original_forward is None:
                        vars(block).pop("forward", None)
                    else:
                        vars(block)["forward"] = original_forward

    def _shares_bias(self) -> bool:
        """Whether block 0 computes the attention bias of all blocks, as in T5."""
        first_block, *later_blocks = self.blocks
        return _computes_bias(first_block) and not any(_computes_bias(block) for block in later_blocks)

    def tuples(self, call: Callable[[], Any] | None = None) -> list[int]:
        """The length of each block's output tuple; 0 if a block returns the residual alone.

        Args:
            call: function that starts a forward pass; None for a forward pass of one row.
        """
        if self._tuples is None:
            lengths: dict[int, int] = {}

            def note(number: int, _module: nn.Module, _args: Any, output: Any) -> None:
                lengths[number] = len(output) if isinstance(output, tuple) else 0

            with temporary_hooks() as handles, torch.no_grad(), eval_mode(self.module):
                for number, block in enumerate(self.blocks):
                    handles.append(on_leave(block, partial(note, number)))
                if call is None:
                    self.source.call(self._example or _one_token())
                else:
                    call()
            self._tuples = [lengths.get(number, 0) for number in range(len(self.blocks))]
        return self._tuples


def _computes_bias(block: nn.Module) -> bool:
    """Whether a block computes an attention bias from relative positions."""
    return any(getattr(submodule, "has_relative_attention_bias", False) for submodule in block.modules())


def _one_token() -> Batch:
    token = torch.zeros(1, 1, dtype=torch.int64)
    attention = torch.ones(1, 1, dtype=torch.bool)
    return Batch(token, attention, attention, 0)


def _pass_on(length: int, replace_residual: Replacement | None, block_forward: Callable[..., Any] | None) -> Callable[..., Any]:
    """A replacement for a block's `forward`: it returns the block's input, or `replace_residual(input)`.

    The result is the first item of a tuple unless `length` is 0. With `block_forward`, the block's own forward, the block runs
    for what it returns beside the residual.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = first_tensor((*args, *kwargs.values()))
        if replace_residual is not None:
            hidden = replace_residual(hidden)
        other_outputs: Sequence[Any] = [None] * (length - 1)
        if block_forward is not None:
            with torch.no_grad():
                other_outputs = block_forward(*args, **kwargs)[1:]
        return (hidden, *other_outputs) if length else hidden

    return forward
