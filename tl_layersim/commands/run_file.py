"""`run.yaml`: the options of a run with its record, which is written beside every report and read by `--config`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from ..core.errors import LayersimError, warn, without_secrets
from ..core.storage import replacing

RUN_FILE = "run.yaml"
# Keys of the file that are no options.
COMMAND, RECORD = "command", "record"
# Options that say where a run writes, or which part of it runs here.
NOT_KEPT = ("config", "out", "checkpoint", "shard", "save_to", "first")
# Options that a file, which may be another person's, cannot set: they write files, run code, or send the API key.
NOT_FROM_FILES = (*NOT_KEPT, "trust_remote_code", "server")
# Options that hold names, joined by commas on the command line.
JOINED = ("analyzers", "format", "at", "column", "thresholds")
PATHS = ("model", "data", "model_a", "model_b", "eval_data", "heads")


def read_run_file(context: typer.Context, value: Path | None) -> Path | None:
    """Callback of `--config`: the options of the file become the defaults of this call.

    Args:
        context: of the command.
        value: path of the file; None where `--config` was not given.

    Raises:
        LayersimError: the file cannot be read as YAML, is of another command, or has a key that is no option.
    """
    if value is None:
        return None
    found = _parsed(value)
    command = str(found.pop(COMMAND, context.info_name))
    if command != context.info_name:
        raise LayersimError(
            f"`--config` names a file of another command, `{command}`.",
            given=f"tl-layersim {context.info_name} --config {value}",
            expected=f"a file with `command: {context.info_name}`, or without this line",
            do=f"tl-layersim {command} --config {value}",
        )
    context.obj = found.pop(RECORD, None)
    kinds = {
        str(parameter.name): "flag" if getattr(parameter, "is_flag", False) else "several" if parameter.multiple else "text"
        for parameter in context.command.params
        if parameter.name not in ("config", "help")
    }
    context.default_map = {name: _as_given(name, own, kinds, value) for name, own in found.items()}
    return value


def refuse_from_file(context: typer.Context) -> None:
    """Refuse options of `NOT_FROM_FILES` that the file of `--config` sets and the command line does not.

    Args:
        context: of the command, whose options were parsed.

    Raises:
        LayersimError: names the option.
    """
    for name, value in (context.default_map or {}).items():
        if name in NOT_FROM_FILES and value and not _is_given(context, name):
            flag = f"--{name.replace('_', '-')}"
            given = flag if value is True else f"{flag} {value}"
            raise LayersimError(
                f"`{flag}` is given by the file of `--config`, which may not set it.",
                given=f"{given} in {context.params['config']}",
                expected="options that run code, write files or choose a server on the command line alone",
                do=f"add {given} to the command if you trust the file",
            )


def _parsed(path: Path) -> dict[str, Any]:
    """The keys and values of a file; keys with hyphens are written with underscores."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        # A few lines of aliases of aliases could grow without bound as text.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise ValueError("it has an alias, such as *name")
        found = yaml.safe_load(text)
    except OSError as error:
        raise LayersimError(
            "`--config` names a file that cannot be read.",
            given=f"{path}: {error.strerror or error}",
            expected="a YAML file of options, such as the run.yaml beside a report",
            do=f"--config {path / RUN_FILE}" if (path / RUN_FILE).is_file() else "check the path",
        ) from None
    # ValueError: text in another encoding, an alias, or a date that does not exist.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise LayersimError(
            "`--config` is not a YAML file.",
            given=f"{path}: {error}",
            expected="a line `option: value` for each option, as in the run.yaml beside a report",
            do="put text with a colon, such as a slice of positions, in quotes",
        ) from None
    if not isinstance(found, dict):
        raise LayersimError(
            "`--config` must be a YAML file of options.",
            given=f"{path}, which holds {type(found).__name__}",
            expected="a line `option: value` for each option, as in the run.yaml beside a report",
            do="max_tokens: 4096",
        )
    return {str(key).replace("-", "_"): value for key, value in found.items()}


def _as_given(name: str, value: Any, kinds: Mapping[str, str], path: Path) -> Any:
    """A value of the file as it would stand on the command line, from which it is converted and checked."""
    if name not in kinds:
        near = difflib.get_close_matches(name, kinds, n=1)
        raise LayersimError(
            f"`--config` has a key that is no option of this command: {name}.",
            given=f"{path}: {name}",
            expected=f"one of {', '.join(sorted(kinds))}",
            do=f"did you mean {near[0]}?" if near else f"leave {name} out",
        )
    if value is None or kinds[name] == "flag":
        return value
    if kinds[name] == "several":
        return [str(one) for one in (value if isinstance(value, list) else [value])]
    if isinstance(value, list) and name in JOINED:
        return ",".join(map(str, value))
    if isinstance(value, (list, dict, bool)) or (name == "positions" and not isinstance(value, str)):
        # YAML reads 2:10 as a number in base 60, and `no` as False.
        raise LayersimError(
            f"`--config` has a value of another kind for {name}.",
            given=f"{path}: {name}: {value!r}",
            expected="text or a number",
            do=f'{name}: "...", in quotes: YAML reads 2:10 as a number, and no as false',
        )
    return str(value)


def write_run_file(folder: Path, name: str, context: typer.Context, settled: Mapping[str, Any], report: Any = None) -> Path:
    """Write the options of a run, so that `--config` repeats it.

    Args:
        folder: of the file.
        name: of the file.
        context: of the command.
        settled: options whose default depends on model and data, as they were in the run.
        report: of the run, whose provenance becomes the record; None for a shard.
    """
    options = context.params | dict(settled)
    # In the order of the help.
    names = [str(parameter.name) for parameter in context.command.params]
    kept = {key: options[key] for key in names if key in options and key not in NOT_KEPT}
    return write_options(folder / name, str(context.info_name), kept, report)


def write_options(path: Path, command: str, options: Mapping[str, Any], report: Any = None) -> Path:
    """Write options to a run file.

    Args:
        path: of the file.
        command: that the options are of.
        options: by name.
        report: see `write_run_file`.
    """
    import yaml

    content = {COMMAND: command, **{key: _written_value(key, value) for key, value in options.items()}}
    if report is not None:
        content[RECORD] = _record_of(report)
    # The folder of the trained model is required, and another run must not replace it unasked.
    further = " --save-to FOLDER" if command == "train" else ""
    further += " --trust-remote-code" if options.get("trust_remote_code") else ""
    further += f" --server {options['server']}" if options.get("server") else ""
    heading = f"# tl-layersim {command} --config {path.name}{further} repeats this run.\n"
    text = heading + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    with replacing(path) as file:
        file.write(without_secrets(text).encode())
    return path


def _written_value(name: str, value: Any) -> Any:
    """An option as YAML writes it: names as lists, files and folders of this machine by their whole path."""
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value] or None
    if isinstance(value, str) and name in JOINED and "," in value:
        return [one.strip() for one in value.split(",")]
    if isinstance(value, (str, Path)):
        is_here = name in PATHS and Path(value).exists()
        return str(Path(value).resolve()) if is_here else str(value)
    return value


def _record_of(report: Any) -> dict[str, Any]:
    """The model, data and versions of a run, by which a repetition is compared."""
    run = next(iter(report.values())).provenance
    return {
        "model": run.model,
        "weights": run.weights_hash,
        "data": run.data,
        "tokens": run.tokens,
        "versions": dict(run.versions),
    }


def warn_of_another_run(context: typer.Context, report: Any) -> None:
    """Warn where a run that `--config` repeats had other data, weights or versions.

    Args:
        context: of the command.
        report: of this run.
    """
    given = [name for name in context.params if _is_given(context, name) and name not in (*NOT_KEPT, "format")]
    if not isinstance(context.obj, dict) or given:
        return
    now = _record_of(report)
    other = [key for key in ("data", "weights") if context.obj.get(key) not in (None, now[key])]
    then = context.obj.get("versions")
    for package, version in (then if isinstance(then, dict) else {}).items():
        if now["versions"].get(package) != version:
            other.append(f"{package} {version}")
    if other:
        warn(f"The run of {context.params['config']} had other {', '.join(other)}: its numbers may differ from these.")


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def is_set(context: typer.Context, name: str) -> bool:
    """Whether an option was given, on the command line or in the file of `--config`.

    Args:
        context: of the command.
        name: of the option.
    """
    source = context.get_parameter_source(name)
    in_file = context.default_map is not None and context.default_map.get(name) is not None
    return source is not None and (source.name == "COMMANDLINE" or in_file)


def merged_analyzer_options(context: typer.Context, names: list[str]) -> list[str]:
    """The values of `--option`; those of the file of `--config` hold for options that the command line does not set.

    Args:
        context: of the command.
        names: of the analyzers of this run.
    """
    given = list(context.params["option"] or [])
    if not _is_given(context, "option"):
        in_file = given
        given = []
    else:
        in_file = list((context.default_map or {}).get("option") or [])
    taken = {setting.partition("=")[0] for setting in given}
    # Options of analyzers that the command line leaves out are of no use.
    named_here = _is_given(context, "analyzers")
    kept = [one for one in in_file if not named_here or one.partition(".")[0] in names]
    return [one for one in kept if one.partition("=")[0] not in taken] + given


def shard_options(files: list[Path]) -> dict[str, Any] | None:
    """The options of a run whose shards were measured on the command line; None where a shard was measured elsewhere.

    Args:
        files: of the shards, each with its run file beside it.
    """
    beside = [file.with_suffix(".yaml") for file in files]
    if not all(path.is_file() for path in beside):
        return None
    found = _parsed(beside[0])
    return {name: value for name, value in found.items() if name not in (COMMAND, RECORD)}
