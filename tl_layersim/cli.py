"""The command line `tl-layersim`. Its commands are in `commands/`."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from typing import Any

from cyclopts import App, CycloptsError, Group, Parameter

from .commands import measure
from .commands import show_merge_list as files
from .commands import stitch_and_train as training
from .commands.output import print_error
from .commands.run_file import read_run_file
from .core.errors import LayersimError, LayersimWarning, remove_secrets

app = App(
    name="tl-layersim",
    help="Measure how the layers of a transformer relate to each other.",
    help_epilogue="--traceback, with any command, shows the traceback of an error.",
    version=lambda: f"tl-layersim {metadata.version('tl_layersim')}",
    help_format="plaintext",
    config=read_run_file,
    default_parameter=Parameter(negative_iterable=()),
)
for panel, commands in (
    ("Measure one model", (measure.report_on_model, measure.measure_exits, measure.estimate_cost)),
    ("Two models, and training", (measure.compare_models, training.stitch_models, training.train_model)),
    ("Files and lists", (files.show_file, files.merge_shards, files.list_analyzers, files.list_sites)),
):
    group = Group.create_ordered(panel)
    for command in commands:
        # By its path: options need torch, so they are made when the command runs.
        text, _, examples = inspect.cleandoc(command.__doc__ or "").partition("Examples:")
        path = f"{command.__module__}:{command.__name__}"
        app.command(path, command.name, help=text, help_epilogue=f"Examples:{examples}", group=group)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Wrong usage exits with status 2, an unexpected error with a traceback and status 1.

    Args:
        arguments: command-line arguments; None for those of this process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with_traceback = "--traceback" in words
    if not sys.stderr.isatty():
        # Read by transformers and datasets when they are imported.
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    showwarning = warnings.showwarning

    def show_warning(message: Warning | str, category: type[Warning], *location: Any, **options: Any) -> None:
        if issubclass(category, LayersimWarning):
            # Without the line of code, which is one of this package.
            # Its secrets and control characters are removed already.
            print(f"Warning: {message}", file=sys.stderr)
        else:
            showwarning(message, category, *location, **options)

    warnings.showwarning = show_warning
    try:
        app([word for word in words if word != "--traceback"], exit_on_error=False, print_error=False)
    except (LayersimError, OSError, CycloptsError) as error:
        if with_traceback:
            remove_secrets(error)
            raise
        print_error(error)
        raise SystemExit(2) from None
    except Exception as error:
        remove_secrets(error)
        raise
    finally:
        warnings.showwarning = showwarning


if __name__ == "__main__":
    main()
