"""Shards: contiguous parts of the data that separate processes measure; `merge` makes one report from their files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial, reduce
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from tqdm.auto import tqdm

from ..core.arguments import typed
from ..core.distributed import rank_and_size
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.resumable_file import ResumableFile
from ..core.storage import MALFORMED, refuse_other_types, refuse_unwritable
from ..core.sums import Sums, SumTree, Tally
from ..core.wording import brief
from .report_assembly import make_report, refuse_empty
from .run import run
from .run_arguments import AnalyzersArgument
from .run_description import FIRST, MAIN, Analysis, DataCounts, DataPart, FirstStage
from .run_files import model_of, restored_analyzers, sums_below, tallies_of

SHARD_FILE = "shard"
# A folder, a pattern or a path; or several paths.
FilesArgument: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def check_shard_arguments(
    shard: tuple[int, int] | None,
    save_to: str | os.PathLike[str] | None,
    first: FilesArgument | None,
    checkpoint: str | os.PathLike[str] | None,
    blocking: bool,
) -> None:
    """Raise an error if the arguments `shard`, `save_to` and `first` of `analyze` do not fit one another or the others.

    Args:
        shard: index of the shard and number of shards; None for a run over all data.
        save_to: path of the shard's file.
        first: files of the first stage.
        checkpoint: the option `checkpoint`, which a shard does not take.
        blocking: the option `blocking`, which is True for a shard.

    Raises:
        LayersimError: the arguments contradict each other, or no file can be written at `save_to`.
    """
    if shard is None:
        for name, value in (("save_to", save_to), ("first", first)):
            if value is not None:
                raise LayersimError(f"`{name}` is {brief(value)}; it needs `shard`, such as shard=(0, 64).")
        return
    number, of = shard
    if not 0 <= number < of:
        raise LayersimError(
            f"`shard` is ({number}, {of}); it must be the index of a shard, from 0, and the number of shards, which is larger."
        )
    if save_to is None:
        raise LayersimError(f"`shard` is ({number}, {of}); it needs `save_to`, the path of a file for the sums of this shard.")
    if checkpoint is not None:
        raise LayersimError("`checkpoint` cannot be combined with `shard`: the file of a shard, `save_to`, is its checkpoint.")
    if not blocking:
        raise LayersimError("`blocking=False` cannot be combined with `shard`.")
    if rank_and_size()[1] > 1:
        raise LayersimError(
            f"`shard` is ({number}, {of}); it cannot be used in a torch.distributed group, whose {rank_and_size()[1]} "
            "ranks divide the data already."
        )
    refuse_unwritable(save_to, "save_to")


def paths_of(files: FilesArgument, argument: str) -> tuple[Path, ...]:
    """Paths of files: the files in a folder, the files that match a pattern, or the given paths.

    Args:
        files: a folder, a pattern or a path; or several paths.
        argument: name of the argument that holds them, for messages.

    Raises:
        LayersimError: there is no file.
    """
    if isinstance(files, (str, os.PathLike)):
        path = Path(files)
        if path.is_dir():
            found = sorted(path.glob("*.safetensors"))
        elif not path.exists() and any(mark in path.name for mark in "*?["):
            found = sorted(path.parent.glob(path.name))
        else:
            found = [path]
    else:
        found = [Path(file) for file in files]
    if not found:
        raise LayersimError(f"`{argument}` is {brief(files)}; no such file exists.")
    return tuple(found)


def run_shard(
    analysis: Analysis, identity: Mapping[str, Any], shard: tuple[int, int], path: Path, first: FirstStage | None
) -> Path:
    """Measure one shard of the data, and write its sums to a file that is also the shard's checkpoint.

    Args:
        analysis: model, data and analyzers.
        identity: identity of the run as plain data, see `Analysis.identity`. A forward pass may change the model's description.
        shard: index of the shard and number of shards.
        path: path of the file.
        first: result of the first stage; None in the first stage, or if there is none.

    Returns:
        Path of the file.

    Raises:
        LayersimError: an analyzer cannot use the model or the data, or the file or the first stage belongs to another run.
        OSError: the file cannot be written.
    """
    if analysis.batches.one_shot:
        raise LayersimError(
            "`data` can be read only once, and a shard reads it twice. Pass list(data), or "
            "datasets.Dataset.from_generator(...)."
        )
    analysis.check()
    if first is not None:
        if not analysis.first_needs_model:
            raise LayersimError("`first` is given, but no analyzer of this call has a first pass with the model.")
        if words := differing_entries(identity, first.identity):
            raise LayersimError(f"`first` holds the first stage of another run, with {words}.")
    number, of = shard
    # A first pass without the model is a part of each shard.
    stage = FIRST if analysis.first_needs_model and first is None else MAIN
    own = {"first": "" if first is None else first.digest, "shard": [number, of], "stage": stage}
    file = ResumableFile(path, SHARD_FILE, {**identity, **own})
    kept = file.resume(partial(_part_of, str(path)))
    counts = analysis.counts if kept is None or kept.is_done else kept.counts
    if kept is not None and kept.is_done:
        if counts != kept.counts:
            raise _other_data(f"`save_to` is {path}, the shard of other data", kept.counts, counts)
        tqdm.write(f"{path} holds this shard already, and is complete.", file=sys.stderr)
        return path
    if first is not None and first.counts != counts:
        raise _other_data("`first` holds the first stage of other data", first.counts, counts)
    refuse_empty(Tally(sequences=counts.sequences, tokens=counts.tokens))
    tallies = {} if kept is None else dict(kept.tallies)
    part = DataPart(number=number, of=of, counts=counts, stage=stage, first=first)
    file.write(*analysis.snapshot(part, tallies))
    run(analysis, part, file, tallies)
    return path


def _other_data(given: str, then: DataCounts, now: DataCounts) -> LayersimError:
    return LayersimError(f"{given}: {then.tokens} tokens in {then.sequences} rows, not {now.tokens} in {now.sequences}.")


@dataclass(frozen=True)
class ShardPart:
    """Contents of a shard's file.

    Attributes:
        path: path of the file.
        number: index of the shard, from 0.
        of: number of shards of the run.
        stage: "first" for the sums of a first pass, which the main pass continues from; "main" for the sums of a report.
        identity: model, analyzers, options and version as plain data; the same in all shards of a run.
        counts: counts of all data.
        tallies: tallies by pass: the main pass, or the first pass if `stage` is "first".
        first: sums of the first pass over all data, by analyzer; empty if no analyzer needs one or `stage` is "first".
        notes: description of the model, the analyzers and the settings, from which the report is made.
    """

    path: str
    number: int
    of: int
    stage: str
    identity: Mapping[str, Any]
    counts: DataCounts
    tallies: Mapping[str, Tally]
    first: Mapping[str, Sums]
    notes: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether the shard was measured to its end."""
        return self.stage in self.tallies and self.tally.done

    @property
    def tally(self) -> Tally:
        """Tally of the pass whose sums the file holds."""
        return self.tallies[self.stage]


def read_part(path: str | os.PathLike[str]) -> ShardPart:
    """Read the file of a shard.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: the file is damaged, or is not the file of a shard.
    """
    return ResumableFile(path, SHARD_FILE).read(partial(_part_of, str(path)))


def _part_of(path: str, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ShardPart:
    """The part in a file, from its notes and tensors; malformed ones may raise any exception."""
    identity = dict(notes["identity"])
    number, of = identity.pop("shard")
    held = {"number": number, "of": of, "stage": identity.pop("stage")}
    refuse_other_types(ShardPart, held)
    refuse_other_types(DataCounts, notes["counts"])
    counts = DataCounts(**{field.name: notes["counts"][field.name] for field in fields(DataCounts)})
    if not 0 <= number < of:
        raise ValueError(f"shard {number} of {of}")
    tallies, start = tallies_of(notes, tensors), counts.within(number, of).start * counts.capacity
    if held["stage"] in tallies and tallies[held["stage"]].tree.start != start:
        raise ValueError(f"the sums do not begin after row {start}")
    first = sums_below("all first", notes["first"], tensors)
    return ShardPart(path, **held, identity=identity, counts=counts, tallies=tallies, first=first, notes=notes)


@typed
def merge(files: FilesArgument, *, analyzers: AnalyzersArgument | None = None) -> Report:
    """Add the sums of all shards of a run, and compute the report.

    Batches are added in one order that depends on their number alone, so every number equals that of one process over all data
    to the last bit, intervals included. Only `seconds` differs: it is the sum over all shards. Memory holds the sums of one
    shard beside the total.

    Args:
        files: the files that `analyze(..., shard=(i, n), save_to=path)` wrote, in any order: paths, a folder that holds only
            these files, or a pattern such as "parts/*.safetensors".
        analyzers: the analyzers as they were given to `analyze`; needed if they are the user's own or hold tensors.

    Returns:
        The results by analyzer name.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: a shard is missing, given twice, not finished, damaged, of another run or of a first stage; the message
            names the files.

    Examples:
        >>> import os, tempfile
        >>> import tl_layersim as lsim
        >>> folder = tempfile.mkdtemp()
        >>> model, texts = lsim.demo_model(), lsim.demo_text()[:8]
        >>> for i in range(2):
        ...     path = os.path.join(folder, f"part-{i}.safetensors")
        ...     _ = lsim.analyze(model, lsim.Data(texts, batch_size=2), ["cka"], shard=(i, 2), save_to=path)
        >>> merged = lsim.merge(folder)
        >>> bool((merged["cka"].values == lsim.analyze(model, lsim.Data(texts, batch_size=2), ["cka"])["cka"].values).all())
        True
    """
    parts = _in_order(map(_header_of, paths_of(files, "files")), MAIN)
    try:
        return _report_of(parts, analyzers)
    except LayersimError:
        raise
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise LayersimError(
            f"`files` cannot be merged ({reason}): {_shard_names(parts)}. A file was edited, or an analyzer of your own fails."
        ) from error


def _report_of(parts: Sequence[ShardPart], analyzers: AnalyzersArgument | None) -> Report:
    tree, head, counts = _tree_of_shards(parts), parts[0], parts[0].counts
    notes = head.notes
    chosen = restored_analyzers(notes["analyzers"], analyzers, "lsim.merge(files, analyzers=[...])")
    # A first pass without a model is a part of each shard; one with a model has files of its own.
    seconds = sum(tally.seconds for part in parts for tally in part.tallies.values()) + notes["first_seconds"]
    tally = Tally(counts.batches, counts.sequences, counts.tokens, counts.digest, seconds, True, tree)
    places = [place for part in parts for place in part.notes["places"]]
    settings = notes["settings"] | ({"remote": places} if places else {})
    models = {name: [model_of(own)] for name, own in notes["models"].items()}
    blocks = None if tree.size is None else tree.blocks()
    return make_report(chosen, models, tally, tree.total().sums, head.first, settings, blocks)


def merged_first(files: Iterable[Path]) -> FirstStage:
    """Add the first-stage sums of all shards.

    Args:
        files: the files of the first stage.

    Raises:
        LayersimError: a shard is missing, given twice, not finished, or of another run.
    """
    parts = _in_order(map(_header_of, files), FIRST)
    total = _tree_of_shards(parts).total().sums
    identity = {key: value for key, value in parts[0].identity.items() if key != "first"}
    sums = {name: total[name] for name in identity["analyzers"] if name in total}
    return FirstStage(sums, sum(part.tally.seconds for part in parts), parts[0].counts, identity)


def _header_of(path: Path) -> ShardPart:
    """The part in a file, without the tensors of its sums: one part at a time is held beside the total."""
    part = read_part(path)
    tallies = {label: replace(tally, tree=SumTree(tally.tree.size, tally.tree.start)) for label, tally in part.tallies.items()}
    return replace(part, tallies=tallies)


def _tree_of_shards(parts: Sequence[ShardPart]) -> SumTree:
    """The sums of all batches, from the files of all shards in order."""
    trees = (read_part(part.path).tally.tree for part in parts)
    return reduce(SumTree.join, trees)


def _in_order(headers: Iterable[ShardPart], stage: str) -> list[ShardPart]:
    """The shards in order of their index.

    Raises:
        LayersimError: a shard is missing, not finished, of another run, or given twice.
    """
    parts = list(headers)
    others = [part for part in parts if part.stage != stage]
    if others and stage == MAIN:
        raise LayersimError(
            f"Files of a first stage cannot be merged to a report: {_shard_names(others)}. Measure all shards with "
            "first=[these files], and merge the files that these calls write."
        )
    if others:
        raise LayersimError(f"`first` names files of the main pass: {_shard_names(others)}.")
    here, head = version("tl_layersim"), parts[0]
    if others := [part for part in parts if part.identity["version"] != here]:
        then = others[0].identity["version"]
        raise LayersimError(
            f"Shards were written by tl_layersim {then}, and this is {here}: {_shard_names(others)}. Their sums may have "
            "another meaning; install that version."
        )
    if others := [part for part in parts if (part.identity, part.of) != (head.identity, head.of)]:
        words = differing_entries(head.identity, others[0].identity) or f"{others[0].of} shards, not {head.of}"
        raise LayersimError(f"Shards belong to another run than {head.path}, with {words}: {_shard_names(others)}.")
    if others := [part for part in parts if part.counts != head.counts]:
        raise _other_data(f"Shards were measured on other data: {_shard_names(others)}", head.counts, others[0].counts)
    if unfinished := [part for part in parts if not part.is_done]:
        raise LayersimError(
            f"Shards are not finished: {_shard_names(unfinished)}. The call with shard=({unfinished[0].number}, "
            f"{unfinished[0].of}) continues from its file."
        )
    by_number = {part.number: part for part in parts}
    if twice := [part for part in parts if by_number[part.number] is not part]:
        raise LayersimError(f"Shards are given more than once: {_shard_names(twice)}.")
    if count := head.of - len(parts):
        # `of` comes from a file: no list is as long as it says.
        missing = list(islice((number for number in range(head.of) if number not in by_number), 20))
        words = ", ".join(map(str, missing)) + (" ..." if count > len(missing) else "")
        raise LayersimError(
            f"{count} of {head.of} shards {'is' if count == 1 else 'are'} missing: {words}. Pass their files too, or measure "
            f"them with shard=({missing[0]}, {head.of}){' and without `first`' if stage == FIRST else ''}."
        )
    return [by_number[number] for number in range(head.of)]


def differing_entries(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """The entries in which the identities of two runs differ, in words.

    Args:
        now: identity of this run.
        then: identity of the other run.
    """
    names = {"models": "model", "code": "code of the analyzers", "first": "first stage", "version": "version of tl_layersim"}
    words = []
    for key in sorted(now.keys() | then.keys()):
        mine, other = now.get(key), then.get(key)
        if mine != other and key == "data" and isinstance(mine, dict) and isinstance(other, dict):
            options = sorted(name for name in mine.keys() | other.keys() if mine.get(name) != other.get(name))
            words.append("other options " + ", ".join(f"{name}={other.get(name)!r}" for name in options))
        elif mine != other:
            words.append(f"other {names.get(key, key)}")
    return " and ".join(words)


def _shard_names(parts: Sequence[ShardPart]) -> str:
    """Paths and indices of parts, cut after the first few."""
    words = [f"{part.path} (shard {part.number})" for part in parts[:10]]
    return ", ".join(words) + (f" and {len(parts) - 10} more" if len(parts) > 10 else "")
