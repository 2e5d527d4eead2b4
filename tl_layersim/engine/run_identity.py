"""The inputs of a run: everything that changes a number.

A run continues from a file, shards are merged, and sums of ranks are added only if all inputs are equal. Most inputs are
compared as the identity of the run, before anything is measured; rows are compared by a digest that grows with each row.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from ..core.distributed import gathered
from ..core.errors import LayersimError
from ..core.resumable_file import differences, plain
from ..core.sums import Tally
from ..sources.computation import computation_of
from ..sources.model_description import ModelDescription
from ..sources.source import HasModule, OnServer

# Each input of a run, and where it is compared.
INPUTS = {
    "weights": "models: weights, with buffers, quantised values and scales, settings of modules and how modules are wired",
    "configuration": "models: configuration, of the model and of its parts",
    "code": "models: changes (hooks, replaced methods, edits) and weights (code of the user's classes and functions)",
    "head": "models: head, as found or as `unembed` names it",
    "dtype": "models: dtype",
    "precision": "computation: autocast, default_dtype, settings (TF32 and the like)",
    "attention": "computation: attention and settings (kinds of attention that are off)",
    "versions": "version, computation: libraries",
    "sites": "sites, data: layers, at, per_head",
    "analyzers": "analyzers: class, options (seeds, labels, heads, tensors) and the code of the user's own",
    "options of the data": "data: options of `Data`, main input, intervals",
    "tokenizer and processor": "data: tokenizer, processor; what they make is compared as rows",
    "rows": "digest: tokens, masks and further inputs of all rows",
    "positions": "digest: counted positions of all rows",
    "labels": "digest: labels of all rows",
    "texts": "digest: the text of each row, and where the row begins in it",
    "processes": "processes, copies: number of ranks and of copies of the model",
}


def identity_of(models: Sequence[ModelDescription], modules: Iterable[torch.nn.Module], argument: str | None) -> dict[str, Any]:
    """The part of a run's identity that analyses, stitches and trainings share.

    Args:
        models: descriptions of the models.
        modules: the models that run in this process.
        argument: see `ModelDescription.identity`.
    """
    return {
        "models": [model.identity(argument) for model in models],
        "computation": computation_of(modules),
        "version": version("tl_layersim"),
    }


def modules_here(sources: Iterable[Any]) -> list[torch.nn.Module]:
    """The models of sources that run in this process."""
    return [source.module for source in sources if isinstance(source, HasModule) and not isinstance(source, OnServer)]


def refuse_other_ranks(label: str, inputs: Any) -> None:
    """Raise an error on all ranks if a rank of a `torch.distributed` group has other inputs than rank 0.

    Every rank of the group must call this function.

    Args:
        label: what is compared, for the message.
        inputs: inputs of this rank.

    Raises:
        LayersimError: names the first rank that differs, and its inputs that differ.
    """
    inputs_by_rank = gathered(plain({label: inputs}))
    first_inputs = inputs_by_rank[0]
    for rank, rank_inputs in enumerate(inputs_by_rank):
        if rank_inputs != first_inputs:
            rank_entries, first_entries = differences(rank_inputs, first_inputs)
            raise LayersimError(
                f"Rank {rank} of the torch.distributed group has {rank_entries}; it must have the inputs of rank 0, "
                f"{first_entries}. All ranks must open the same model, and read the same rows in the same order."
            )


def refuse_other_data_on_ranks(tally: Tally) -> None:
    """Raise an error on all ranks if a rank has read other rows, counted positions, labels or texts than rank 0.

    Every rank of the group must call this function before sums are added.

    Args:
        tally: the finished pass of this rank.
    """
    counts = {name: getattr(tally, name) for name in ("batches", "sequences", "tokens")}
    refuse_other_ranks("data", counts | {"rows": tally.digest[:12], "rows with labels and positions": tally.inputs[:12]})
