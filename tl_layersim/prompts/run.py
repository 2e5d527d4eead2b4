"""One forward pass of a model over one prompt, and the tokens of the prompt that a user names."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..activations.view import Kernel
from ..core.errors import LayersimError
from ..core.fields import Provenance
from ..core.sums import Tally
from ..core.wording import brief
from ..data.batches import Batch, Batches, fingerprint, new_digest
from ..data.data import Data
from ..engine.chosen_analyzers import with_tokenizer
from ..engine.plan import refuse_selection
from ..engine.report_assembly import record
from ..sources.checks import check_lens, need_stream, refuse_not_finite
from ..sources.model import Model
from ..sources.source import CanReadSites, Source, running


def pair_of(position: Any, tokens: int) -> tuple[int, int]:
    """Convert a position ("last", a token or a pair of tokens) to t_in and t_out, counted from 0."""
    pair = (-1, -1) if position == "last" else (position, position) if isinstance(position, int) else position
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not all(type(token) is int for token in pair):
        raise LayersimError(
            f"`positions` contains {brief(position)}; it must be 'last', or hold indices of tokens or pairs (t_in, t_out)."
        )
    return token_of(pair[0], tokens), token_of(pair[1], tokens)


def different(chosen: list[Any]) -> list[Any]:
    """Return the chosen positions; raise an error if there are none, or if one is given twice."""
    twice = [one for one, times in Counter(chosen).items() if times > 1]
    if twice or not chosen:
        found = f"(t_in, t_out) = {twice[0][-2:]} twice" if twice else "no token"
        raise LayersimError(f"`positions` selects {found}; it must select one token or more, each once.")
    return chosen


def token_of(position: int, tokens: int) -> int:
    """The index of a token, counted from 0."""
    if not -tokens <= position < tokens:
        raise LayersimError(
            f"Token {position} does not exist: the prompt has tokens 0 to {tokens - 1}, or -1 to {-tokens} from the end."
        )
    return position % tokens


def connections_of(
    along: str, blocks: tuple[int, ...], token: int | None, positions: list[int] | None, tokens: int
) -> list[tuple[int, int, int]]:
    """Block, t_in and t_out of each connection."""
    at = token_of((0 if along == "fixed-input" else -1) if token is None else token, tokens)
    if along == "depth":
        return [(block, at, at) for block in blocks]
    first, last = (at, tokens) if along == "fixed-input" else (0, at + 1) if along == "fixed-output" else (0, tokens)
    moving = list(range(first, last)) if positions is None else [token_of(p, tokens) for p in positions]
    wrong = [t for t in moving if not first <= t < last]
    if wrong:
        raise LayersimError(
            f"`positions` contains {wrong[0]}; it must be from {first} to {last - 1} for along={along!r}, as a token has "
            "no effect on earlier ones. block_jacobians takes any pair."
        )
    if along == "self":
        return [(block, t, t) for block in blocks for t in moving]
    return [(block, at, t) if along == "fixed-input" else (block, t, at) for block in blocks for t in moving]


CALLER = "A figure of one prompt"


@dataclass(frozen=True, kw_only=True)
class PromptKernel:
    """A kernel for one prompt, and its requirements on the model and the prompt.

    Attributes:
        make: function that returns the kernel for a number of tokens, or raises an error for that number.
        check: function that raises an error if the kernel cannot run on a model.
        options: options that the provenance records.
        lens: whether the kernel reads logits, which are then compared with the model's own.
        calls: whether the kernel runs blocks again, between any tokens of the prompt.
        least: smallest number of tokens.
    """

    make: Callable[[int], Kernel]
    options: Mapping[str, Any]
    check: Callable[[Model], None] | None = None
    lens: bool = False
    calls: bool = False
    least: int = 3


class PromptOutput(NamedTuple):
    """Output of a kernel on one prompt.

    Attributes:
        tensors: by name, on the CPU.
        tokens: the counted tokens of the prompt as text.
        word: function that turns a token id into text.
        provenance: provenance of the run.
    """

    tensors: dict[str, Tensor]
    tokens: tuple[str, ...]
    word: Callable[[int], str]
    provenance: Provenance


def run_on_prompt(source: Source, prompt: Any, kernel: PromptKernel) -> PromptOutput:
    """Run a kernel on one prompt.

    Args:
        source: the model.
        prompt: a `Data`, or a text or token ids.
        kernel: the kernel and its requirements.

    Raises:
        LayersimError: the prompt or the model does not suit the kernel, or activations are not finite.
    """
    start = time.perf_counter()
    data = Data.of(prompt)
    refuse_selection(data, "every token is read", "positions", *(("skip_first",) if kernel.calls else ()))
    model = with_tokenizer(source.model, data.tokenizer)
    need_stream(model, CALLER, parts=True)
    if kernel.check is not None:
        kernel.check(model)
    batches = Batches(replace(data, batch_size=1, seq_len=data.seq_len or model.context), model)
    batch = _single_batch(batches, kernel.least)
    made = kernel.make(int(batch.counted.sum()))
    with running(source, kernel.calls):
        if isinstance(source, CanReadSites):
            source.settle(batch)
        need_stream(source.model, CALLER, parts=True)
        if model.head is not None and kernel.lens:
            check_lens(source, batch)
        not_finite, out = source.run(batch, {"prompt": made})
    refuse_not_finite(not_finite, [model.layers], "this prompt")
    digest = new_digest()
    fingerprint(digest, batch)
    counted = batch.tokens[batch.counted].tolist()
    tally = Tally(1, 1, len(counted), digest.hexdigest(), time.perf_counter() - start)

    def word(token: int) -> str:
        # Decoded one by one, a token keeps its leading space.
        return str(token) if model.tokenizer is None else str(model.tokenizer.decode([token]))

    tensors = {name: value.cpu() for name, value in out["prompt"].items()}
    provenance = record([model], tally, batches.record() | batches.row_counts() | dict(kernel.options), None)
    return PromptOutput(tensors, tuple(word(token) for token in counted), word, provenance)


def _single_batch(batches: Batches, least: int) -> Batch:
    """The prompt as a batch of one row; raises an error if it has fewer than `least` counted tokens."""
    rows = list(batches)
    if len(rows) != 1:
        raise LayersimError(
            f"`prompt` gives {len(rows)} rows of tokens; it must be one row, of at most {batches.model.context or 256} tokens."
        )
    tokens = int(rows[0].counted.sum())
    if tokens < least:
        raise LayersimError(f"`prompt` has {tokens} tokens; it must have {least} or more.")
    return rows[0]
