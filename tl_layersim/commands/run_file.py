"""The file `run.yaml` with the options of a run: written with every report, and read by `--config`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError, warn, without_secrets
from .options import CommandCall, flag

RUN_FILE = "run.yaml"
# Keys of the file that are no options.
COMMAND, RECORD = "command", "record"
# Options that say where a run writes, or which part of it runs here.
NOT_KEPT = ("config", "out", "checkpoint", "cache", "shard", "save_to", "first")
# Options that a file, which may be another person's, cannot set: they write files, run code, or send the API key.
NOT_FROM_FILES = (*NOT_KEPT, "trust_remote_code", "server")
PATHS = ("model", "data", "model_a", "model_b", "front", "back", "eval_data", "heads")


def run_file(*, config: Path | None = None) -> None:
    """Declares the option `--config`: a file from which other options are read.

    Args:
        config: read options from a YAML file, such as the run.yaml of a report. Options of the command line override it.
    """


def read_run_file(app: Any, commands: tuple[str, ...], arguments: Any) -> None:
    """Read the `--config` file, and set its options unless the command line sets them.

    Args:
        app: the cyclopts app.
        commands: name of the command, in parts.
        arguments: cyclopts' arguments, with the values of the command line.

    Raises:
        LayersimError: the file cannot be read, belongs to another command, or sets an unknown option or one that only the
            command line may set.
    """
    from cyclopts.config import Dict

    known = {one.name.removeprefix("--").replace("-", "_"): one.tokens for one in arguments}
    given = {name: tokens for name, tokens in known.items() if tokens}
    if "config" not in given:
        return
    path = Path(given["config"][-1].value)
    found = parsed_run_file(path)
    if (other := found.pop(COMMAND, commands[-1])) != commands[-1]:
        raise LayersimError(f"`--config` is {path}, a run file of {other}; it must be a run file of {commands[-1]}.")
    found.pop(RECORD, None)
    for name, value in found.items():
        # Cyclopts would accept other spellings too, such as trustRemoteCode.
        if name not in known:
            raise LayersimError(f"`--config` is {path}; its key {name} is no option of this command.")
        own_code = name == "analyzers" and ":" in str(value)
        if (own_code or name in NOT_FROM_FILES) and name not in given and str(value).lower() not in ("false", "null", ""):
            why = "options that run code, write files or choose a server are read from the command line alone"
            raise LayersimError(f"`{flag(name)}` is {value} in {path}; {why}.")
    allowed = {name: value for name, value in found.items() if name not in NOT_FROM_FILES}
    # Below the name of the command: at the top level, cyclopts leaves out options named as a command, such as analyzers.
    Dict({commands[-1]: allowed}, source=str(path))(app, commands[-1:], arguments)


def parsed_run_file(path: Path) -> dict[str, Any]:
    """Parse the keys and values of a run file. Values are text; hyphens in keys become underscores.

    Raises:
        LayersimError: the file cannot be read.
    """
    import yaml

    try:
        # This loader leaves every value a text. Others would read 2:10 as a number and no as False.
        found = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.BaseLoader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise LayersimError(f"`--config` is {path}, which cannot be read as YAML: {error}") from None
    if not isinstance(found, dict):
        raise LayersimError(f"`--config` is {path}, which is no run file; it must hold a line `option: value` for each option.")
    return {str(key).replace("-", "_"): value for key, value in found.items()}


def options_of(call: CommandCall) -> dict[str, Any]:
    """A dict of the options in the `--config` file; empty without such a file."""
    path = call.options.get("config")
    return {} if path is None else parsed_run_file(path)


def write_run_file(folder: Path, name: str, call: CommandCall, settled: Mapping[str, Any], report: Any = None) -> Path:
    """Write the options of a run to a file. `--config` reads it to repeat the run.

    Args:
        folder: folder of the file.
        name: name of the file.
        call: the call of the command.
        settled: values of options that are written in place of those of the call.
        report: report of the run, whose record gives the values of options that the call left open; None for a shard.
    """
    import yaml

    from ..core.file_format import replacing

    used = {} if report is None else _used_options(report)
    options = {name: value if name in call.given else used.get(name, value) for name, value in call.options.items()}
    options |= settled
    options = {key: value for key, value in options.items() if key not in NOT_KEPT and value is not None}
    content = {COMMAND: call.command, **{key: _written_value(key, value) for key, value in options.items()}}
    if report is not None:
        content[RECORD] = _record_of(report)
    # The folder of the trained model is required, and another run must not replace it unasked.
    further = " --save-to FOLDER" if call.command == "train" else ""
    further += " --trust-remote-code" if str(options.get("trust_remote_code")).lower() == "true" else ""
    further += f" --server {options['server']}" if options.get("server") else ""
    named = ",".join(options.get("analyzers") or [])
    further += f" --analyzers {named}" if ":" in named else ""
    heading = f"# tl-layersim {call.command} --config {name}{further} repeats this run.\n"
    text = heading + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    with replacing(folder / name) as file:
        file.write(without_secrets(text).encode())
    return folder / name


def _written_value(name: str, value: Any) -> Any:
    """The YAML value of an option; local files and folders get their absolute path."""
    if isinstance(value, (list, tuple)):
        return [str(one) for one in value]
    if isinstance(value, (str, Path)):
        return str(Path(value).resolve() if name in PATHS and Path(value).exists() else value)
    return str(value) if value == math.inf else value


def _used_options(report: Any) -> dict[str, Any]:
    """The options that a run used, including defaults that depend on the model, the data or other options."""
    options = next(iter(report.values())).provenance.options
    known = {**options, **options.get("training", {})}
    # `--at` of a stitch has another form than the sites in the provenance.
    return {name: value for name, value in known.items() if name != "at" and value is not None}


def _record_of(report: Any) -> dict[str, Any]:
    """A dict of the model, weights, data and package versions of a run."""
    run = next(iter(report.values())).provenance
    known = {"model": run.model, "weights": run.weights_hash, "data": run.data, "tokens": run.tokens}
    return known | {"versions": dict(run.versions)}


def warn_of_another_run(call: CommandCall, report: Any) -> None:
    """Warn if the run that `--config` repeats used different data, weights or versions.

    Args:
        call: the call of the command.
        report: report of this run.
    """
    then, now = options_of(call).get(RECORD), _record_of(report)
    if then is None:
        return
    other = [key for key in ("data", "weights") if then.get(key, "null") not in ("null", now[key])]
    versions = then.get("versions", {}).items()
    other += [f"{package} {version}" for package, version in versions if now["versions"].get(package) != version]
    if other:
        warn(f"The run in {call.options['config']} used different {', '.join(other)}, so the numbers of this run may differ.")


def shard_options(files: list[Path]) -> dict[str, Any] | None:
    """Options of the command that measured the shards, from the first run file; None if a shard has no run file.

    Args:
        files: files of the shards, each with its run file in the same folder.
    """
    beside = [file.with_suffix(".yaml") for file in files]
    if not all(path.is_file() for path in beside):
        return None
    return {name: value for name, value in parsed_run_file(beside[0]).items() if name not in (COMMAND, RECORD)}
