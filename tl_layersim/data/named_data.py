"""Data by its name: a table, a text file, a folder of a saved data set, or a data set of the hub, as `--data` takes it."""

from __future__ import annotations

import csv
from functools import partial
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError


def load_data(name: str, split: str) -> Any:
    """Data from a table, a text file, a folder of a data set, or the hub.

    Args:
        name: path of the file or folder, or name on the hub.
        split: of a data set.

    Raises:
        LayersimError: there is no such data, or it cannot be read.
    """
    path = Path(name)
    if path.is_file():
        try:
            return _read_file(path)
        # Whatever a library raises while it reads a file is about this file.
        except Exception as error:
            raise LayersimError(
                "`--data` is a file that cannot be read as text or as a table.",
                given=f"{name}: {(str(error).strip().splitlines() or [type(error).__name__])[0][:160]}",
                expected="a text file in UTF-8, or a table in .csv, .tsv, .jsonl or .parquet",
                do="convert it first, for example iconv -f latin1 -t utf-8; weights belong to --model",
            ) from error
    import datasets

    from .readers import FILES

    if path.is_dir():
        try:
            dataset = datasets.load_from_disk(name)
        except Exception as error:
            raise LayersimError(
                "`--data` is a folder without a saved data set.",
                given=name,
                expected="a folder that Dataset.save_to_disk wrote, a text file or a table",
                do="name a file in it, or save the data set with data.save_to_disk(folder)",
            ) from error
        if isinstance(dataset, datasets.DatasetDict) and split not in dataset:
            raise LayersimError(
                "`--split` is not a split of this data set.",
                given=split,
                expected=f"one of {', '.join(dataset)}",
                do=f"--split {next(iter(dataset), 'test')}",
            )
        return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(FILES):
        raise LayersimError(
            "`--data` names a file or folder that does not exist.",
            given=f"--data {name}",
            expected="a text file, a folder or a hub name",
            do="check the path",
        )
    try:
        return datasets.load_dataset(name, split=split, streaming=True)
    except Exception as error:
        raise LayersimError(
            "`--data` is neither a local file or folder nor a data set that can be loaded from the hub.",
            given=f"{name}, split {split}: {(str(error).strip().splitlines() or [type(error).__name__])[0][:160]}",
            expected="a text file, a table, a folder of a saved data set, or a hub name",
            do="check the path or the name, the split and the network",
        ) from error


def _read_file(path: Path) -> Any:
    """A table, or the paragraphs of a text."""
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
