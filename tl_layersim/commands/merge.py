"""`tl-layersim merge`: the report of all shards of a run."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ..core.errors import LayersimError
from . import options as o
from .command import in_options
from .inputs import shard_files
from .output import chosen_formats, make_folder, noted, print_run, settled_options, write_merged
from .run_file import shard_options

# Options of `report` that measured the shards, by the arguments that errors name.
FLAGS = {"shard": "--shard", "first": "--first", "save_to": "--save-to"}
FilesArguments = Annotated[
    list[str], typer.Argument(metavar="FILES...", help="Files that `report --shard` wrote, or a folder with them alone.")
]


def merge_shards(files: FilesArguments, out: o.OutOption = o.OUT, format: o.FormatOption = "html") -> None:
    """Add the sums of all shards, and write the report of the run."""
    from .. import merge

    formats = chosen_formats(format)
    make_folder(out)
    paths = shard_files(files, "FILES")
    try:
        report: Any = merge(paths)
    except LayersimError as error:
        raise in_options(error, FLAGS) from error
    options = shard_options(paths)
    if options is not None:
        report = noted(report, trust_remote_code=bool(options.get("trust_remote_code", False)))
        options |= settled_options(report) | {"format": format}
    print_run(next(iter(report.values())))
    write_merged(report, out, formats, options)
