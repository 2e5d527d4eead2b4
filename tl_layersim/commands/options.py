"""Options that several commands share, each with its help and the panel of `--help` that lists it."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .run_file import read_run_file

# Panels of `--help`.
MODEL, DATA, MEASURES, RUN, OUTPUT = "Model", "Data", "Measures", "Run", "Output"
OUT = Path("layersim-report")


class Dtype(StrEnum):
    """The dtype of the model's weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def option(panel: str, metavar: str | None, text: str, *names: str, **more: Any) -> Any:
    """An option of a command, in a panel of `--help`.

    Args:
        panel: heading of the panel.
        metavar: what stands for the value; None for a flag.
        text: the help; brackets in it are text, not markup.
        *names: of the option; by default that of the parameter.
        **more: see `typer.Option`.
    """
    # A blank in place of the word <bool> beside a flag.
    return typer.Option(*names, metavar=metavar or " ", help=text.replace("[", r"\["), rich_help_panel=panel, **more)


def argument(metavar: str, text: str) -> Any:
    """A positional argument that names a model.

    Args:
        metavar: what stands for it in the help.
        text: the help.
    """
    return typer.Argument(metavar=metavar, help=text)


MODEL_TEXT = "Folder or hub name of a Hugging Face model; demo and demo-aligned are models that ship with this package."
ModelOption = Annotated[str | None, option(MODEL, "NAME", f"{MODEL_TEXT} Default: demo.", "--model")]
ModelArgument = Annotated[str, argument("MODEL", MODEL_TEXT)]
FirstModel = Annotated[str, argument("MODEL_A", MODEL_TEXT)]
FrontModel = Annotated[str, argument("FRONT", "The model whose lower blocks are used. " + MODEL_TEXT)]
BackModel = Annotated[str, argument("BACK", "The model whose upper blocks are used; the tokenizers must be the same.")]
SecondModel = Annotated[str, argument("MODEL_B", "The second model, of the same tokenizer. Widths and depths may differ.")]
DeviceOption = Annotated[
    str, option(MODEL, "DEVICE", "Device of the model: cpu, cuda, mps, or auto to spread it over GPUs.", "--device")
]
DtypeOption = Annotated[Dtype, option(MODEL, "NAME", "Dtype of the weights: float32, bfloat16 or float16.", "--dtype")]
TrustOption = Annotated[
    bool,
    option(
        MODEL,
        None,
        "Run the Python code that comes with the model. Without this option such models are refused.",
        "--trust-remote-code",
    ),
]
RemoteOption = Annotated[
    bool,
    option(
        MODEL,
        None,
        "Run on the NDIF server that nnsight is set to. The key is read by nnsight, from NDIF_API_KEY or nnsight.login().",
        "--remote",
    ),
]
ServerOption = Annotated[
    str | None,
    option(
        MODEL,
        "ADDRESS",
        "Run on another NDIF server, or in nnsight's simulation of one: http://host:port, or local.",
        "--server",
    ),
]
DemoPairOption = Annotated[
    bool, option(MODEL, None, "Compare the demo model with its fine-tune by aligned training, layer by layer.", "--demo-pair")
]

DataOption = Annotated[
    str | None,
    option(DATA, "NAME", "Text file, table, folder of a saved data set, or hub name. Default: the demo text.", "--data"),
]
SplitOption = Annotated[str, option(DATA, "NAME", "Split of a data set.", "--split")]
ColumnOption = Annotated[
    str | None,
    option(DATA, "NAME", "Column of a data set that holds texts or tokens; two, joined by a comma, for pairs of texts."),
]
MaxTokensOption = Annotated[int | None, option(DATA, "N", "Stop after this many tokens.", "--max-tokens")]
SeqLenOption = Annotated[
    int | None,
    option(DATA, "N", "Longest row of tokens. Default: 256, or the model's context if that is shorter.", "--seq-len"),
]
PackOption = Annotated[
    bool | None,
    option(
        DATA,
        None,
        "Join texts and cut rows of full length. Default: on for text files, except with analyzers of prompts.",
        "--pack/--no-pack",
    ),
]
SkipFirstOption = Annotated[int, option(DATA, "N", "Leave out the first positions of each row.", "--skip-first")]
PositionsOption = Annotated[
    str | None,
    option(
        DATA,
        "RULE",
        "Positions of each row that are measured: all, first, last, mean, assistant, a slice such as 2:-1, or a mask column. "
        "Default: the position that the head of a row classifier reads, else all.",
        "--positions",
    ),
]
EvalDataOption = Annotated[
    str | None, option(DATA, "NAME", "Held-out data. Default: a part of --data, which is kept out of the fit.", "--eval-data")
]

AnalyzersOption = Annotated[
    str,
    option(MEASURES, "NAMES", "Analyzers, separated by commas; `tl-layersim analyzers` lists them.", "--analyzers"),
]
AnalyzerOptions = Annotated[
    list[str] | None,
    option(
        MEASURES,
        "NAME.OPTION=VALUE",
        "Option of an analyzer: --option cka.minibatch=128. May be repeated for further options.",
        "--option",
    ),
]
AtOption = Annotated[
    list[str] | None,
    option(
        MEASURES,
        "SITES",
        "Sites that are read: families such as attn_out, names or patterns, separated by commas; `tl-layersim sites` lists "
        "them. May be repeated. Default: resid_post.",
        "--at",
    ),
]
PerHeadOption = Annotated[bool, option(MEASURES, None, "Read each head of z, q, k or v as a site of its own.", "--per-head")]
IntervalsOption = Annotated[
    bool, option(MEASURES, None, "Give every number a confidence interval, from blocks of the data.", "--intervals")
]
BaselineOption = Annotated[
    str | None,
    option(MEASURES, "untrained", "Measure the same architecture with fresh weights of three seeds too.", "--baseline"),
]

ConfigOption = Annotated[
    Path | None,
    option(
        RUN,
        "FILE",
        "Read options from a YAML file, such as the run.yaml beside every report. Options on the command line come first.",
        "--config",
        is_eager=True,
        callback=read_run_file,
    ),
]
BatchSizeOption = Annotated[int, option(RUN, "N", "Rows in a forward pass.", "--batch-size")]
CheckpointOption = Annotated[
    Path | None,
    option(
        RUN, "FILE", "File for the state of the run. The same command continues from it after an interrupt.", "--checkpoint"
    ),
]
RequestOption = Annotated[
    int | None,
    option(
        RUN, "N", "Most positions in one request to a server. Default: as many as run in about 10 s.", "--tokens-per-request"
    ),
]
SeedOption = Annotated[int, option(RUN, "N", "Seed of the order of batches.", "--seed")]
ShardOption = Annotated[
    str | None,
    option(
        RUN,
        "I/N",
        "Measure one of several parts of the data and write its sums, for `tl-layersim merge`. Numbers begin at 0: "
        "--shard 0/64 to --shard 63/64, or --shard $SLURM_ARRAY_TASK_ID/64 with --array=0-63.",
        "--shard",
    ),
]
ShardFileOption = Annotated[
    Path | None,
    option(
        RUN,
        "FILE",
        "File for the sums of the shard, from which it resumes. Default: parts/part-3-of-64.safetensors.",
        "--save-to",
    ),
]
FirstOption = Annotated[
    list[str] | None,
    option(
        RUN, "FILES", "Folder, pattern or file of the first stage, for analyzers that need one. May be repeated.", "--first"
    ),
]

OutOption = Annotated[Path, option(OUTPUT, "FOLDER", "Folder for the report, its numbers and its run.yaml.", "--out")]
FormatOption = Annotated[
    str,
    option(OUTPUT, "NAMES", "Files that are written beside the numbers, separated by commas: html, csv, json.", "--format"),
]
