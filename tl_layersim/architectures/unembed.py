"""Logit lens: maps a residual to logits by final norm, unembedding, logit scale and soft-cap.

`Unembed`, `Pool`, `LayerHeads` and `unembed_gap` are shipped to NDIF servers by value, as source: they use torch and the
standard library alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError

HeadModule = Callable[[Tensor], Any]
# Names of heads that give classes, not tokens.
CLASSIFIERS = ("score", "classifier", "class_labels_classifier")


# Functions between the modules of a head, by the names that stand for them among its parts.
FUNCTIONS: dict[str, HeadModule] = {"torch.relu": torch.relu}
# A module or a function of a head; or modules that each read an equal part of the vector, and whose outputs are averaged.
HeadPart = str | tuple[str, ...]


@dataclass(frozen=True)
class Pool:
    """Pooling over positions: concatenates the vectors at single positions and a mean over positions.

    Attributes:
        single: positions whose vectors are used as they are.
        mean_from: first position of the mean over attended positions; None for no mean.
        before_norm: whether pooling comes before the final norm.

    Examples:
        >>> x = torch.tensor([[[1.0], [2.0], [4.0]]])
        >>> Pool((0,), 1)(x, torch.ones(1, 3, dtype=torch.bool)).tolist()
        [[1.0, 3.0]]
    """

    single: tuple[int, ...] = ()
    mean_from: int | None = None
    before_norm: bool = False

    @property
    def vectors(self) -> int:
        """Number of vectors that are concatenated."""
        return len(self.single) + (self.mean_from is not None)

    def __call__(self, x: Tensor, attended: Tensor) -> Tensor:
        """Pool vectors (`... row pos d_model`) to one vector per row (`... row width`).

        Args:
            x: vectors of all positions.
            attended: `row pos`, False at padding.
        """
        vectors = [x[..., place, :] for place in self.single]
        if self.mean_from is not None:
            averaged = attended[:, self.mean_from :, None].to(x.device)
            sums = x[..., self.mean_from :, :].masked_fill(~averaged, 0).sum(-2)
            vectors.append(sums / averaged.sum(-2))
        return torch.cat(vectors, -1)

    def written(self, x: str) -> str:
        """The pooled vector as a formula; `x` stands for the vectors of all positions."""
        vectors = [f"{x}[{place}]" for place in self.single]
        if self.mean_from is not None:
            vectors.append(f"mean({x}[{self.mean_from}:])" if self.mean_from else f"mean({x})")
        return vectors[0] if len(vectors) == 1 else f"cat({', '.join(vectors)})"


@dataclass(frozen=True)
class Tail:
    """The part of a forward pass behind the last block, which runs as it is in place of single modules.

    Attributes:
        blocks: paths of the blocks, which are passed over.
        lengths: for each block, the length of the tuple that it returns; 0 if it returns the residual alone.
        token_input: name of the input that holds token ids.
        token: the token id that stands for any input.
    """

    blocks: tuple[str, ...]
    lengths: tuple[int, ...]
    token_input: str
    token: int


@dataclass(frozen=True)
class Head:
    """The modules between the last block and the logits, by module path.

    Attributes:
        norm: path of the final norm, "" if the model has none.
        parts: the steps from the normed residual to logits: module paths, names in `FUNCTIONS`, and tuples of module paths
            whose outputs are averaged.
        reads: positions that the head reads: "every", "first", "last", or several as one vector ("rows").
        scale: factor of the logits.
        soft_cap: c in c tanh(logits / c); None if the logits are not capped.
        scales_input: whether the model scales the head's input, so that the head's output is scaled already.
        pool: pooling of the positions if `reads` is "rows"; else None.
        hides_norm: whether one of the parts may be or contain the final norm, which no lens can then leave out.
        tail: if the model does more than its modules show, the part of its forward pass that runs in place of `parts`.
    """

    norm: str
    parts: tuple[HeadPart, ...]
    reads: str = "every"
    scale: float = 1.0
    soft_cap: float | None = None
    scales_input: bool = False
    pool: Pool | None = None
    hides_norm: bool = False
    tail: Tail | None = None

    @property
    def classifies(self) -> bool:
        """Whether the head predicts classes, not tokens."""
        return self.reads != "every" or self.parts[-1] in CLASSIFIERS

    @property
    def modules(self) -> tuple[str, ...]:
        """Module paths after the final norm, in order."""
        paths: list[str] = []
        for part in self.parts:
            branches = part if isinstance(part, tuple) else (part,)
            paths += [path for path in branches if path not in FUNCTIONS]
        return tuple(paths)

    def under(self, prefix: str) -> Head:
        """The same head with all paths below `prefix`, for a model inside another model."""

        def with_prefix(part: HeadPart) -> HeadPart:
            if isinstance(part, tuple):
                return tuple(f"{prefix}.{path}" for path in part)
            return part if part in FUNCTIONS else f"{prefix}.{part}"

        norm = f"{prefix}.{self.norm}" if self.norm else ""
        return replace(self, norm=norm, parts=tuple(with_prefix(part) for part in self.parts))

    def written(self, normed: bool = True) -> str:
        """The map from the residual x to logits as a formula."""
        text = "x"
        if self.pool is not None and self.pool.before_norm:
            text = self.pool.written(text)
        if self.norm and normed:
            text = f"{self.norm}({text})"
        if self.pool is not None and not self.pool.before_norm:
            text = self.pool.written(text)
        if self.tail is not None:
            return f"forward pass after {self.tail.blocks[-1]} ({text})"
        for part in self.parts:
            text = f"{part}({text})" if isinstance(part, str) else f"mean of {' and '.join(part)} ({text})"
        if self.scale != 1.0:
            text = f"{self.scale:g} {text}"
        if self.soft_cap is not None:
            text = f"{self.soft_cap:g} tanh({text} / {self.soft_cap:g})"
        return text

    def __str__(self) -> str:
        return self.written()


@dataclass(frozen=True)
class Branches:
    """The mean output of several head modules, each applied to an equal chunk of the last axis."""

    modules: tuple[HeadModule, ...]

    def __call__(self, x: Tensor) -> Tensor:
        chunks = x.chunk(len(self.modules), -1)
        outputs = [tensor_of(module(chunk)) for module, chunk in zip(self.modules, chunks, strict=True)]
        return torch.stack(outputs).mean(0)


def head_parts(head: Head, module_at: Callable[[str], HeadModule]) -> tuple[HeadModule, ...]:
    """The modules and functions of a head, for `Unembed`.

    Args:
        head: the head.
        module_at: returns the module at a path.
    """

    def part_at(part: HeadPart) -> HeadModule:
        if isinstance(part, tuple):
            return Branches(tuple(module_at(path) for path in part))
        return FUNCTIONS[part] if part in FUNCTIONS else module_at(part)

    return tuple(part_at(part) for part in head.parts)


@dataclass(frozen=True)
class Unembed:
    """The logit lens of a model, which maps residuals to logits in the model's dtype.

    Attributes:
        norm: the final norm; None if the model has none.
        parts: the modules after it, in order.
        reads: see `Head`.
        scale: see `Head`.
        soft_cap: see `Head`.
        scales_input: see `Head`.
        dtype: dtype of the head's weights; None if they are not floating-point.
        norm_dtype: dtype of the norm's weights; None if it has none, and the norm uses the head's dtype.
        device: device of the head's weights; None if the modules move their inputs themselves.
        pool: see `Head`.
        linear: the last part if it is a plain linear layer in this process; else None. Its logits are written into reused
            memory, which saves a fifth of the time on a CPU.
    """

    norm: HeadModule | None
    parts: tuple[HeadModule, ...]
    reads: str
    scale: float
    soft_cap: float | None
    dtype: torch.dtype | None
    device: torch.device | None
    linear: torch.nn.Linear | None = None
    norm_dtype: torch.dtype | None = None
    scales_input: bool = False
    pool: Pool | None = None

    def raw(self, x: Tensor, normed: bool = True, spare: Tensor | None = None) -> Tensor:
        """Compute logits before scale and soft-cap.

        Args:
            x: residuals `... d_model`; if the head reads rows, the output of `pooled`, with normed=False.
            normed: whether the final norm is applied.
            spare: memory `token vocabulary` for the logits; None to allocate it.
        """
        if spare is None or self.linear is None:
            logits = self._apply_parts(self.parts, x, normed)
            return logits.reshape(*x.shape[:-1], logits.shape[-1])
        features = self._apply_parts(self.parts[:-1], x, normed)
        features = features.reshape(-1, features.shape[-1]).to(self.linear.weight.dtype)
        weight = self.linear.weight.T
        bias = self.linear.bias
        logits = spare[: len(features)]
        if bias is None:
            torch.mm(features, weight, out=logits)
        else:
            torch.addmm(bias, features, weight, out=logits)
        return logits.reshape(*x.shape[:-1], logits.shape[-1])

    def features(self, x: Tensor, normed: bool = True) -> Tensor:
        """Compute the input of the head's last part (`... width`): normed residuals, or the output of a pooler.

        Args:
            x: residuals `... d_model`.
            normed: whether the final norm is applied.
        """
        out = self._apply_parts(self.parts[:-1], x, normed)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _apply_parts(self, parts: tuple[HeadModule, ...], x: Tensor, normed: bool) -> Tensor:
        """Apply some parts of the head to residuals, in the dtype of the head."""
        if normed:
            x = self.normed(x)
        # One row of many positions; for heads that read one position of a row, many rows of one position.
        x = x.reshape(1, -1, x.shape[-1]) if self.reads == "every" else x.reshape(-1, 1, x.shape[-1])
        x = x.to(device=self.device, dtype=self.dtype)
        for part in parts:
            # A norm that is kept in float32 returns float32, which a half-precision head does not accept.
            x = tensor_of(part(x if self.dtype is None else x.to(self.dtype)))
        return x

    def normed(self, x: Tensor) -> Tensor:
        """Apply the final norm to residuals (`... d_model`), in the model's dtype; without a norm they are unchanged."""
        if self.norm is None:
            return x
        residuals = x.to(device=self.device, dtype=self.norm_dtype or self.dtype).reshape(1, -1, x.shape[-1])
        return tensor_of(self.norm(residuals)).reshape(x.shape)

    def pooled(self, x: Tensor, attended: Tensor, normed: bool = True) -> Tensor:
        """Pool the residuals of each row (`... row pos d_model`) to the input of a classification head (`... row width`).

        Args:
            x: residuals of all positions.
            attended: `row pos`, False at padding.
            normed: whether the final norm is applied.
        """
        assert self.pool is not None
        if not normed:
            return self.pool(x, attended)
        if self.pool.before_norm:
            return self.normed(self.pool(x, attended))
        return self.pool(self.normed(x), attended)

    def __call__(self, x: Tensor, normed: bool = True, spare: Tensor | None = None) -> Tensor:
        """Compute logits of residuals. The arguments are those of `raw`."""
        return self.finish(self.raw(x, normed, spare))

    def finish(self, logits: Tensor) -> Tensor:
        """Apply the logit scale and soft-cap."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits


def tensor_of(output: Any) -> Tensor:
    """The logits or residual in a module's output: the output itself, `.logits`, or the first tensor."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    values: Any = ()
    if isinstance(output, Mapping):
        values = output.values()
    elif isinstance(output, list | tuple):
        values = output
    for value in values:
        if isinstance(value, Tensor) and value.dim() > 0:
            return value
    raise ValueError(f"the output is a {type(output).__name__} without a tensor; it must hold logits or a residual")


def plain_linear(module: torch.nn.Module) -> torch.nn.Linear | None:
    """The module itself if it is a plain linear layer with weights in this process; else None."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return None
    # torchao keeps the class of the module and stores another kind of tensor in it.
    if module.weight.is_meta or type(module.weight) is not torch.nn.Parameter:
        return None
    return module


def unembed_gap(unembed: Unembed, hidden: Tensor, logits: Tensor, attended: Tensor, finished: bool = True) -> Tensor:
    """The norm of the logit lens's error at the last layer, and the norm of the model's logits.

    Args:
        unembed: the lens.
        hidden: `pos d_model`, output of the last block for the row.
        logits: the model's logits, `pos vocabulary` at all or only the last positions; `classes` for a classifier.
        attended: `pos`, the positions that the model attended to.
        finished: whether scale and soft-cap were applied to the logits.

    Returns:
        `2`, float64: the Euclidean norm of the difference, and that of the logits; infinite and NaN if the shapes differ. It is
        a norm, not the largest difference, because half precision is inexact at some ids and a wrong head at all.
    """
    # One vector for each row, without positions.
    hidden = hidden[None] if hidden.dim() == 1 else hidden
    if unembed.reads == "every":
        logits = logits[None] if logits.dim() == 1 else logits
        count = min(8, logits.shape[0])
        hidden = hidden[-count:]
        logits = logits[-count:]
    elif unembed.pool is not None:
        hidden = unembed.pooled(hidden[None], attended[None])[0]
    else:
        hidden = hidden[int(attended.nonzero()[-1]) if unembed.reads == "last" else 0]
    # What `pooled` returns has the norm already.
    normed = unembed.pool is None
    if finished:
        lens_logits = unembed(hidden, normed)
    else:
        lens_logits = unembed.raw(hidden, normed) * (unembed.scale if unembed.scales_input else 1.0)
    if lens_logits.shape != logits.shape:
        return torch.tensor([torch.inf, torch.nan], dtype=torch.float64)
    logits = logits.detach().double().cpu()
    lens_logits = lens_logits.detach().double().cpu()
    # Where both are infinite, they agree.
    is_compared = logits.isfinite() | lens_logits.isfinite()
    error = torch.where(is_compared, lens_logits - logits, 0.0)
    finite_logits = torch.where(logits.isfinite(), logits, 0.0)
    return torch.stack([error.norm(), finite_logits.norm()])


def rounding(*dtypes: torch.dtype) -> float:
    """Largest relative difference that rounding can cause in the least precise of the given dtypes.

    It is at least that of float32: transformers computes rotary embeddings, RMS norms and some softmaxes in float32, whatever
    the dtype of the weights.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (*dtypes, torch.float32))
    # Half precision rounds at every step of the norm and the product; float32 differs by the order of its sums.
    return 2.5 * eps if eps > 1e-4 else 500 * eps


@dataclass(frozen=True, eq=False)
class LayerHeads:
    """A linear head for each layer below the last, in place of the last part of the model's head.

    Attributes:
        weight: `layer vocabulary d_model`, starting with the first block.
        bias: `layer vocabulary`; None if the heads have none.
        digest: digest of weight and bias, a cache key.
    """

    weight: Tensor
    bias: Tensor | None
    digest: str

    def fitting(self, unembed: Unembed, x: Tensor) -> LayerHeads:
        """The heads on the residuals' device, after a check that they fit the model's head.

        Args:
            unembed: the model's logit lens, whose last part the heads replace.
            x: `layer token d_model`, the outputs of all blocks, pooled if the head reads rows.

        Raises:
            LayersimError: the heads have another input width or another number of classes than the model's head.
        """
        if x.shape[1]:
            vector = x[-1, :1]
            classes = unembed(vector, normed=False).shape[-1]
            width = unembed.features(vector, normed=False).shape[-1]
            expected = (len(x) - 1, classes, width)
            if expected != tuple(self.weight.shape):
                raise LayersimError(
                    f"`heads` has shape {tuple(self.weight.shape)}, `layer vocabulary d_model`; for this model it must "
                    f"have shape {expected}."
                )
        return self.on(x.device)

    def on(self, device: torch.device) -> LayerHeads:
        """The same heads on a device."""
        if self.weight.device == device:
            return self
        bias = None if self.bias is None else self.bias.to(device)
        return replace(self, weight=self.weight.to(device), bias=bias)

    def rows(self, layer: int, ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Weight (`vocabulary d_model`) and bias (`vocabulary`) of one layer's head.

        Args:
            layer: index of the block, from 0.
            ids: token ids; None for the whole vocabulary.
        """
        weight = self.weight[layer]
        bias = None if self.bias is None else self.bias[layer]
        if ids is None:
            return weight, bias
        ids = ids.to(weight.device)
        return weight[ids], None if bias is None else bias[ids]

    def logits(self, unembed: Unembed, x: Tensor, layer: int, normed: bool) -> Tensor:
        """Compute logits (`... vocabulary`) of residuals with one layer's head, in the heads' dtype.

        Args:
            unembed: the model's logit lens, whose last part the layer's head replaces.
            x: `... d_model`, the block's output.
            layer: index of the block, from 0.
            normed: whether the final norm is applied.
        """
        weight, bias = self.rows(layer)
        features = unembed.features(x, normed).to(device=weight.device, dtype=weight.dtype)
        return unembed.finish(torch.nn.functional.linear(features, weight, bias))


def layer_logits(
    unembed: Unembed, x: Tensor, normed: bool, heads: LayerHeads | None = None, spare: Tensor | None = None
) -> Tensor:
    """Compute the logits of all layers (`token layer vocabulary`).

    Args:
        unembed: the model's logit lens, for the last layer, and for all layers if `heads` is None.
        x: `token layer d_model`, the outputs of all blocks.
        normed: whether the final norm is applied.
        heads: heads of the layers below the last; None for the model's own.
        spare: memory `(token layer) vocabulary` for the logits; None to allocate it.
    """
    if heads is None:
        return unembed(x, normed, spare)
    last_logits = unembed(x[:, -1], normed)
    tokens, layers = x.shape[:2]
    shape = (tokens, layers, last_logits.shape[-1])
    if spare is None:
        dtype = torch.promote_types(last_logits.dtype, heads.weight.dtype)
        logits = torch.empty(shape, dtype=dtype, device=last_logits.device)
    else:
        logits = spare[: tokens * layers].view(shape)
    for layer in range(layers - 1):
        logits[:, layer] = heads.logits(unembed, x[:, layer], layer, normed)
    logits[:, -1] = last_logits
    return logits
