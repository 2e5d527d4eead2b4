"""Names of arguments: unknown, missing and repeated ones are refused, with the names that were probably meant."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from .errors import LayersimTypeError
from .wording import brief, call_text, counted

# The signature of every public call by its name: an unknown keyword may be an argument of another call.
_SIGNATURES: dict[str, inspect.Signature] = {}
# By argument: the names that other libraries and papers have for it, in order of preference.
SYNONYMS = {
    "seq_len": "max_length max_len maxlen max_seq_len max_seq_length seq_length sequence_length context context_length "
    "context_size ctx_len n_ctx block_size length truncation",
    "max_tokens": "n_tokens num_tokens token_limit limit max_samples n_samples num_samples total_tokens",
    "max_new_tokens": "max_length max_tokens n_tokens num_tokens new_tokens length",
    "new_tokens": "max_new_tokens n_new_tokens",
    "batch_size": "bs batch batchsize minibatch minibatch_size per_device_train_batch_size per_device_batch_size",
    "minibatch": "batch_size bs batch minibatch_size batchsize n_samples",
    "layers": "layer layer_names layer_paths blocks modules module_names hook_points hook_names sites names at",
    "at": "layer layers blocks exit_layers exits layer_a layer_b l m",
    "n_layers": "num_layers layers n_blocks num_blocks depth num_hidden_layers layer",
    "analyzers": "analyzer analysers analyser metrics metric measures measure analyses",
    "data": "dataset datasets texts text inputs input corpus tokens input_ids prompts train_dataset train_data "
    "pixel_values images",
    "prompt": "text texts tokens input_ids inputs input prompts data",
    "tokens": "input_ids inputs data text ids batch pixel_values images",
    "model": "net module lm llm network hf_model",
    "column": "text_column field text_field key feature",
    "prepend_bos": "bos add_bos add_special_tokens default_prepend_bos prepend_bos_token",
    "skip_first": "skip skip_bos drop_first ignore_first skip_first_n",
    "positions": "position pos token_positions pos_slice which pool pooling",
    "chat_template": "template",
    "pack": "packing packed concat concatenate",
    "remote": "host server url address ndif",
    "blocking": "wait asynchronous non_blocking",
    "checkpoint": "resume resume_from resume_from_checkpoint checkpoint_path ckpt",
    "save_to": "output_dir out_dir save_dir save_path out path output",
    "unembed": "head lm_head final_norm ln_f unembedding",
    "norm": "final_norm normalize layer_norm apply_norm",
    "labels": "targets target label y classes answers",
    "eval_data": "eval_dataset validation_data val_data test_data heldout held_out",
    "test_data": "eval_data eval_dataset test_dataset validation_data val_data heldout held_out",
    "test_fraction": "test_size eval_fraction val_fraction",
    "lr": "learning_rate step_size alpha",
    "steps": "n_steps num_steps max_steps iterations iters epochs num_epochs num_train_epochs",
    "warmup": "warmup_steps num_warmup_steps warmup_ratio",
    "clip": "max_grad_norm grad_clip clip_grad_norm clip_grad gradient_clipping",
    "accumulation": "gradient_accumulation_steps grad_accum accumulate grad_accumulation",
    "mixed_precision": "bf16 fp16 amp precision autocast",
    "lora": "peft_config peft lora_config",
    "rank": "r lora_r lora_rank",
    "ridge": "l2 lambda_ regularization reg alpha weight_decay",
    "adapter": "kind transform map mapping",
    "seed": "random_state random_seed rng manual_seed",
    "temperature": "temp",
    "top_p": "nucleus p",
    "do_sample": "sample sampling",
    "stop": "stop_strings stop_sequences stop_words",
    "eos_token_id": "eos eos_token stop_token_id stop_tokens",
    "threshold": "thresholds tau confidence confidence_threshold thresh",
    "thresholds": "threshold tau confidence levels",
    "center": "centered centre mean mean_center",
    "estimator": "method kind unbiased debiased biased",
    "k": "top_k topk n_components rank neighbours neighbors n_neighbours n_neighbors num_neighbors knn",
    "method": "estimator mode",
    "training": "args training_args config settings",
}
# Words for images, which the suggestion passes on.
IMAGES = ("pixel_values", "images")
# Synonyms with another unit or the opposite meaning: the suggestion omits the given value.
OTHER_UNITS = (
    "epochs num_epochs num_train_epochs warmup_ratio truncation wait asynchronous non_blocking n_samples num_samples "
    "max_samples normalize layer_norm apply_norm final_norm skip_bos skip bf16 fp16 amp drop_first ignore_first"
)
# Arguments of other libraries that no call of this package takes, and how to set them.
SET_ON_MODEL = {
    "device": "the model runs where it is: model.to({value}) before the call",
    "dtype": "the model runs in the dtype of its weights: from_pretrained(..., dtype=...) before the call",
    "torch_dtype": "the model runs in the dtype of its weights: from_pretrained(..., dtype=...) before the call",
    "device_map": "the model runs where it is: from_pretrained(..., device_map=...) before the call",
}


def register(call: Any) -> tuple[str, inspect.Signature]:
    """Return the name and signature of a function or class, and remember public ones for suggestions in errors.

    Args:
        call: the function or class.

    Returns:
        The name that a user writes, such as "EarlyExit.generate", and the signature.
    """
    name = call.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
    signature = inspect.signature(call)
    if "." not in name and not name.startswith("_"):
        _SIGNATURES[name] = signature
    return name, signature


def bind(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """Assign the arguments of a call to the parameters of its signature.

    Args:
        name: of the call, for messages.
        signature: of the call.
        args: positional arguments.
        kwargs: arguments by name.

    Raises:
        LayersimTypeError: an argument is unknown, missing, repeated, or one positional argument too many.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        pass
    parameters = {p: value for p, value in signature.parameters.items() if p != "self"}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for keyword in kwargs:
            if keyword not in parameters:
                raise unknown_keyword(name, keyword, kwargs[keyword], parameters)
    positional = [p for p, value in parameters.items() if value.kind in (value.POSITIONAL_ONLY, value.POSITIONAL_OR_KEYWORD)]
    if "self" in signature.parameters:
        args = args[1:]
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in parameters.values()):
        rest = [p for p in parameters if p not in positional]
        raise LayersimTypeError(
            f"`{name}` takes {counted(len(positional), 'positional argument')}.",
            given=f"{len(args)}: {', '.join(map(brief, args))}",
            expected=f"{call_text(name, positional)}" + (f"; by name: {', '.join(rest)}" if rest else ""),
            do=f"name the further ones, such as {rest[0]}=..." if rest else f"leave out the last {len(args) - len(positional)}",
        )
    by_position = positional[: len(args)]
    for keyword in by_position:
        if keyword in kwargs:
            raise LayersimTypeError(
                f"`{keyword}` of {name} is given twice.",
                given=f"by position: {brief(args[positional.index(keyword)])}, and by name: {brief(kwargs[keyword])}",
                expected=call_text(name, positional),
                do=f"leave one of them out; the first argument is `{positional[0]}`",
            )
    raise _missing(name, parameters, positional, [*by_position, *kwargs])


def _missing(
    name: str, parameters: Mapping[str, inspect.Parameter], positional: Collection[str], given: Collection[str]
) -> LayersimTypeError:
    """The error for a call that lacks required arguments."""
    required = [p for p, value in parameters.items() if value.default is value.empty and value.kind < value.VAR_KEYWORD]
    required = [p for p in required if parameters[p].kind is not parameters[p].VAR_POSITIONAL]
    missing = [p for p in required if p not in given]
    complete = call_text(name, [p if p in positional else f"{p}=..." for p in required])
    return LayersimTypeError(
        f"`{missing[0]}` of {name} is missing."
        if len(missing) == 1
        else f"{', '.join(f'`{p}`' for p in missing)} of {name} are missing.",
        given=", ".join(given) or "no arguments",
        expected=complete,
        do=f"{complete}; help({name}) explains each argument",
    )


def unknown_keyword(name: str, keyword: str, value: object, known: Iterable[str]) -> LayersimTypeError:
    """The error for an unknown argument of a call, with the arguments that were probably meant.

    Args:
        name: of the call.
        keyword: the unknown argument.
        value: its value.
        known: the arguments that the call takes.
    """
    known = [p for p in known if p not in ("self", "args", "options", "kwargs")]
    synonyms = [p for p in known if keyword.lower() in SYNONYMS.get(p, "").split()]
    similar = difflib.get_close_matches(keyword.lower(), known, n=2, cutoff=0.7)
    words = set(keyword.lower().split("_"))
    with_same_word = [p for p in known if words & set(p.split("_")) - {"data", "first", "to", "n", "max", "size"}]
    meant = list(dict.fromkeys([*synonyms, *similar] or with_same_word))[:3]
    short = isinstance(value, bool | int | float | str) and len(repr(value)) < 30 and keyword not in OTHER_UNITS.split()
    text = "images" if keyword in IMAGES else brief(value) if short else "..."
    hints = [f"{p}={text if number == 0 else '...'}" for number, p in enumerate(meant)]
    do = [f"did you mean {' or '.join(hints)}?"] if hints else []
    argument, owners = _owners(name, keyword, known)
    if keyword in SET_ON_MODEL:
        do = [SET_ON_MODEL[keyword].format(value=text)]
    elif owners and argument == keyword and not synonyms:
        # Spelt as another call has it: that call was meant, not a similar argument of this one.
        do = [f"{argument}= is an argument of {', '.join(owners[:3])}: {owners[0]}(..., {argument}={text})"]
    elif owners and (argument == keyword or not meant) and not similar:
        do.append(f"{argument}= is an argument of {', '.join(owners[:3])}: {owners[0]}(..., {argument}={text})")
    return LayersimTypeError(
        f"`{keyword}` is not an argument of {name}.",
        given=f"{keyword}={brief(value)}",
        expected=f"{name} takes " + (", ".join(known) or "no arguments"),
        do="; or ".join(do) or f"leave it out; help({name}) explains each argument",
    )


def _owners(name: str, keyword: str, known: Collection[str]) -> tuple[str, list[str]]:
    """Find the public calls that take a keyword or its synonym: the argument's name and the calls, likeliest first."""
    public: tuple[str, ...] = sys.modules[__name__.split(".")[0]].__all__
    for argument in (keyword, *(p for p, words in SYNONYMS.items() if keyword.lower() in words.split())):
        calls = [call for call, signature in _SIGNATURES.items() if argument in signature.parameters and call in public]
        calls = [call for call in calls if call not in (name, "Provenance") and not call.endswith("Result")]
        if calls:
            return argument, _likeliest_first(calls, known)
    options = {p for call, signature in _SIGNATURES.items() if call in public for p in signature.parameters}
    near = difflib.get_close_matches(keyword.lower(), options, n=1, cutoff=0.8)
    calls = [call for call, signature in _SIGNATURES.items() if call in public and near and near[0] in signature.parameters]
    return (near[0], _likeliest_first(calls, known)) if near and name not in calls else ("", [])


def _likeliest_first(calls: Collection[str], known: Collection[str]) -> list[str]:
    settings = "StitchTraining" if "at" in known else "AlignedTraining"
    return sorted(calls, key=lambda call: (call != "analyze", call != settings, call))


def refuse_keywords(name: str, given: Mapping[str, Any], *calls: Callable[..., Any]) -> None:
    """Refuse keyword arguments that are passed on to several calls and that none of these calls takes.

    Args:
        name: of the call that a user wrote.
        given: its further keyword arguments.
        *calls: the calls that receive them.

    Raises:
        LayersimTypeError: a keyword is an argument of none of them.
    """
    known = dict.fromkeys(p for call in calls for p in inspect.signature(call).parameters)
    for keyword, value in given.items():
        if keyword not in known:
            raise unknown_keyword(name, keyword, value, known)
