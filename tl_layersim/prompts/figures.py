"""Figures of one prompt: each layer's prediction after each token, and each token's path through the layers."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from jaxtyping import Float64
from torch import Tensor

from ..activations.view import View
from ..analyzers.analyzer import need_head
from ..core.arguments import PositiveFloat, typed
from ..core.errors import LayersimError
from ..core.result_declarations import NOT_MEASURED, ValuesAlias, result_class
from ..core.results import Result, axes
from ..data.data import Data
from ..data.labels import NO_LABEL
from ..engine.run_arguments import with_tokenizer
from ..lens.single_tokens import token_id
from ..lens.statistics import ids_at, likeliest, read_lens, saturation_layers
from ..remote.open_model import open_source
from ..sources.activation_checks import need_known_norm, refuse_bad_logits
from .prompt_forward import run_on_prompt

if TYPE_CHECKING:
    import pandas

# Number of most likely next tokens in a prediction grid, at each block and token.
RANKS = 5


@result_class
class PredictionGrid(Result):
    """Most likely next token at each block and token of a prompt, by the logit lens. Float64.

    Attributes:
        values: `token layer`, the same as `probability`: probability of the most likely next token.
        saturation_layer: `token`, index from 0 of the first block from which on the most likely next token is the final one.
        entropy: `token layer`, entropy of the block's distribution, in nats.
        top_probability: `token layer rank`, probabilities of the five most likely next tokens.
        words: `token layer`, the most likely next tokens as text.
        top_words: `token layer rank`, the five most likely next tokens as text.
        target_rank: `token layer`, rank of the token `target`: 1 + the number of tokens with a strictly larger logit. NaN
            without `target`, as is the next.
        target_probability: `token layer`, probability of the token `target`.
        tokens: the prompt's tokens as text.
        target: the token `target` as text; "" without one.
    """

    probability = ValuesAlias()
    values: Float64[Tensor, "token layer"] = axes(
        "token",
        "layer",
        label="Top-1 probability",
        title="Prediction of each layer after each token",
        within=(0, 1),
        drawn="tokens",
    )
    saturation_layer: Float64[Tensor, " token"] = axes(
        "token", label="Saturation layer (number)", title="Saturation layer of each token", within=(0, math.inf)
    )
    entropy: Float64[Tensor, "token layer"] = axes(
        "token",
        "layer",
        label="Entropy",
        unit="nats",
        title="Entropy of the predictions at each token and layer",
        within=(0, math.inf),
    )
    top_probability: Float64[Tensor, "token layer rank"] = axes("token", "layer", "rank", within=(0, 1))
    target_rank: Float64[Tensor, "token layer"] = axes(
        "token",
        "layer",
        label="Rank",
        title="Rank of the target at each token and layer",
        default=NOT_MEASURED,
        within=(1, math.inf),
    )
    target_probability: Float64[Tensor, "token layer"] = axes(
        "token",
        "layer",
        label="Probability",
        title="Probability of the target at each token and layer",
        default=NOT_MEASURED,
        within=(0, 1),
    )
    words: tuple[tuple[str, ...], ...]
    top_words: tuple[tuple[tuple[str, ...], ...], ...]
    tokens: tuple[str, ...]
    target: str = ""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Labels of the `rank` axis, from 1."""
        return tuple(range(1, len(self.top_words[0][0]) + 1))

    @typed
    def to_frame(self, field: str | None = None) -> pandas.DataFrame:
        """A tidy table with a row for each token and block, or for each entry of `field`.

        The table of `probability` has further columns: the token's position, the most likely word, and whether this word stays
        the most likely in all later blocks.
        """
        table = super().to_frame(field)
        if field in (None, "values", "probability"):
            blocks = self.values.shape[1]
            table.insert(0, "position", torch.arange(len(self.tokens)).repeat_interleave(blocks).tolist())
            table["word"] = list(itertools.chain.from_iterable(self.words))
            final = torch.arange(blocks)[None] >= self.saturation_layer[:, None]
            table["final"] = final.reshape(-1).numpy()
        return table

    def headline(self) -> dict[str, float]:
        early = self.saturation_layer < self.values.shape[1] - 1
        return {"saturated before the last block (fraction)": float(early.double().mean())}


@result_class
class TrajectoryPCA(Result):
    """Paths of a prompt's tokens in the plane of two principal components. Float64.

    Attributes:
        values: `token residual component`, coordinates. The origin is the mean of the residuals that the plane is fitted to.
        explained: `component`, fraction of the variance of these residuals along each component.
        tokens: the prompt's tokens as text.
    """

    # Labels of the `component` axis.
    components: ClassVar[tuple[str, ...]] = ("PC 1", "PC 2")
    values: Float64[Tensor, "token residual component"] = axes(
        "token", "residual", "component", title="Paths of tokens through the layers", drawn="paths"
    )
    explained: Float64[Tensor, " component"] = axes("component", label="Explained variance", unit="fraction", within=(0, 1))
    tokens: tuple[str, ...]

    def headline(self) -> dict[str, float]:
        return {"variance in the plane (fraction)": float(self.explained.sum())}


@typed
def prediction_grid(
    model: Any,
    prompt: Any,
    *,
    target: Any = None,
    norm: Literal["final", "none"] = "final",
    lens_memory_mb: PositiveFloat = 128,
) -> PredictionGrid:
    """Most likely next token at each block and token of one prompt, by the logit lens.

    Args:
        model: as in `analyze`.
        prompt: a `Data`, or a text or token ids `pos`. Without a tokenizer, words are shown as ids. For a prompt that the model
            continues, as in figure 20, pass the ids that `model.generate` returns.
        target: a token whose rank and probability are read too: its text, such as " Paris", or its id.
        norm: as in `LogitLens`.
        lens_memory_mb: as in `LogitLens`.

    Raises:
        LayersimError: the model has no head over a vocabulary, the prompt is longer than its context, or `target` is not one
            token.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), appendix C.1, figure 20.

    Examples:
        >>> import tl_layersim as lsim
        >>> grid = lsim.prompts.prediction_grid(lsim.demo_model(), "Once upon a time there was a little")
        >>> grid.words[-1][-1]
        ' girl'

        The rank of a token after each block, at the last position of the prompt.

        >>> grid = lsim.prompts.prediction_grid(lsim.demo_model(), "Once upon a time there was a little", target=" boy")
        >>> grid.target_rank[-1].int().tolist()[-1]
        2
    """
    check = partial(need_head, analyzer="prediction_grid", targets=True)
    source = open_source(model)
    if norm == "none":
        need_known_norm(source.model)
    options: dict[str, Any] = {"norm": norm}
    target_id = None
    if target is not None:
        target_id = token_id(target, with_tokenizer(source.model, Data.of(prompt).tokenizer), "target")
        options["target"] = target_id
    memory_mb = float(lens_memory_mb)
    kernel = partial(grid_kernel, normed=norm == "final", memory_mb=memory_mb, ranks=RANKS, target=target_id)
    statistics, tokens, word, provenance = run_on_prompt(source, prompt, lambda _: kernel, options, check=check, lens=True)
    refuse_bad_logits(statistics["bad"], source.model.layers)
    words = []
    for ids in statistics["best"].T.tolist():
        words.append(tuple(map(word, ids)))
    top_words = []
    for ids_of_blocks in statistics["top"].transpose(0, 1).tolist():
        top_words.append(tuple(tuple(map(word, ids)) for ids in ids_of_blocks))
    probability = statistics["probability"].double().T
    unknown = torch.full_like(probability, math.nan)
    has_target = target_id is not None
    return PredictionGrid(
        target_rank=statistics["target_rank"].double().T if has_target else unknown,
        target_probability=statistics["target_probability"].double().T if has_target else unknown,
        target="" if target_id is None else word(target_id),
        values=probability,
        saturation_layer=statistics["saturation"].double(),
        entropy=statistics["entropy"].double().T,
        top_probability=statistics["top_probability"].double().transpose(0, 1),
        words=tuple(words),
        top_words=tuple(top_words),
        tokens=tokens,
        layers=source.model.layers,
        provenance=provenance,
    )


@typed
def trajectory_pca(
    model: Any, prompt: Any, *, fit: Literal["last", "path"] = "last", sites: slice = slice(None)
) -> TrajectoryPCA:
    """Paths of one prompt's tokens through the layers, in the plane of two principal components.

    Args:
        model: as in `analyze`.
        prompt: a `Data`, or a text or token ids `pos`. `Data(prompt, skip_first=1)` leaves out the first position, whose path
            is far longer than all others in many models. Without a tokenizer, tokens are shown as ids.
        fit: residuals whose principal components span the plane: "last" for the last layer, "path" for all layers.
        sites: the residual layers to keep, such as `slice(0, 5)`. The plane does not depend on `sites`, so parts of a path can
            be compared.

    Raises:
        LayersimError: there are fewer than three tokens, no layer is kept, or the residuals of all tokens are equal.

    Source:
        Aubry et al. 2025 (arXiv 2407.07810), appendix A.2.1 and figure 17, whose rows are all, shallow and deep layers.

    Examples:
        >>> import tl_layersim as lsim
        >>> girl = lsim.Data("Once upon a time there was a little girl", skip_first=1)
        >>> path = lsim.prompts.trajectory_pca(lsim.demo_model(), girl)
        >>> path.values.shape[1:], bool(path.explained[0] > path.explained[1])
        (torch.Size([9, 2]), True)
    """
    source = open_source(model)
    layers = source.model.layers[sites]
    if not layers:
        raise LayersimError(f"`sites` is {sites}; it must keep one or more of the {len(source.model.layers)} residual layers.")
    options: dict[str, str] = {"fit": fit}
    if sites != slice(None):
        options["sites"] = str(sites)
    kernel = partial(pca_kernel, all_layers=fit == "path")
    plane, tokens, _, provenance = run_on_prompt(source, prompt, lambda _: kernel, options)
    if not bool(plane["explained"].isfinite().all()):
        raise LayersimError(
            f"All {len(tokens)} tokens of `prompt` have the same residual at the last layer, so there is no principal plane."
        )
    return TrajectoryPCA(
        values=plane["coordinates"].double()[:, sites],
        explained=plane["explained"].double(),
        tokens=tokens,
        layers=layers,
        provenance=provenance,
    )


def grid_kernel(view: View, *, normed: bool, memory_mb: float, ranks: int, target: int | None) -> dict[str, Tensor]:
    """A dict of logit-lens statistics of one prompt: top tokens, probabilities, entropies and saturation layers.

    Args:
        view: view of one row of tokens.
        normed: whether the final norm is applied to every layer.
        memory_mb: megabytes for logits.
        ranks: number of most likely tokens.
        target: id of a token whose rank and probability are read too; None for none.
    """
    no_labels = torch.full_like(view.tokens, NO_LABEL)
    ids = None if target is None else ids_at(view, target)
    lens = read_lens(view, no_labels, normed, memory_mb, 1, "none", ids=ids)
    of_target = {} if ids is None else {"target_rank": lens["rank"], "target_probability": lens["rank_prob"]}
    saturation, bad = saturation_layers(view, normed, memory_mb)
    top, top_probability = likeliest(view, normed, lens["best"], ranks)
    return of_target | {
        "bad": bad,
        "best": lens["best"],
        "entropy": lens["entropy"],
        "probability": lens["best_prob"],
        "saturation": saturation,
        "top": top,
        "top_probability": top_probability,
    }


def pca_kernel(view: View, *, all_layers: bool) -> dict[str, Tensor]:
    """A dict with the coordinates of residuals in a principal plane (`token residual component`), and the explained variance.

    Args:
        view: view of one row of tokens.
        all_layers: whether the components are those of all layers; if not, of the last layer.
    """
    residuals = view.activations.double()
    fitted = residuals.flatten(0, 1) if all_layers else residuals[-1]
    mean = fitted.mean(0)
    _, sigma, basis = torch.linalg.svd(fitted - mean, full_matrices=False)
    plane = basis[:2]
    # A component's sign is arbitrary: its largest entry is positive.
    plane = plane * plane.gather(1, plane.abs().argmax(1, keepdim=True)).sign()
    explained = sigma[:2].square() / sigma.square().sum()
    # If all tokens are alike, the differences are rounding, and there is no plane.
    has_plane = sigma[0] > 1e-5 * fitted.norm()
    return {
        "coordinates": torch.einsum("ltd,cd->tlc", residuals - mean, plane),
        "explained": torch.where(has_plane, explained, torch.nan),
    }
