"""Measures contiguous parts of the data, called shards, in separate processes.

`merge` makes one report from the files of all shards.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor
from tqdm.auto import tqdm

from ..core.arguments import FilePath, is_path, typed
from ..core.errors import LayersimError
from ..core.file_format import checksum
from ..core.results import Report
from ..core.resumable_file import ResumableFile, differences
from ..core.sums import SumTree, Tally
from ..core.wording import brief
from .report_assembly import make_report, refuse_empty
from .run import run
from .run_arguments import AnalyzersArgument
from .run_description import FIRST, MAIN, Analysis, DataCounts, DataPart
from .run_files import model_of, restored_analyzers, sums_snapshot, tallies_of

SHARD_FILE = "shard"
# A folder, a pattern or a path; or several of these.
FilesArgument: TypeAlias = FilePath | Sequence[FilePath]


def paths_of(files: FilesArgument, argument: str) -> list[Path]:
    """Paths of the given files, of files in folders, and of files that match patterns.

    Args:
        files: a folder, a pattern or a path; or several.
        argument: name of the argument that holds them, for messages.

    Raises:
        LayersimError: there is no file.
    """
    items = [files] if isinstance(files, str | os.PathLike) else files
    # The annotation is checked on one random item of a list.
    wrong = [item for item in items if not is_path(item)]
    if wrong:
        raise LayersimError(f"`{argument}` holds {brief(wrong[0])}; it must hold paths of files or folders.")
    paths: list[Path] = []
    for path in map(Path, items):
        if path.is_dir():
            paths += sorted(path.glob("*.safetensors"))
        elif not path.exists() and any(wildcard in path.name for wildcard in "*?["):
            paths += sorted(path.parent.glob(path.name))
        else:
            paths.append(path)
    if not paths:
        raise LayersimError(f"`{argument}` is {brief(files)}; no such file exists.")
    return paths


@dataclass(frozen=True)
class ShardPart:
    """Sums of one shard, read from its file. `merged_first` returns the first pass over all shards in this form.

    Attributes:
        path: path of the file.
        number: index of the shard, from 0.
        shard_count: number of shards of the run.
        pass_name: "first" or "main", the pass whose sums the file is for.
        identity: model, analyzers, options and version as plain data; the same in all shards of a run.
        counts: counts of all data.
        tallies: tallies by pass. In a file of the main pass, the tally of the first pass is that of all shards.
        notes: the header of the file, from which the report is made.
    """

    path: str
    number: int
    shard_count: int
    pass_name: str
    identity: Mapping[str, Any]
    counts: DataCounts
    tallies: Mapping[str, Tally]
    notes: Mapping[str, Any]

    @property
    def is_done(self) -> bool:
        """Whether the shard was measured to its end."""
        return self.pass_name in self.tallies and self.tally.done

    @property
    def tally(self) -> Tally:
        return self.tallies[self.pass_name]

    def refuse_other_counts(self, statement: str, counts: DataCounts) -> None:
        """Raise an error if the shard was measured on other data.

        Args:
            statement: the argument and its value, as the beginning of a sentence.
            counts: counts of the data of this call.
        """
        if self.counts == counts:
            return
        measured = f"{self.counts.tokens} tokens in {self.counts.sequences} rows"
        expected = f"{counts.tokens} tokens in {counts.sequences} rows"
        if measured != expected:
            raise LayersimError(f"{statement}: {measured}, which differ from the expected {expected}.")
        differing = "tokens or inputs" if self.counts.digest != counts.digest else "counted positions, labels or texts"
        raise LayersimError(f"{statement}: {measured} as expected, but with other {differing}.")


def run_shard(
    analysis: Analysis, identity: Mapping[str, Any], shard: tuple[int, int], path: Path, first_pass: ShardPart | None
) -> Path:
    """Measure one shard and write its sums to a file, which is also the shard's checkpoint.

    Args:
        analysis: model, data and analyzers.
        identity: identity of the run as plain data, see `Analysis.identity`. A forward pass may change the model's description.
        shard: index of the shard and number of shards.
        path: path of the file.
        first_pass: the first pass over all shards; None to measure the first pass, or if no first pass runs the model.

    Returns:
        Path of the file.

    Raises:
        LayersimError: an analyzer cannot use the model or the data, or the file or the first pass belongs to another run.
        OSError: the file cannot be written.
    """
    analysis.check()
    differing = "" if first_pass is None else differing_entries(identity, first_pass.identity)
    if differing:
        raise LayersimError(f"`first` holds the first pass of another run: {differing}.")
    # A first pass without the model is a part of each shard.
    pass_name = FIRST if analysis.first_needs_model and first_pass is None else MAIN
    digest = "" if first_pass is None else checksum("", sums_snapshot(FIRST, first_pass.tally.tree.total().sums))
    file = ResumableFile(path, SHARD_FILE, {**identity, "first": digest, "shard": list(shard), "pass": pass_name})
    resumed = file.resume(partial(_part_of, str(path)))
    # Counting reads all data. An unfinished shard has counted it already, and `run` compares the rows as it reads them.
    counts = analysis.counts if resumed is None or resumed.is_done else resumed.counts
    if resumed is not None and resumed.is_done:
        resumed.refuse_other_counts(f"`save_to` is {path}, which holds a shard of other data", counts)
        tqdm.write(f"{path} holds this shard already, and is complete.", file=sys.stderr)
        return path
    if first_pass is not None:
        first_pass.refuse_other_counts("`first` holds the first pass over other data", counts)
    refuse_empty(counts.tokens, counts.sequences)
    earlier = resumed or first_pass
    tallies = {} if earlier is None else dict(earlier.tallies)
    part = DataPart(counts=counts, within=counts.within(*shard), last_pass=pass_name)
    file.write(*analysis.snapshot(part, tallies))
    run(analysis, part, file, tallies)
    return path


def read_part(path: FilePath) -> ShardPart:
    """Read the file of a shard.

    Args:
        path: path of the file.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: the file is damaged, or is not the file of a shard.
    """
    return ResumableFile(path, SHARD_FILE).read(partial(_part_of, str(path)))


def _part_of(path: str, notes: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ShardPart:
    """Parse a shard's file. Malformed notes or tensors may raise any exception."""
    identity = dict(notes["identity"])
    number, shard_count = identity.pop("shard")
    pass_name = identity.pop("pass")
    counts = DataCounts(**notes["counts"])
    if not 0 <= number < shard_count:
        raise ValueError(f"the index of the shard is {number}; it must be 0 or more, and below {shard_count}")
    tallies = tallies_of(notes, tensors)
    start = counts.within(number, shard_count).start * counts.capacity
    if pass_name in tallies and tallies[pass_name].tree.start != start:
        raise ValueError(f"the sums of shard {number} begin at text {tallies[pass_name].tree.start}, not {start}")
    return ShardPart(path, number, shard_count, pass_name, identity, counts, tallies, notes)


@typed
def merge(files: FilesArgument, *, analyzers: AnalyzersArgument | None = None) -> Report:
    """Make the report of a run from the files of its shards.

    The order of additions depends on the number of texts alone. Every number, intervals included, therefore equals that of one
    process over all data to the last bit. `seconds` is the sum over all shards. Memory holds the sums of one shard beside the
    total.

    Args:
        files: the files that `analyze(..., shard=(i, n), save_to=path)` wrote, in any order: paths, a folder that holds only
            these files, or a pattern such as "parts/*.safetensors".
        analyzers: the analyzers as they were given to `analyze`; needed if they are the user's own or hold tensors.

    Returns:
        The results by analyzer name.

    Raises:
        FileNotFoundError: there is no such file.
        LayersimError: a shard is missing, given twice, not finished, damaged, of another run or of a first pass; the message
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
    parts = _all_shards(map(_header_of, paths_of(files, "files")), MAIN)
    tree = _tree_of_shards(parts)
    first_shard = parts[0]
    counts = first_shard.counts
    chosen = restored_analyzers(first_shard.identity["analyzers"], analyzers, "lsim.merge(files, analyzers=[...])")
    passes = [part.tally for part in parts]
    # A first pass without a model is a part of each shard; one with a model is the same in all.
    shards_with_own_first_pass = parts[:1] if first_shard.identity["first"] else parts
    for part in shards_with_own_first_pass:
        if FIRST in part.tallies:
            passes.append(part.tallies[FIRST])
    seconds = sum(pass_tally.seconds for pass_tally in passes)
    tally = Tally(
        counts.batches,
        counts.sequences,
        counts.tokens,
        counts.digest,
        seconds,
        done=True,
        tree=tree,
        inputs=counts.inputs,
        texts=counts.texts,
    )
    provenance = dict(first_shard.notes["provenance"])
    # Each shard has its own facts about the server that measured it.
    servers = []
    for part in parts:
        servers += part.notes["provenance"].get("remote", [])
    if servers:
        provenance["remote"] = servers
    models = {name: [model_of(notes)] for name, notes in first_shard.notes["models"].items()}
    first_sums = read_part(first_shard.path).tallies.get(FIRST, Tally()).tree.total().sums
    return make_report(chosen, models, tally, first_sums, provenance)


def merged_first(files: Iterable[Path]) -> ShardPart:
    """Add up the first-pass sums of all shards.

    Args:
        files: the files of the first pass.

    Raises:
        LayersimError: a shard is missing, given twice, not finished, or of another run.
    """
    parts = _all_shards(map(_header_of, files), FIRST)
    total = SumTree(nodes=(_tree_of_shards(parts).total(),))
    tally = replace(parts[-1].tally, seconds=sum(part.tally.seconds for part in parts), tree=total)
    identity = {key: value for key, value in parts[0].identity.items() if key != "first"}
    return replace(parts[0], identity=identity, tallies={FIRST: tally})


def _header_of(path: Path) -> ShardPart:
    """Read a shard's file and drop its sums. Memory thus holds the sums of one shard at a time."""
    part = read_part(path)
    tallies = {}
    for pass_name, tally in part.tallies.items():
        tallies[pass_name] = replace(tally, tree=SumTree(tally.tree.size, tally.tree.start))
    return replace(part, tallies=tallies)


def _tree_of_shards(parts: Sequence[ShardPart]) -> SumTree:
    """Read the sums of all shards into one `SumTree`."""
    trees = (read_part(part.path).tally.tree for part in parts)
    return reduce(SumTree.join, trees)


def _all_shards(headers: Iterable[ShardPart], pass_name: str) -> list[ShardPart]:
    """All shards of a run, in order of their index.

    Raises:
        LayersimError: a shard is missing, not finished, of another run, or given twice.
    """
    parts = list(headers)
    of_other_pass = [part for part in parts if part.pass_name != pass_name]
    if of_other_pass:
        argument, preposition = ("files", "with") if pass_name == MAIN else ("first", "without")
        raise LayersimError(
            f"`{argument}` holds files of the {of_other_pass[0].pass_name} data pass: {_shard_names(of_other_pass)}. It must "
            f"hold files of the {pass_name} pass: call analyze(..., shard=(i, n), save_to=...) {preposition} `first`."
        )
    installed = version("tl_layersim")
    of_other_version = [part for part in parts if part.identity.get("version") != installed]
    if of_other_version:
        recorded = of_other_version[0].identity.get("version")
        raise LayersimError(
            f"tl_layersim {recorded} wrote the shards {_shard_names(of_other_version)}, and {installed} is installed. Sums of "
            f"other versions may have another meaning; install version {recorded}."
        )
    head = parts[0]
    of_other_run = [part for part in parts if (part.identity, part.shard_count) != (head.identity, head.shard_count)]
    if of_other_run:
        example = of_other_run[0]
        differing = differing_entries(head.identity, example.identity)
        if not differing:
            differing = f"{example.shard_count} shards, not {head.shard_count}"
        raise LayersimError(
            f"These shards belong to another run than {head.path}: {_shard_names(of_other_run)}. Their run has {differing}."
        )
    of_other_data = [part for part in parts if part.counts != head.counts]
    if of_other_data:
        statement = f"Other data than in {head.path} was measured in {_shard_names(of_other_data)}"
        of_other_data[0].refuse_other_counts(statement, head.counts)
    unfinished = [part for part in parts if not part.is_done]
    if unfinished:
        raise LayersimError(
            f"These shards are not finished: {_shard_names(unfinished)}. Repeat the call with shard=({unfinished[0].number}, "
            f"{unfinished[0].shard_count}) and the same `save_to` to continue."
        )
    by_number = {part.number: part for part in parts}
    duplicates = [part for part in parts if by_number[part.number] is not part]
    if duplicates:
        raise LayersimError(f"These shards are given more than once: {_shard_names(duplicates)}.")
    count = head.shard_count - len(parts)
    if count:
        # `shard_count` comes from a file: no list is as long as it says.
        missing = list(islice((number for number in range(head.shard_count) if number not in by_number), 20))
        numbers = ", ".join(map(str, missing))
        if count > len(missing):
            numbers += " ..."
        verb = "is" if count == 1 else "are"
        condition = " and without `first`" if pass_name == FIRST else ""
        raise LayersimError(
            f"{count} of {head.shard_count} shards {verb} missing: {numbers}. Pass their files too, or measure them with "
            f"shard=({missing[0]}, {head.shard_count}){condition}."
        )
    return [by_number[number] for number in range(head.shard_count)]


def differing_entries(expected: Mapping[str, Any], recorded: Mapping[str, Any]) -> str:
    """Entries in which the identities of two runs differ, as text; "" if equal.

    Args:
        expected: identity of this run.
        recorded: identity of the other run.
    """
    if expected == recorded:
        return ""
    expected_entries, recorded_entries = differences(expected, recorded)
    return f"{recorded_entries}, not {expected_entries}"


def _shard_names(parts: Sequence[ShardPart]) -> str:
    """Paths and indices of shards as text, cut after the first ten."""
    names = ", ".join(f"{part.path} (shard {part.number})" for part in parts[:10])
    if len(parts) > 10:
        names += f" and {len(parts) - 10} more"
    return names
