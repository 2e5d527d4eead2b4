"""Loading of the data that `--data` names: a table, a text file, a saved data set, or a data set of the hub."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError
from ..core.wording import first_line
from .readers import FILES


def load_data(name: str, split: str) -> Any:
    """Load a table, a text file, a saved data set, or a data set of the hub.

    Args:
        name: path of a file or folder, or name on the hub.
        split: split of the data set.

    Raises:
        LayersimError: the data does not exist or cannot be read.
    """
    path = Path(name)
    if path.is_file():
        try:
            return _read_file(path)
        # Whatever a library raises while it reads a file is about this file.
        except Exception as error:
            raise LayersimError(
                f"`--data` is {name}, which cannot be read as a text in UTF-8 or as a table: {first_line(error)}."
            ) from error
    import datasets

    if path.is_dir():
        try:
            dataset = datasets.load_from_disk(name)
        except Exception as error:
            raise LayersimError(
                f"`--data` is {name}, a folder without a saved data set; Dataset.save_to_disk writes one."
            ) from error
        if isinstance(dataset, datasets.DatasetDict) and split not in dataset:
            raise LayersimError(f"`--split` is {split}; the data set has {', '.join(dataset)}.")
        return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(FILES):
        raise LayersimError(f"`--data` is {name}, a file or folder that does not exist.")
    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except Exception as error:
        raise LayersimError(
            f"`--data` is {name}, which is neither a file or folder nor a data set of the hub with a split {split}: "
            f"{first_line(error)}."
        ) from error


def _read_file(path: Path) -> Any:
    """Read a table, or the paragraphs of a text file."""
    if path.suffix in (".csv", ".tsv", ".jsonl", ".parquet"):
        import pandas

        readers: dict[str, Any] = {
            ".csv": pandas.read_csv,
            ".tsv": partial(pandas.read_csv, sep="\t", quoting=csv.QUOTE_NONE),
            ".jsonl": partial(pandas.read_json, lines=True),
            ".parquet": pandas.read_parquet,
        }
        return readers[path.suffix](path)
    text = path.read_text(encoding="utf-8")
    if "\0" in text:
        raise ValueError("it holds zero bytes")
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]
