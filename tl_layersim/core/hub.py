"""Reports on the Hugging Face hub: upload with page, table and card, and download by an address such as hf://user/name."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

from .errors import LayersimError, without_secrets
from .intervals import headline_texts
from .provenance import JOINT
from .storage import REPORT_FILE
from .wording import first_line

SCHEME = "hf://"
# A repository of numbers about a model, not of weights.
REPO_TYPE = "dataset"
LOGIN = "hf auth login, or set the variable HF_TOKEN to a token of https://huggingface.co/settings/tokens"


def is_hub_address(path: Any) -> bool:
    """Whether a path is the address of a file on the hub.

    Args:
        path: as it was given to `load`.
    """
    return isinstance(path, str) and path.startswith(SCHEME)


def downloaded(address: str) -> Path:
    """Download a file from the hub into its cache, and return the path.

    Args:
        address: hf://user/name[@revision][/file]; `report.safetensors` without a file.

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
    """The card of the repository: what was measured on what, the headline numbers, and the call that reads the file.

    Args:
        report: to be uploaded.
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
    """A value as Markdown that shows it in one line, without headings, links, HTML or cells of its own.

    Examples:
        >>> print(_as_plain_text("# [a](javascript:b) <script> layer_1 | 2"))
        \\# \\[a\\](javascript:b) \\<script\\> layer_1 \\| 2
    """
    text = ", ".join(f"{k}={v}" for k, v in value.items() if v is not None) if isinstance(value, dict) else str(value)
    return re.sub(r"([\\`*\[\]<>|#!&~])", r"\\\1", " ".join(text.split()))


@contextmanager
def _hub_errors(repo: str, call: str, reading: bool) -> Iterator[None]:
    """Context manager: translate errors of the hub into errors that say what to do."""
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    # The error of the HTTP library that this version of huggingface_hub uses.
    not_reached: type[Exception] = hub.HTTPError  # type: ignore[attr-defined]  # imported there
    try:
        yield
    except hub.OfflineModeIsEnabled as error:
        raise _error("is not asked: offline mode is on", error, repo, "unset HF_HUB_OFFLINE, then " + call) from error
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
            f"wants you to accept the conditions of {repo}", error, repo, "accept them on its page, then " + LOGIN
        ) from error
    except hub.RepositoryNotFoundError as error:
        do = f"check the name; for a private repository {LOGIN}" if reading else LOGIN
        raise _error(f"has no repository {repo} that you may {'read' if reading else 'write'}", error, repo, do) from error
    except hub.LocalTokenNotFoundError as error:
        raise _error("does not know you: you are not logged in", error, repo, LOGIN) from error
    except hub.HfHubHTTPError as error:
        if reading and isinstance(error, hub.RemoteEntryNotFoundError):
            raise _error(f"has no such file in {repo}", error, repo, f"pass one of {_files_of(repo)}") from error
        code = getattr(error.response, "status_code", 0)
        if code in (401, 403):
            why = "does not know you: you are not logged in" if code == 401 else f"does not let you write to {repo}"
            do = LOGIN if code == 401 else "use a token with write access, or a repository in your own account"
            raise _error(why, error, repo, do) from error
        raise _error(f"answered with an error ({code})", error, repo, f"try again later: {call}") from error
    except (not_reached, hub.LocalEntryNotFoundError) as error:
        if constants.is_offline_mode():
            raise _error("is not asked: offline mode is on", error, repo, "unset HF_HUB_OFFLINE, then " + call) from error
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
