"""Names of axes in words, with units, as figures show them."""

from __future__ import annotations

AXES = {
    "affected": "Affected block",
    "batch": "Batch",
    "centre": "After block",
    "direction": "Number of the singular value",
    "draw": "Permutation",
    "label": "Class",
    "layer": "Block",
    "length": "Prompt length (tokens)",
    "look": "Evaluation",
    "other_text_layer": "After block of the text tower",
    "other_vision_layer": "After block of the vision tower",
    "prediction": "Predicted class",
    "prompt_row": "Row of the data",
    "residual": "After block",
    "skipped": "Skipped block",
    "step": "Training step",
    "text_layer": "After block of the text tower",
    "threshold": "Threshold of the top probability",
    "vision_layer": "After block of the vision tower",
    "back_bias": "Dimension of the back",
    "back_dim": "Dimension of the back",
    "block": "Block",
    "comparison": "Groups of the two models",
    "component": "Principal component",
    "connection": "Block",
    "dim": "Dimension of the stream",
    "dimension": "Dimension of the stream",
    "front_dim": "Dimension of the front",
    "k": "Number of most likely predictions (k)",
    "model": "Model",
    "quantile": "Quantile (fraction of tokens below)",
    "stage": "Stage",
    "token": "Token of the prompt",
}
# Names of lines, of which there is one for each label of an axis.
SERIES = {
    "direction": "number {}",
    "k": "top {}",
    "look": "after {:,} steps",
    "quantile": "{:.0%} of tokens below",
    "threshold": "threshold {:g}",
}
# Axes whose labels are names.
NAMED = ("comparison", "model", "stage")


def axis_title(axis: str) -> str:
    """An axis in words, with its unit.

    Examples:
        >>> axis_title("length"), axis_title("head_number")
        ('Prompt length (tokens)', 'Head number')
    """
    return AXES.get(axis) or _words(axis)


def series_label(axis: str, label: object) -> str:
    """The name of a line that belongs to one label of an axis.

    Examples:
        >>> series_label("k", 5), series_label("look", 1000), series_label("model", "before"), series_label("head_group", 2)
        ('top 5', 'after 1,000 steps', 'before', 'head group 2')
    """
    if axis in NAMED:
        return str(label)
    template = SERIES.get(axis)
    return template.format(label) if template else f"{_words(axis).lower()} {label}"


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()
