"""Order of arguments: a model in the place of data, data in the place of analyzers, and so on, are refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from .errors import LayersimTypeError
from .wording import brief, call_text, with_article

MODELS = {"model", "model_a", "model_b", "front", "back", "before", "after"}
# By argument: what it holds.
ROLES = {
    **dict.fromkeys(MODELS, "model"),
    **dict.fromkeys(("data", "prompt", "tokens"), "data"),
    "analyzers": "analyzers",
    "training": "training settings",
}


def refuse_swapped(name: str, given: Mapping[str, Any], signature: inspect.Signature) -> None:
    """Refuse a model in the place of data, data in the place of analyzers, and so on.

    Args:
        name: of the call.
        given: its arguments that are in `ROLES`.
        signature: of the call.

    Raises:
        LayersimTypeError: names the arguments that are swapped.
    """
    wrong = {p: role for p, value in given.items() if (role := _role(value, ROLES[p])) is not None and role != ROLES[p]}
    if not wrong:
        return
    order = [p for p, value in signature.parameters.items() if value.kind is value.POSITIONAL_OR_KEYWORD]
    shown = ", ".join(f"{p}={brief(value)}" for p, value in given.items())
    # A text is the name of a model or data: it counts as data only where the argument for data holds the model.
    pairs = [(a, b) for a in wrong for b in wrong if a < b and wrong[a] == ROLES[b] and wrong[b] == ROLES[a]]
    if len(wrong) == 2 and pairs:
        first, second = sorted(pairs[0], key=order.index)
        what, do = f"`{first}` and `{second}` of {name} are swapped.", f"exchange these two: {call_text(name, order)}"
    elif len(wrong) > 2:
        what, do = f"The arguments of {name} are in another order.", call_text(name, order)
    else:
        argument, role = next(iter(wrong.items()))
        what = f"`{argument}` of {name} is {with_article(role) if role == 'model' else role}."
        do = f"{call_text(name, order)}, in this order"
    raise LayersimTypeError(what, given=shown, expected=call_text(name, order), do=do)


def _object_role(value: Any) -> str | None:
    """Kind of an object that is a model, an analyzer or training settings; None for any other value."""
    bases = [
        (cls.__module__.split(".")[0], cls.__name__) for cls in (value if isinstance(value, type) else type(value)).__mro__
    ]
    if ("tl_layersim", "Analyzer") in bases:
        return "analyzers"
    if ("tl_layersim", "AlignedTraining") in bases or ("tl_layersim", "StitchTraining") in bases:
        return "training settings"
    if isinstance(value, torch.nn.Module) or ("tl_layersim", "Source") in bases or ("nnsight", "Envoy") in bases:
        return "model"
    return None


def _role(value: Any, expected: str) -> str | None:
    """Kind of a value: model, data, analyzers or training settings; None where it may be several, as a generator may."""
    if (role := _object_role(value)) is not None:
        return role
    if isinstance(value, Mapping) and (value or expected == "analyzers"):
        tables = (list, tuple, Mapping, torch.Tensor)
        kinds = {_object_role(each) or ("data" if isinstance(each, tables) else None) for each in value.values()}
        # Names of analyzers are texts, as data may be.
        if kinds == {"analyzers"} or (expected == "analyzers" and kinds <= {"analyzers", None}):
            return "analyzers"
    if isinstance(value, torch.Tensor | Mapping) or hasattr(value, "column_names"):
        return "data"
    if isinstance(value, list | tuple) and value:
        first = value[0]
        if isinstance(first, str):
            # The name of an analyzer is one word. A text may be one word too, and is then accepted as data.
            texts = expected == "analyzers" and any(" " in text for text in value if isinstance(text, str))
            return "data" if texts or expected in ("model", "training settings") else None
        return _role(first, expected) if not isinstance(first, list | tuple) else "data"
    if isinstance(value, str) and expected == "analyzers" and len(value.split()) > 3 and "," not in value:
        return "data"
    if isinstance(value, str) and expected == "model" and len(value.split()) > 3:
        return "data"
    return None
