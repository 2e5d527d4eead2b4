"""Loads Hugging Face models by folder or hub name: with weights, for a server, or on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..architectures.blocks import anatomy_of
from ..core.errors import LayersimError, warn
from ..core.wording import amount, brief, first_line


def refuse_missing_device(device: str) -> None:
    """Raise an error if this machine or this build of torch lacks a device."""
    try:
        torch.empty(0, device="cpu" if device == "auto" else device)
    except (AssertionError, RuntimeError) as error:
        raise LayersimError(f"`--device` is {device}, which is not on this machine: {first_line(error)}.") from error


def load_model(name: str, device: str, dtype: str, trust_remote_code: bool, option: str = "--model") -> Any:
    """Load a model in evaluation mode, with its tokenizer as `.tokenizer`.

    Args:
        name: path of a folder, or name on the hub.
        device: "cpu", "cuda", "mps" or "auto".
        dtype: dtype of the weights.
        trust_remote_code: whether Python code in the model's repository may run.
        option: name of the command-line option, for messages.

    Raises:
        LayersimError: the model cannot be loaded, needs `trust_remote_code`, or the files lack weights of blocks.

    Warns:
        LayersimWarning: the files lack other weights, such as those of a head.
    """
    import transformers

    place = {"device_map": "auto"} if device == "auto" else {}
    with _loading_options(name, trust_remote_code, option) as options:
        cls = _model_class(transformers.AutoConfig.from_pretrained(name, **options), trust_remote_code)
        loading = {"dtype": getattr(torch, dtype), "output_loading_info": True}
        model, loading_info = cls.from_pretrained(name, **loading, **options, **place)
        model.tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
    missing = sorted(loading_info["missing_keys"])
    if missing:
        examples = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        text = f"`{option}` is {name}, whose files lack {amount(len(missing), 'weight')}"
        prefixes_of_blocks = tuple(f"{stack.list_path}." for stack in anatomy_of(model).known_stacks.values())
        if any(weight.startswith(prefixes_of_blocks) for weight in missing):
            raise LayersimError(f"{text} of the model's blocks: {examples}.")
        warn(f"{text}: {examples}. These weights are now random.")
    if device != "auto":
        model = model.to(device)
    return model.eval()


def load_for_server(name: str, dtype: str | None, trust_remote_code: bool, option: str) -> Any:
    """Load an nnsight model without weights, for a server, with its tokenizer as `.tokenizer`.

    Args:
        name: path of a folder, or name on the hub.
        dtype: dtype of the weights, which are loaded for nnsight's local simulation of a server; None to load no weights.
        trust_remote_code: whether Python code in the model's repository may run.
        option: name of the command-line option, for messages.

    Raises:
        LayersimError: see `load_model`.
    """
    import transformers
    from nnsight import TransformersModel

    loading = {} if dtype is None else {"dispatch": True, "dtype": getattr(torch, dtype)}
    with _loading_options(name, trust_remote_code, option) as options:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        return TransformersModel(
            name, task="text-generation", tokenizer=tokenizer, trust_remote_code=trust_remote_code, **loading
        )


def load_without_weights(name: str, trust_remote_code: bool, option: str) -> Any:
    """Load a model on the meta device: its modules from its configuration, without weights.

    Args:
        name: path of a folder, or name on the hub.
        trust_remote_code: whether Python code in the model's repository may run.
        option: name of the command-line option, for messages.

    Raises:
        LayersimError: see `load_model`.
    """
    import transformers

    with _loading_options(name, trust_remote_code, option) as options, torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(name, **options)
        return _new_model(_model_class(config, trust_remote_code), config, trust_remote_code)


def _new_model(cls: Any, config: Any, trust_remote_code: bool) -> Any:
    """A model of a class of transformers, which may be one of its auto classes, with fresh weights."""
    if hasattr(cls, "from_config"):
        return cls.from_config(config, trust_remote_code=trust_remote_code)
    return cls(config)


# Fields of a config.json that transformers converts to others.
OLDER_FIELDS = ("rope_theta", "rope_scaling", "torch_dtype", "auto_map")


def model_without_weights(config: Any) -> Any:
    """Build a model on the meta device: shapes without values.

    Its dtype is that of the configuration, or float32.

    Args:
        config: a configuration of transformers, its fields as a mapping with "model_type", or the folder or hub name of a
            model. If it names no class, the model is a causal language model, if one exists for its type.

    Raises:
        LayersimError: there is no such model, or `config` is no configuration.

    Warns:
        LayersimWarning: fields of the mapping are unknown, because a misspelt field silently leaves its default.
    """
    import transformers

    if isinstance(config, str):
        return load_without_weights(config, False, "model_or_config").eval()
    if isinstance(config, Mapping) and "model_type" in config:
        config_fields = dict(config)
        config = transformers.AutoConfig.for_model(config_fields.pop("model_type"), **config_fields)
        _warn_of_unknown_fields(config_fields, type(config))
    if not isinstance(config, transformers.PreTrainedConfig):
        raise LayersimError(
            f"`model_or_config` is {brief(config)}; it must be a model, a configuration of transformers, its fields as a "
            "dict, or the folder or hub name of a model."
        )
    has_causal_model = type(config) in transformers.AutoModelForCausalLM._model_mapping
    cls: Any = transformers.AutoModelForCausalLM
    if config.architectures or not has_causal_model:
        cls = _model_class(config, False)
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    with torch.device("meta"):
        model = _new_model(cls, config, False)
    return model.to(dtype).eval()


def _warn_of_unknown_fields(config_fields: Mapping[str, Any], cls: Any) -> None:
    """Warn of fields that a class of configurations does not have.

    Args:
        config_fields: the fields, without "model_type".
        cls: the class.
    """
    known_fields = {*cls().to_dict(), *cls.attribute_map, *OLDER_FIELDS}
    unknown_fields: list[str] = []
    for name in config_fields:
        # Every configuration takes private fields and ids of special tokens.
        if name not in known_fields and not name.startswith("_") and not name.endswith("_token_id"):
            unknown_fields.append(name)
    if unknown_fields:
        warn(f"{cls.__name__} has no fields {', '.join(unknown_fields)}; those of `model_or_config` are ignored.")


@contextmanager
def _loading_options(name: str, trust_remote_code: bool, option: str) -> Iterator[dict[str, Any]]:
    """A context manager that yields keyword arguments of `from_pretrained`. Errors inside it name `option`."""
    try:
        # Passed to each call: transformers asks at the terminal where it is not.
        yield {"local_files_only": Path(name).is_dir(), "trust_remote_code": trust_remote_code}
    # Whatever the libraries raise while they read the files of the model is about these files.
    except Exception as error:
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise LayersimError(
                f"`{option}` names a model with custom Python code, which would run with your permissions: {name}. Read its "
                ".py files, and add --trust-remote-code if you trust them."
            ) from None
        raise LayersimError(
            f"`{option}` is {name}, which could not be loaded; it must be a folder with config.json and weights, or a hub name "
            f"such as org/name: {type(error).__name__}: {first_line(error)}"
        ) from error


def _model_class(config: Any, trust_remote_code: bool) -> Any:
    """The class that a configuration names, in transformers or in the repository of the model."""
    import transformers

    architecture = (config.architectures or ["AutoModel"])[0]
    if trust_remote_code:
        classes_in_repository = getattr(config, "auto_map", None) or {}
        for auto_class, path in classes_in_repository.items():
            is_architecture = str(path).rpartition(".")[2] == architecture
            if auto_class.startswith("AutoModel") and is_architecture and hasattr(transformers, auto_class):
                return getattr(transformers, auto_class)
    cls = getattr(transformers, architecture, None)
    # The name comes from a file, so it may be that of any object in transformers.
    is_model_class = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    return cls if is_model_class else transformers.AutoModel
