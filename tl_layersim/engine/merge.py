"""`merge`: the report from the files of all shards of a run, equal to a run of one process over all data."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from itertools import islice
from typing import Any, NamedTuple

from ..core.arguments import typed
from ..core.errors import LayersimError
from ..core.results import Report
from ..core.resumable_file import plain
from ..core.storage import MALFORMED
from ..core.sums import Sums, SumTree, Tally
from .chosen_analyzers import AnalyzersArgument
from .report_assembly import make_report
from .shards import FIRST, MAIN, DataCounts, FilesArgument, ShardPart, paths_of, read_part
from .submitted_runs import model_of, models_read, restored_analyzers


def _same(part: ShardPart) -> ShardPart:
    return part


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
    parts = list(map(header_of, paths_of(files, "files")))
    try:
        return merged_report(parts, analyzers, reread)
    except LayersimError:
        raise
    except MALFORMED as error:
        reason = f"{type(error).__name__}: {error}"[:300]
        raise LayersimError(
            f"`files` cannot be merged ({reason}): {_shard_names(parts)}. A file was edited, or an analyzer of your own fails."
        ) from error


def merged_report(
    parts: Iterable[ShardPart], analyzers: AnalyzersArgument | None = None, read: Callable[[ShardPart], ShardPart] = _same
) -> Report:
    """The report from all shards of a run.

    Args:
        parts: the parts, in any order.
        analyzers: see `merge`.
        read: function that reads a part with its sums; one part at a time is held beside the total.

    Raises:
        LayersimError: as `merge`.
    """
    parts = _in_order(list(parts), MAIN)
    tree, head, counts = _tree_of_shards(map(read, parts)), parts[0], parts[0].counts
    assert counts is not None
    notes = head.notes
    chosen = restored_analyzers(notes["analyzers"], analyzers, "lsim.merge(files, analyzers=[...])")
    # A first pass without a model is a part of each shard; one with a model has files of its own.
    seconds = sum(tally.seconds for part in parts for tally in part.tallies.values()) + notes["first_seconds"]
    tally = Tally(counts.batches, counts.sequences, counts.tokens, counts.digest, seconds, True, tree)
    places = [place for part in parts for place in part.notes["places"]]
    settings = notes["settings"] | ({"remote": places} if places else {})
    models = {name: [model] for name, model in models_read(notes, model_of(notes["model"])).items()}
    blocks = None if tree.size is None else tree.blocks()
    return make_report(chosen, models, tally, tree.total().sums, head.first, settings, blocks)


class FirstStage(NamedTuple):
    """Result of the first pass over all data, from all shards of the first stage.

    Attributes:
        sums: sums by analyzer.
        seconds: time that all shards took together.
        counts: counts of all data, see `DataCounts`.
    """

    sums: dict[str, Sums]
    seconds: float
    counts: DataCounts


def merged_first(
    parts: Iterable[ShardPart], identity: Mapping[str, Any], read: Callable[[ShardPart], ShardPart] = _same
) -> FirstStage:
    """Add the first-stage sums of all shards.

    Args:
        parts: the parts, in any order.
        identity: identity of the run that continues from them, see `Analysis.identity`.
        read: see `merged_report`.

    Raises:
        LayersimError: a shard is missing, given twice, not finished, or of another run.
    """
    parts = _in_order(list(parts), FIRST)
    own = plain({**identity, "first": ""})
    if words := differing_entries(own, parts[0].identity):
        raise LayersimError(f"`first` holds the first stage of another run, with {words}: {_shard_names(parts)}.")
    total = _tree_of_shards(map(read, parts)).total().sums
    assert parts[0].counts is not None
    sums = {name: total[name] for name in own["analyzers"] if name in total}
    return FirstStage(sums, sum(part.tally.seconds for part in parts), parts[0].counts)


def header_of(path: str | os.PathLike[str]) -> ShardPart:
    """The part in a file, without the tensors of its sums.

    Args:
        path: path of the file.
    """
    part = read_part(path)
    tallies = {label: replace(tally, tree=SumTree(tally.tree.size, tally.tree.start)) for label, tally in part.tallies.items()}
    return replace(part, tallies=tallies)


def reread(part: ShardPart) -> ShardPart:
    """The part with its sums, read from its file.

    Args:
        part: the part without its sums.
    """
    return read_part(part.path)


def _tree_of_shards(parts: Iterable[ShardPart]) -> SumTree:
    """The sums of all batches, from all shards in order."""
    total: SumTree | None = None
    for part in parts:
        tree = part.tally.tree
        total = tree if total is None else total.join(tree)
    assert total is not None
    return total


def _in_order(parts: Sequence[ShardPart], stage: str) -> list[ShardPart]:
    """The shards in order of their index.

    Raises:
        LayersimError: a shard is missing, not finished, of another run, or given twice.
    """
    others = [part for part in parts if part.stage != stage]
    if others and stage == MAIN:
        raise LayersimError(
            f"Files of a first stage cannot be merged to a report: {_shard_names(others)}. Measure all shards with "
            "first=[these files], and merge the files that these calls write."
        )
    if others:
        raise LayersimError(f"`first` names files of the main pass: {_shard_names(others)}.")
    here = version("tl_layersim")
    if others := [part for part in parts if part.identity["version"] != here]:
        then = others[0].identity["version"]
        raise LayersimError(
            f"Shards were written by tl_layersim {then}, and this is {here}: {_shard_names(others)}. Their sums may have "
            "another meaning; install that version."
        )
    run = _most_common(parts, lambda part: [part.identity, part.of])
    if others := [part for part in parts if [part.identity, part.of] != run]:
        words = differing_entries(run[0], others[0].identity) or f"{others[0].of} shards, not {run[1]}"
        raise LayersimError(f"Shards belong to another run than the other files, with {words}: {_shard_names(others)}.")
    if unfinished := [part for part in parts if not part.is_done]:
        raise LayersimError(
            f"Shards are not finished: {_shard_names(unfinished)}. The call with shard=({unfinished[0].number}, "
            f"{unfinished[0].of}) continues from its file."
        )
    counts = _most_common(parts, lambda part: part.counts)
    if others := [part for part in parts if part.counts != counts]:
        raise LayersimError(
            f"Shards were measured on other data than the rest, which has {counts.tokens} tokens in {counts.sequences} rows: "
            f"{_shard_names(others)}."
        )
    for part in parts:
        start = counts.within(part.number, part.of).start * counts.capacity
        if part.tally.tree.start != start:
            raise LayersimError(
                f"{_shard_names([part])} holds the sums of another shard, which begin after row {part.tally.tree.start}, not "
                f"{start}."
            )
    return _each_once(parts)


def _each_once(parts: Sequence[ShardPart]) -> list[ShardPart]:
    """The shards in order of their index, if each appears exactly once."""
    of = parts[0].of
    times = Counter(part.number for part in parts)
    if twice := sorted(number for number, count in times.items() if count > 1):
        raise LayersimError(
            f"Shards are given more than once: {_shard_names([part for part in parts if part.number in twice])}."
        )
    if count := of - len(times):
        # `of` comes from a file: no list is as long as it says.
        missing = list(islice((number for number in range(of) if number not in times), 20))
        words = ", ".join(map(str, missing)) + (" ..." if count > len(missing) else "")
        raise LayersimError(
            f"{count} of {of} shards {'is' if count == 1 else 'are'} missing: {words}. Pass their files too, or measure them "
            f"with shard=({missing[0]}, {of}){' and without `first`' if parts[0].stage == FIRST else ''}."
        )
    return sorted(parts, key=lambda part: part.number)


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


def _most_common(parts: Sequence[ShardPart], key: Callable[[ShardPart], Any]) -> Any:
    """The value that most parts share; of equally common values, the first."""
    values = [key(part) for part in parts]
    return max(values, key=lambda value: sum(value == other for other in values))


def _shard_names(parts: Sequence[ShardPart]) -> str:
    """Paths and indices of parts, cut after the first few."""
    words = [f"{part.path} (shard {part.number})" for part in parts[:10]]
    return ", ".join(words) + (f" and {len(parts) - 10} more" if len(parts) > 10 else "")
