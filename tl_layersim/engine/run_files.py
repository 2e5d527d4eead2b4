"""Converts the state of a run to JSON data and tensors for a file, and back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from torch import Tensor

from ..analyzers import find_analyzers
from ..analyzers.analyzer import Analyzer, code_digest
from ..architectures.unembed import Head, Pool
from ..core.errors import LayersimError
from ..core.resumable_file import Snapshot
from ..core.sums import DataBlock, Sums, SumTree, Tally
from ..sources.model_description import ModelDescription
from .run_arguments import AnalyzersArgument, choose_analyzers

# Fields of a tally that JSON holds; the others are sums.
PLAIN = ("batches", "sequences", "texts", "tokens", "digest", "inputs", "seconds", "done")


def sums_snapshot(prefix: str, sums: Mapping[str, Sums]) -> dict[str, Tensor]:
    """Convert named sums to tensors with keys "prefix/name/field"."""
    tensors = {}
    for name, named_sums in sums.items():
        for field, tensor in named_sums.fields.items():
            tensors[f"{prefix}/{name}/{field}"] = tensor
    return tensors


def sums_below(prefix: str, names: list[str], tensors: Mapping[str, Tensor]) -> dict[str, Sums]:
    """Restore named sums from the tensors of `sums_snapshot`."""
    fields_of: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors_below(f"{prefix}/", tensors).items():
        name, _, field = key.partition("/")
        fields_of[name][field] = tensor
    return {name: Sums(sum_fields) for name, sum_fields in fields_of.items()}


def tensors_below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Select the tensors whose keys begin with `prefix`, and remove the prefix from their keys."""
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def tallies_snapshot(tallies: Mapping[str, Tally]) -> Snapshot:
    """Convert the counts and sums of all passes to JSON data and tensors."""
    passes: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for label, tally in tallies.items():
        tree = tally.tree
        passes[label] = {name: getattr(tally, name) for name in PLAIN}
        passes[label]["tree"] = {
            "size": tree.size,
            "start": tree.start,
            "nodes": [[node.texts, node.tokens] for node in tree.nodes],
            "names": list(tree.nodes[0].sums) if tree.nodes else [],
        }
        for number, node in enumerate(tree.nodes):
            tensors |= sums_snapshot(f"{label} {number}", node.sums)
    return {"passes": passes}, tensors


def tallies_of(notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tally]:
    """Restore the counts and sums of all passes from the output of `tallies_snapshot`."""
    tallies = {}
    for label, pass_notes in notes["passes"].items():
        plain = {name: pass_notes[name] for name in PLAIN}
        tree = pass_notes["tree"]
        nodes = []
        for number, (texts, tokens) in enumerate(tree["nodes"]):
            sums = sums_below(f"{label} {number}", tree["names"], tensors)
            nodes.append(DataBlock(texts, tokens, sums))
        tallies[label] = Tally(**plain, tree=SumTree(tree["size"], tree["start"], tuple(nodes)))
    return tallies


def model_notes(model: ModelDescription) -> dict[str, Any]:
    """A model's description as plain data, without tokenizer and processor."""
    plain = {}
    for field in fields(ModelDescription):
        if field.name not in ("tokenizer", "processor", "head", "weights"):
            plain[field.name] = getattr(model, field.name)
    head = None if model.head is None else asdict(model.head)
    return plain | {"weights_hash": model.weights_hash, "head": head}


def model_of(notes: Mapping[str, Any]) -> ModelDescription:
    """Restore a model's description from `model_notes`."""
    plain = dict(notes)
    head = plain.pop("head")
    if head is not None:
        pool = head["pool"]
        if pool is not None:
            pool = Pool(**{**pool, "single": tuple(pool["single"])})
        parts = tuple(tuple(part) if isinstance(part, list) else part for part in head["parts"])
        head = Head(**{**head, "parts": parts, "pool": pool})
    # Tuples are lists in JSON.
    for name in ("layers", "pads", "starts", "ends", "widths"):
        plain[name] = tuple(plain[name])
    plain["weights"] = plain.pop("weights_hash")
    return ModelDescription(**plain, tokenizer=None, head=head)


def recipe_of(analyzer: Analyzer) -> dict[str, Any]:
    """Class, options and code digest of an analyzer, for a file."""
    return {"class": _class_name(type(analyzer)), "options": analyzer.options(), "code": code_digest(analyzer)}


def _class_name(cls: type[Analyzer]) -> str:
    """Name of a class with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


def restored_analyzers(
    recipes: Mapping[str, Any], analyzers: AnalyzersArgument | None, call: str = "lsim.load_run(path, analyzers=[...])"
) -> dict[str, Analyzer]:
    """The analyzers of a saved run, by name.

    Args:
        recipes: descriptions of the analyzers by name, in the form that a file stores.
        analyzers: the analyzers as they were given to `analyze`; None to restore the analyzers of this package.
        call: the call that passes the analyzers, for messages.

    Raises:
        LayersimError: the given analyzers differ from the analyzers of the run, or cannot be restored.
    """
    if analyzers is None:
        return {name: _restored(name, recipe, call) for name, recipe in recipes.items()}
    chosen = choose_analyzers(analyzers)
    chosen_recipes = {name: recipe_of(analyzer) for name, analyzer in chosen.items()}
    if chosen_recipes != recipes:
        raise LayersimError(
            f"`analyzers` are {str(chosen_recipes)[:300]}; they must be those of the saved run, {str(recipes)[:300]}."
        )
    return chosen


def _restored(name: str, recipe: Mapping[str, Any], call: str) -> Analyzer:
    """Restore an analyzer from its options in a file. A file cannot import a class, so the analyzer must be installed."""
    installed = {_class_name(cls): cls for cls in find_analyzers().values()}
    options = {}
    for key, value in recipe["options"].items():
        # Tuples are lists in JSON.
        options[key] = tuple(value) if isinstance(value, list) else value
    restored = None
    # A tensor of labels is only a digest in the file, which its analyzer does not take.
    with suppress(LayersimError):
        if recipe["class"] in installed:
            restored = installed[recipe["class"]](**options)
    if restored is None or recipe_of(restored) != recipe:
        raise LayersimError(
            f"The analyzer {name!r}, {recipe['class']} with the options {recipe['options']}, cannot be created from the file. "
            f"Pass it to {call}."
        )
    return restored
