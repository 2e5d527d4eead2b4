"""One forward pass of a model over one prompt; a kernel runs where the activations are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from ..core.data_pass_progress import Tally
from ..core.errors import LayersimError
from ..core.provenance import Provenance
from ..data.batches import Batch, Batches
from ..data.data import Data
from ..data.digest import fingerprint, new_digest
from ..models.activation_checks import check_lens, need_stream, refuse_not_finite
from ..models.model_info import Model
from ..models.source import CanReadSites, Source, running
from ..models.view import Kernel
from .position_rules import refuse_selection
from .report_assembly import record
from .validation import with_tokenizer

CALLER = "A figure of one prompt"


@dataclass(frozen=True, kw_only=True)
class PromptKernel:
    """A kernel for one prompt, and what it needs of the model and the prompt.

    Attributes:
        make: returns the kernel for a number of tokens, or refuses that number.
        check: refuses a model that the kernel does not fit.
        options: for the provenance.
        lens: whether the kernel reads logits, which are then checked against the model's own.
        calls: whether the kernel calls blocks again, between any tokens of the prompt.
        least: the fewest tokens that it needs.
    """

    make: Callable[[int], Kernel]
    options: Mapping[str, Any]
    check: Callable[[Model], None] | None = None
    lens: bool = False
    calls: bool = False
    least: int = 3


class PromptOutput(NamedTuple):
    """The tensors of a kernel on one prompt.

    Attributes:
        tensors: by name, on the CPU.
        tokens: the counted tokens of the prompt as text.
        word: a token id as text.
        provenance: of the run.
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
        kernel: with its needs.

    Raises:
        LayersimError: the prompt or the model is refused, or activations are not finite.
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
    """The prompt as a batch of one row; refused if it has fewer than `least` counted tokens."""
    rows = list(batches)
    if len(rows) != 1:
        raise LayersimError(
            f"`prompt` gives {len(rows)} rows of tokens; it must be one row, of at most {batches.model.context or 256} tokens."
        )
    tokens = int(rows[0].counted.sum())
    if tokens < least:
        raise LayersimError(f"`prompt` has {tokens} tokens; it must have {least} or more.")
    return rows[0]
