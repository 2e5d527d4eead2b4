"""One forward pass of a model over one prompt."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..activations.view import Kernel
from ..core.errors import LayersimError
from ..core.result_declarations import Provenance
from ..core.sums import Tally
from ..data.batches import Batches, fingerprint, new_digest
from ..data.data import Data
from ..engine.report_assembly import record
from ..engine.run_arguments import with_tokenizer
from ..engine.site_plan import refuse_selection
from ..sources.activation_checks import check_lens, need_stream, refuse_not_finite
from ..sources.model_description import ModelDescription
from ..sources.source import CanReadSites, Source, running

CALLER = "A figure of one prompt"


def run_on_prompt(
    source: Source,
    prompt: Any,
    make: Callable[[int], Kernel],
    options: Mapping[str, Any],
    *,
    check: Callable[[ModelDescription], None] | None = None,
    lens: bool = False,
    calls: bool = False,
    least: int = 3,
) -> tuple[dict[str, Tensor], tuple[str, ...], Callable[[int], str], Provenance]:
    """Run a model on one prompt, and apply a kernel function to the activations.

    Args:
        source: the model.
        prompt: a `Data`, or a text or token ids.
        make: function that returns the kernel for a prompt of a given number of tokens.
        options: options that the provenance records.
        check: function that raises an error if the kernel cannot run on a model.
        lens: whether the kernel reads logits, which are then compared with the model's own.
        calls: whether the kernel runs blocks again.
        least: smallest number of tokens.

    Returns:
        Output of the kernel on the CPU, the counted tokens as text, a function that turns a token id into text, and the
        provenance.

    Raises:
        LayersimError: the prompt or the model does not suit the kernel, or activations are not finite.
    """
    start = time.perf_counter()
    data = Data.of(prompt)
    refuse_selection(data, "every token is read", "positions", *(("skip_first",) if calls else ()))
    model = with_tokenizer(source.model, data.tokenizer)
    need_stream(model, CALLER, parts=True)
    if check is not None:
        check(model)
    data = replace(data, batch_size=1, seq_len=data.seq_len or model.context)
    batches = Batches(data, model, argument="prompt")
    rows = list(batches)
    if len(rows) != 1:
        raise LayersimError(
            f"`prompt` gives {len(rows)} rows of tokens; it must be one row, of at most {model.context or 256} tokens."
        )
    batch = rows[0]
    tokens = int(batch.counted.sum())
    if tokens < least:
        raise LayersimError(f"`prompt` has {tokens} tokens; it must have {least} or more.")
    kernel = make(tokens)
    with running(source, calls):
        if isinstance(source, CanReadSites):
            source.settle(batch)
        need_stream(source.model, CALLER, parts=True)
        if model.head is not None and lens:
            check_lens(source, batch)
        not_finite, out = source.run(batch, {"prompt": kernel})
    refuse_not_finite(not_finite, [model.layers], "this prompt")
    digest = new_digest()
    fingerprint(digest, batch)
    counted = batch.tokens[batch.counted].tolist()
    tally = Tally(1, 1, len(counted), digest.hexdigest(), time.perf_counter() - start)

    def word(token: int) -> str:
        # Decoded one by one, a token keeps its leading space.
        return str(token) if model.tokenizer is None else str(model.tokenizer.decode([token]))

    tensors = {name: value.cpu() for name, value in out["prompt"].items()}
    provenance = record([model], tally, batches.record() | batches.row_counts() | dict(options), None)
    return tensors, tuple(word(token) for token in counted), word, provenance
