"""`EarlyExit`: generation and logits in which each token exits at the first confident layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from ..analyzers.exit_curve import ExitCurveResult
from ..architectures.site_selection import block_numbers, items_of
from ..core.arguments import FilePath, Fraction, Layer, PositiveFloat, PositiveInt, Seed, typed
from ..core.cross_entropy import need_classes
from ..core.errors import LayersimError, warn
from ..core.wording import brief
from ..data.batches import Batches, refuse_other_ids
from ..data.data import Data
from ..data.padding_masks import as_mask
from ..data.right_padding import RightPadding
from ..engine.run_arguments import with_tokenizer
from ..lens.exit_heads import ExitHeads, as_heads
from ..sources.forward_arguments import refusing_failed_forward, with_padding_ids
from ..sources.open_local import OpenedModel
from .exit_costs import ExitCosts, ExitPlan, evenly_spread, exited_fractions, plan_for
from .exit_decisions import ExitCheck, ExitLens, Shortlist, shortlist_ids
from .generation import Generated, TokenSampler, generate_rows, prompt_rows
from .generation_config import TokenRules, end_ids, token_rules
from .rules import EXIT_RULES, MaxProbRule
from .segments import FullSequence
from .supported_models import (
    check_decoding,
    check_full_sequence,
    is_causal,
    open_for_early_exit,
    positions_read,
    reads_pixels,
    refusing_crashes,
    synthetic_inputs,
)

# Largest key-value cache, in bytes, for layers that generate together.
KEYS_AND_VALUES_BYTES = 2**28


@dataclass(frozen=True, eq=False, repr=False)
class ExitLogits:
    """Result of `EarlyExit.logits`: logits, the exit layer of each position, and counts of the computation.

    Attributes:
        logits: `batch pos vocabulary`, or `batch classes` of a classifier; each of the layer at which it exited. 0 at padding.
        exits: `batch pos` or `batch`, the number of blocks that had run. 0 at padding.
        layers: number of blocks of the model.
        block_tokens: number of computed (position, block) pairs.
        full_block_tokens: the same for the full model.
        checks: positions evaluated at checks, summed over checks.
    """

    logits: Tensor
    exits: Tensor
    layers: int
    block_tokens: int
    full_block_tokens: int
    checks: int

    @property
    def share_of_block_tokens(self) -> float:
        """Number of (token, block) pairs that are computed, divided by the number in the full model."""
        return self.block_tokens / max(1, self.full_block_tokens)

    def __repr__(self) -> str:
        return (
            f"ExitLogits: {tuple(self.logits.shape)}, exits after {float(self.exits[self.exits > 0].float().mean()):.2f} of "
            f"{self.layers} blocks on average, {100 * self.share_of_block_tokens:.0f} % of the full model's tokens through "
            "blocks"
        )


class EarlyExit:
    """A model in which each token exits at the first confident layer. The layers above the exit do not run.

    The model is not changed, and no hook stays on it between calls. When a later token of the same row runs deeper, the layers
    above an exit run on the tokens that exited there too, in the same forward pass. Every hidden state is therefore that of the
    full model, and the exits are those that `ExitCurve` measures on the same text.

    Args:
        model: a Hugging Face language model or classifier, in this process and on one device; or what `open_model` returns.
        threshold: the value that the rule's statistic must exceed. At 1, for all rules but `"patience"`, every token runs
            through all layers and no check is made.
        at: blocks after which a check is made: numbers from 0, negative from the end, names such as `blocks.3.hook_resid_post`,
            or `"all"`. There is no check after the last block. Default: the cheapest set by `costs` on `curve`; without a curve
            at most four evenly spread blocks, whose checks read at most a sixth of the model's weights (but at least one).
        rule: name of the exit rule. `"max-prob"`: the largest probability at the layer, through the model's own final norm and
            head; `"margin"`: the largest minus the second largest; `"patience"`: the prediction is the same at `threshold`
            checks in a row; `"cosine"`: the cosine similarity of the residuals that enter and leave the block, without
            unembedding.
        curve: an `ExitCurveResult` of this model, from which layers are chosen; for `"max-prob"` only.
        costs: costs of the parts of a decoding step, which `curve` needs: `ExitCosts.measure(model)`. Without a curve, the
            default of `at` counts these costs in place of weights.
        shortlist: token ids over which checks compute probabilities, in place of the whole vocabulary; these probabilities are
            too large. Tokens are always chosen from the whole vocabulary.
        heads: `ExitHeads` of the layers below the last, or their file: checks after a layer, and tokens that exit there, are
            read by its own head. The last layer keeps the model's. A curve must be measured with the same heads.

    Attributes:
        at: the numbers of the blocks after which a check is made.
        lens: the predictions of each layer.
        heads: heads of the layers below the last; None if every layer is read by the model's own head.
        plan: an `ExitPlan`, the checks with the expected exits and speed-up; None without a curve.

    Raises:
        LayersimError: the model is not supported, or its logits with early exit differ from those of its own forward pass.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3. Schuster et al. 2022 (arXiv 2207.07061) for the rules; they
        fill caches with copies of hidden states, where this class runs the layers later. Zhou et al. 2020 (arXiv 2006.04152)
        for patience.

    Examples:
        >>> import tl_layersim as lsim
        >>> early = lsim.EarlyExit(lsim.demo_model(), threshold=0.9, at=(3,))
        >>> early.generate("Once upon a", max_new_tokens=4).texts
        (' time, there was',)
    """

    @typed
    def __init__(
        self,
        model: Any,
        threshold: int | float = 0.9,
        *,
        at: Layer | Sequence[Layer] | None = None,
        rule: str = "max-prob",
        curve: ExitCurveResult | None = None,
        costs: ExitCosts | None = None,
        shortlist: Shortlist | None = None,
        heads: ExitHeads | FilePath | None = None,
    ) -> None:
        rule_class = EXIT_RULES.named(rule)
        self.split_model, self.unembed = open_for_early_exit(model)
        self.model = OpenedModel.of(model).model
        self._description = self.split_model.model
        head = self.split_model.source.model.head
        assert head is not None
        self._head_paths = [path for path in (head.norm, *head.modules) if path]
        self._head_at_start = self._head_weights()
        ids = shortlist_ids(shortlist, rule_class, self.split_model, self.unembed)
        self.rule = rule_class(float(threshold), ids)
        blocks = len(self.split_model.blocks)
        self.heads = as_heads(heads)
        if self.heads is None:
            self.lens = ExitLens(self.unembed, blocks)
        else:
            self.heads.check(self._description, self.unembed.linear)
            layer_heads = self.heads.plain.on(self.split_model.device)
            self.lens = ExitLens(self.unembed, blocks, layer_heads, self.heads.norm == "final")
        requested_blocks = self._requested_blocks(at)
        self.plan = None if curve is None else self._plan(curve, costs, requested_blocks)
        if self.plan is not None:
            self.at = self.plan.at
        elif requested_blocks is not None:
            self.at = requested_blocks
        else:
            self.at = evenly_spread(blocks, self._share_of_check(costs))
        # Numbers of blocks after which tokens may exit.
        ends = (*(block + 1 for block in self.at), blocks)
        self.ends = (blocks,) if self.rule.never else ends
        self._verify(ends)

    def _requested_blocks(self, at: Layer | Sequence[Layer] | None) -> tuple[int, ...] | None:
        """Indices of the blocks in `at`, ascending. None if `at` is None.

        Raises:
            LayersimError: `at` names the last block, no block, or one twice.
        """
        names = self._description.layers[1:]
        last = len(names) - 1
        if at is None:
            return None
        if at == "all":
            return tuple(range(last))
        layers = items_of(at)
        blocks = tuple(sorted(block_numbers(layers, names, "at"))) if layers else ()
        if last in blocks:
            raise LayersimError(
                f"`at` is {brief(at)}; it must name blocks 0 to {last - 1}: no exit check follows the last block."
            )
        return blocks

    def _share_of_check(self, costs: ExitCosts | None) -> float:
        """The cost of an exit check, as a fraction of the model's cost."""
        if costs is not None:
            full = costs.blocks * costs.block + costs.head
            return costs.check / max(full, costs.check) if costs.check else 0.0
        if not self.rule.reads_logits:
            return 0.0
        block_weights = 0
        for block in self.split_model.blocks:
            block_weights += sum(parameter.numel() for parameter in block.parameters())
        head_weights = sum(parameter.numel() for parameter in self._head_parameters())
        weights_of_check = head_weights
        if self.rule.shortlist is not None:
            weights_of_check = len(self.rule.shortlist) * (self._description.d_model or 0)
        return weights_of_check / (block_weights + head_weights)

    def _plan(self, curve: ExitCurveResult, costs: ExitCosts | None, requested_blocks: tuple[int, ...] | None) -> ExitPlan:
        """Choose the blocks for exit checks from an exit curve, and estimate the speed-up.

        Raises:
            LayersimError: there are no costs, or the curve was measured with other rules, thresholds or heads.
        """
        if costs is None:
            raise LayersimError("`costs` is None; with `curve`, it must be ExitCosts.measure(model).")
        if not isinstance(self.rule, MaxProbRule):
            raise LayersimError(f"`rule` is {self.rule.name!r}; with `curve`, it must be {MaxProbRule.name!r}.")
        description = self._description
        run = curve.provenance
        heads = None if self.heads is None else str(self.heads)
        heads_of_curve = run.options.get("heads")
        if heads_of_curve != heads:
            raise LayersimError(
                f"`heads` is {heads}; it must be {heads_of_curve or 'None (the head of the model)'}, with which `curve` was "
                "measured."
            )
        exited = exited_fractions(curve, self.rule.threshold, len(self.split_model.blocks))
        plan = plan_for(costs, exited, requested_blocks)
        if description.weights_hash and run.weights_hash and description.weights_hash != run.weights_hash:
            warn(f"`curve` was measured on {run.model} with other weights than those of {description.name}.")
        if plan.speedup < 1 and plan.at:
            warn(
                f"Exit checks after blocks {plan.at} are expected to make the model slower, {plan.speedup:.2f} times as fast. "
                "Leave out `at` to have the blocks chosen by `curve`."
            )
        return plan

    def _verify(self, ends: tuple[int, ...]) -> None:
        """Find out whether the model is causal and generates. Raise an error if early exit does not reproduce its logits.

        Raises:
            LayersimError: the logits differ, or the rule reads probabilities of a head with one output.
        """
        split_model = self.split_model
        with split_model.evaluating(), torch.no_grad(), refusing_crashes(split_model):
            model = split_model.module
            options = synthetic_inputs(split_model, 1, 1) | split_model.source.anatomy.without_cache
            # Records the length of the tuples that blocks return. Blocks that a later segment skips return as many items.
            split_model.tuples(lambda: model(**options))
            is_token_model = self.unembed.reads == "every" and not reads_pixels(split_model)
            self.causal = is_token_model and is_causal(split_model)
            self.generates = self.causal and "past_key_values" in inspect.signature(type(model).forward).parameters
            outputs = check_full_sequence(split_model, self.lens, ends, self.causal)
            if self.rule.reads_logits:
                need_classes(outputs)
        self._no_decoding_error = self._decoding_error(ends) if self.generates else None

    def _decoding_error(self, ends: tuple[int, ...]) -> LayersimError | None:
        """The error of decoding with early exit, which `logits` does not need; None if decoding gives the model's own logits.

        Layers of convolutions and state spaces keep states that cannot wait for tokens that exit below them.
        """
        split_model = self.split_model
        try:
            with split_model.evaluating(), torch.no_grad(), refusing_crashes(split_model):
                check_decoding(split_model, self.lens, ends)
        except LayersimError as error:
            return error
        return None

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self.at)) or "none"
        speedup = "" if self.plan is None else f"; {self.plan.speedup:.2f} times as fast is expected"
        rule = f"{self.rule.name} > {self.rule.threshold:g}"
        return f"EarlyExit({self._description.name}, {rule} after blocks: {layers}{speedup})"

    def _head_weights(self) -> list[Any]:
        return [(id(parameter), parameter.dtype, parameter.device) for parameter in self._head_parameters()]

    def _head_parameters(self) -> list[torch.nn.Parameter]:
        parameters: list[torch.nn.Parameter] = []
        for path in self._head_paths:
            parameters += self.split_model.module.get_submodule(path).parameters()
        return parameters

    def _refuse_changed_head(self) -> None:
        if self._head_weights() != self._head_at_start:
            raise LayersimError(
                "The final norm or the head of the model was replaced after this EarlyExit was built. Build another EarlyExit."
            )

    @typed
    def generate(
        self,
        prompt: str | list[str] | Integer[Tensor, "batch pos"] | Integer[Tensor, " pos"],
        *,
        attention_mask: Shaped[Tensor, "batch pos"] | None = None,
        max_new_tokens: PositiveInt = 50,
        do_sample: bool = False,
        temperature: PositiveFloat | None = None,
        top_p: Fraction | None = None,
        seed: Seed | None = None,
        eos_token_id: int | list[int] | tuple[int, ...] | None = None,
        tokenizer: Any = None,
    ) -> Generated:
        """Continue texts or rows of tokens, greedily or by sampling.

        The model's generation configuration applies to each row as if it ran alone: repetition penalties, suppressed and forced
        tokens, minimum lengths and the like. `do_sample` of the configuration does not apply, nor do its warpers without
        sampling. Exits depend on none of these settings.

        Args:
            prompt: a text or a list of texts, tokenised as in `analyze`, or token ids `batch pos`.
            attention_mask: mask of token ids, `batch pos`; padding may be on either side.
            max_new_tokens: maximum number of new tokens in each row.
            do_sample: whether tokens are sampled, by transformers' own warpers.
            temperature: temperature of the sampling. Default: that of the generation configuration, else 1.
            top_p: probability of the smallest set of tokens from which one is sampled. Default: that of the generation
                configuration, else 1.
            seed: seed of the sampling; the tokens of the i-th row do not depend on the other rows.
            eos_token_id: tokens that end a row. Default: the model's own; `()` for none.
            tokenizer: used in place of the model's own.

        Returns:
            A `Generated`.

        Raises:
            LayersimError: the model cannot generate, the rows would exceed its context, or the generation configuration asks
                for another kind of decoding, such as beams.
        """
        self._refuse_changed_head()
        if self._no_decoding_error is not None:
            raise LayersimError(f"{self._no_decoding_error} EarlyExit.logits works on this model.") from self._no_decoding_error
        warpers = {"temperature": temperature, "top_p": top_p}
        if not do_sample and (seed is not None or any(value not in (None, 1) for value in warpers.values())):
            raise LayersimError(
                f"`temperature`, `top_p` and `seed` are {temperature}, {top_p} and {seed}; they have no effect without "
                "do_sample=True."
            )
        sampling = None
        if do_sample:
            sampling = {name: float(value) for name, value in warpers.items() if value is not None}
        tokenizer, prompts = self._prompts(prompt, attention_mask, tokenizer, max_new_tokens)
        check = ExitCheck(self.lens, self.rule)
        stop = end_ids(self.model, eos_token_id)
        rules = self._token_rules_of_rows(prompts, stop, max_new_tokens, sampling, tokenizer)
        sampler = TokenSampler(rules, do_sample, seed)
        return generate_rows(self.split_model, self.ends, check, prompts, sampler, stop, max_new_tokens, tokenizer)

    def _token_rules_of_rows(
        self,
        prompts: tuple[Tensor, Tensor | None],
        stop: frozenset[int],
        max_new_tokens: int,
        sampling: dict[str, float] | None,
        tokenizer: Any,
    ) -> list[TokenRules]:
        """The rules of the generation configuration for each prompt."""
        tokens, attended = prompts
        rows = list(tokens)
        if attended is not None:
            rows = [row[mask] for row, mask in zip(tokens, attended, strict=True)]
        device = self.split_model.device
        return [token_rules(self.model, row.to(device), stop, max_new_tokens, sampling, tokenizer) for row in rows]

    def _prompts(
        self, prompt: Any, attention_mask: Tensor | None, tokenizer: Any, max_new_tokens: int
    ) -> tuple[Any, tuple[Tensor, Tensor | None]]:
        """Tokenizer, token ids and attention mask of the prompts.

        Raises:
            LayersimError: the model cannot generate, or the rows would exceed its context.
        """
        description = self._description
        if not self.generates:
            raise LayersimError(
                f"{description.name} cannot generate with early exit; `model` must be a causal language model whose forward "
                "takes past_key_values. Use EarlyExit.logits."
            )
        tokenizer = with_tokenizer(description, tokenizer).tokenizer
        return tokenizer, prompt_rows(prompt, attention_mask, description, tokenizer, max_new_tokens)

    def generate_from_layers(
        self,
        prompts: list[str],
        *,
        max_new_tokens: int,
        top_p: float,
        seed: int,
        tokenizer: Any = None,
        on_tokens: Callable[[int], object] = lambda _count: None,
    ) -> list[list[tuple[Tensor, str]]]:
        """Sample continuations of prompts from the logits of every layer.

        Each continuation is read at one layer, and no block above it runs. Every layer draws the same random numbers, as if it
        ran alone. There are as few decoding steps as the cache's memory allows.

        Args:
            prompts: the texts.
            max_new_tokens: maximum number of new tokens in each row.
            top_p: see `generate`.
            seed: seed of the sampling.
            tokenizer: used in place of the model's own.
            on_tokens: called at each step with the number of its tokens.

        Returns:
            For each layer and prompt, the new token ids and their text without special tokens.

        Raises:
            LayersimError: the model cannot generate, or the rows would exceed its context.
        """
        tokenizer, (tokens, attended) = self._prompts(prompts, None, tokenizer, max_new_tokens)
        split_model = self.split_model
        count = len(tokens)
        stop = end_ids(self.model)
        sampling = {"temperature": 1.0, "top_p": top_p}
        rules = self._token_rules_of_rows((tokens, attended), stop, max_new_tokens, sampling, tokenizer)
        blocks = len(split_model.blocks)
        columns = tokens.shape[1] + max_new_tokens
        # Keys and values are rarely wider than the residual.
        width = self._description.d_model or 4096
        number_bytes = next(split_model.module.parameters()).element_size()
        bytes_of_layer = 2 * blocks * count * columns * width * number_bytes
        layers_together = max(1, KEYS_AND_VALUES_BYTES // bytes_of_layer)
        by_layer = []
        for start in range(1, blocks + 1, layers_together):
            layers = range(start, min(start + layers_together, blocks + 1))
            copies = len(layers)
            check = ExitCheck(self.lens, torch.tensor(layers).repeat_interleave(count))
            sampler = TokenSampler(rules, True, seed, copies)
            attended_rows = None if attended is None else attended.repeat(copies, 1)
            prompt_copies = (tokens.repeat(copies, 1), attended_rows)
            generated = generate_rows(
                split_model, tuple(layers), check, prompt_copies, sampler, stop, max_new_tokens, tokenizer, on_tokens
            )
            continuations = list(zip(generated.tokens, generated.texts, strict=True))
            by_layer += [continuations[i : i + count] for i in range(0, len(continuations), count)]
        return by_layer

    @typed
    def logits(
        self,
        tokens: Integer[Tensor, "batch pos"] | Float[Tensor, "batch channel height width"],
        attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    ) -> ExitLogits:
        """Logits at each position, from the first layer that meets the exit rule there.

        A layer runs up to the last position of a row that still needs it. A row of a classifier exits as a whole.

        Args:
            tokens: a tensor of ids `batch pos`, or of images `batch channel height width` for models that read them.
            attention_mask: mask of token ids, `batch pos`; padding may be on either side.

        Returns:
            An `ExitLogits`.

        Raises:
            LayersimError: the model does not take these inputs, or `tokens` has ids outside the vocabulary.
        """
        self._refuse_changed_head()
        split_model = self.split_model
        description = self._description
        reads = self.unembed.reads
        pixels = reads_pixels(split_model)
        mask = None if attention_mask is None else as_mask(attention_mask)
        if pixels and mask is not None:
            raise LayersimError(f"`attention_mask` is given, but {description.name} reads images; it must be None.")
        if tokens.is_floating_point() != pixels or not tokens.numel():
            inputs_in_words = "images `batch channel height width`" if pixels else "token ids `batch pos`"
            raise LayersimError(f"`tokens` is {brief(tokens)}; {description.name} takes one or more {inputs_in_words}.")
        longest = tokens.shape[1] if mask is None else int(mask.sum(1).max())
        if not pixels and description.context and longest > description.context:
            raise LayersimError(
                f"`tokens` has {tokens.shape[1]} positions; the context of {description.name} has {description.context}."
            )
        if mask is not None and not bool(mask.any(1).all()):
            row = int(mask.any(1).int().argmin())
            raise LayersimError(f"`attention_mask` has only zeros in row {row}; every row needs a token.")
        if not pixels:
            refuse_other_ids(tokens, description, "tokens")
        attended = None if mask is None else mask.to(split_model.device)
        order = RightPadding(attended)
        inputs = {"pixel_values" if pixels else "input_ids": order.moved(tokens.to(split_model.device))}
        if attended is not None:
            attended = order.moved(attended)
            inputs["input_ids"] = with_padding_ids(split_model.module, inputs["input_ids"], attended)
            inputs["attention_mask"] = attended.long()
        positions = positions_read(split_model, reads, inputs, attended)
        attended_of_pool = attended if reads == "rows" else None
        check = ExitCheck(self.lens, self.rule)
        passes = FullSequence(split_model, self.ends, check, inputs, positions, self.causal, attended_of_pool)
        with split_model.evaluating(), torch.no_grad(), refusing_failed_forward(split_model.module):
            passes.run()
        if reads == "every":
            logits = order.restored(passes.logits)
            exits = order.restored(passes.exits)
        else:
            logits = passes.logits[positions]
            exits = passes.exits[positions.cpu()]
        blocks = len(split_model.blocks)
        return ExitLogits(logits, exits, blocks, passes.block_tokens, passes.tokens * blocks, check.checked)


@typed
def frequent_tokens(model: Any, data: Any, size: PositiveInt) -> Any:
    """The most frequent token ids of a data set, for the `shortlist` of `EarlyExit`.

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
    description = split_model.model
    data = Data.of(data, max_tokens=100_000)
    batches = Batches(data, with_tokenizer(description, data.tokenizer))
    tokens = [batch.tokens[batch.attention] for batch in batches]
    if not tokens:
        raise LayersimError("`data` is empty.")
    counts = torch.cat(tokens).bincount()
    return counts.topk(min(size, int((counts > 0).sum()))).indices
