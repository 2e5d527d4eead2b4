"""EarlyExit: generate, and read, with layers left out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..analysis.validation import with_tokenizer
from ..core.errors import LayersimError, warn
from ..core.typed import typed
from ..models.split_model import LocalSplitModel
from .costs import ExitCosts, ExitPlan, plan_for, shares_of, spread, warn_if_slower
from .exit_check import ExitCheck
from .full_sequence import FullSequence, Rows
from .generation import Counts, Decoding
from .prompts import Choice, Ends, end_ids, rows_of
from .results import ExitLogits, Generated
from .rules import exit_rule, exit_rules
from .rules.base import ExitRule
from .supported_models import note_tuples, opened, reads_pixels, takes_cache
from .verification import check_decoding, check_whole, is_causal, no_crash, read_position


class EarlyExit:
    """A model that stops at the first layer that is sure, for each token and each row on its own.

    The model is not changed, and nothing stays on it between calls. Layers above an exit do not run. When a later token of the
    row goes deeper, they run on the tokens that wait there too, in the same pass: so every hidden state is the whole model's,
    and exits are those that `ExitCurve` measures on the same text.

    Args:
        model: a Hugging Face language model or classifier, in this process and on one device.
        threshold: what the rule has to exceed. At 1, for all rules but `"patience"`, every token runs through all layers and
            nothing is asked.
        at: where to ask: counts of blocks that have run, 1 to L - 1, or `"all"`. Default: what is cheapest by `costs` on
            `curve`; without a curve a few evenly spread layers, whose checks cost at most a sixth of the model (at least one,
            at most four).
        min_layer: do not ask below.
        rule: `"max-prob"`: the largest probability that the layer gives, through the model's own final norm and head;
            `"margin"`: that minus the second largest; `"patience"`: the same first choice at `threshold` checks in a row;
            `"cosine"`: the cosine of what enters and what leaves the block, which needs no unembedding.
        curve: an `ExitCurveResult` of this model, from which layers are chosen; of `"max-prob"` alone.
        costs: what steps cost; default `ExitCosts.count(model)`. `ExitCosts.measure(model)` times them here.
        shortlist: token ids over which checks are made, in place of the whole vocabulary. Probabilities are then too large.
            What is said always comes from the whole vocabulary.
        layers: paths of the blocks, for layouts that are not known.
        unembed: paths of the final norm and head, where they are not found.

    Attributes:
        at: the layers that are asked.
        plan: the layers with what is expected of them, a `ExitPlan`; None without a curve.

    Raises:
        LayersimError: the model cannot be run in parts here, or a run in parts does not say what the model says.

    Source:
        Jiang, Zhou and Zhu 2024 (arXiv 2406.14479), section 3. Schuster et al. 2022 (arXiv 2207.07061) for the rules; they
        fill caches with copies, where this runs the layers later. Zhou et al. 2020 (arXiv 2006.04152) for patience.

    Example:
        >>> import tl_layersim as lsim
        >>> early = lsim.EarlyExit(lsim.demo_model(), threshold=0.9, at=(4,))
        >>> found = early.generate("Once upon a", max_new_tokens=4)
        >>> found.texts
        (' time, there was',)
    """

    @typed
    def __init__(
        self,
        model: Any,
        threshold: int | float = 0.9,
        *,
        at: tuple[int, ...] | list[int] | str | None = None,
        min_layer: int = 1,
        rule: str = "max-prob",
        curve: Any = None,
        costs: ExitCosts | None = None,
        shortlist: Any = None,
        layers: list[str] | None = None,
        unembed: list[str] | None = None,
    ) -> None:
        if min_layer < 1:
            raise LayersimError(
                "`min_layer` must be at least 1.",
                given=f"min_layer={min_layer}",
                expected="a count of blocks that have run",
                do="min_layer=1",
            )
        kind = exit_rule(rule)
        self.half, self.unembed = opened(model, layers, unembed)
        self._head = self._head_now()
        self.model = model
        ids = None if shortlist is None else self._shortlist(shortlist, kind)
        self.rule = kind(float(threshold), ids)
        blocks = len(self.half.blocks)
        if curve is not None and not kind.has_exit_curve:
            measured = [name for name, other in exit_rules().items() if other.has_exit_curve]
            raise LayersimError(
                f"`curve` cannot be used with rule={rule!r}, whose exits an exit curve does not measure.",
                given=f"curve= with rule={rule!r}",
                expected=f"rule={' or '.join(map(repr, measured))}, or no curve",
                do="at=(...)",
            )
        counted = costs or ExitCosts.count(model, rule=rule, shortlist=ids, layers=layers, unembed=unembed)
        chosen = self._chosen(at, min_layer, blocks)
        self.plan: ExitPlan | None = None
        if curve is not None:
            self.plan = plan_for(counted, shares_of(curve, float(threshold), blocks), min_layer, chosen)
            ours, theirs = self.half.model.weights_hash, curve.provenance.weights_hash
            if ours and theirs and ours != theirs:
                warn(
                    f"The exit curve is of {curve.provenance.model}, whose weights are not those that "
                    f"{self.half.model.name} has now."
                )
            warn_if_slower(self.plan)
            self.at = self.plan.at
        else:
            self.at = spread(counted, min_layer) if chosen is None else chosen
        self.ends = (blocks,) if self.rule.never else (*self.at, blocks)
        with self.half.evaluating(), torch.no_grad():
            note_tuples(self.half)
            tokens = self.unembed.reads == "every" and not reads_pixels(self.half)
            self.causal = tokens and is_causal(self.half)
            self.generates = self.causal and takes_cache(self.half)
            checked = (*self.at, blocks)
            with no_crash(self.half):
                check_whole(self.half, self.unembed, checked, self.causal)
                if self.generates:
                    check_decoding(self.half, self.unembed, checked)

    def __repr__(self) -> str:
        asked = ", ".join(map(str, self.at)) or "none"
        expected = "" if self.plan is None else f"; {self.plan.speedup:.2f} times as fast is expected"
        return f"EarlyExit({self.half.model.name}, {self.rule.name} > {self.rule.threshold:g} after blocks: {asked}{expected})"

    def _head_now(self) -> list[Any]:
        """What the norm and the head are made of."""
        head = self.half.source.model.head
        assert head is not None
        parts = [self.half.module.get_submodule(path) for path in (head.norm, *head.parts) if path]
        return [(id(p), p.dtype, p.device) for part in parts for p in part.parameters()]

    def _refuse_another_head(self) -> None:
        if self._head_now() != self._head:
            raise LayersimError(
                "The model's norm or head is another one than when this EarlyExit was built.",
                given="other weights, another dtype or another device",
                expected="the model as it was",
                do="EarlyExit(model, ...) once more",
            )

    @staticmethod
    def _chosen(at: Any, min_layer: int, blocks: int) -> tuple[int, ...] | None:
        """The layers that the user names."""
        if at is None:
            return None
        if isinstance(at, str):
            if at != "all":
                raise LayersimError("Layers are counted.", given=f"at={at!r}", expected='numbers, or "all"', do='at="all"')
            return tuple(range(max(1, min_layer), blocks))
        layers = tuple(at)
        if list(layers) != sorted(set(layers)) or (layers and not max(1, min_layer) <= layers[0] <= layers[-1] < blocks):
            raise LayersimError(
                "These are no layers at which to ask.",
                given=f"at={layers}, min_layer={min_layer}",
                expected=f"counts of blocks that have run, ascending, {max(1, min_layer)} to {blocks - 1}",
                do=f"at=({blocks // 2},)",
            )
        return layers

    def _shortlist(self, shortlist: Any, rule: type[ExitRule]) -> Tensor:
        try:
            ids = torch.as_tensor(shortlist).detach().cpu()
        except (RuntimeError, TypeError, ValueError):
            ids = torch.zeros(0)
        vocabulary = 0 if self.unembed.linear is None else self.unembed.linear.out_features
        fine = (
            ids.dim() == 1
            and not ids.is_floating_point()
            and ids.dtype != torch.bool
            and len(set(ids.tolist())) == len(ids) >= 2
        )
        if not fine or (vocabulary and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary):
            raise LayersimError(
                "This is no shortlist.",
                given=f"{ids.dtype} of shape {tuple(ids.shape)}",
                expected=f"two or more different token ids from 0 to {vocabulary - 1}",
                do="frequent_tokens(model, texts, 1000)",
            )
        if not rule.reads_logits or self.unembed.linear is None or len(self.unembed.parts) > 1:
            raise LayersimError(
                "A shortlist has no use here.",
                given=f"rule={rule.name!r}, a head {self.half.source.model.head}",
                expected="a rule that unembeds, and a head that is one plain linear layer",
                do="leave shortlist= out",
            )
        return ids

    @typed
    def generate(
        self,
        prompt: Any,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int = 50,
        do_sample: bool = False,
        temperature: int | float = 1.0,
        top_p: int | float = 1.0,
        seed: int | None = None,
        eos_token_id: int | list[int] | tuple[int, ...] | None = None,
        stop: str | list[str] | None = None,
        tokenizer: Any = None,
    ) -> Generated:
        """Go on from a text, some texts, or tokens; the most probable token at each step, or a drawn one.

        Args:
            prompt: a text or a list of texts, tokenised as `analyze` does, or token ids `batch pos`.
            attention_mask: of token ids, `batch pos`; padding may stand on either side.
            max_new_tokens: at most so many for each row.
            do_sample: draw tokens, by transformers' own warpers. Whether a layer is sure does not depend on them.
            temperature: of the draw.
            top_p: of the draw: only the smallest set of tokens with this probability.
            seed: of the draw; what the i-th row draws does not depend on the rows beside it.
            eos_token_id: ends a row. Default: the model's own; `()` for none.
            stop: a row ends when its new text contains one of these.
            tokenizer: in place of the model's own.

        Returns:
            A `Generated`.

        Raises:
            LayersimError: the model does not generate, or not that much.
        """
        if not self.generates:
            raise LayersimError(
                f"{self.half.model.name} does not generate.",
                given=f"{type(self.model).__name__}, which "
                + ("keeps no keys and values" if self.causal else "is no causal language model"),
                expected="a causal language model whose forward takes past_key_values",
                do="early.logits(...); adapters of peft are merged first: model.merge_and_unload()",
            )
        self._refuse_another_head()
        if max_new_tokens < 1:
            raise LayersimError(
                "`max_new_tokens` must be at least 1.",
                given=f"max_new_tokens={max_new_tokens}",
                expected="1 or more",
                do="max_new_tokens=50",
            )
        reader = with_tokenizer(self.half.model, tokenizer).tokenizer
        tokens, attended = rows_of(prompt, attention_mask, self.half.model, reader, max_new_tokens)
        done = Ends(end_ids(self.model, eos_token_id), stop, reader)
        choice = Choice(do_sample, temperature, top_p, seed, len(tokens))
        tokens = tokens.to(self.half.device)
        attended = None if attended is None else attended.to(self.half.device)
        with self.half.evaluating(), torch.no_grad():
            run = _Run(self, tokens, attended, max_new_tokens, choice, done)
            run.go()
        return run.result(reader)

    @typed
    def logits(self, tokens: Tensor, attention_mask: Tensor | None = None) -> ExitLogits:
        """What the model says of given rows, each position from the layer at which it was first sure.

        A layer runs up to the last position of a row that still needs it. Of a classifier each row leaves as a whole.

        Args:
            tokens: `batch pos` ids, or images `batch channel height width` for models that read them.
            attention_mask: `batch pos`, for ids.

        Returns:
            An `ExitLogits`.

        Raises:
            LayersimError: this is nothing that the model reads.
        """
        self._refuse_another_head()
        given = self._rows(tokens, attention_mask)
        with self.half.evaluating(), torch.no_grad():
            whole = FullSequence(self.half, self.unembed, self.ends, self.rule)
            logits, exits = whole(given)
        asked = given.asked.cpu()
        full = whole.first_tokens * len(self.half.blocks)
        if self.unembed.reads != "every":
            logits, exits = logits[given.asked], exits[asked]
        return ExitLogits(logits, exits, len(self.half.blocks), whole.counts.tokens, full, whole.counts.checks)

    def _rows(self, tokens: Tensor, mask: Tensor | None) -> Rows:
        pixels = reads_pixels(self.half)
        if tokens.is_floating_point() != pixels or tokens.dim() != (4 if pixels else 2) or (pixels and mask is not None):
            raise LayersimError(
                "The model does not read this.",
                given=f"{tokens.dtype} of shape {tuple(tokens.shape)}",
                expected="images `batch channel height width`" if pixels else "token ids `batch pos`",
                do="logits(pixel_values)" if pixels else "logits(encoded.input_ids, encoded.attention_mask)",
            )
        context = self.half.model.context
        if not pixels and context and tokens.shape[1] > context and (mask is None or int(mask.bool().sum(1).max()) > context):
            raise LayersimError(
                "The model does not take rows this long.",
                given=f"{tokens.shape[1]} tokens",
                expected=f"at most {context}, the context of {self.half.model.name}",
                do=f"tokens[:, :{context}]",
            )
        if mask is not None and (mask.shape != tokens.shape or not bool(mask.bool().any(1).all())):
            raise LayersimError(
                "The mask does not fit.",
                given=f"shape {tuple(mask.shape)}, {int(mask.bool().any(-1).logical_not().sum())} empty rows",
                expected=f"shape {tuple(tokens.shape)}, with a token in each row",
                do="logits(encoded.input_ids, encoded.attention_mask)",
            )
        tokens = tokens.to(self.half.device)
        attended = None if mask is None else mask.to(self.half.device).bool()
        inputs = {"pixel_values" if pixels else "input_ids": tokens}
        if attended is not None:
            inputs["attention_mask"] = attended.long()
        if self.unembed.reads == "every":
            asked = torch.ones_like(tokens, dtype=torch.bool) if attended is None else attended
        else:
            asked = read_position(self.half, self.unembed.reads, inputs, attended)
        return Rows(inputs, asked, self.causal)


class _Run:
    """One generation."""

    def __init__(self, early: EarlyExit, tokens: Tensor, attended: Tensor | None, new: int, choice: Choice, done: Ends) -> None:
        self.early, self.new, self.choice, self.done = early, new, choice, done
        self.counts = Counts()
        half: LocalSplitModel = early.half
        self.state = Decoding(half, early.ends, tokens, attended, tokens.shape[1] + new, self.counts)
        self.judge = ExitCheck(early.rule, early.unembed, len(tokens))
        self.rows = list(range(len(tokens)))
        self.tokens: list[list[int]] = [[] for _ in self.rows]
        self.exits: list[list[int]] = [[] for _ in self.rows]
        self.said: list[Tensor] = []
        self.left: list[int] = []
        self.steps = self.full = 0

    def go(self) -> None:
        """All steps."""
        state, blocks = self.state, len(self.early.half.blocks)
        with state.watched(self.decide) as run:
            while True:
                self.said, self.left = [torch.empty(0)] * len(self.rows), [0] * len(self.rows)
                self.judge.restart(len(self.rows))
                self.full += blocks * len(self.rows) * (state.tokens.shape[1] if self.steps == 0 else 1)
                run()
                self.steps += 1
                logits = self.said[0] if len(self.rows) == 1 else torch.cat(self.said)
                new = self.choice(logits, self.rows, state.tokens)
                kept = self._note(new.tolist())
                if not kept:
                    return
                state.append(new)
                if len(kept) < len(self.rows):
                    state.keep(kept)
                    self.rows = [self.rows[i] for i in kept]

    def _note(self, new: list[int]) -> list[int]:
        """Which rows are not done, after one more token in each."""
        kept = []
        for i, (row, token) in enumerate(zip(self.rows, new, strict=True)):
            self.tokens[row].append(token)
            self.exits[row].append(self.left[i])
            if len(self.tokens[row]) < self.new and not self.done(self.tokens[row]):
                kept.append(i)
        return kept

    def decide(self, layer: int, rows: list[int], x: Tensor, entering: Tensor) -> list[int]:
        """Which rows go on; what the others say is kept."""
        if layer == self.early.ends[-1]:
            self._say(layer, rows, self.early.unembed(x))
            return []
        self.counts.checks += len(rows)
        sure, logits = self.judge(x, entering, torch.tensor(rows))
        flags = sure.tolist()
        out = [row for row, flag in zip(rows, flags, strict=True) if flag]
        if not out:
            return rows
        # Unembedded once more only where the check did not make all logits.
        every = len(out) == len(rows)
        chosen = self.early.unembed(x if every else x[sure]) if logits is None else logits if every else logits[sure]
        self._say(layer, out, chosen)
        return [row for row, flag in zip(rows, flags, strict=True) if not flag]

    def _say(self, layer: int, rows: list[int], logits: Tensor) -> None:
        for i, row in enumerate(rows):
            self.said[row], self.left[row] = logits[i : i + 1], layer

    def result(self, tokenizer: Any) -> Generated:
        """What came out."""
        texts = [tokenizer.decode(row, skip_special_tokens=True) if tokenizer is not None else "" for row in self.tokens]
        return Generated(
            tokens=tuple(torch.tensor(row) for row in self.tokens),
            texts=tuple(texts),
            exits=tuple(torch.tensor(row) for row in self.exits),
            layers=len(self.early.half.blocks),
            steps=self.steps,
            block_calls=self.counts.blocks,
            block_tokens=self.counts.tokens,
            full_block_tokens=self.full,
            passes=self.counts.passes,
            checks=self.counts.checks,
        )
