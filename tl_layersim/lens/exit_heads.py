"""Exit heads: one linear output head for each layer below the last."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..architectures.unembed import LayerHeads
from ..core import LayersimError, typed
from ..core.arguments import FilePath
from ..core.file_format import checksum, reading
from ..core.file_format import read as read_file
from ..core.file_format import write as write_file
from ..sources.model_description import ModelDescription


class ExitHeads:
    """Output heads of a multi-exit model: one linear head for each layer below the last.

    The last layer keeps the model's own head.

    `LogitLens`, `Saturation`, `ExitCurve`, `EarlyExit` and `evaluate_layers` take them as `heads=`.
    `finetune_aligned(objective="multi-head")` trains them, and its result has them as `heads`.

    A head replaces the last linear layer of the model's own head. Parts before it (the final norm, BERT's pooler) and logit
    scaling are the model's.

    Args:
        weight: `layer vocabulary d_model`, starting with the first block; for a classifier, `vocabulary` is its number of
            classes.
        bias: `layer vocabulary`; None for heads without a bias.
        norm: "final" if the heads read the output of the model's final norm, "none" if they read the residual itself.
        layers: names of the layers; the default is `blocks.0.hook_resid_post`, `blocks.1.hook_resid_post`, ...
        weights_hash: `provenance.weights_hash` of the model that was trained with the heads; any other model then raises an
            error. Default: any model with such layers.

    Raises:
        LayersimError: the shapes do not fit together, or the weights are not finite floating-point numbers.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), table 1, figures 4 and 7, "multi-exit/classifiers"; Teerapittayanon et al.
        2016 (arXiv 1709.01686) for exits with classifiers of their own.

    Examples:
        Copies of the model's own head read what the logit lens reads.

        >>> import tl_layersim as lsim
        >>> from tl_layersim.lens import ExitHeads
        >>> model, texts = lsim.demo_model(), lsim.demo_text()[:2]
        >>> heads = ExitHeads(model.lm_head.weight.expand(7, -1, -1))
        >>> own = lsim.analyze(model, texts, [lsim.LogitLens(heads=heads)])["logit_lens"]
        >>> bool((own.values - lsim.analyze(model, texts, [lsim.LogitLens()])["logit_lens"].values).abs().max() < 1e-4)
        True
    """

    @typed
    def __init__(
        self,
        weight: Float[Tensor, "layer vocabulary d_model"],
        bias: Float[Tensor, "layer vocabulary"] | None = None,
        *,
        norm: Literal["final", "none"] = "final",
        layers: tuple[str, ...] | list[str] | None = None,
        weights_hash: str = "",
    ) -> None:
        if layers is None:
            layers = [f"blocks.{number}.hook_resid_post" for number in range(len(weight))]
        if not len(weight):
            raise LayersimError(f"`weight` has shape {tuple(weight.shape)}; it must have one head or more.")
        if bias is not None and bias.dtype != weight.dtype:
            raise LayersimError(f"`bias` is {bias.dtype}; it must be {weight.dtype}, as `weight`.")
        if len(layers) != len(weight):
            raise LayersimError(f"`layers` has {len(layers)} names for {len(weight)} heads; it must name each head's layer.")
        for values in (weight, bias):
            if values is not None and not bool(values.isfinite().all()):
                raise LayersimError("`weight` or `bias` holds values that are NaN or infinite.")
        self.weight = weight.detach().contiguous()
        self.bias = None if bias is None else bias.detach().contiguous()
        self.norm: Literal["final", "none"] = norm
        self.layers = tuple(layers)
        self.weights_hash = weights_hash

    def __len__(self) -> int:
        return len(self.weight)

    def __repr__(self) -> str:
        size = " x ".join(map(str, self.weight.shape))
        bias = "" if self.bias is None else " with biases"
        dtype = str(self.weight.dtype).removeprefix("torch.")
        return f"ExitHeads({size}{bias}, {dtype}, norm={self.norm!r}, sha256 {self.digest[:12]})"

    @cached_property
    def digest(self) -> str:
        """SHA-256 of weights, biases and the norm, in hex digits."""
        tensors = {name: tensor.cpu() for name, tensor in self._tensors().items()}
        return checksum(self.norm, tensors)

    def _tensors(self) -> dict[str, Tensor]:
        """Weights and biases by name, without biases that the heads do not have."""
        tensors = {"weight": self.weight}
        if self.bias is not None:
            tensors["bias"] = self.bias
        return tensors

    @property
    def nbytes(self) -> int:
        """Size of weights and biases in bytes."""
        return sum(tensor.nbytes for tensor in self._tensors().values())

    @property
    def plain(self) -> LayerHeads:
        """The heads as `LayerHeads`: weights, biases and digest alone, which can be sent to a server."""
        return LayerHeads(self.weight, self.bias, self.digest)

    def to(self, to: torch.device | torch.dtype | str) -> ExitHeads:
        """The heads on another device or in another dtype.

        Args:
            to: a device or a dtype.
        """
        if self.weight.to(to) is self.weight:
            return self
        bias = None if self.bias is None else self.bias.to(to)
        return ExitHeads(self.weight.to(to), bias, norm=self.norm, layers=self.layers, weights_hash=self.weights_hash)

    @typed
    def save(self, path: FilePath) -> Path:
        """Write the heads to one safetensors file, without pickle.

        Args:
            path: path of the file.
        """
        header = {"norm": self.norm, "layers": self.layers, "weights_hash": self.weights_hash}
        return write_file(path, "heads", header, self._tensors())

    @staticmethod
    @typed
    def load(path: FilePath) -> ExitHeads:
        """Read heads from the file that `save` wrote.

        `AlignedTraining(save_to=)` writes such a file, `heads.safetensors`, into its folder.

        Args:
            path: path of the file.

        Raises:
            FileNotFoundError: the file does not exist.
            LayersimError: the file is malformed or of another kind.
        """
        header, tensors = read_file(path, ("heads",))
        with reading(path, "a complete file of heads", "Copy the file again, or train again"):
            return ExitHeads(
                tensors["weight"],
                tensors.get("bias"),
                norm=header["norm"],
                layers=header["layers"],
                weights_hash=header["weights_hash"],
            )

    def check(self, model: ModelDescription, linear: torch.nn.Linear | None = None) -> None:
        """Raise an error if the heads do not belong to this model.

        Args:
            model: the description of the model.
            linear: the last part of the model's head, if it is a linear layer in this process.

        Raises:
            LayersimError: the heads have other layers, another size or other weights than the model.
        """
        layers_below = model.layers[1:-1]
        if self.layers != layers_below:
            count = f"{len(self)} heads"
            for head_layer, model_layer in zip(self.layers, layers_below, strict=False):
                if head_layer != model_layer:
                    count += f", one of them for {head_layer}"
                    break
            examples = ", ".join(layers_below[:2]) + (", ..." if len(layers_below) > 2 else "")
            raise LayersimError(
                f"`heads` has {count}; this model needs {len(layers_below)}, one for each layer below the last: {examples}."
            )
        if model.head is not None and model.head.tail is not None:
            raise LayersimError(
                f"`heads` cannot replace the last part of the head of {model.name}, which is the {model.head}; it must be a "
                "chain of modules that ends in a linear layer."
            )
        vocabulary: int | None = None
        width: int | None = None
        if linear is not None:
            vocabulary = linear.out_features
            width = linear.in_features
        elif model.head is not None and len(model.head.parts) == 1 and model.d_model is not None:
            # A part before the last one may change the width, and a head that reads rows may join several vectors.
            vectors = 1 if model.head.pool is None else model.head.pool.vectors
            width = model.d_model * vectors
        fits_vocabulary = vocabulary is None or vocabulary == self.weight.shape[1]
        fits_width = width is None or width == self.weight.shape[2]
        if not fits_vocabulary or not fits_width:
            raise LayersimError(
                f"`heads` has shape {tuple(self.weight.shape)}, `layer vocabulary d_model`; it must be "
                f"({len(self)}, {vocabulary or 'vocabulary'}, {width}), as in the head of {model.name}."
            )
        if self.weights_hash and model.weights_hash and self.weights_hash != model.weights_hash:
            raise LayersimError(
                f"`heads` were trained with weights {self.weights_hash}, but {model.name} has weights {model.weights_hash}. "
                "For a cast or converted copy of the same weights, pass ExitHeads(heads.weight, heads.bias, norm=heads.norm)."
            )


def as_heads(heads: Any, norm: str = "") -> ExitHeads | None:
    """Convert the argument `heads` to `ExitHeads`; read the file if `heads` is a path.

    Args:
        heads: `ExitHeads`, the path of a file, or None.
        norm: norm with which the layers are read; "" for the norm of the heads.

    Raises:
        LayersimError: the file does not exist or cannot be read, or the heads were trained with another norm.
    """
    if heads is None:
        return None
    exit_heads: ExitHeads = heads if isinstance(heads, ExitHeads) else ExitHeads.load(heads)
    if norm and exit_heads.norm != norm:
        raise LayersimError(f"`norm` is {norm!r}, but `heads` were trained with norm={exit_heads.norm!r}.")
    return exit_heads
