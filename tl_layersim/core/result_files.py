"""Conversion of results and reports to the header and tensors of a file, and back.

The classes of results and reports are arguments here, because they themselves import this module.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from torch import Tensor

from .errors import LayersimError
from .intervals import with_replicates
from .report_exports import downloaded, is_hub_address
from .result_declarations import Provenance, class_of, kind_of
from .storage import by_first_name, read, reading, refuse_other_types

# Results of a kind that a result holds: without each block of the data, and of untrained models.
ALIKE = ("replicates", "untrained")
# Fields that are stored apart from the others, or that replicates share with the result itself.
APART = ("provenance", "replicates", "untrained")


def pack(result: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a result."""
    header, tensors = _pack_alone(result)
    header["provenance"] = {f.name: getattr(result.provenance, f.name) for f in fields(Provenance)}
    # Names of layers and the like are those of the result itself.
    plain = header["fields"]
    for kind in ALIKE:
        each = [_pack_alone(one, nested=False) for one in getattr(result, kind)]
        for number, (_, own) in enumerate(each):
            tensors |= {f"{kind}/{number}/{name}": tensor for name, tensor in own.items()}
        if each:
            header[kind] = [{name: value for name, value in own["fields"].items() if value != plain[name]} for own, _ in each]
    return header, tensors


def _pack_alone(result: Any, nested: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a result without provenance and replicates.

    Args:
        result: a `Result`.
        nested: whether to include the reports in its fields. For a replicate they are stored with these reports' own results.
    """
    values = {f.name: getattr(result, f.name) for f in fields(result) if f.name not in APART}
    reports = {name: pack_report(value) for name, value in values.items() if isinstance(value, Mapping) and _is_report(value)}
    tensors: dict[str, Tensor] = {name: values[name] for name in result.tensor_fields()}
    plain = {name: value for name, value in values.items() if name not in tensors.keys() | reports.keys()}
    header = {"class": kind_of(type(result)), "fields": plain}
    if nested:
        tensors |= {f"{name}/{key}": tensor for name, (_, own) in reports.items() for key, tensor in own.items()}
    return header | ({"reports": {name: own for name, (own, _) in reports.items()}} if reports and nested else {}), tensors


def _is_report(value: Mapping[str, Any]) -> bool:
    return hasattr(value, "to_html")


def pack_report(report: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header and the tensors of a report."""
    packed = {name: pack(result) for name, result in report.items()}
    tensors = {f"{name}/{key}": tensor for name, (_, own) in packed.items() for key, tensor in own.items()}
    return {name: header for name, (header, _) in packed.items()}, tensors


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
    if is_hub_address(path):
        path = downloaded(str(path))
    header, tensors = read(path, kinds)
    with reading(path, f"a whole {header['kind']}", "copy the file again, or run the analysis again"):
        if header["kind"] == "result":
            loaded = _unpack(path, header, tensors, base, report)
        else:
            loaded = _unpack_report(path, header["results"], tensors, base, report)
        # Malformed values that pass the type check fail here, while the error can still name the file.
        repr(loaded)
        return loaded


def _unpack(
    path: str | os.PathLike[str], header: Mapping[str, Any], tensors: Mapping[str, Tensor], base: type[Any], report: type[Any]
) -> Any:
    kind = str(header["class"])
    cls = class_of(kind, base)
    if cls is None:
        # A class is never imported because a file names it.
        raise LayersimError(
            f"{path} holds a {kind}, a kind of result that no imported module defines. Import the module of its class first, "
            "if you trust it, then load again."
        )
    record = {**header["provenance"], "warnings": tuple(header["provenance"].get("warnings", ()))}
    refuse_other_types(Provenance, record)
    provenance = Provenance(**record)
    names = header.get("reports", {})
    own = {name: tensor for name, tensor in tensors.items() if name.partition("/")[0] not in (*names, *ALIKE)}
    apart = by_first_name([*names, *ALIKE], {name: tensor for name, tensor in tensors.items() if name not in own})
    reports = {name: _unpack_report(path, own, apart[name], base, report) for name, own in names.items()}
    plain = _plain_fields(cls, header["fields"])
    _refuse_other_shapes(cls, {**plain, **own})
    result = cls(**plain, **own, **reports, provenance=provenance)
    alike = {}
    for kind in ALIKE:
        plains = header.get(kind, ())
        each = by_first_name(map(str, range(len(plains))), apart[kind])
        alike[kind] = tuple(
            cls(
                **_plain_fields(cls, {**header["fields"], **plain}),
                **each[str(number)],
                **{name: _of_number(nested, kind, number) for name, nested in reports.items()},
                provenance=provenance,
            )
            for number, plain in enumerate(plains)
        )
    result = replace(result, untrained=alike["untrained"])
    return with_replicates(result, alike["replicates"], result.block_tokens) if alike["replicates"] else result


def _of_number(report: Any, kind: str, number: int) -> Any:
    """The report without one block of the data, or of one untrained model."""
    return type(report)({name: getattr(result, kind)[number] for name, result in report.items()})


def _refuse_other_shapes(cls: type[Any], values: Mapping[str, Any]) -> None:
    """Raise an error that names the tensors whose shape does not fit their axes; type checks would name another field."""
    bare = object.__new__(cls)
    vars(bare).update(values)
    bare.refuse_other_shapes()


def _plain_fields(cls: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: _as_tuple(value) for name, value in values.items()}
    refuse_other_types(cls, plain)
    return plain


def _unpack_report(
    path: str | os.PathLike[str], headers: Mapping[str, Any], tensors: Mapping[str, Tensor], base: type[Any], report: type[Any]
) -> Any:
    parts = by_first_name(headers, tensors)
    return report({name: _unpack(path, own, parts[name], base, report) for name, own in headers.items()})


def _as_tuple(value: Any) -> Any:
    return tuple(_as_tuple(item) for item in value) if isinstance(value, list) else value
