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
    found = list[Path]()
    given = [files] if isinstance(files, str | os.PathLike) else files
    # The annotation is checked on one random item of a list.
    if wrong := [file for file in given if not is_path(file)]:
        raise LayersimError(f"`{argument}` holds {brief(wrong[0])}; it must hold paths of files or folders.")
    for path in map(Path, given):
        if path.is_dir():
            found += sorted(path.glob("*.safetensors"))
        elif not path.exists() and any(mark in path.name for mark in "*?["):
            found += sorted(path.parent.glob(path.name))
        else:
            found.append(path)
    if not found:
        raise LayersimError(f"`{argument}` is {brief(files)}; no such file exists.")
    return found


@dataclass(frozen=True)
class ShardPart:
    """Sums of one shard, read from its file. `merged_first` returns the first pass over all shards in this form.

    Attributes:
        path: path of the file.
        number: index of the shard, from 0.
        of: number of shards of the run.
        pass_name: "first" or "main", the pass whose sums the file is for.
        identity: model, analyzers, options and version as plain data; the same in all shards of a run.
        counts: counts of all data.
        tallies: tallies by pass. In a file of the main pass, the tally of the first pass is that of all shards.
        notes: the header of the file, from which the report is made.
    """

    path: str
    number: int
    of: int
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

    def refuse_other_counts(self, given: str, counts: DataCounts) -> None:
        """Raise an error if the shard was measured on other data.

        Args:
            given: the argument and its value, as the beginning of a sentence.
            counts: counts of the data of this call.
        """
        if self.counts == counts:
            return
        own, expected = (f"{each.tokens} tokens in {each.sequences} rows" for each in (self.counts, counts))
        if own != expected:
            raise LayersimError(f"{given}: {own}, which differ from the expected {expected}.")
        what = "tokens or inputs" if self.counts.digest != counts.digest else "counted positions, labels or texts"
        raise LayersimError(f"{given}: {own} as expected, but with other {what}.")


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
    if first_pass is not None and (words := differing_entries(identity, first_pass.identity)):
        raise LayersimError(f"`first` holds the first pass of another run: {words}.")
    # A first pass without the model is a part of each shard.
    pass_name = FIRST if analysis.first_needs_model and first_pass is None else MAIN
    digest = "" if first_pass is None else checksum("", sums_snapshot(FIRST, first_pass.tally.tree.total().sums))
    file = ResumableFile(path, SHARD_FILE, {**identity, "first": digest, "shard": list(shard), "pass": pass_name})
    kept = file.resume(partial(_part_of, str(path)))
    counts = analysis.counts if kept is None or kept.is_done else kept.counts
    if kept is not None and kept.is_done:
        kept.refuse_other_counts(f"`save_to` is {path}, which holds a shard of other data", counts)
        tqdm.write(f"{path} holds this shard already, and is complete.", file=sys.stderr)
        return path
    if first_pass is not None:
        first_pass.refuse_other_counts("`first` holds the first pass over other data", counts)
    refuse_empty(counts.tokens, counts.sequences)
    held = kept or first_pass
    tallies = {} if held is None else dict(held.tallies)
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
    number, of = identity.pop("shard")
    held = {"number": number, "of": of, "pass_name": identity.pop("pass")}
    counts = DataCounts(**notes["counts"])
    if not 0 <= number < of:
        raise ValueError(f"the index of the shard is {number}; it must be 0 or more, and below {of}")
    tallies, start = tallies_of(notes, tensors), counts.within(number, of).start * counts.capacity
    if held["pass_name"] in tallies and tallies[held["pass_name"]].tree.start != start:
        raise ValueError(f"the sums of shard {number} begin at text {tallies[held['pass_name']].tree.start}, not {start}")
    return ShardPart(path, **held, identity=identity, counts=counts, tallies=tallies, notes=notes)


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
    parts = _in_order(map(_header_of, paths_of(files, "files")), MAIN)
    tree, head, counts = _tree_of_shards(parts), parts[0], parts[0].counts
    chosen = restored_analyzers(head.identity["analyzers"], analyzers, "lsim.merge(files, analyzers=[...])")
    # A first pass without a model is a part of each shard; one with a model is the same in all.
    passes = [part.tally for part in parts]
    passes += [part.tallies[FIRST] for part in (parts[:1] if head.identity["first"] else parts) if FIRST in part.tallies]
    seconds = sum(one.seconds for one in passes)
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
    places = [place for part in parts for place in part.notes["provenance"].get("remote", [])]
    how = head.notes["provenance"] | ({"remote": places} if places else {})
    models = {name: [model_of(own)] for name, own in head.notes["models"].items()}
    first_sums = read_part(head.path).tallies.get(FIRST, Tally()).tree.total().sums
    return make_report(chosen, models, tally, first_sums, how)


def merged_first(files: Iterable[Path]) -> ShardPart:
    """Add up the first-pass sums of all shards.

    Args:
        files: the files of the first pass.

    Raises:
        LayersimError: a shard is missing, given twice, not finished, or of another run.
    """
    parts = _in_order(map(_header_of, files), FIRST)
    total = SumTree(nodes=(_tree_of_shards(parts).total(),))
    tally = replace(parts[-1].tally, seconds=sum(part.tally.seconds for part in parts), tree=total)
    identity = {key: value for key, value in parts[0].identity.items() if key != "first"}
    return replace(parts[0], identity=identity, tallies={FIRST: tally})


def _header_of(path: Path) -> ShardPart:
    """Read a shard's file and drop its sums. Memory thus holds the sums of one shard at a time."""
    part = read_part(path)
    tallies = {label: replace(tally, tree=SumTree(tally.tree.size, tally.tree.start)) for label, tally in part.tallies.items()}
    return replace(part, tallies=tallies)


def _tree_of_shards(parts: Sequence[ShardPart]) -> SumTree:
    """Read the sums of all shards into one `SumTree`."""
    trees = (read_part(part.path).tally.tree for part in parts)
    return reduce(SumTree.join, trees)


def _in_order(headers: Iterable[ShardPart], pass_name: str) -> list[ShardPart]:
    """The shards in order of their index.

    Raises:
        LayersimError: a shard is missing, not finished, of another run, or given twice.
    """
    parts = list(headers)
    if others := [part for part in parts if part.pass_name != pass_name]:
        argument, how = ("files", "with") if pass_name == MAIN else ("first", "without")
        raise LayersimError(
            f"`{argument}` holds files of the {others[0].pass_name} data pass: {_shard_names(others)}. It must hold files of "
            f"the {pass_name} pass: call analyze(..., shard=(i, n), save_to=...) {how} `first`."
        )
    here, head = version("tl_layersim"), parts[0]
    if others := [part for part in parts if part.identity.get("version") != here]:
        then = others[0].identity.get("version")
        raise LayersimError(
            f"tl_layersim {then} wrote the shards {_shard_names(others)}, and {here} is installed. Sums of other versions may "
            f"have another meaning; install version {then}."
        )
    if others := [part for part in parts if (part.identity, part.of) != (head.identity, head.of)]:
        words = differing_entries(head.identity, others[0].identity) or f"{others[0].of} shards, not {head.of}"
        raise LayersimError(
            f"These shards belong to another run than {head.path}: {_shard_names(others)}. Their run has {words}."
        )
    if others := [part for part in parts if part.counts != head.counts]:
        others[0].refuse_other_counts(f"Other data than in {head.path} was measured in {_shard_names(others)}", head.counts)
    if unfinished := [part for part in parts if not part.is_done]:
        raise LayersimError(
            f"These shards are not finished: {_shard_names(unfinished)}. Repeat the call with shard=({unfinished[0].number}, "
            f"{unfinished[0].of}) and the same `save_to` to continue."
        )
    by_number = {part.number: part for part in parts}
    if twice := [part for part in parts if by_number[part.number] is not part]:
        raise LayersimError(f"These shards are given more than once: {_shard_names(twice)}.")
    if count := head.of - len(parts):
        # `of` comes from a file: no list is as long as it says.
        missing = list(islice((number for number in range(head.of) if number not in by_number), 20))
        words = ", ".join(map(str, missing)) + (" ..." if count > len(missing) else "")
        raise LayersimError(
            f"{count} of {head.of} shards {'is' if count == 1 else 'are'} missing: {words}. Pass their files too, or measure "
            f"them with shard=({missing[0]}, {head.of}){' and without `first`' if pass_name == FIRST else ''}."
        )
    return [by_number[number] for number in range(head.of)]


def differing_entries(now: Mapping[str, Any], then: Mapping[str, Any]) -> str:
    """Entries in which the identities of two runs differ, as text; "" if equal.

    Args:
        now: identity of this run.
        then: identity of the other run.
    """
    return "" if now == then else "{1}, not {0}".format(*differences(now, then))


def _shard_names(parts: Sequence[ShardPart]) -> str:
    """Paths and indices of shards as text, cut after the first ten."""
    words = [f"{part.path} (shard {part.number})" for part in parts[:10]]
    return ", ".join(words) + (f" and {len(parts) - 10} more" if len(parts) > 10 else "")
