"""Models, data and analyzers from the options of a command."""

from __future__ import annotations

import ast
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..core.errors import LayersimError, warn
from ..core.wording import brief, did_you_mean
from .options import CommandCall, names_of
from .run_file import options_of

if TYPE_CHECKING:
    from ..data.data import Data
    from ..sources.open_local import OpenedModel

# Models that ship with the package, by the names that commands take.
DEMO = "demo"
ALIGNED = "demo-aligned"


def named_model(
    model: str = DEMO,
    *,
    device: str | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    trust_remote_code: bool = False,
    remote: bool = False,
    server: str | None = None,
) -> Any:
    """Load a model by name, with its tokenizer as `.tokenizer`.

    Args:
        model: folder or hub name of a Hugging Face model; demo and demo-aligned are models that ship with this package.
        device: device of the model: cpu, cuda, mps, or auto to spread it over GPUs. Default: cpu.
        dtype: dtype of the weights. Default: float32.
        trust_remote_code: run the Python code that comes with the model. Without this option, such a model is an error.
        remote: run on nnsight's default NDIF server. nnsight reads the key from NDIF_API_KEY or nnsight.login().
        server: run on another NDIF server, http://host:port; local is nnsight's simulation of a server.

    Raises:
        LayersimError: the model cannot be loaded, or an option has no effect on a server.
    """
    from ..demo import demo_model
    from ..sources.load_by_name import load_for_server, load_model

    if remote or server:
        if device or (dtype and server != "local"):
            name = "device" if device else "dtype"
            raise LayersimError(
                f"`{name}` is {device or dtype}, but has no effect on a server, which has loaded the model already."
            )
        if is_demo(model):
            raise LayersimError(f"`model` is {model}, a demo model; a server needs the hub name of a model that it runs.")
        # Only nnsight's simulation of a server loads the weights here.
        local_dtype = (dtype or "float32") if server == "local" else None
        return load_for_server(model, local_dtype, trust_remote_code, "model")
    device = device or "cpu"
    dtype = dtype or "float32"
    if not is_demo(model):
        return load_model(model, device, dtype, trust_remote_code, "model")
    import torch

    demo = demo_model(aligned=model == ALIGNED).to(getattr(torch, dtype))
    return demo if device in ("cpu", "auto") else demo.to(device)


def is_demo(name: str) -> bool:
    """Whether the name is a demo model.

    Args:
        name: name of the model. A folder of the same name comes first.
    """
    return name in (DEMO, ALIGNED) and not Path(name).exists()


def opened(call: CommandCall, option: str = "model") -> OpenedModel:
    """Open the model that a command-line option names, in this process or on a server.

    Args:
        call: the call of the command.
        option: name of the option that holds the model.

    Raises:
        LayersimError: the model cannot be loaded or opened.
    """
    from .. import open_model

    model = named_model(call.options[option], **call.of(named_model, without=["model"]))
    options = call.of("open_model")
    options["remote"] = call.options.get("server") or call.options.get("remote", False)
    return open_model(model, **options)


def named_data(*, data: str | None = None, split: str = "test", pack: bool | None = None) -> Any:
    """Load data by path or by hub name, or the demo text.

    Args:
        data: text file, table, folder of a saved data set, or name of a data set on the hub. Default: the demo text.
        split: split of a data set.
        pack: join texts, and cut rows of full length. Default: on for text files, unless an analyzer reads each row as a
            prompt; off for other data.

    Raises:
        LayersimError: there is no such data, or it cannot be read.
    """
    from ..demo import demo_text

    return demo_text() if data is None else load_data(data, split)


def load_data(name: str, split: str, option: str = "--data") -> Any:
    """Load a table, a text file, a saved data set, or a data set of the hub.

    Args:
        name: path of a file or folder, or name on the hub.
        split: split of the data set.
        option: the option that holds the name, for messages.

    Raises:
        LayersimError: the data does not exist or cannot be read.
    """
    from ..core.wording import first_line

    path = Path(name)
    try:
        if path.is_file():
            return _read_file(path)
        import datasets

        if path.is_dir():
            dataset = datasets.load_from_disk(name)
            return dataset[split] if isinstance(dataset, datasets.DatasetDict) else dataset
        return datasets.load_dataset(name, split=split, streaming=True)
    # Libraries raise errors of many kinds for data that they cannot read.
    except Exception as error:
        reason = "cannot be read" if path.exists() else "is no file or folder here, and cannot be read from the hub"
        raise LayersimError(
            f"`{option}` is {name}, which {reason}: {first_line(error)}. It must be a text file in UTF-8, a table, the "
            f"folder of a saved data set, or a data set of the hub with a split {split}."
        ) from error


def _read_file(path: Path) -> Any:
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
    # UTF-16 text is also valid UTF-8, with a zero byte beside each letter.
    if "\0" in text:
        raise ValueError("it holds zero bytes")
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def read_data(call: CommandCall, of_prompts: bool = False) -> Data:
    """Read the data that the options of a call name.

    Args:
        call: the call of the command.
        of_prompts: whether an analyzer reads each row as a prompt.

    Raises:
        LayersimError: there is no such data, or an option is out of its bounds.
    """
    from .. import Data

    options = call.of("Data")
    # Bounds are checked before data is loaded.
    Data([], **options)
    source = named_data(**call.of(named_data))
    options.setdefault("pack", isinstance(source, list) and not of_prompts)
    return Data(source, **options)


def evaluation_data_option(*, eval_data: str | None = None) -> None:
    """Declares the option for held-out data.

    Args:
        eval_data: held-out data, in a form that `--data` accepts. Default: a part of `--data`, which is not used for the fit.
    """


def read_held_out(call: CommandCall) -> Any:
    """Read the held-out data of a call; None if a part of the training data is held out instead."""
    if call.options["eval_data"] is None:
        return None
    return load_data(call.options["eval_data"], call.options["split"], "--eval-data")


def analyzer_options(*, analyzers: list[str] = ["cosine,cka"], option: list[str] | None = None) -> None:  # noqa: B006
    """Declares the options that choose and set the analyzers of a run.

    Args:
        analyzers: names, separated by commas; `tl-layersim analyzers` lists them. path/to/file.py:Class is an analyzer of your
            own; it can be given on the command line, but not in a file of options.
        option: an option of an analyzer, such as cka.minibatch=128; `tl-layersim analyzers cka` lists the options. May be
            repeated.
    """


def chosen_analyzers(call: CommandCall) -> dict[str, Any]:
    """A dict of the chosen analyzers by name, with the options that `--option` sets.

    Args:
        call: the call of the command. Options of the command line override those of its run file.

    Raises:
        LayersimError: there is no such analyzer or option.
    """
    from ..engine.run_arguments import choose_analyzers

    names = names_of(call.options["analyzers"])
    chosen = choose_analyzers([own_analyzer(name) if ":" in name else name for name in names])
    settings = call.options["option"] or []
    settings_of_file = _settings_of_file(call, chosen)
    # By analyzer and option: a setting of the command line replaces that of the file.
    setting_of: dict[str, str] = {}
    for setting in settings_of_file:
        if _analyzer_named_by(setting) in chosen:
            setting_of[setting.partition("=")[0]] = setting
    for setting in settings:
        # Cyclopts takes the settings of the file if the command line has none.
        if setting not in settings_of_file:
            setting_of[setting.partition("=")[0]] = setting
    return with_options(chosen, list(setting_of.values()))


def _analyzer_named_by(setting: str) -> str:
    """Name of the analyzer in a setting, such as "cka" in "cka.minibatch=128"."""
    return setting.partition("=")[0].partition(".")[0]


def _settings_of_file(call: CommandCall, chosen: Mapping[str, Any]) -> list[str]:
    """The settings of analyzers in the `--config` file.

    The command line may choose other analyzers than the file. Settings of the others have no effect; they are verified, because
    a misspelt name would look like one of them.

    Args:
        call: the call of the command.
        chosen: the chosen analyzers, by name.

    Raises:
        LayersimError: a setting is malformed, or its analyzer or option does not exist.
    """
    from ..analyzers import find_analyzers

    options = options_of(call)
    settings = options.get("option", [])
    settings = [settings] if isinstance(settings, str) else settings
    unused = [setting for setting in settings if _analyzer_named_by(setting) not in chosen]
    analyzers = options.get("analyzers", [])
    names = names_of([analyzers] if isinstance(analyzers, str) else analyzers)
    installed = find_analyzers()
    if any(":" in name for name in names):
        # An analyzer of the user's own file, whose name and options are known only if the file runs.
        unknown = [setting for setting in unused if _analyzer_named_by(setting) not in installed]
        if unknown:
            warn(f"`--config` sets {', '.join(map(brief, unknown))}, which has no effect: the analyzer is not chosen.")
        unused = [setting for setting in unused if setting not in unknown]
    checked = dict(chosen)
    for setting in unused:
        name = _analyzer_named_by(setting)
        if name in installed:
            checked[name] = installed[name]()
    # Raises errors only: the analyzers with these options are not used.
    with_options(checked, unused)
    return settings


def with_options(analyzers: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A dict of copies of analyzers, with options set from text.

    Args:
        analyzers: the analyzers, by name.
        settings: settings of the form `name.option=value`. A value is written as in Python or JSON; text needs no quotation
            marks.

    Raises:
        LayersimError: a setting does not have this form, or its analyzer or option does not exist.

    Examples:
        >>> import tl_layersim as lsim
        >>> with_options({"cka": lsim.CKA()}, ["cka.minibatch=128"])["cka"].minibatch
        128
    """
    values: dict[str, dict[str, Any]] = {name: {} for name in analyzers}
    for setting in settings:
        path, equals, text = setting.partition("=")
        name, _, option = path.partition(".")
        # For an unknown analyzer, the message lists the options of all.
        listed = {name: analyzers[name]} if name in analyzers else analyzers
        allowed = []
        for analyzer_name, analyzer in listed.items():
            allowed += [f"{analyzer_name}.{field.name}" for field in fields(analyzer)]
        if not equals or path not in allowed:
            raise LayersimError(
                f"`--option` is {brief(setting)}; it must be name.option=value, where name.option is one of "
                f"{', '.join(allowed)}.{did_you_mean(path, allowed)}"
            )
        values[name][option] = _parsed_value(text)
    return {name: replace(analyzer, **values[name]) for name, analyzer in analyzers.items()}


def as_settings(analyzer: Any) -> list[str]:
    """A list of an analyzer's options as `name.option=value`, the form that `with_options` reads.

    Args:
        analyzer: an analyzer. An option that text cannot hold, such as heads that were read from a file, is left out.

    Examples:
        >>> import tl_layersim as lsim
        >>> as_settings(lsim.Cosine(center="none"))[0]
        'cosine.center=none'
    """
    settings = []
    for field in fields(analyzer):
        value = getattr(analyzer, field.name)
        text = value if isinstance(value, str) else repr(value)
        if repr(_parsed_value(text)) == repr(value):
            settings.append(f"{analyzer.name}.{field.name}={text}")
    return settings


def _parsed_value(text: str) -> Any:
    """Parse a value written as in JSON or Python; return any other text unchanged.

    Values that are nested too deeply for either reader stay texts, which no option takes.
    """
    for parse in (json.loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return parse(text)
    return text


def own_analyzer(name: str) -> Any:
    """Load an analyzer with default options from a Python file of the user.

    Args:
        name: path of the file, a colon and the name of the class.

    Raises:
        LayersimError: the file or the class does not exist, or raises an error.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    path, _, class_name = name.rpartition(":")
    try:
        # The name that `import` gives the module. Files of results and of shards name the class by this module.
        spec = spec_from_file_location(Path(path).stem, path)
        assert spec is not None, "it is no Python file"
        assert spec.loader is not None
        module = module_from_spec(spec)
        # Dataclasses look their module up.
        sys.modules.setdefault(spec.name, module)
        spec.loader.exec_module(module)
        return getattr(module, class_name)()
    # The file may raise any error.
    except Exception as error:
        raise LayersimError(f"`analyzers` is {name}, which raises {type(error).__name__}: {error}") from error
