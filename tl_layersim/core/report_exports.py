"""Exports of a report: tables, CSV, JSON, LaTeX and HTML files, numbers for loggers, and a repository on the hub."""

from __future__ import annotations

import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from .arguments import typed
from .errors import LayersimError, without_secrets
from .intervals import headline_intervals, headline_texts
from .report_tables import (
    NUMBERS,
    Correction,
    adjusted,
    distinct_tests,
    field_lines,
    headline_table,
    joined_tables,
    latex,
    markdown,
    result_table,
)
from .result_declarations import JOINT
from .storage import REPORT_FILE, replacing

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    import xarray

SCHEME = "hf://"
# A repository of numbers about a model, not of weights.
REPO_TYPE = "dataset"


def is_hub_address(path: Any) -> bool:
    """Whether a path is a hub address, hf://user/name."""
    return isinstance(path, str) and path.startswith(SCHEME)


def downloaded(address: str) -> Path:
    """Download a file from the hub into its cache, and return the path.

    Args:
        address: hf://user/name[@revision][/file]; the default file is `report.safetensors`.

    Raises:
        LayersimError: the address is malformed.
        OSError: an error of `huggingface_hub`: the repository, revision or file does not exist or cannot be read, or the hub
            cannot be reached.
    """
    from huggingface_hub import hf_hub_download

    match = re.fullmatch(r"hf://(?:datasets/)?([\w.-]+/[\w.-]+)(?:@([^@]+?))?(?:/([^@]+))?", address)
    if match is None:
        raise LayersimError(
            f"`path` is {address!r}; an address on the hub is hf://user/name, hf://user/name/file.safetensors or "
            "hf://user/name@revision."
        )
    repo, revision, file = match.groups()
    return Path(hf_hub_download(repo, file or REPORT_FILE, repo_type=REPO_TYPE, revision=revision))


def card(report: Any, repo: str, revision: str | None = None) -> str:
    """The repository's card: the models, the data, the headline numbers, and the call that reads the file.

    Args:
        report: the report to upload.
        repo: "user/name".
        revision: branch; None for the main one.
    """
    from jinja2 import Environment

    text = (files(__package__) / "hub_card.md.j2").read_text(encoding="utf-8")
    first = next(iter(report.values())).provenance
    results = [
        {"name": name, "kind": type(result).__name__, "headline": headline_texts(result), "run": result.provenance}
        for name, result in report.items()
    ]
    intervals = any(result.has_intervals for result in report.values())
    address = f"{SCHEME}{repo}" + (f"@{revision}" if revision not in (None, "main") else "")
    # Every value of the card goes through `_as_plain_text`: names come from files.
    page = Environment(trim_blocks=True, lstrip_blocks=True, finalize=_as_plain_text)
    title = " and ".join(name.rstrip("/\\").replace("\\", "/").split("/")[-1] for name in first.model.split(JOINT))
    rendered = page.from_string(text).render(title=title, first=first, results=results, address=address, intervals=intervals)
    return without_secrets(rendered)


def _as_plain_text(value: Any) -> str:
    """Escape a value so that Markdown shows it as plain text in one line.

    Examples:
        >>> print(_as_plain_text("# [a](javascript:b) <script> layer_1 | 2"))
        \\# \\[a\\](javascript:b) \\<script\\> layer_1 \\| 2
    """
    text = ", ".join(f"{k}={v}" for k, v in value.items() if v is not None) if isinstance(value, dict) else str(value)
    return re.sub(r"([\\`*\[\]<>|#!&~])", r"\\\1", " ".join(text.split()))


class ReportExports(Mapping[str, Any], ABC):
    """Abstract base of `Report`: its tables, files and headline numbers, and its repository on the Hugging Face hub."""

    @abstractmethod
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write all results to one file."""

    def to_frame(self) -> pandas.DataFrame:
        """All numbers of all results in one tidy table, one line for each number.

        Columns `analyzer` (the key in the report) and `field`; one column for each axis that any field has, such as `layer`,
        `row_layer`, `column_layer`, `quantile` or `threshold`, which is NaN in lines of fields without this axis; and `value`.
        After `intervals=True` also the ends `low` and `high` of the 95 % interval and the standard error `se`, NaN if a field
        has none. Layers are ordered as in the model. Fields that the run did not measure are left out.

        `result.to_frame()` is the wide table of one result, with a column for each field over the axes of its `values`.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens(), lsim.Cosine(center="none")])
            >>> table = report.to_frame()
            >>> losses = table.query("analyzer == 'logit_lens' and field == 'cross_entropy'")
            >>> len(losses), losses["value"].is_monotonic_decreasing
            (8, True)
        """
        tables = [
            field_lines(name, result, field)
            for name, result in self.items()
            for field in result.tensor_fields()
            if not bool(getattr(result, field).isnan().all())
        ]
        return joined_tables(tables)

    def to_xarray(self) -> xarray.DataTree:
        """The labelled tables of all results in one tree, with a node for each result; see `Result.to_xarray`.

        `tl_layersim.stack` makes one table of many reports.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens(), lsim.CKA()])
            >>> float(report.to_xarray()["logit_lens"]["accuracy"].max()) > 0.3
            True
        """
        import xarray

        return xarray.DataTree.from_dict({name: result_table(result) for name, result in self.items()})

    @typed
    def p_values(self, method: Correction = "holm") -> pandas.DataFrame:
        """All p-values of the report in one table, corrected for the number of tests in the whole report.

        These are the p-values of `permutations=`: the tensor fields whose names end in `p_value` or `p_values`. Columns
        `analyzer` and `field`; the labels of each axis as in `to_frame`; `p_value`, as it was measured; and `p_adjusted`. Each
        test is one line. For layers of one model, the diagonal is left out, and a symmetric measure counts each pair of layers
        once. A p-value that is NaN stays NaN and does not count.

        The smallest p-value of a run is 1 / (permutations + 1), so m tests need 20 m - 1 permutations for 0.05 after Holm.

        Args:
            method: "holm" bounds the probability of any false finding in the report (Holm 1979); "fdr_bh" the expected
                fraction of false findings among all (Benjamini and Hochberg 1995).

        Source:
            `statsmodels.stats.multitest.multipletests`; Holm 1979; Benjamini and Hochberg 1995.

        Examples:
            >>> import tl_layersim as lsim
            >>> analyzers = [lsim.CKA(minibatch=32, permutations=39), lsim.LogitLens()]
            >>> found = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], analyzers).p_values("fdr_bh")
            >>> list(found.columns)
            ['analyzer', 'field', 'row_layer', 'column_layer', 'p_value', 'p_adjusted']
            >>> len(found), bool((found["p_adjusted"] >= found["p_value"]).all())  # 36 pairs of layers, and the maximum
            (37, True)
        """
        tables = [
            field_lines(name, result, field)[tested.numpy().reshape(-1)]
            for name, result in self.items()
            for field in result.tensor_fields()
            if field.endswith(("p_value", "p_values")) and bool((tested := distinct_tests(result, field)).any())
        ]
        found = joined_tables(tables).drop(columns=list(NUMBERS[1:]), errors="ignore").rename(columns={"value": "p_value"})
        [corrected] = adjusted([(torch.tensor(found["p_value"].to_numpy(dtype=float)), False)], method)
        return found.assign(p_adjusted=corrected.numpy())

    @typed
    def plot(self, width: Literal["column", "text"] | None = None, title: str | None = None) -> plotly.graph_objects.Figure:
        """One plotly figure with the first picture of each result, such as the heatmap of CKA beside the curve of a lens.

        Args:
            width: see `Result.plot`. With "column" the panels are stacked vertically.
            title: title above all panels; None or "" for no title.

        Raises:
            LayersimError: no result of the report has a picture.
        """
        from ..reporting.figures import panels

        shown = [result.plot(width=width) for result in self.values() if result.pictures]
        if not shown:
            raise LayersimError(f"No result of the report has a picture; it has {', '.join(self) or 'no results'}.")
        return panels(shown, width, title or "")

    @typed
    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of `to_frame` as CSV, without index; undefined numbers are empty.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written; an older file at `path` is unchanged.
        """
        text = self.to_frame().to_csv(index=False)
        with replacing(path) as file:
            file.write(text.encode())
        return Path(path)

    def to_latex(self) -> str:
        """The headline numbers as a LaTeX table; with `intervals=True`, each has ± half its 95 % interval.

        It uses the package booktabs. `result.to_latex(field)` is the table of a field.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.LogitLens())
            >>> report.to_latex().splitlines()[4].split(" & ")[:2]
            ['logit\\\\_lens', 'accuracy of the last layer']
        """
        return latex(headline_table(self), 2)

    def to_markdown(self) -> str:
        """The headline numbers as a Markdown table; with `intervals=True`, each has ± half its 95 % interval."""
        return markdown(headline_table(self))

    @typed
    def to_json(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of `to_frame`, the headline numbers and the provenance as strict JSON.

        Entries `schema` and `data` are those of pandas' layout "table", so that `pandas.read_json(path, orient="table",
        precise_float=True)` is the table again. Entries `headline`, `results` (classes) and `provenance` stand beside them.
        JSON has no NaN and no infinite numbers: they are null. `save` writes a file that `load` reads exactly.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written; an older file at `path` is unchanged.
        """
        from pandas.io.json import build_table_schema

        table = self.to_frame()
        about = {
            "schema": build_table_schema(table, index=False),
            "data": table.astype(object).to_dict("records"),
            "headline": self.headline(),
            "results": {name: type(result).__name__ for name, result in self.items()},
            "provenance": {name: asdict(result.provenance) for name, result in self.items()},
        }
        strict = json.loads(json.dumps(about), parse_constant=lambda constant: None)
        with replacing(path) as file:
            file.write(json.dumps(strict, allow_nan=False).encode())
        return Path(path)

    def headline(self) -> dict[str, float]:
        """The headline numbers of all results as a flat dict for wandb, tensorboard or MLflow.

        Keys are the name of the result, a slash and the description in lower-case letters, digits and _, such as
        "cka/cka_last_but_one_last". Sites that are findings are left out of them, so that curves over a training have one name.
        After `intervals=True` the ends of 95 % intervals are beside the numbers, under the same key with _low and _high.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], lsim.LogitLens())
            >>> sorted(report.headline())[0]
            'logit_lens/accuracy_after_block_4'
        """
        numbers: dict[str, float] = {}
        for name, result in self.items():
            intervals = headline_intervals(result)
            for text, value in result.headline().items():
                # A site that is a finding would give another name at every step of a training.
                short = _logger_name(re.sub(r" \(.*\)$", "", text.partition(", at ")[0]))
                keys = (f"{name}/{own}" for own in (short, _logger_name(text), *(f"{short}_{n}" for n in range(2, 1000))))
                key = next(key for key in keys if key not in numbers)
                numbers[key] = float(value)
                if text in intervals:
                    numbers |= {f"{key}_low": float(intervals[text].low), f"{key}_high": float(intervals[text].high)}
        return numbers

    @typed
    def push_to_hub(
        self,
        repo: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | None = None,
        message: str = "Upload a tl_layersim report",
    ) -> str:
        """Upload the report to the Hugging Face hub, where `tl_layersim.load("hf://user/name")` reads it.

        The repository holds `report.safetensors` (all numbers), `report.html` (the page), `report.csv` (the table, which the
        hub shows and `datasets.load_dataset` reads) and a card with the provenance. Its type is dataset, because it holds
        numbers about a model and no weights. It is created if it does not exist; each upload is one commit.

        The provenance is uploaded as it is, with the path of a model that was loaded from a folder.

        Args:
            repo: "user/name", or "name" in the own account.
            private: whether a new repository is private. Default: as the account is set. True raises an error if the repository
                exists and is public.
            revision: branch to upload to, created if it does not exist. Default: the main branch.
            token: token with write access. Default: the token of `hf auth login` or of the variable HF_TOKEN. It is not written
                anywhere.
            message: text of the commit.

        Returns:
            The address of the repository's page.

        Raises:
            LayersimError: the report is empty, or `private` is True and the repository is public.
            OSError: an error of `huggingface_hub`: not logged in, no write access, or the hub cannot be reached.
        """
        from huggingface_hub import CommitOperationAdd, HfApi

        if not self:
            raise LayersimError("The report is empty, so there is nothing to upload.")
        api = HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            found = api.create_repo(repo, repo_type=REPO_TYPE, private=private, exist_ok=True)
            full = found.repo_id
            if private and not api.repo_info(full, repo_type=REPO_TYPE).private:
                raise LayersimError(
                    f"`private` is True, but the repository {full} exists and is public. Make it private at "
                    f"{found}/settings, or pass another name."
                )
            if revision is not None and revision != "main":
                api.create_branch(full, repo_type=REPO_TYPE, branch=revision, exist_ok=True)
            self.save(Path(folder, REPORT_FILE))
            self.to_html(Path(folder, "report.html"))
            self.to_csv(Path(folder, "report.csv"))
            Path(folder, "README.md").write_text(card(self, full, revision), encoding="utf-8")
            added = [CommitOperationAdd(path.name, path) for path in sorted(Path(folder).iterdir())]
            api.create_commit(full, added, repo_type=REPO_TYPE, revision=revision, commit_message=message)
        return str(found)

    @typed
    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page with a summary, tables, and every figure with its explanation.

        The page opens from disk without a network. It has about 5 MB, most of which is plotly.js.

        Args:
            path: path of the page.
        """
        from ..reporting.html import write_html

        return write_html(self, path)


def _logger_name(text: str) -> str:
    """Convert a description to lower-case letters, digits and _, which all loggers accept.

    Examples:
        >>> _logger_name("COS(last but one, last)")
        'cos_last_but_one_last'
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")
