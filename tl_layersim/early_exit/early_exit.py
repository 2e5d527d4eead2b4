"""EarlyExit: generation and full-sequence logits in which each token exits at the first layer that is confident."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Integer, Shaped
from torch import Tensor

from ..analyzers.exit_curve import ExitCurveResult
from ..architectures.chosen_hook_points import block_number
from ..core.arguments import Fraction, PositiveFloat, PositiveInt, Seed, typed
from ..core.cross_entropy import need_classes
from ..core.errors import LayersimError, warn
from ..engine.chosen_analyzers import with_tokenizer
from ..lens.exit_heads import ExitHeads, as_heads
from ..sources.inputs import no_cache, refusing_failed_forward
from ..sources.open import OpenedModel
from .arguments import check_curve, check_layers, prompt_rows, sequence_rows, shortlist_ids
from .exit_checks import ExitLens, RuleCheck
from .exit_plan import ExitCosts, ExitPlan, evenly_spread, exited_fractions, plan_for, warn_if_slower
from .exit_results import ExitLogits, Generated
from .full_model_check import check_decoding, check_full_sequence, is_causal, refusing_crashes
from .full_sequence import FullSequence
from .generation import GenerationLoop, StopCriteria, TokenSampler, end_ids
from .rules import EXIT_RULES
from .supported_models import open_for_early_exit, reads_pixels, synthetic_inputs, takes_cache


class EarlyExit:
    """A model in which each token exits at the first layer that is confident; the layers above it do not run.

    The model is not changed, and no hook stays on it between calls. When a later token of the same row runs deeper, the layers
    above an exit run on the tokens that exited there too, in the same forward pass. Every hidden state is therefore that of the
    full model, and the exits are those that `ExitCurve` measures on the same text.

    Args:
        model: a Hugging Face language model or classifier, in this process and on one device; or what `open_model` returns.
        threshold: the value that the rule's statistic must exceed. At 1, for all rules but `"patience"`, every token runs
            through all layers and no check is made.
        at: blocks after which a check is made: numbers from 0, negative from the end, names such as `blocks.3.hook_resid_post`,
            or `"all"`. There is no check after the last block. Default: the cheapest set by `costs` on `curve`; without a curve
            at most four evenly spread blocks, whose checks cost at most a sixth of the model (but at least one block).
        min_layer: lowest block after which a check is made, by number or name.
        rule: name of the exit rule. `"max-prob"`: the largest probability at the layer, through the model's own final norm and
            head; `"margin"`: the largest minus the second largest; `"patience"`: the prediction is the same at `threshold`
            checks in a row; `"cosine"`: the cosine similarity of the residuals that enter and leave the block, without
            unembedding.
        curve: an `ExitCurveResult` of this model, from which layers are chosen; for `"max-prob"` only.
        costs: costs of the parts of a decoding step; default `ExitCosts.count(model)`. `ExitCosts.measure(model)` times them
            here.
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
        at: int | str | Sequence[int | str] | None = None,
        min_layer: int | str = 0,
        rule: str = "max-prob",
        curve: ExitCurveResult | None = None,
        costs: ExitCosts | None = None,
        shortlist: Any = None,
        heads: ExitHeads | str | os.PathLike[str] | None = None,
    ) -> None:
        rule_class = EXIT_RULES.named(rule)
        self.split_model, self.unembed = open_for_early_exit(model)
        self.model = OpenedModel.of(model).model
        self._head = self._head_weights()
        ids = None if shortlist is None else shortlist_ids(shortlist, rule_class, self.split_model, self.unembed)
        self.rule = rule_class(float(threshold), ids)
        blocks = len(self.split_model.blocks)
        self.heads = as_heads(heads)
        self.lens = self._open_lens(self.heads, blocks)
        if curve is not None:
            check_curve(curve, rule_class, self.heads)
        costs = costs or ExitCosts.count(model, rule=rule, shortlist=ids)
        names = self.split_model.model.layers[1:]
        lowest = block_number(min_layer, names, "min_layer")
        given = check_layers(at, lowest, names)
        self.plan: ExitPlan | None = None
        if curve is not None:
            self.plan = plan_for(costs, exited_fractions(curve, float(threshold), blocks), lowest, given)
            self._warn_of_other_weights(curve)
            warn_if_slower(self.plan)
            self.at = self.plan.at
        else:
            self.at = evenly_spread(costs, lowest) if given is None else given
        # Numbers of blocks after which tokens may exit.
        self.ends = (blocks,) if self.rule.never else self._ends()
        self._verify()

    def _ends(self) -> tuple[int, ...]:
        """The number of blocks that have run at each check, and at the end."""
        return (*(block + 1 for block in self.at), len(self.split_model.blocks))

    def _open_lens(self, heads: ExitHeads | None, blocks: int) -> ExitLens:
        """The predictions of each layer."""
        if heads is None:
            return ExitLens(self.unembed, blocks)
        heads.check(self.split_model.model, self.unembed.linear)
        return ExitLens(self.unembed, blocks, heads.plain.on(self.split_model.device), heads.norm == "final")

    def _verify(self) -> None:
        """Determine what the model supports, and check that early exit reproduces its logits.

        Raises:
            LayersimError: the logits differ, or the rule reads probabilities of a head with one output.
        """
        split_model = self.split_model
        with split_model.evaluating(), torch.no_grad():
            options = synthetic_inputs(split_model, 1, 1) | no_cache(split_model.module)
            split_model.tuples(lambda: split_model.module(**options))
            is_token_model = self.unembed.reads == "every" and not reads_pixels(split_model)
            self.causal = is_token_model and is_causal(split_model)
            self.generates = self.causal and takes_cache(split_model)
            ends = self._ends()
            with refusing_crashes(split_model):
                outputs = check_full_sequence(split_model, self.lens, ends, self.causal)
                if self.rule.reads_logits:
                    need_classes(outputs)
                if self.generates:
                    check_decoding(split_model, self.unembed, ends)

    def __repr__(self) -> str:
        layers = ", ".join(map(str, self.at)) or "none"
        expected = "" if self.plan is None else f"; {self.plan.speedup:.2f} times as fast is expected"
        rule = f"{self.rule.name} > {self.rule.threshold:g}"
        return f"EarlyExit({self.split_model.model.name}, {rule} after blocks: {layers}{expected})"

    def _warn_of_other_weights(self, curve: ExitCurveResult) -> None:
        """Warn if an exit curve was measured with other weights."""
        ours, theirs = self.split_model.model.weights_hash, curve.provenance.weights_hash
        if ours and theirs and ours != theirs:
            warn(
                f"The exit curve was measured on {curve.provenance.model}, whose weights differ from those that "
                f"{self.split_model.model.name} has now."
            )

    def _head_weights(self) -> list[Any]:
        """Identity, dtype and device of each parameter of the final norm and the head."""
        head = self.split_model.source.model.head
        assert head is not None
        modules = [self.split_model.module.get_submodule(path) for path in (head.norm, *head.modules) if path]
        return [(id(p), p.dtype, p.device) for module in modules for p in module.parameters()]

    def _refuse_changed_head(self) -> None:
        """Raise an error if the final norm or the head of the model has been replaced."""
        if self._head_weights() != self._head:
            raise LayersimError(
                "The model's final norm or head was replaced after this EarlyExit was built; build another one."
            )

    def refuse_no_generation(self) -> None:
        """Raise an error if the model is no causal language model with a cache.

        Raises:
            LayersimError: the model cannot generate.
        """
        if self.generates:
            return
        head = self.split_model.source.model.head
        if head is not None and head.classifies:
            reason = "it is a classifier"
        elif self.causal:
            reason = "its forward takes no past_key_values (adapters of peft are merged first: model.merge_and_unload())"
        else:
            reason = "it is no causal language model"
        raise LayersimError(f"{self.split_model.model.name} cannot generate: {reason}. Use EarlyExit.logits.")

    @typed
    def generate(
        self,
        prompt: str | list[str] | Integer[Tensor, "batch pos"] | Integer[Tensor, " pos"],
        *,
        attention_mask: Shaped[Tensor, "batch pos"] | None = None,
        max_new_tokens: PositiveInt = 50,
        do_sample: bool = False,
        temperature: PositiveFloat = 1.0,
        top_p: Fraction = 1.0,
        seed: Seed | None = None,
        eos_token_id: int | list[int] | tuple[int, ...] | None = None,
        stop: str | list[str] | None = None,
        tokenizer: Any = None,
    ) -> Generated:
        """Continue texts or rows of tokens, with the most probable token at each step or with a sampled one.

        Args:
            prompt: a text or a list of texts, tokenised as in `analyze`, or token ids `batch pos`.
            attention_mask: mask of token ids, `batch pos`; padding may be on either side.
            max_new_tokens: maximum number of new tokens in each row.
            do_sample: whether tokens are sampled, by transformers' own warpers. Exits do not depend on them.
            temperature: temperature of the sampling.
            top_p: probability of the smallest set of tokens from which one is sampled.
            seed: seed of the sampling; the tokens of the i-th row do not depend on the other rows.
            eos_token_id: tokens that end a row. Default: the model's own; `()` for none.
            stop: a row ends when its new text contains one of these.
            tokenizer: used in place of the model's own.

        Returns:
            A `Generated`.

        Raises:
            LayersimError: the model cannot generate, or the rows would exceed its context.
        """
        self.refuse_no_generation()
        model = self.split_model.model
        self._refuse_changed_head()
        tokenizer = with_tokenizer(model, tokenizer).tokenizer
        tokens, attended = prompt_rows(prompt, attention_mask, model, tokenizer, max_new_tokens)
        stop_criteria = StopCriteria(end_ids(self.model, eos_token_id), stop, tokenizer)
        sampler = TokenSampler(do_sample, temperature, top_p, seed, len(tokens))
        loop = GenerationLoop(
            self.split_model,
            self.ends,
            RuleCheck(self.lens, self.rule),
            tokens,
            attended,
            sampler,
            stop_criteria,
            max_new_tokens,
        )
        loop.run()
        return loop.result(tokenizer)

    @typed
    def logits(
        self,
        tokens: Integer[Tensor, "batch pos"] | Float[Tensor, "batch channel height width"],
        attention_mask: Shaped[Tensor, "batch pos"] | None = None,
    ) -> ExitLogits:
        """The logits of given rows, at each position from the first layer at which the rule is met.

        A layer runs up to the last position of a row that still needs it. A row of a classifier exits as a whole.

        Args:
            tokens: a tensor of ids `batch pos`, or of images `batch channel height width` for models that read them.
            attention_mask: mask of token ids, `batch pos`.

        Returns:
            An `ExitLogits`.

        Raises:
            LayersimError: the model does not take these inputs.
        """
        self._refuse_changed_head()
        rows = sequence_rows(tokens, attention_mask, self.split_model, self.unembed.reads, self.causal)
        inputs = refusing_failed_forward(self.split_model.module, rows.inputs)
        with self.split_model.evaluating(), torch.no_grad(), inputs:
            check = RuleCheck(self.lens, self.rule)
            passes = FullSequence(self.split_model, self.ends, check, rows)
            passes.run()
        blocks, logits, exits = len(self.split_model.blocks), passes.logits, passes.exits
        if self.unembed.reads != "every":
            logits, exits = logits[rows.positions], exits[rows.positions.cpu()]
        return ExitLogits(logits, exits, blocks, passes.block_tokens, passes.tokens * blocks, check.checked)
