"""Conversion of results and reports to files, and back.

The classes of results and reports are arguments here, because they themselves import this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_type_hints

from torch import Tensor

from .arguments import is_of_type
from .errors import LayersimError
from .file_format import REPORT_FILE, by_first_name, read, reading
from .result_declarations import Provenance, class_of, kind_of
from .wording import brief

SCHEME = "hf://"
# A repository of numbers about a model, not of weights.
REPO_TYPE = "dataset"
# Results of the same class that a result holds: without each block of the data, and of untrained models.
ALIKE = ("replicates", "untrained")


def pack(result: Any, like: Any = None) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a result, for its file. Tensors of nested results are named "field/key/name".

    Args:
        result: a `Result`.
        like: the result that holds `result` in a field of `ALIKE`. Names of layers and the like are not stored again.
    """
    values = {field.name: getattr(result, field.name) for field in fields(result)}
    nested_headers: dict[str, Any] = {}
    nested_tensors: dict[str, dict[str, Tensor]] = {}
    for name, value in values.items():
        if name not in ALIKE and hasattr(value, "to_html"):
            nested_headers[name], nested_tensors[name] = pack_report(value, {} if like is None else getattr(like, name))
    for name in ALIKE:
        results = {str(number): nested for number, nested in enumerate(values[name])}
        nested_headers[name], nested_tensors[name] = pack_report(results, dict.fromkeys(results, result))
    plain = _plain_fields(result)
    if like is not None:
        plain_of_like = _plain_fields(like)
        plain = {name: value for name, value in plain.items() if value != plain_of_like[name]}
    header: dict[str, Any] = {
        "class": kind_of(type(result)),
        "fields": plain,
        "held": {name: nested_header for name, nested_header in nested_headers.items() if nested_header},
    }
    if like is None or result.provenance != like.provenance:
        header["provenance"] = {field.name: getattr(result.provenance, field.name) for field in fields(Provenance)}
    tensors = {name: values[name] for name in result.tensor_fields()}
    return header, tensors | _with_prefixes(nested_tensors)


def _with_prefixes(tensors_of_parts: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Join tensors of several parts in one dict, with keys of the form "part/tensor"."""
    joined = {}
    for part, tensors in tensors_of_parts.items():
        for name, tensor in tensors.items():
            joined[f"{part}/{name}"] = tensor
    return joined


def _plain_fields(result: Any) -> dict[str, Any]:
    """All fields of a result except tensors, provenance and nested results."""
    stored_elsewhere = {"provenance", *ALIKE, *result.tensor_fields()}
    names = [field.name for field in fields(result) if field.name not in stored_elsewhere]
    values = {name: getattr(result, name) for name in names}
    return {name: value for name, value in values.items() if not hasattr(value, "to_html")}


def pack_report(
    report: Mapping[str, Any], likes: Mapping[str, Any] = MappingProxyType({})
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Headers and tensors of several results, for one file. See `pack` for a single result.

    Headers are a dict by result, and names of tensors have the form "result/tensor".
    """
    headers: dict[str, Any] = {}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name, result in report.items():
        headers[name], tensors[name] = pack(result, likes.get(name))
    return headers, _with_prefixes(tensors)


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
        raise _malformed_address(address)
    repo, revision, file = match.groups()
    try:
        return Path(hf_hub_download(repo, file or REPORT_FILE, repo_type=REPO_TYPE, revision=revision))
    except OSError:
        raise
    except ValueError as error:
        # The hub has rules of its own for names, and a file's path must stay inside the repository.
        raise _malformed_address(address) from error


def _malformed_address(address: str) -> LayersimError:
    return LayersimError(
        f"`path` is {brief(address)}; an address on the hub has the form hf://user/name, hf://user/name/file.safetensors or "
        "hf://user/name@revision."
    )


def load_kind(path: str | os.PathLike[str], kinds: tuple[str, ...], base: type[Any], report: type[Any]) -> Any:
    """Read a result or a report from a file.

    Args:
        path: path of the file, or its address on the hub.
        kinds: accepted kinds of file, "result" or "report".
        base: the class `Result`.
        report: the class `Report`.

    Raises:
        FileNotFoundError: the file does not exist.
        LayersimError: the file is damaged, of another kind, or of another version.
    """
    if isinstance(path, str) and path.startswith(SCHEME):
        path = downloaded(path)
    header, tensors = read(path, kinds)
    with reading(path, f"a complete {header['kind']}", "Copy the file again, or run the analysis again"):
        if header["kind"] == "result":
            return _unpack(path, header, tensors, base, report)
        return report(_unpack_results(path, header["results"], tensors, base, report))


def _unpack(
    path: str | os.PathLike[str],
    header: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    base: type[Any],
    report: type[Any],
    like: Any = None,
) -> Any:
    """Restore a result from the header and the tensors that `pack` returned."""
    kind = str(header["class"])
    cls = class_of(kind, base)
    if cls is None:
        # A class is never imported because a file names it.
        raise LayersimError(
            f"{path} holds a result of class {kind}, which no imported module defines. If you trust the module of this class, "
            "import it and load the file again."
        )
    values = {cls.former_names.get(name, name): _as_tuple(value) for name, value in header["fields"].items()}
    _refuse_other_types(cls, values)
    if like is None or "provenance" in header:
        run = {**header["provenance"], "warnings": _as_tuple(header["provenance"]["warnings"])}
        _refuse_other_types(Provenance, run)
        values["provenance"] = Provenance(**run)
    if like is not None:
        values = {**_plain_fields(like), "provenance": like.provenance, **values}
    nested_headers = header.get("held", {})
    tensors_of_result = {}
    tensors_of_nested = {}
    for name, tensor in tensors.items():
        if name.partition("/")[0] in nested_headers:
            tensors_of_nested[name] = tensor
        else:
            tensors_of_result[cls.former_names.get(name, name)] = tensor
    nested_tensors = by_first_name(nested_headers, tensors_of_nested)
    for name in nested_headers.keys() - set(ALIKE):
        likes = {} if like is None else getattr(like, name)
        values[name] = report(_unpack_results(path, nested_headers[name], nested_tensors[name], base, report, likes))
    result = cls(**values, **tensors_of_result)
    alike = {}
    for name in nested_headers.keys() & set(ALIKE):
        likes = dict.fromkeys(nested_headers[name], result)
        results = _unpack_results(path, nested_headers[name], nested_tensors[name], base, report, likes)
        alike[name] = tuple(results.values())
    return replace(result, **alike)


def _refuse_other_types(cls: type[Any], values: Mapping[str, Any]) -> None:
    """Raise an error if a value is not of the type that the class declares for its field.

    The check of types when an object is made reads one random item of each tuple. A file needs all of them read.

    Args:
        cls: a dataclass.
        values: the values in the file, by field.
    """
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:
        # A class of the user's own may name types that exist for type checkers only.
        return
    for name, value in values.items():
        if name in hints and not is_of_type(value, hints[name]):
            raise LayersimError(f"`{name}` of {cls.__name__} is {brief(value)}; it is of another type than the field")


def _unpack_results(
    path: str | os.PathLike[str],
    headers: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    base: type[Any],
    report: type[Any],
    likes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Any]:
    parts = by_first_name(headers, tensors)
    results = {}
    for name, header in headers.items():
        results[name] = _unpack(path, header, parts[name], base, report, likes.get(name))
    return results


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
