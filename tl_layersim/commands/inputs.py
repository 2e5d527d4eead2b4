"""Models and data that commands name, with the options of opening and reading, as the functions of this package take them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from ..core.errors import LayersimError
from .run_file import is_set, merged_analyzer_options

if TYPE_CHECKING:
    from ..data.data import Data
    from ..models.open import OpenedModel

# Models that ship with the package, by the names that commands take.
DEMO, ALIGNED = "demo", "demo-aligned"


def server_of(context: typer.Context) -> bool | str:
    """The server that the options name, as `remote=` takes it; False for this process.

    Args:
        context: of the command.

    Raises:
        LayersimError: an option has no effect on a server.
    """
    options = context.params
    server: bool | str = options["server"] or options["remote"]
    for name in ("device", "dtype") if server and server != "local" else ():
        if is_set(context, name):
            raise LayersimError(
                f"`--{name}` has no effect on a server, which loaded the model before.",
                given=f"--{name} {options[name]} with a server",
                expected=f"--remote or --server without --{name}",
                do=f"leave --{name} out; capabilities(model, remote=True) in Python lists the dtype of the weights",
            )
    return server


def named_model(name: str | None, options: dict[str, Any], server: bool | str = False, option: str = "--model") -> OpenedModel:
    """A model by its name, with its tokenizer as `.model.tokenizer`, opened in this process or on a server.

    Args:
        name: folder, hub name, or name of a demo model; None for the demo model.
        options: of the command, with `device`, `dtype`, `trust_remote_code`, and `tokens_per_request` where it has it.
        server: as `server_of` returns it.
        option: that names the model, for messages.

    Raises:
        LayersimError: the model cannot be loaded or opened.
    """
    from .. import open_model

    model = loaded_model(name, options, server, option)
    return open_model(model, remote=server, tokens_per_request=options.get("tokens_per_request"))


def loaded_model(name: str | None, options: dict[str, Any], server: bool | str = False, option: str = "--model") -> Any:
    """A model by its name, not yet opened.

    Args:
        name: see `named_model`.
        options: of the command, with `device`, `dtype` and `trust_remote_code`.
        server: see `named_model`.
        option: see `named_model`.

    Raises:
        LayersimError: the model cannot be loaded.
    """
    from ..demo import demo_model
    from ..models.named_model import load_for_server, load_model

    trusted = options["trust_remote_code"]
    if server:
        if is_demo(name):
            raise LayersimError(
                f"`{option}` must name a model that the server runs; the demo models are in this package alone.",
                given=f"{option} {name or DEMO}",
                expected="the hub name of a model, such as meta-llama/Llama-3.1-70B",
                do="curl https://api.ndif.us/status lists the models that NDIF runs",
            )
        assert name is not None
        return load_for_server(name, options["dtype"] if server == "local" else None, trusted, option)
    if not is_demo(name):
        assert name is not None
        return load_model(name, options["device"], options["dtype"], trusted, option)
    import torch

    model = demo_model(aligned=name == ALIGNED).to(getattr(torch, options["dtype"]))
    return model if options["device"] in ("cpu", "auto") else model.to(options["device"])


def is_demo(name: str | None) -> bool:
    """Whether a name is that of a model of this package.

    Args:
        name: as commands take it. A folder of the same name comes first.
    """
    return name is None or (name in (DEMO, ALIGNED) and not Path(name).exists())


def named_data(name: str | None, split: str, option: str = "--data") -> Any:
    """Data by its name; None for the demo text.

    Args:
        name: see `load_data`.
        split: of a data set.
        option: that names the data, for messages.

    Raises:
        LayersimError: as `load_data`.
    """
    from ..data.named_data import load_data
    from ..demo import demo_text

    if name is None:
        return demo_text()
    try:
        return load_data(name, split)
    except LayersimError as error:
        what, given = (text.replace("--data", option) for text in (error.what, error.given))
        raise LayersimError(what, given=given, expected=error.expected, do=error.do) from error


def as_data(source: Any, options: dict[str, Any], model: OpenedModel | None = None, of_prompts: bool = False) -> Data:
    """Data with the options of reading.

    Args:
        source: as `named_data` returns it.
        options: of the command.
        model: whose tokenizer makes the tokens; None for that of the first of two models.
        of_prompts: whether an analyzer takes each row for a prompt.

    Raises:
        LayersimError: as `Data`.
    """
    from .. import Data
    from ..data.positions import as_rule

    first, comma, second = (options["column"] or "").partition(",")
    pack = options["pack"]
    return Data(
        source,
        column=(first.strip(), second.strip()) if comma else options["column"],
        tokenizer=None if model is None else getattr(model.model, "tokenizer", None),
        # Some analyzers take each row for a prompt.
        pack=isinstance(source, list) and not of_prompts if pack is None else pack,
        positions=as_rule(options.get("positions")),
        **{name: options[name] for name in ("max_tokens", "seq_len", "batch_size", "skip_first")},
    )


def measuring(options: dict[str, Any]) -> dict[str, Any]:
    """The options of `analyze` and `compare` on sites, intervals, baseline and checkpoint.

    Args:
        options: of the command.
    """
    from ..analysis.site_plan import DEFAULT

    return {
        "at": names_of(options["at"]) if options["at"] else DEFAULT,
        "per_head": options["per_head"],
        "intervals": options["intervals"],
        "baseline": options["baseline"],
        "checkpoint": options["checkpoint"],
    }


def chosen_analyzers(context: typer.Context) -> list[Any]:
    """The analyzers that `--analyzers` names, with the options that `--option` sets.

    Args:
        context: of the command.

    Raises:
        LayersimError: there is no such analyzer or option.
    """
    from ..analysis.validation import choose_analyzers
    from ..analyzers.text_options import with_options

    named = choose_analyzers(names_of([context.params["analyzers"]]))
    return list(with_options(named, merged_analyzer_options(context, list(named))).values())


def names_of(texts: list[str] | None) -> list[str]:
    """The names that commas separate.

    Args:
        texts: each with one name or several; None for no names.
    """
    return [name.strip() for text in texts or [] for name in text.split(",") if name.strip()]


def shard_files(names: list[str], option: str) -> list[Path]:
    """The files of shards; the run files beside them, which a pattern may match, are left out.

    Args:
        names: folders, patterns and files.
        option: that holds them, for messages.
    """
    from ..analysis.shards import listed

    return [file for name in names for file in listed(name, option) if file.suffix != ".yaml"]
