"""Arguments of `EarlyExit`: prompts as rows, layers of checks, shortlists of frequent tokens, curves, tokens and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..analyzers.exit_curve import ExitCurveResult
from ..architectures.chosen_hook_points import block_numbers
from ..architectures.unembed import Unembed
from ..core.arguments import PositiveInt, typed
from ..core.errors import LayersimError, warn
from ..core.wording import brief
from ..data.batches import Batches, refuse_other_ids
from ..data.data import Data
from ..data.padding import RunsAtEnds, as_mask, mask_of, masked_warning
from ..engine.chosen_analyzers import with_tokenizer
from ..lens.exit_heads import ExitHeads
from ..sources.model import Model
from ..sources.split_model import LocalSplitModel
from .full_model_check import positions_read
from .full_sequence import Rows
from .rules.built_in import MaxProbRule
from .rules.exit_rule import ExitRule
from .supported_models import open_for_early_exit, reads_pixels


def prompt_rows(
    prompt: Any, attention_mask: Tensor | None, model: Model, tokenizer: Any, max_new_tokens: int
) -> tuple[Tensor, Tensor | None]:
    """Token ids `row column` padded on the left, and their mask, False at padding; the mask is None if no row is padded.

    Raises:
        LayersimError: `prompt` is neither text nor token ids, or leaves no room for `max_new_tokens`.
    """
    if isinstance(prompt, Tensor):
        tokens, attention = _rows_of_ids(prompt, attention_mask, replace(model, tokenizer=tokenizer))
    else:
        tokens, attention = _rows_of_texts(prompt, attention_mask, model, tokenizer)
    lengths = attention.sum(1)
    if not len(lengths) or int(lengths.min()) == 0:
        raise LayersimError("`prompt` has a row without a token.")
    refuse_other_ids(tokens[attention], model, "prompt")
    longest = int(lengths.max())
    # The model does not run on the last new token.
    if model.context and longest + max_new_tokens - 1 > model.context:
        raise LayersimError(
            f"`prompt` has {longest} tokens and `max_new_tokens` is {max_new_tokens}; the context of {model.name} has room for "
            f"{model.context + 1} in all."
        )
    if int(lengths.min()) == tokens.shape[1]:
        return tokens, None
    left = torch.zeros(len(tokens), longest, dtype=torch.int64, device=tokens.device)
    for row, length in enumerate(lengths.tolist()):
        left[row, longest - length :] = tokens[row, attention[row]]
    attended = torch.arange(longest, device=tokens.device) >= (longest - lengths)[:, None]
    return left, None if bool(attended.all()) else attended


def _rows_of_ids(tokens: Tensor, mask: Tensor | None, model: Model) -> tuple[Tensor, Tensor]:
    """Token ids and mask of a tensor prompt; without a given mask, padding ids at the ends of rows are padding."""
    tokens = tokens[None] if tokens.dim() == 1 else tokens
    if mask is None:
        runs = RunsAtEnds()
        runs.add(tokens, model)
        if warning := runs.warning(model):
            warn(warning)
        if (mask := mask_of(tokens, model)) is not None:
            warn(masked_warning(tokens[~mask].tolist()))
    return tokens.long(), torch.ones_like(tokens, dtype=torch.bool) if mask is None else as_mask(mask).to(tokens.device)


def _rows_of_texts(prompt: Any, mask: Tensor | None, model: Model, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Token ids and attention of texts, tokenised as in `analyze`."""
    texts = [prompt] if isinstance(prompt, str) else prompt
    if mask is not None:
        raise LayersimError("`attention_mask` cannot be given for texts.")
    if not texts:
        raise LayersimError("`prompt` is empty.")
    # Without its head the texts are not cut: one that exceeds the context is refused below.
    described = replace(model, tokenizer=tokenizer or model.tokenizer, head=None)
    length = model.context or 1 << 20
    batches = Batches(Data(texts, batch_size=len(texts) + 1, seq_len=length), described)
    rows = list(batches.rows())
    if len(rows) != len(texts):
        raise LayersimError(
            f"`prompt` has {len(texts)} texts, of which {len(texts) - len(rows)} are empty or have more than {length} tokens."
        )
    batch = batches.batch(rows, 0)
    return batch.tokens, batch.attention


@typed
def frequent_tokens(model: Any, data: Any, size: PositiveInt) -> Any:
    """The most frequent token ids of a data set, as a shortlist for the checks of `EarlyExit`.

    Args:
        model: as in `EarlyExit`; its vocabulary applies, and its tokenizer unless `data` has one.
        data: a `Data`; or raw data, of which the first 100,000 tokens are read.
        size: maximum number of ids.

    Returns:
        Ids, the most frequent first.

    Examples:
        >>> import tl_layersim as lsim
        >>> from tl_layersim.early_exit import frequent_tokens
        >>> len(frequent_tokens(lsim.demo_model(), lsim.demo_text(), 200))
        200
    """
    split_model, _ = open_for_early_exit(model)
    data = Data.of(data, max_tokens=100_000)
    batches = Batches(data, with_tokenizer(split_model.model, data.tokenizer))
    tokens = [batch.tokens[batch.attention] for batch in batches]
    if not tokens:
        raise LayersimError("`data` is empty.")
    counts = torch.cat(tokens).bincount()
    return counts.topk(min(size, int((counts > 0).sum()))).indices


def check_layers(at: int | str | Sequence[int | str] | None, lowest: int, names: Sequence[str]) -> tuple[int, ...] | None:
    """The numbers of the blocks after which `at` asks for a check, ascending; None if `at` is None.

    Args:
        at: see `EarlyExit`.
        lowest: number of the lowest block after which a check is made.
        names: names of the outputs of all blocks.

    Raises:
        LayersimError: `at` names a block below `lowest`, the last block, no block, or one twice.
    """
    if at is None:
        return None
    last = len(names) - 1
    if at == "all":
        return tuple(range(lowest, last))
    layers = [at] if isinstance(at, int | str) else list(at)
    blocks = tuple(sorted(block_numbers(layers, names, "at"))) if layers else ()
    if blocks and not lowest <= blocks[0] <= blocks[-1] < last:
        raise LayersimError(f"`at` is {brief(at)}; a check can be made after blocks {lowest} to {last - 1}.")
    return blocks


def shortlist_ids(shortlist: Any, rule: type[ExitRule], split_model: LocalSplitModel, unembed: Unembed) -> Tensor:
    """The token ids of a shortlist.

    Raises:
        LayersimError: these are not distinct token ids, or the rule or the head cannot use a shortlist.
    """
    if not rule.reads_logits or unembed.linear is None or len(unembed.parts) > 1:
        raise LayersimError(
            f"`shortlist` cannot be used with rule={rule.name!r} and the head {split_model.source.model.head}: it needs a rule "
            "that reads logits, and a head that is one linear layer."
        )
    try:
        ids = torch.as_tensor(shortlist).detach().cpu()
    except (RuntimeError, TypeError, ValueError):
        ids = torch.zeros(0)
    vocabulary = unembed.linear.out_features
    valid = (
        ids.dim() == 1 and not ids.is_floating_point() and ids.dtype != torch.bool and len(set(ids.tolist())) == len(ids) >= 2
    )
    if not valid or not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
        raise LayersimError(
            f"`shortlist` is {brief(shortlist)}; it must be two or more distinct token ids from 0 to {vocabulary - 1}."
        )
    return ids


def check_curve(curve: ExitCurveResult, rule: type[ExitRule], heads: ExitHeads | None) -> None:
    """Check that an exit curve measures the exits of a rule, and was measured with the heads of the layers.

    Raises:
        LayersimError: it measures other rules, or was measured with other heads.
    """
    if rule is not MaxProbRule:
        raise LayersimError(
            f"`curve` cannot be used with rule={rule.name!r}: an exit curve measures the exits of {MaxProbRule.name!r}."
        )
    measured_with, own = curve.provenance.options.get("heads"), None if heads is None else str(heads)
    if measured_with != own:
        raise LayersimError(
            f"`curve` was measured with {measured_with or 'the head of the model'}, and `heads` is {own}; they must be "
            "the same."
        )


def sequence_rows(
    tokens: Tensor, attention_mask: Tensor | None, split_model: LocalSplitModel, reads: str, causal: bool
) -> Rows:
    """The inputs of a full-sequence forward pass.

    Args:
        tokens: `batch pos` ids, or images `batch channel height width`.
        attention_mask: `batch pos`; None if no position is masked.
        split_model: the model.
        reads: the positions at which the model's head gives logits, see `Head`.
        causal: whether positions do not depend on later ones.

    Raises:
        LayersimError: the model does not take these inputs.
    """
    pixels, mask = reads_pixels(split_model), None if attention_mask is None else as_mask(attention_mask)
    if pixels and mask is not None:
        raise LayersimError("`attention_mask` cannot be given for a model of images.")
    if tokens.is_floating_point() != pixels or not tokens.numel():
        takes = "images `batch channel height width`" if pixels else "token ids `batch pos`"
        raise LayersimError(f"`tokens` is {brief(tokens)}; {split_model.model.name} takes one or more {takes}.")
    context = split_model.model.context
    if not pixels and context and tokens.shape[1] > context and (mask is None or int(mask.sum(1).max()) > context):
        raise LayersimError(f"`tokens` has {tokens.shape[1]} positions; the context of {split_model.model.name} has {context}.")
    if mask is not None and not bool(mask.any(1).all()):
        raise LayersimError("`attention_mask` has a row without a token.")
    tokens = tokens.to(split_model.device)
    attended = None if mask is None else mask.to(split_model.device)
    inputs = {"pixel_values" if pixels else "input_ids": tokens}
    if attended is not None:
        inputs["attention_mask"] = attended.long()
    return Rows(inputs, positions_read(split_model, reads, inputs, attended), causal, attended if reads == "rows" else None)
