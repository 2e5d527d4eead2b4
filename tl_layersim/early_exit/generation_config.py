"""Settings of a model's generation configuration: how they change scores of next tokens, and when they end a row."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.errors import LayersimError
from ..core.wording import brief, first_line

# Settings that ask for more than one pass or one continuation, with the values that leave them off.
OTHER_DECODING: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "num_return_sequences": (None, 1),
    "penalty_alpha": (None, 0),
    "dola_layers": (None,),
    "guidance_scale": (None, 1),
    "constraints": (None,),
    "force_words_ids": (None,),
    "token_healing": (None, False),
}
# Settings that change the speed of transformers' generation and not its tokens.
SPEED = {"use_cache": False, "prompt_lookup_num_tokens": None, "assistant_early_exit": None}
# `generate` passes no tokenizer on to the criterion of these texts, which is built here.
TEXTS = {"stop_strings": None}
# Warpers that are off without sampling, whatever the configuration says.
NOT_SAMPLED = {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50}


def end_ids(model: Any, eos_token_id: Any = None) -> frozenset[int]:
    """Set of token ids at which the generation of a row stops. Default: those of the generation configuration."""
    if eos_token_id is None:
        settings = getattr(model, "generation_config", None)
        eos_token_id = getattr(model.config if settings is None else settings, "eos_token_id", None)
    if eos_token_id is None:
        return frozenset()
    if isinstance(eos_token_id, Iterable):
        return frozenset(int(token) for token in eos_token_id)
    return frozenset({int(eos_token_id)})


class TokenRules:
    """Rules by which the next token of one row is chosen, as in transformers' `generate` on this row alone.

    The rules are transformers' own logits processors, warpers and stopping criteria.

    Args:
        processors: a `LogitsProcessorList`.
        criteria: stopping criteria, other than the maximum length and the end tokens.
    """

    def __init__(self, processors: Any, criteria: list[Any]) -> None:
        self.processors = processors
        self.criteria = criteria

    @property
    def plain(self) -> bool:
        """Whether the next token depends on its logits alone, by rules that are the same for every row."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        warpers = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)
        return not self.criteria and all(isinstance(processor, warpers) for processor in self.processors)

    def scores(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Processed logits (`row vocabulary`), in float32.

        Args:
            tokens: `row pos`, the prompt and the tokens that follow, without padding.
            logits: `row vocabulary`.

        Raises:
            LayersimError: transformers cannot apply the settings.
        """
        # Some processors write into their argument.
        scores = logits.to(torch.float32, copy=True)
        try:
            processed: Tensor = self.processors(tokens, scores)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise _not_applied(error) from error
        return processed

    def ends(self, tokens: Tensor, scores: Tensor) -> bool:
        """Whether a criterion ends the row (`1 pos`) after its last token, which was chosen from `scores`."""
        return any(bool(criterion(tokens, scores).all()) for criterion in self.criteria)


def token_rules(
    model: Any, prompt: Tensor, stop: frozenset[int], max_new_tokens: int, sampling: dict[str, Any] | None, tokenizer: Any
) -> TokenRules:
    """The rules of a model's generation configuration for one row.

    Args:
        model: the model.
        prompt: `pos`, the token ids of the row without padding.
        stop: token ids that end a row.
        max_new_tokens: maximum number of new tokens.
        sampling: settings of the sampling, which replace those of the configuration; None for no sampling.
        tokenizer: tokenizer of texts that end a row; None if there is none.

    Raises:
        LayersimError: the configuration asks for another kind of decoding, or is not valid.
    """
    from transformers import LogitsProcessorList
    from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

    settings = getattr(model, "generation_config", None)
    if settings is None or not hasattr(model, "generate"):
        return TokenRules(LogitsProcessorList(), [])
    for name, neutral in OTHER_DECODING.items():
        value = getattr(settings, name, None)
        if value not in neutral:
            raise LayersimError(
                f"`model.generation_config.{name}` is {brief(value)}; it must be {neutral[-1]}, because early exit takes one "
                "token after the other."
            )
    texts = getattr(settings, "stop_strings", None)
    if texts is not None and tokenizer is None:
        raise LayersimError(
            f"`model.generation_config.stop_strings` is {brief(texts)}, but there is no tokenizer. Pass `tokenizer`, or set it "
            "to None."
        )
    rules: list[TokenRules] = []
    # Ends at end tokens and at the maximum length are those of `generate_rows`.
    replaced_criteria = (EosTokenCriteria, MaxLengthCriteria)

    # `generate` calls this function with all that it has prepared, in place of its own loop.
    def record_rules(_model: Any, input_ids: Tensor, logits_processor: Any, stopping_criteria: Any, **_: Any) -> Tensor:
        criteria = [criterion for criterion in stopping_criteria if not isinstance(criterion, replaced_criteria)]
        rules.append(TokenRules(logits_processor, criteria))
        return input_ids

    options: dict[str, Any] = {**SPEED, **TEXTS, "max_new_tokens": max_new_tokens, "eos_token_id": sorted(stop) or None}
    if sampling is None:
        options |= NOT_SAMPLED
    else:
        # transformers takes 50 where the configuration has no value.
        top_k = getattr(settings, "top_k", None)
        options |= {"do_sample": True, "top_k": 0 if top_k is None else top_k} | sampling
    if "attention_mask" in inspect.signature(type(model).forward).parameters:
        options["attention_mask"] = torch.ones_like(prompt)[None]
    try:
        model.generate(prompt[None], custom_generate=record_rules, **options)
        if texts is not None:
            rules[0].criteria.append(StopStringCriteria(tokenizer, texts))
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise _not_applied(error) from error
    return rules[0]


def _not_applied(error: Exception) -> LayersimError:
    return LayersimError(
        f"`model.generation_config` has settings that transformers cannot apply here: {type(error).__name__}: "
        f"{first_line(error)}."
    )
