"""Exports of a report: tables, CSV, JSON, LaTeX and HTML files, numbers for loggers, and a repository on the hub."""

from __future__ import annotations

import os
import re
import tempfile
from abc import ABC
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .arguments import typed
from .errors import LayersimError, without_secrets
from .fields import JOINT
from .intervals import headline_texts
from .labelled_tables import report_table
from .p_values import Correction, report_p_values
from .report_tables import headline_numbers, headline_table, latex, markdown, tidy_table, write_csv, write_json
from .storage import REPORT_FILE
from .wording import first_line

if TYPE_CHECKING:
    import pandas
    import plotly.graph_objects
    import xarray

SCHEME = "hf://"
# A repository of numbers about a model, not of weights.
REPO_TYPE = "dataset"
LOGIN = "hf auth login, or set the variable HF_TOKEN to a token of https://huggingface.co/settings/tokens"


def is_hub_address(path: Any) -> bool:
    """Whether a path is a hub address, hf://user/name."""
    return isinstance(path, str) and path.startswith(SCHEME)


def downloaded(address: str) -> Path:
    """Download a file from the hub into its cache, and return the path.

    Args:
        address: hf://user/name[@revision][/file]; the default file is `report.safetensors`.

    Raises:
        LayersimError: the address is malformed; the repository, revision or file does not exist or cannot be read; or the hub
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
    with _hub_errors(repo, f"lsim.load({address!r})", reading=True):
        return Path(hf_hub_download(repo, file or REPORT_FILE, repo_type=REPO_TYPE, revision=revision))


def push_report(report: Any, repo: str, private: bool | None, revision: str | None, token: str | None, message: str) -> str:
    """Upload a report; see `Report.push_to_hub`."""
    from huggingface_hub import CommitOperationAdd, HfApi

    if not report:
        raise LayersimError("The report is empty, so there is nothing to upload.")
    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder, _hub_errors(repo, f"report.push_to_hub({repo!r})", reading=False):
        found = api.create_repo(repo, repo_type=REPO_TYPE, private=private, exist_ok=True)
        full = found.repo_id
        if private and not api.repo_info(full, repo_type=REPO_TYPE).private:
            raise LayersimError(
                f"`private` is True, but the repository {full} exists and is public. Make it private at {found}/settings, or "
                "pass another name."
            )
        if revision is not None and revision != "main":
            api.create_branch(full, repo_type=REPO_TYPE, branch=revision, exist_ok=True)
        report.save(Path(folder, REPORT_FILE))
        report.to_html(Path(folder, "report.html"))
        report.to_csv(Path(folder, "report.csv"))
        Path(folder, "README.md").write_text(card(report, full, revision), encoding="utf-8")
        added = [CommitOperationAdd(path.name, path) for path in sorted(Path(folder).iterdir())]
        api.create_commit(full, added, repo_type=REPO_TYPE, revision=revision, commit_message=message)
    return str(found)


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


@contextmanager
def _hub_errors(repo: str, call: str, reading: bool) -> Iterator[None]:
    """A context manager that translates errors of the hub into a `LayersimError` with a remedy."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    # The error of the HTTP library that this version of huggingface_hub uses.
    not_reached: type[Exception] = hub.HTTPError  # type: ignore[attr-defined]  # imported there
    try:
        yield
    except hub.OfflineModeIsEnabled as error:
        raise _error(
            "was not contacted, because offline mode is on", error, repo, "unset HF_HUB_OFFLINE, then " + call
        ) from error
    except hub.HFValidationError as error:
        raise _error(
            "cannot have a repository of this name", error, repo, "pass user/name, of letters, digits, -, _ and ."
        ) from error
    except hub.RevisionNotFoundError as error:
        raise _error(
            f"has no such revision of {repo}", error, repo, "pass a branch, tag or commit of the repository"
        ) from error
    except hub.GatedRepoError as error:
        raise _error(
            f"requires you to accept the conditions of {repo}", error, repo, "accept them on its page, then " + LOGIN
        ) from error
    except hub.RepositoryNotFoundError as error:
        do = f"check the name; for a private repository {LOGIN}" if reading else LOGIN
        raise _error(f"has no repository {repo} that you may {'read' if reading else 'write'}", error, repo, do) from error
    except hub.LocalTokenNotFoundError as error:
        raise _error("requires a login", error, repo, LOGIN) from error
    except hub.HfHubHTTPError as error:
        if reading and isinstance(error, hub.RemoteEntryNotFoundError):
            raise _error(f"has no such file in {repo}", error, repo, f"pass one of {_files_of(repo)}") from error
        code = getattr(error.response, "status_code", 0)
        if code in (401, 403):
            why = "requires a login" if code == 401 else f"does not let you write to {repo}"
            do = LOGIN if code == 401 else "use a token with write access, or a repository in your own account"
            raise _error(why, error, repo, do) from error
        raise _error(f"answered with an error ({code})", error, repo, f"try again later: {call}") from error
    except (not_reached, hub.LocalEntryNotFoundError) as error:
        if constants.is_offline_mode():
            raise _error(
                "was not contacted, because offline mode is on", error, repo, "unset HF_HUB_OFFLINE, then " + call
            ) from error
        do = f"check the connection, then {call}"
        raise _error(f"cannot be reached at {constants.ENDPOINT}", error, repo, do) from error


def _error(what: str, error: BaseException, repo: str, do: str) -> LayersimError:
    return LayersimError(f"The Hugging Face hub {what} ({repo}: {first_line(error)}). {do[0].upper()}{do[1:]}.")


def _files_of(repo: str) -> str:
    """The files of a repository that `load` may read."""
    from huggingface_hub import HfApi

    try:
        names = [name for name in HfApi().list_repo_files(repo, repo_type=REPO_TYPE) if name.endswith(".safetensors")]
    except OSError:
        names = []
    return ", ".join(f"hf://{repo}/{name}" for name in names[:8]) or "the files on its page"


class ReportExports(Mapping[str, Any], ABC):
    """Abstract base of `Report`: its tables, files and headline numbers, and its repository on the Hugging Face hub."""

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
        return tidy_table(self)

    def to_xarray(self) -> xarray.DataTree:
        """The labelled tables of all results in one tree, with a node for each result; see `Result.to_xarray`.

        `tl_layersim.stack` makes one table of many reports.

        Examples:
            >>> import tl_layersim as lsim
            >>> report = lsim.analyze(lsim.demo_model(), lsim.demo_text()[:4], [lsim.LogitLens(), lsim.CKA()])
            >>> float(report.to_xarray()["logit_lens"]["accuracy"].max()) > 0.3
            True
        """
        return report_table(self)

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
        return report_p_values(self, method)

    @typed
    def plot(self, width: Literal["column", "text"] | None = None, title: str | None = None) -> plotly.graph_objects.Figure:
        """One plotly figure with the first picture of each result, such as the heatmap of CKA beside the curve of a lens.

        Args:
            width: see `Result.plot`. With "column" the panels are stacked vertically.
            title: title above all panels; None to show the model and the data, "" for no title.

        Raises:
            LayersimError: no result of the report has a picture.
        """
        from ..reporting.figures import report_figure

        return report_figure(self, width, title)

    @typed
    def to_csv(self, path: str | os.PathLike[str]) -> Path:
        """Write the table of `to_frame` as CSV, without index; undefined numbers are empty.

        Args:
            path: path of the file.

        Raises:
            OSError: the file cannot be written; an older file at `path` is unchanged.
        """
        return write_csv(self, path)

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
        return write_json(self, path)

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
        return headline_numbers(self)

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
            LayersimError: not logged in, no write access, the hub cannot be reached, or the repository is public.
        """
        return push_report(self, repo, private, revision, token, message)

    @typed
    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained HTML page with a summary, tables, and every figure with its explanation.

        The page opens from disk without a network. It has about 5 MB, most of which is plotly.js.

        Args:
            path: path of the page.
        """
        from ..reporting.html import write_html

        return write_html(self, path)
