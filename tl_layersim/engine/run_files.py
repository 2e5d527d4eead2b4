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
from ..sources.model_description import Model
from .run_arguments import AnalyzersArgument, choose_analyzers

# Fields of a tally that JSON holds; the others are sums.
PLAIN = ("batches", "sequences", "texts", "tokens", "digest", "inputs", "seconds", "done")


def sums_snapshot(prefix: str, sums: Mapping[str, Sums]) -> dict[str, Tensor]:
    """Convert named sums to tensors with keys "prefix/name/field"."""
    return {f"{prefix}/{name}/{key}": tensor for name, own in sums.items() for key, tensor in own.fields.items()}


def sums_below(prefix: str, names: list[str], tensors: Mapping[str, Tensor]) -> dict[str, Sums]:
    """Restore named sums from the tensors of `sums_snapshot`."""
    found: dict[str, dict[str, Tensor]] = {name: {} for name in names}
    for key, tensor in tensors_below(f"{prefix}/", tensors).items():
        name, _, field = key.partition("/")
        found[name][field] = tensor
    return {name: Sums(own) for name, own in found.items()}


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
    for label, kept in notes["passes"].items():
        plain = {name: kept[name] for name in PLAIN}
        tree = kept["tree"]
        nodes = tuple(
            DataBlock(texts, tokens, sums_below(f"{label} {number}", tree["names"], tensors))
            for number, (texts, tokens) in enumerate(tree["nodes"])
        )
        tallies[label] = Tally(**plain, tree=SumTree(tree["size"], tree["start"], nodes))
    return tallies


def model_notes(model: Model) -> dict[str, Any]:
    """A model's description as plain data, without tokenizer and processor."""
    plain = {
        f.name: getattr(model, f.name) for f in fields(Model) if f.name not in ("tokenizer", "processor", "head", "weights")
    }
    return plain | {"weights_hash": model.weights_hash, "head": None if model.head is None else asdict(model.head)}


def model_of(notes: Mapping[str, Any]) -> Model:
    """Restore a model's description from `model_notes`."""
    plain = dict(notes)
    head = plain.pop("head")
    if head is not None:
        pool = head["pool"]
        head = {**head, "parts": tuple(tuple(part) if isinstance(part, list) else part for part in head["parts"])}
        head["pool"] = None if pool is None else Pool(**{**pool, "single": tuple(pool["single"])})
        head = Head(**head)
    # Tuples are lists in JSON.
    plain |= {name: tuple(plain[name]) for name in ("layers", "pads", "starts", "ends", "widths")}
    plain["weights"] = plain.pop("weights_hash")
    return Model(**plain, tokenizer=None, head=head)


def recipe_of(analyzer: Analyzer) -> dict[str, Any]:
    """Class, options and code digest of an analyzer, for a file."""
    cls = type(analyzer)
    where = f"{cls.__module__}.{cls.__qualname__}"
    return {"class": where, "options": analyzer.options(), "code": code_digest(analyzer)}


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
    given = {name: recipe_of(analyzer) for name, analyzer in chosen.items()}
    if given != recipes:
        raise LayersimError(f"`analyzers` are {str(given)[:300]}; they must be those of the saved run, {str(recipes)[:300]}.")
    return chosen


def _restored(name: str, recipe: Mapping[str, Any], call: str) -> Analyzer:
    """Restore an analyzer from its options in a file. A file cannot import a class, so the analyzer must be installed."""
    installed = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in find_analyzers().values()}
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in recipe["options"].items()}
    restored = None
    # A tensor of labels is only a digest in the file, which its analyzer does not take.
    with suppress(LayersimError):
        restored = installed[recipe["class"]](**options) if recipe["class"] in installed else None
    if restored is None or recipe_of(restored) != recipe:
        raise LayersimError(
            f"The analyzer {name!r}, {recipe['class']} with the options {recipe['options']}, cannot be created from the file. "
            f"Pass it to {call}."
        )
    return restored
