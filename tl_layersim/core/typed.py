"""Checks of the arguments of public calls: their names, their order, their types and shapes (jaxtyping with beartype).

A checked call costs tens of microseconds, so the check stands on what users call and on results, never inside a kernel:
kernels travel to machines that have neither package.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from jaxtyping import TypeCheckError, jaxtyped

from .errors import LayersimError, LayersimTypeError


@contextmanager
def _without_mounted_save() -> Iterator[None]:
    """Take nnsight's `.save` off `object` for a moment.

    nnsight mounts it for every Python object; beartype hashes all of `object`'s attributes while it is imported, and this
    one has no hash. So `import nnsight` before the first `import beartype` fails without this.
    """
    mounted = object.__dict__.get("save")
    if mounted is None or "nnsight" not in sys.modules:
        yield
        return
    from nnsight import save
    from nnsight._c import mount, unmount

    unmount("save")
    try:
        yield
    finally:
        mount(save, "save")


with _without_mounted_save():
    from beartype import beartype

_checked = jaxtyped(typechecker=beartype)
_T = TypeVar("_T", bound=Callable[..., Any])
# Every public call by name, so that an argument of another one is recognised.
_KNOWN: dict[str, inspect.Signature] = {}
# What the field calls an argument, and what it is called here, in order of preference.
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
    "data": "dataset datasets texts text inputs input corpus tokens input_ids prompts train_dataset train_data",
    "prompt": "text texts tokens input_ids inputs input prompts data",
    "tokens": "input_ids inputs data text ids batch",
    "model": "net module lm llm network hf_model",
    "column": "text_column field text_field key feature",
    "prepend_bos": "bos add_bos add_special_tokens default_prepend_bos prepend_bos_token",
    "skip_first": "skip skip_bos drop_first ignore_first skip_first_n",
    "pack": "packing packed concat concatenate",
    "remote": "host server url address ndif",
    "blocking": "wait asynchronous non_blocking",
    "checkpoint": "resume resume_from resume_from_checkpoint checkpoint_path ckpt",
    "save_to": "output_dir out_dir save_dir save_path out path output",
    "unembed": "head lm_head final_norm ln_f unembedding",
    "norm": "final_norm normalize layer_norm apply_norm",
    "labels": "targets target label y classes answers",
    "eval_data": "eval_dataset validation_data val_data test_data heldout held_out",
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
    "k": "top_k topk n_components rank",
    "method": "estimator mode",
    "training": "args training_args config settings",
}
# Synonyms that count in another unit, or say the opposite: the value is not carried over.
OTHER_UNITS = (
    "epochs num_epochs num_train_epochs warmup_ratio truncation wait asynchronous non_blocking n_samples num_samples "
    "max_samples normalize layer_norm apply_norm final_norm skip_bos skip bf16 fp16 amp drop_first ignore_first"
)
# Arguments that no call here has, and where their subject is set.
ELSEWHERE = {
    "device": "the model runs where it is: model.to({value}) before the call",
    "dtype": "the model runs in the dtype of its weights: from_pretrained(..., dtype=...) before the call",
    "torch_dtype": "the model runs in the dtype of its weights: from_pretrained(..., dtype=...) before the call",
    "device_map": "the model runs where it is: from_pretrained(..., device_map=...) before the call",
}
MODELS = {"model", "model_a", "model_b", "front", "back", "before", "after"}
ROLES = {
    **dict.fromkeys(MODELS, "model"),
    **dict.fromkeys(("data", "prompt", "tokens"), "data"),
    "analyzers": "analyzers",
    "training": "training settings",
}


def typed(thing: _T) -> _T:
    """Check the arguments of a function, or of a class when it is made, against its signature and its annotations.

    Raises:
        LayersimTypeError: names the argument, what it was and what it must be. (jaxtyping's own error goes on to print every
            argument, which for a model is pages.)
    """
    checked = _checked(thing)
    target: Any = vars(checked)["__init__"] if isinstance(checked, type) else checked
    name, signature = _register(thing)
    numbers = [p for p, value in signature.parameters.items() if _is_number(value.annotation)]
    paths = [p for p, value in signature.parameters.items() if "PathLike" in str(value.annotation)]
    needed = [p for p, value in signature.parameters.items() if value.default is value.empty]
    roles = {p: ROLES[p] for p in signature.parameters if p in ROLES} if not isinstance(thing, type) else {}

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = args[1:] if isinstance(thing, type) else args
        bound = bind(name, signature, given, kwargs).arguments
        if len(roles) > 1:
            refuse_swapped(name, {p: bound[p] for p in roles if p in bound}, signature)
        for number in numbers:
            # To Python a bool is a number: batch_size=True would be 1.
            if isinstance(bound.get(number), bool):
                raise _wrong(name, number, bound[number], str(signature.parameters[number].annotation))
        for place in paths:
            # To pathlib an empty text, such as an unset variable gives, is the current folder.
            if isinstance(bound.get(place), str) and not bound[place].strip():
                raise LayersimTypeError(
                    f"`{place}` of {name} is an empty text.",
                    given=f"{place}={bound[place]!r}",
                    expected="a path",
                    do=f"a name of a file or folder{'' if place in needed else f', or leave {place}= out'}",
                )
        try:
            return target(*args, **kwargs)
        except TypeCheckError as error:
            raise _refusal(str(error), name, bound) from None

    if isinstance(checked, type):
        checked.__init__ = call  # type: ignore[misc]  # wrapped, with the signature that it had
        return cast(_T, checked)
    return cast(_T, call)


def named(thing: _T) -> _T:
    """Check that the arguments of a call are those of its signature, without looking at their types.

    For calls that check their arguments themselves, and for classes that are made often.

    Raises:
        LayersimTypeError: an argument is missing, or is none of those that there are; the nearest are named.
    """
    target: Any = thing.__init__ if isinstance(thing, type) else thing  # type: ignore[misc]
    name, signature = _register(thing)

    @functools.wraps(target)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return target(*args, **kwargs)
        except TypeError:
            bind(name, signature, args[1:] if isinstance(thing, type) else args, kwargs)
            raise

    if isinstance(thing, type):
        thing.__init__ = call  # type: ignore[misc]
        return thing
    return cast(_T, call)


def _register(thing: Any) -> tuple[str, inspect.Signature]:
    """What a user calls it, and its arguments."""
    name = thing.__qualname__.rpartition("<locals>.")[2].removesuffix(".__init__")
    signature = inspect.signature(thing)
    if "." not in name and not name.startswith("_"):
        _KNOWN[name] = signature
    return name, signature


def bind(name: str, signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> inspect.BoundArguments:
    """The arguments of a call by name.

    Raises:
        LayersimTypeError: they are not those of the signature.
    """
    try:
        return signature.bind(*args, **kwargs)
    except TypeError:
        pass
    known = {p: value for p, value in signature.parameters.items() if p != "self"}
    if not any(p.kind is p.VAR_KEYWORD for p in known.values()):
        for keyword in kwargs:
            if keyword not in known:
                raise unknown_keyword(name, keyword, kwargs[keyword], known)
    positional = [p for p, value in known.items() if value.kind in (value.POSITIONAL_ONLY, value.POSITIONAL_OR_KEYWORD)]
    if "self" in signature.parameters:
        args = args[1:]
    if len(args) > len(positional) and not any(p.kind is p.VAR_POSITIONAL for p in known.values()):
        rest = [p for p in known if p not in positional]
        raise LayersimTypeError(
            f"`{name}` takes {_count(len(positional), 'argument')} without a name.",
            given=f"{len(args)}: {', '.join(map(brief, args))}",
            expected=f"{_call(name, positional)}" + (f"; by name: {', '.join(rest)}" if rest else ""),
            do=f"name the further ones, such as {rest[0]}=..." if rest else f"leave out the last {len(args) - len(positional)}",
        )
    taken = positional[: len(args)]
    for keyword in taken:
        if keyword in kwargs:
            raise LayersimTypeError(
                f"`{keyword}` of {name} is given twice.",
                given=f"by its place: {brief(args[positional.index(keyword)])}, and by name: {brief(kwargs[keyword])}",
                expected=_call(name, positional),
                do=f"leave one of them out; the first argument is `{positional[0]}`",
            )
    needed = [p for p, value in known.items() if value.default is value.empty and value.kind < value.VAR_KEYWORD]
    needed = [p for p in needed if known[p].kind is not known[p].VAR_POSITIONAL]
    missing = [p for p in needed if p not in taken and p not in kwargs]
    written = [p if p in positional else f"{p}=..." for p in needed]
    raise LayersimTypeError(
        f"`{missing[0]}` of {name} is missing."
        if len(missing) == 1
        else f"{', '.join(f'`{p}`' for p in missing)} of {name} are missing.",
        given=", ".join([*taken, *kwargs]) or "no arguments",
        expected=_call(name, written),
        do=f"{_call(name, written)}; help({name}) says what each argument means",
    )


def unknown_keyword(name: str, keyword: str, value: object, known: Iterable[str]) -> LayersimTypeError:
    """The refusal of an argument that a call does not have, with those that may have been meant."""
    known = [p for p in known if p not in ("self", "args", "options", "kwargs")]
    same = [p for p in known if keyword.lower() in SYNONYMS.get(p, "").split()]
    near = difflib.get_close_matches(keyword.lower(), known, n=2, cutoff=0.7)
    parts = set(keyword.lower().split("_"))
    within = [p for p in known if parts & set(p.split("_")) - {"data", "first", "to", "n", "max", "size"}]
    meant = list(dict.fromkeys([*same, *near] or within))[:3]
    short = isinstance(value, bool | int | float | str) and len(repr(value)) < 30 and keyword not in OTHER_UNITS.split()
    said = brief(value) if short else "..."
    hints = [f"{p}={said if number == 0 else '...'}" for number, p in enumerate(meant)]
    do = [f"did you mean {' or '.join(hints)}?"] if hints else []
    theirs, owners = _owners(name, keyword, known) if not near else ("", [])
    if keyword in ELSEWHERE:
        do = [ELSEWHERE[keyword].format(value=said)]
    elif owners and (theirs == keyword or not meant):
        do.append(f"{theirs}= is an argument of {', '.join(owners[:3])}: {owners[0]}(..., {theirs}={said})")
    return LayersimTypeError(
        f"`{keyword}` is no argument of {name}.",
        given=f"{keyword}={brief(value)}",
        expected=f"{name} takes " + (", ".join(known) or "no arguments"),
        do="; or ".join(do) or f"leave it out; help({name}) says what each argument means",
    )


def _owners(name: str, keyword: str, known: Collection[str]) -> tuple[str, list[str]]:
    """The argument of other public calls that a keyword names, itself or as a synonym; and these calls, the likeliest first."""
    for theirs in (keyword, *(p for p, words in SYNONYMS.items() if keyword.lower() in words.split())):
        found = [other for other, signature in _KNOWN.items() if theirs in signature.parameters and _is_public(other)]
        found = [other for other in found if other not in (name, "Provenance") and not other.endswith("Result")]
        if found:
            settings = "StitchTraining" if "at" in known else "AlignedTraining"
            return theirs, sorted(found, key=lambda other: (other != "analyze", other != settings, other))
    return "", []


def refuse_keywords(name: str, given: Mapping[str, Any], *calls: Callable[..., Any]) -> None:
    """Refuse further arguments that none of the calls that they are handed on to takes."""
    known = dict.fromkeys(p for call in calls for p in inspect.signature(call).parameters)
    for keyword, value in given.items():
        if keyword not in known:
            raise unknown_keyword(name, keyword, value, known)


def refuse_swapped(name: str, given: Mapping[str, Any], signature: inspect.Signature) -> None:
    """Refuse a model in the place of data, data in the place of analyzers, and so on."""
    wrong = {p: kind for p, value in given.items() if (kind := _kind(value, ROLES[p])) is not None and kind != ROLES[p]}
    if not wrong:
        return
    order = [p for p, value in signature.parameters.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    shown = ", ".join(f"{p}={brief(value)}" for p, value in given.items())
    # A name of a model is data only where the data's place holds the model.
    pairs = [(a, b) for a in wrong for b in wrong if a < b and wrong[a] == ROLES[b] and wrong[b] == ROLES[a]]
    if len(wrong) == 2 and pairs:
        first, second = sorted(pairs[0], key=order.index)
        what, do = f"`{first}` and `{second}` of {name} are swapped.", f"exchange these two: {_call(name, order)}"
    elif len(wrong) > 2:
        what, do = f"The arguments of {name} are in another order.", _call(name, order)
    else:
        place, kind = next(iter(wrong.items()))
        article = "analyzers" if kind == "analyzers" else "training settings" if kind == "training settings" else _a(kind)
        what = f"`{place}` of {name} is {article if kind != 'data' else 'data'}."
        do = f"{_call(name, order)}, in this order"
    raise LayersimTypeError(what, given=shown, expected=_call(name, order), do=do)


def _kind(value: Any, place: str) -> str | None:
    """Model, data, analyzers or training settings, where that is sure; a generator is not looked into."""
    bases = [
        (cls.__module__.split(".")[0], cls.__name__) for cls in (value if isinstance(value, type) else type(value)).__mro__
    ]
    if ("tl_layersim", "Analyzer") in bases:
        return "analyzers"
    if ("tl_layersim", "AlignedTraining") in bases or ("tl_layersim", "StitchTraining") in bases:
        return "training settings"
    if isinstance(value, torch.nn.Module) or ("tl_layersim", "Source") in bases or ("nnsight", "Envoy") in bases:
        return "model"
    if isinstance(value, torch.Tensor | Mapping) or hasattr(value, "column_names"):
        return "data"
    if isinstance(value, list | tuple) and value:
        first = value[0]
        if isinstance(first, str):
            # Names of analyzers are single words; so may a text be, which is then fine where data belongs.
            texts = place == "analyzers" and any(" " in text for text in value if isinstance(text, str))
            return "data" if texts or place in ("model", "training settings") else None
        return _kind(first, place) if not isinstance(first, list | tuple) else "data"
    if isinstance(value, str) and place == "analyzers" and len(value.split()) > 3 and "," not in value:
        return "data"
    if isinstance(value, str) and place == "model" and len(value.split()) > 3:
        return "data"
    return None


def brief(value: object) -> str:
    """A value in a few words: itself where it is short, else its kind and size.

    >>> brief([1, 2]), brief(["a long text"] * 40)
    ('[1, 2]', 'a list of 40 str')
    """
    if isinstance(value, torch.nn.Module):
        return type(value).__name__
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if value is None or isinstance(value, bool | int | float | complex):
        return repr(value)[:40]
    if isinstance(value, str):
        return repr(value) if len(value) <= 40 else f"{value[:30]!r}... ({len(value)} characters)"
    kind = type(value).__name__
    if isinstance(value, list | tuple | dict | set | frozenset):
        flat = all(item is None or isinstance(item, bool | int | float | str) for item in value)
        if flat and len(value) <= 8 and len(repr(value)) <= 60 and not isinstance(value, dict):
            return repr(value)
        kinds = sorted({type(item).__name__ for item in list(value)[:100]})
        return f"{_a(kind)} of {len(value)}" + (f" {' and '.join(kinds[:3])}" if kinds else "")
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    text = repr(value)
    return text if len(text) <= 60 and " at 0x" not in text and "\n" not in text else _a(kind)


def _call(name: str, names: Iterable[str]) -> str:
    return f"{name}({', '.join(names)})"


def _count(number: int, noun: str) -> str:
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _is_public(name: str) -> bool:
    public: tuple[str, ...] = sys.modules[__name__.split(".")[0]].__all__
    return name in public


def _is_number(annotation: Any) -> bool:
    """Whether an annotation, as text, is of numbers without bool."""
    parts = {part.strip() for part in str(annotation).split("|")}
    return bool(parts & {"int", "float"}) and "bool" not in str(annotation)


def _wrong(name: str, parameter: str, value: object, expected: str) -> LayersimTypeError:
    return LayersimTypeError(
        f"`{parameter}` of {name} cannot be {brief(value)}.",
        given=f"{parameter}={brief(value)}" + ("" if value is None else f", {_a(type(value).__name__)}"),
        expected=expected.replace("typing.", ""),
        do=_instead(parameter, value, expected) or f"help({name}) says what each argument means",
    )


def _instead(parameter: str, value: Any, expected: str) -> str:
    """The same value as it should be written, where that is plain."""
    numbers = re.search(r"\b(int|float)\b", expected)
    if isinstance(value, str):
        near = difflib.get_close_matches(value, re.findall(r"'([^']*)'", expected), n=1, cutoff=0.75)
        # "debiased" is not "biased".
        if near and not value.endswith(near[0]):
            return f"did you mean {parameter}={near[0]!r}?"
        if "list[str]" in expected:
            return f"{parameter}=[{brief(value)}]"
        if numbers and re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", value):
            return f"{parameter}={value}"
    if isinstance(value, float) and value.is_integer() and numbers:
        return f"{parameter}={int(value)}"
    if isinstance(value, list) and "tuple[" in expected:
        return f"{parameter}={brief(tuple(value))}" if len(value) <= 8 else f"{parameter}=tuple({parameter})"
    if isinstance(value, tuple) and "list[" in expected:
        return f"{parameter}={brief(list(value))}" if len(value) <= 8 else f"{parameter}=list({parameter})"
    if isinstance(value, int) and not isinstance(value, bool) and "tuple[int, ..." in expected:
        return f"{parameter}=({value},)"
    if numbers and type(value).__module__ == "numpy":
        return f"{parameter}={numbers[0]}({parameter})"
    return ""


def _a(noun: str) -> str:
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def _refusal(message: str, name: str, bound: Mapping[str, Any]) -> LayersimError:
    """The parts of jaxtyping's message that say something."""
    what = r"(?:parameter '(?P<name>\w+)'|return value).*?"
    values = r"Actual value: (?P<given>.*?)\nExpected type: (?P<expected>.*?)\.?\n"
    found = re.search(what + values, message, re.DOTALL)
    if not found:
        return LayersimTypeError(message.splitlines()[0], given=message, expected="see the annotations", do=f"help({name})")
    expected = found["expected"].removeprefix("<class '").removesuffix("'>")
    if found["name"] in bound:
        return _wrong(name, found["name"], bound[found["name"]], expected)
    which = f"`{found['name']}` of {name}" if found["name"] else f"The result of {name}"
    return LayersimTypeError(
        f"{which} has another type than it is said to have.",
        given=found["given"],
        expected=expected,
        do=f"help({name}) says what each argument means",
    )


__all__ = ["brief", "named", "refuse_keywords", "typed"]
