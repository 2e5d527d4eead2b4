"""The file `run.yaml` with the options of a run: written with every report, and read by `--config`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..core.errors import LayersimError, warn, without_secrets
from ..core.wording import brief, did_you_mean
from .bounded_yaml import read_bounded_yaml
from .options import CommandCall, flag

RUN_FILE = "run.yaml"
# Keys of the file that are no options.
COMMAND_KEY = "command"
RECORD_KEY = "record"
# Entries of the record that are texts.
RECORDED_KEYS = ("model", "weights", "data", "tokens")
# Entry of the record with the versions of packages.
VERSIONS_KEY = "versions"
# Options that say where a run writes, or which part of it runs here.
NOT_KEPT = ("config", "out", "checkpoint", "cache", "shard", "save_to", "first")
# Options that a file, which may be another person's, cannot set: they write files, run code, or send the API key.
NOT_FROM_FILES = (*NOT_KEPT, "trust_remote_code", "server")
PATHS = ("model", "data", "model_a", "model_b", "front", "back", "eval_data", "heads")


def config_option(*, config: Path | None = None) -> None:
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
        LayersimError: the file cannot be read, belongs to another command, or sets an unknown option, one of another type or
            one that only the command line may set.
    """
    from cyclopts.config import Dict

    argument_of = {argument.name.removeprefix("--").replace("-", "_"): argument for argument in arguments}
    on_command_line = [name for name, argument in argument_of.items() if argument.tokens]
    if "config" not in on_command_line:
        return
    path = Path(argument_of["config"].tokens[-1].value)
    content = parsed_run_file(path)
    command = content.pop(COMMAND_KEY, commands[-1])
    if command != commands[-1]:
        raise LayersimError(f"`--config` is {path}, a run file of {brief(command)}; it must be a run file of {commands[-1]}.")
    content.pop(RECORD_KEY, None)
    takes_several = {name: argument.token_count()[1] for name, argument in argument_of.items()}
    # Cyclopts would accept other spellings too, such as trustRemoteCode.
    _refuse_other_options(path, "--config", content, takes_several)
    for name, value in content.items():
        # An analyzer of the user's own file, path/to/file.py:Class.
        runs_code = name == "analyzers" and any(":" in text for text in _texts(value))
        is_refused = runs_code or name in NOT_FROM_FILES
        has_no_effect = isinstance(value, str) and value.lower() in ("false", "null", "")
        if is_refused and name not in on_command_line and not has_no_effect:
            reason = "options that run code, write files or choose a server are read from the command line alone"
            raise LayersimError(f"`{flag(name)}` is {brief(value)} in {path}; {reason}.")
    allowed = {name: value for name, value in content.items() if name not in NOT_FROM_FILES}
    # Below the name of the command: at the top level, cyclopts leaves out options named as a command, such as analyzers.
    Dict({commands[-1]: allowed}, source=str(path))(app, commands[-1:], arguments)


def parsed_run_file(path: Path, argument: str = "--config") -> dict[str, Any]:
    """Parse the keys and values of a run file. Values are text or lists of text; hyphens in keys become underscores.

    Args:
        path: path of the file.
        argument: the argument that names the file, for messages.

    Raises:
        LayersimError: the file cannot be read, or its command or record has another form than `write_run_file` gives it.
    """
    # Every value stays a text. Other loaders would read 2:10 as a number and no as False.
    content = read_bounded_yaml(path, argument)
    if not isinstance(content, dict):
        raise LayersimError(
            f"`{argument}` is {path}, which is no run file; it must hold a line `option: value` for each option."
        )
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in options:
            raise LayersimError(f"`{argument}` is {path}, which sets the option {brief(name)} twice.")
        options[name] = value
    if COMMAND_KEY in options:
        _refuse_other_type(path, COMMAND_KEY, options[COMMAND_KEY], takes_several=False)
    if RECORD_KEY in options:
        _refuse_other_record(path, options[RECORD_KEY])
    return options


def _texts(value: str | list[str]) -> list[str]:
    """The texts of an option's value, which is one text or a list of texts."""
    return [value] if isinstance(value, str) else value


def _refuse_other_options(path: Path, argument: str, options: Mapping[str, Any], takes_several: Mapping[str, bool]) -> None:
    """Raise an error if a file sets an unknown option, or one of another type.

    Args:
        path: path of the file.
        argument: the argument that names the file, for messages.
        options: the options in the file.
        takes_several: for each option of the command, whether it takes several values.
    """
    for name, value in options.items():
        _refuse_other_names(f"`{argument}` is {path}; its key", "no option of this command", name, takes_several)
        _refuse_other_type(path, flag(name), value, takes_several[name])


def _refuse_other_type(path: Path, name: str, value: Any, takes_several: bool) -> None:
    """Raise an error if a value is not one text, or a list of texts for an option that takes several.

    Args:
        path: path of the file.
        name: the option or the entry, as messages write it.
        value: its value in the file.
        takes_several: whether the option takes several values.
    """
    # An empty list would have no effect.
    is_list_of_texts = isinstance(value, list) and value and all(isinstance(text, str) for text in value)
    if isinstance(value, str) or (takes_several and is_list_of_texts):
        return
    allowed = "one value or a list of values" if takes_several else "one value"
    raise LayersimError(f"`{name}` is {brief(value)} in {path}; it must be {allowed}.")


def _refuse_other_names(statement: str, description: str, name: str, allowed: Iterable[str]) -> None:
    """Raise an error that proposes the nearest allowed name, if a name is not allowed.

    Args:
        statement: beginning of the message.
        description: what any other name is.
        name: the name in the file.
        allowed: all allowed names.
    """
    if name in allowed:
        return
    raise LayersimError(f"{statement} {brief(name)} is {description}.{did_you_mean(name, allowed)}")


def _refuse_other_record(path: Path, record: Any) -> None:
    """Raise an error if the record of a run has another form: `RECORDED_KEYS` are texts, and versions a mapping of texts."""
    if not isinstance(record, dict):
        raise LayersimError(f"`{RECORD_KEY}` is {brief(record)} in {path}; it must hold a line `name: value` for each value.")
    for name, value in record.items():
        statement = f"`{RECORD_KEY}` in {path} is malformed: its key"
        _refuse_other_names(statement, "no part of a record", name, (*RECORDED_KEYS, VERSIONS_KEY))
        if name != VERSIONS_KEY:
            _refuse_other_type(path, f"{RECORD_KEY}.{name}", value, takes_several=False)
        elif not isinstance(value, dict) or not all(isinstance(version, str) for version in value.values()):
            raise LayersimError(
                f"`{RECORD_KEY}.{VERSIONS_KEY}` is {brief(value)} in {path}; it must hold a line `package: version` for each "
                "package."
            )


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

    used_options = {} if report is None else _effective_options(report)
    options = {}
    for key, value in call.options.items():
        options[key] = value if key in call.explicit else used_options.get(key, value)
    options |= settled
    content: dict[str, Any] = {COMMAND_KEY: call.command}
    for key, value in options.items():
        if key not in NOT_KEPT and value not in (None, [], ()):
            content[key] = _written_value(key, value)
    if report is not None:
        content[RECORD_KEY] = _provenance_record(report)
    # Options that `--config` does not read from a file, see `NOT_FROM_FILES`.
    further = ""
    if call.command == "train":
        # The folder of the trained model is required, and another run must not replace it unasked.
        further += " --save-to FOLDER"
    if str(options.get("trust_remote_code")).lower() == "true":
        further += " --trust-remote-code"
    if options.get("server"):
        further += f" --server {options['server']}"
    analyzers = ",".join(options.get("analyzers") or [])
    if ":" in analyzers:
        further += f" --analyzers {analyzers}"
    heading = f"# tl-layersim {call.command} --config {name}{further} repeats this run.\n"
    text = heading + yaml.safe_dump(content, sort_keys=False, allow_unicode=True, width=120)
    with replacing(folder / name) as file:
        file.write(without_secrets(text).encode())
    return folder / name


def _written_value(name: str, value: Any) -> Any:
    """The YAML value of an option; local files and folders get their absolute path."""
    if isinstance(value, (list, tuple)):
        return [str(item) for item in value]
    if isinstance(value, (str, Path)):
        if name in PATHS and Path(value).exists():
            return str(Path(value).resolve())
        return str(value)
    return str(value) if value == math.inf else value


def _effective_options(report: Any) -> dict[str, Any]:
    """The options that a run used, including defaults that depend on the model, the data or other options."""
    provenance = next(iter(report.values())).provenance
    options = {**provenance.options, **provenance.options.get("training", {})}
    # `--at` of a stitch has another form than the sites in the provenance.
    return {name: value for name, value in options.items() if name != "at" and value is not None}


def _provenance_record(report: Any) -> dict[str, Any]:
    """A dict of the model, weights, data and package versions of a run."""
    run = next(iter(report.values())).provenance
    values = (run.model, run.weights_hash, run.data, run.tokens)
    return dict(zip(RECORDED_KEYS, values, strict=True)) | {VERSIONS_KEY: dict(run.versions)}


def warn_of_another_run(call: CommandCall, report: Any) -> None:
    """Warn if the run that `--config` repeats used different data, weights or versions.

    Args:
        call: the call of the command.
        report: report of this run.
    """
    file_record = options_of(call).get(RECORD_KEY)
    record = _provenance_record(report)
    if file_record is None:
        return
    differing = []
    for key in ("data", "weights"):
        # "null" is the text of None in a file.
        if file_record.get(key, "null") not in ("null", record[key]):
            differing.append(key)
    for package, version in file_record.get(VERSIONS_KEY, {}).items():
        if record[VERSIONS_KEY].get(package) != version:
            differing.append(f"{package} {version}")
    if differing:
        file = call.options["config"]
        warn(f"The run in {file} used different {', '.join(differing)}, so the numbers of this run may differ.")


def options_of_shards(files: list[Path], takes_several: Mapping[str, bool]) -> dict[str, Any] | None:
    """Options of the command that measured the shards, from the first run file; None if a shard has no run file.

    Args:
        files: files of the shards, each with its run file in the same folder.
        takes_several: for each option of `report`, whether it takes several values.

    Raises:
        LayersimError: the run file is malformed.
    """
    run_files = [file.with_suffix(".yaml") for file in files]
    if not all(path.is_file() for path in run_files):
        return None
    content = parsed_run_file(run_files[0], "files")
    options = {name: value for name, value in content.items() if name not in (COMMAND_KEY, RECORD_KEY)}
    _refuse_other_options(run_files[0], "files", options, takes_several)
    return options
