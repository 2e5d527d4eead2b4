"""`Needs`: what an analyzer reads, and what it asks of the models and the data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from ..core.errors import LayersimError
from ..core.wording import brief
from ..data.labels import LabelSource

ModelsNeed = Literal["one", "one_or_two", "two"]
SiteNeed = Literal["any", "equal_width", "stream", "every_block"]
HeadNeed = Literal["none", "logits", "norm", "positions"]
FirstPassNeed = Literal["model", "data"]
PassOfSums = Literal["main", "first"]
Dominance = Literal["samples", "power", "variance"]

# The words that each field may hold.
ALLOWED_WORDS = {
    "models": get_args(ModelsNeed),
    "sites": get_args(SiteNeed),
    "head": get_args(HeadNeed),
    "labels": get_args(LabelSource),
    "first_pass": get_args(FirstPassNeed),
    "largest_sums": get_args(PassOfSums),
}


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Declaration of an analyzer: the models, sites and positions that it reads, and how a run passes them on.

    A class declares it once, as `needs = Needs(...)`; a class whose options decide has a property `needs` instead. The default
    is an analyzer of one model that reads any sites and any positions, and calls nothing of the model.

    Attributes:
        models: the models that the kernel takes, each as a view of the same tokens: "one"; "one_or_two", for `analyze` and
            `compare`; or "two", for `compare` alone.
        symmetric: whether two models in the other order give the transposed result, which `transposed` of the result is.
        one_model_at_a_time: whether models to compare run one after another, so that only their statistics of a batch are held.
        sites: "any"; "equal_width", any sites of one width; "stream", the residual stream after some or all blocks; or
            "every_block", the residual stream after every block.
        resid_mid: whether the residual stream may also be read between attention and MLP.
        families: families of sites that the analyzer always reads, whatever sites the user asked for; none for those of the
            user.
        optional_families: further families that it reads where the model has them.
        head: what the kernel takes from the model's output head. "none"; "logits", by `view.unembed`, at the positions that the
            head reads; "norm", the final norm, at any position; or "positions", activations at the positions that the head
            reads. For logits and norm, the logit lens is first compared with the model's own logits.
        calls: whether the kernel replays blocks, through `view.calls`.
        labels: the source of labels: "none"; "next_token"; "data", a column of the data; or "rows", a tensor by row.
        whole_rows: whether the kernel needs all tokens of a row at once. Single steps of cached generation then raise an error.
        whole_texts: whether the kernel needs all rows of a text at once. A forward pass then holds whole texts.
        single_texts: whether each row must be a single text of the data, known by its number. Packed rows and `attach` then
            raise an error.
        first_pass: what a first pass reads: activations of the "model"; or tokens and labels of the "data" alone, so that the
            model does not run. `Analyzer.first_kernel` says whether there is a first pass.
        one_pass: for an analyzer with a first pass, the call of its variant without a first pass.
        largest_sums: the pass with the large sums, which `Analyzer.sum_numbers` counts.
        in_process: whether sums are computed in this process only. Models on servers then raise an error.
        dominance: what has more weight in the measure if it is large, so that the run warns if a few dominate: "samples"; and
            dimensions, by "power" if the measure reads activations as they are, by "variance" if it subtracts means.

    Raises:
        LayersimError: a field holds another word.

    Examples:
        >>> lens = Needs(sites="stream", head="logits")
        >>> lens.unembeds, lens.positions_of_head, lens.single_positions
        (True, True, True)
        >>> Needs(sites="stream", labels="data").single_positions
        False
    """

    models: ModelsNeed = "one"
    symmetric: bool = False
    one_model_at_a_time: bool = False
    sites: SiteNeed = "any"
    resid_mid: bool = False
    families: tuple[str, ...] = ()
    optional_families: tuple[str, ...] = ()
    head: HeadNeed = "none"
    calls: bool = False
    labels: LabelSource = "none"
    whole_rows: bool = False
    whole_texts: bool = False
    single_texts: bool = False
    first_pass: FirstPassNeed = "model"
    one_pass: str = ""
    largest_sums: PassOfSums = "main"
    in_process: bool = False
    dominance: tuple[Dominance, ...] = ()

    def __post_init__(self) -> None:
        # A misspelt word would otherwise measure other sites or other positions.
        for name, words in ALLOWED_WORDS.items():
            word = getattr(self, name)
            if word not in words:
                raise LayersimError(f"`{name}` of `Needs` is {brief(word)}; it must be {' or '.join(map(repr, words))}.")

    @property
    def unembeds(self) -> bool:
        """Whether the kernel applies the model's head, so that the logit lens is checked against the model's logits."""
        return self.head in ("logits", "norm")

    @property
    def positions_of_head(self) -> bool:
        """Whether the kernel reads activations at the positions that the model's head reads."""
        return self.head in ("logits", "positions")

    @property
    def single_positions(self) -> bool:
        """Whether the kernel needs activations of single positions. If so, `positions="mean"` raises an error."""
        return self.unembeds or self.calls or self.labels == "next_token"

    @property
    def residual_stream(self) -> bool:
        """Whether the sites must lie on the residual stream."""
        return self.sites in ("stream", "every_block")

    @property
    def own_labels(self) -> bool:
        """Whether labels come with the data or as a tensor; next tokens do not."""
        return self.labels in ("data", "rows")
