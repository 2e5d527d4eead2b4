"""Words in figures: titles of axes, names of lines, and labels of sites."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any

from ..core.errors import printable
from ..core.site_names import SiteParts, parse_site

AXES = {
    "affected": "Affected block",
    "centre": "After block",
    "direction": "Number of the direction",
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
    "relative_depth": "Relative depth (0: first site, 1: last)",
    "row_block": "Jacobian of block",
    "column_block": "Singular vectors of block",
    "stage": "Stage",
    "token": "Token of the prompt",
}
# Names of lines, by axis.
SERIES = {
    "direction": "direction {}",
    "k": "top {}",
    "look": "after {:,} steps",
    "quantile": "{:.0%} of tokens below",
    "threshold": "threshold {:g}",
}
# Axes whose labels are names.
NAMED = ("comparison", "model", "stage")
# Titles of axes whose sites are of one kind, by the end of the TransformerLens name.
FAMILY_TITLES = {
    "hook_resid_mid": "Between attention and MLP of block",
    "hook_attn_out": "Attention output of block",
    "hook_mixer_out": "Mixer output of block",
    "hook_mlp_out": "MLP output of block",
    "hook_cross_attn_out": "Cross-attention output of block",
    "hook_resid_mid_cross": "Between cross-attention and MLP of block",
    "attn.hook_z": "Attention head outputs (z) of block",
    "attn.hook_q": "Queries of block",
    "attn.hook_k": "Keys of block",
    "attn.hook_v": "Values of block",
    "mlp.hook_post": "MLP neurons of block",
    "ln1.hook_normalized": "Input of attention of block",
    "ln2.hook_normalized": "Input of MLP of block",
    "ln_final.hook_normalized": "Output of the final norm",
}
HEAD_TITLES = {
    "attn.hook_z": "Attention head (z)",
    "attn.hook_q": "Head (queries)",
    "attn.hook_k": "Head (keys)",
    "attn.hook_v": "Head (values)",
}
# Titles of axes of residual layers that belong to one stack.
STACK_TITLES = {
    ("encoder", "Block"): "Encoder layer",
    ("encoder", "After block"): "After encoder layer",
    ("decoder", "Block"): "Decoder layer",
    ("decoder", "After block"): "After decoder layer",
}
STREAM = ("hook_resid_pre", "hook_resid_post")


def _parse_sites(names: tuple[str, ...]) -> list[SiteParts] | None:
    """Parts of the name of each site; None unless all are TransformerLens names."""
    sites = []
    for name in names:
        site = parse_site(name)
        if site is None:
            return None
        sites.append(site)
    return sites


def short_names(names: tuple[str, ...]) -> list[str]:
    """Tick labels of sites, such as the number of the block.

    `embed` is the input of block 0, and `into 3` the input of block 3.

    Heads are `L3H5`. Labels hold the family's name if there are several families. Sites without a TransformerLens name keep
    their path, without its common prefix.

    Examples:
        >>> short_names(("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post"))
        ['embed', '0']
        >>> short_names(("blocks.0.attn.hook_z[0]", "blocks.0.attn.hook_z[1]"))
        ['L0H0', 'L0H1']
        >>> short_names(("blocks.0.hook_attn_out", "blocks.0.hook_mlp_out"))
        ['0 attn_out', '0 mlp_out']
        >>> short_names(("model.layers.0.mlp.input", "model.layers.0.mlp", "model.layers.1.mlp"))
        ['into 0.mlp', '0.mlp', '1.mlp']
    """
    sites = _parse_sites(names)
    if sites is None:
        return _short_paths(names)
    several_families = len({_family(site) for site in sites}) > 1
    several_stacks = len({site.stack for site in sites}) > 1
    labels = []
    for site in sites:
        label = _tick_label(site, several_families)
        labels.append(f"{site.stack[:3]} {label}" if several_stacks else label)
    return labels


def site_axis_title(names: tuple[str, ...], title: str) -> str:
    """Title of an axis of sites.

    Args:
        names: names of the sites.
        title: title for residual layers. "block" becomes "module" if the sites are modules; other sites have a title of their
            own.

    Examples:
        >>> site_axis_title(("blocks.0.hook_attn_out", "blocks.1.hook_attn_out"), "After block of gpt2")
        'Attention output of block of gpt2'
        >>> site_axis_title(("decoder.blocks.0.hook_resid_post", "decoder.blocks.1.hook_resid_post"), "Block")
        'Decoder layer'
    """
    sites = _parse_sites(names)
    if not sites:
        return re.sub(r"\b([Bb])lock\b", lambda match: "Module" if match[1] == "B" else "module", title, count=1)
    families = {_family(site) for site in sites}
    if families <= {"stream"}:
        stacks = {site.stack for site in sites}
        stack = sites[0].stack if len(stacks) == 1 else ""
        return STACK_TITLES.get((stack, title), title)
    # The title may end with the name of the model, as in "After block of gpt2".
    _, of, model = title.partition(" of ")
    are_heads = all(site.head for site in sites)
    if len(families) > 1:
        sites_title = "Head" if are_heads else "Site"
    elif are_heads:
        sites_title = HEAD_TITLES.get(sites[0].place, "Head")
    else:
        sites_title = FAMILY_TITLES.get(sites[0].place, f"{sites[0].place} of block")
    return f"{sites_title}{of}{model}"


def site_words(names: tuple[str, ...], text: str) -> str:
    """Replace "layer" in a text by "head" or "site", unless the sites are residual layers.

    Args:
        names: names of the sites.
        text: a text, such as the title of a figure.

    Examples:
        >>> site_words(("blocks.0.attn.hook_z[0]", "blocks.0.attn.hook_z[1]"), "Linear CKA between layers")
        'Linear CKA between heads'
        >>> site_words(("blocks.0.hook_attn_out",), "Cosine similarity to the last layer")
        'Cosine similarity to the last site'
    """
    sites = _parse_sites(names)
    if sites is None or all(site.place.startswith("hook_resid_") for site in sites):
        return text
    return re.sub(r"\blayer(s?)\b", r"head\1" if heads_in_block(names) else r"site\1", text)


def heads_in_block(names: tuple[str, ...]) -> int:
    """Number of heads in the first block; 0 unless every site is a head."""
    sites = _parse_sites(names)
    if not sites or not all(site.head for site in sites):
        return 0
    return sum(site[:3] == sites[0][:3] for site in sites)


def _family(site: SiteParts) -> str:
    return "stream" if site.place in STREAM else site.place


def _tick_label(site: SiteParts, with_family: bool) -> str:
    if site.head:
        label = f"L{site.block}H{site.head}"
        # The last letter of "attn.hook_q" and the like.
        return f"{label} {site.place[-1]}" if with_family else label
    if site.place == "hook_resid_pre":
        return "embed" if site.block == "0" else f"into {site.block}"
    if not site.block:
        return "final norm"
    name = site.place.removesuffix(".hook_normalized").split(".")[-1].removeprefix("hook_")
    return f"{site.block} {name}" if with_family else site.block


def _short_paths(names: tuple[str, ...]) -> list[str]:
    paths = [name.removesuffix(".input").split(".") for name in names]
    # Number of parts that all paths have in common. Never the last part, which tells sites apart.
    common = 0
    while all(len(path) > common + 1 and path[common] == paths[0][common] for path in paths):
        common += 1
    labels = []
    for name, path in zip(names, paths, strict=True):
        short_path = ".".join(path[common:])
        labels.append(f"into {short_path}" if name.endswith(".input") else short_path)
    return labels


def axis_title(axis: str) -> str:
    """Title of an axis, with its unit.

    Examples:
        >>> axis_title("length"), axis_title("head_number")
        ('Prompt length (tokens)', 'Head number')
    """
    return AXES.get(axis) or _words(axis)


def markup(label: Any) -> Any:
    """A label as text of a figure, which plotly reads as HTML. Numbers are unchanged.

    Examples:
        >>> markup("<a href=x>"), markup(3)
        ('&lt;a href=x&gt;', 3)
    """
    if not isinstance(label, str):
        return label
    return html.escape(printable(label, lines=False), quote=False)


def series_label(axis: str, label: object) -> str:
    """Legend name of a line, such as "top 5" for label 5 of axis "k".

    Examples:
        >>> series_label("k", 5), series_label("look", 1000), series_label("model", "before"), series_label("head_group", 2)
        ('top 5', 'after 1,000 steps', 'before', 'head group 2')
    """
    if axis in NAMED:
        return str(label)
    template = SERIES.get(axis)
    if template is None:
        return f"{_words(axis).lower()} {label}"
    return template.format(label).replace("%", " %")


def _words(name: str) -> str:
    return name.replace("_", " ").capitalize()


def quantity_with_unit(attrs: Mapping[Any, Any], default: str) -> str:
    """Quantity of a labelled array, with its unit.

    Args:
        attrs: attributes of the array.
        default: name of a quantity without `long_name`.

    Examples:
        >>> quantity_with_unit({"long_name": "Cross-entropy", "units": "nats"}, "Value")
        'Cross-entropy (nats)'
    """
    name = str(attrs.get("long_name", default))
    return f"{name} ({attrs['units']})" if attrs.get("units") else name


def lower_first_letter(words: str) -> str:
    """Words with a small first letter, unless they begin with an initialism such as CKA.

    Examples:
        >>> lower_first_letter("Training step"), lower_first_letter("CKA of layers")
        ('training step', 'CKA of layers')
    """
    return words if words[:2].isupper() else words[:1].lower() + words[1:]


def is_stream(names: tuple[str, ...]) -> bool:
    """Whether all sites are inputs or outputs of blocks."""
    sites = _parse_sites(names)
    return sites is not None and all(site.place in STREAM for site in sites)


def listed_sites(names: tuple[str, ...]) -> str:
    """Number and names of sites, as text.

    Names that differ only in numbers are shortened to the first and the last.

    Examples:
        >>> listed_sites(("blocks.0.hook_resid_pre", *(f"blocks.{i}.hook_resid_post" for i in range(32))))
        '33 sites: blocks.0.hook_resid_pre, blocks.0.hook_resid_post to blocks.31.hook_resid_post'
    """
    names_by_pattern: dict[str, list[str]] = {}
    for name in names:
        names_by_pattern.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    ranges = []
    for similar_names in names_by_pattern.values():
        if len(similar_names) > 1:
            ranges.append(f"{similar_names[0]} to {similar_names[-1]}")
        else:
            ranges.append(similar_names[0])
    return f"{len(names)} site{'s' if len(names) > 1 else ''}: {', '.join(ranges)}"


def visible_token(token: str, letters: int | None = None) -> str:
    """Token as one line of plain text with visible outer spaces.

    Args:
        token: text of the token.
        letters: maximum number of letters; a longer token ends with an ellipsis.

    Examples:
        >>> visible_token(" girl"), visible_token("a\\n"), visible_token(""), visible_token(" extraordinary", 8)
        ('·girl', 'a\\\\n', '(empty)', '·extrao…')
    """
    inner = token.strip(" ")
    spaces_before = len(token) - len(token.lstrip(" "))
    # A token of spaces alone has them all before it.
    spaces_after = len(token) - spaces_before - len(inner) if inner else 0
    spaced = "·" * spaces_before + inner + "·" * spaces_after
    characters = [c if c.isprintable() else c.encode("unicode_escape").decode() for c in spaced]
    visible = "".join(characters) or "(empty)"
    if letters is None or len(visible) <= letters:
        return visible
    return f"{visible[: letters - 1]}…"
