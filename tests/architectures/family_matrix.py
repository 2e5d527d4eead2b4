"""What works on which family, and why the rest does not: the table "What works on which family" of docs/models.md.

`python -m tests.architectures.family_matrix` prints its rows. `test_family_matrix` runs every cell.
"""

from __future__ import annotations

from .family_cases import CASES
from .family_functions import FUNCTIONS

# Reasons for refusals, each with what the error says.
ERRORS = {
    "no head": r"but none is known|has no known head|has no head",
    "post-norm": r"no residual branch: each block ends in a layer norm",
    "no skip": r"do not add their input to their output",
    "two stacks": r"is an encoder-decoder",
    "own model": r"must be a Hugging Face model",
    "feature maps": r"needs the residual stream|are not batch x pos x width|are not known|images of unknown size",
}
NEED_HEAD = ("predictions by layer", "`stitch`", "`finetune_aligned`", "`evaluate_layers`", "`EarlyExit`", "`truncate`")
READ_MODULES = ("`analyze`", "`attach`", "`compare`")
POST_NORM = ("bert", "roberta", "distilbert", "electra", "deberta", "deberta-v2", "mpnet", "bart")
NAMES = {
    "bert": "BERT",
    "roberta": "RoBERTa",
    "distilbert": "DistilBERT",
    "electra": "ELECTRA",
    "deberta": "DeBERTa",
    "deberta-v2": "DeBERTa v2 and v3",
    "modernbert": "ModernBERT",
    "mpnet": "MPNet",
    "vit": "ViT",
    "deit": "DeiT",
    "dinov2": "DINOv2",
    "beit": "BEiT",
    "swin": "Swin",
    "siglip vision": "SigLIP (vision)",
    "clip vision": "CLIP (vision)",
    "clip text": "CLIP (text)",
    "siglip": "SigLIP",
    "clip": "CLIP",
    "t5": "T5",
    "t5 encoder": "T5 (encoder alone)",
    "bart": "BART",
    "mlp": "MLP with skip connections",
    "mlp plain": "MLP without skip connections",
    "resnet": "ResNet and other models of convolutions",
}


def family(key: str) -> str:
    """The family of a case."""
    return key.removesuffix(" masked").removesuffix(" classes").removesuffix(" distilled").removesuffix(" projected")


def reason(key: str, function: str) -> str | None:
    """Why a function refuses a model of a case; None where it works."""
    case = CASES[key]
    if case.pooled and function not in READ_MODULES:
        return "feature maps"
    if not case.labels and function in NEED_HEAD:
        return "no head"
    if case.model == "Mlp" and function in ("`EarlyExit`", "`truncate`"):
        return "own model"
    if case.decodes and function == "`EarlyExit`":
        return "two stacks"
    if function == "`BlockCoupling`" and key == "mlp plain":
        return "no skip"
    return "post-norm" if function == "`BlockCoupling`" and family(key) in POST_NORM else None


def columns() -> list[list[str]]:
    """The functions by column: neighbours that work on the same models share one."""
    groups: list[list[str]] = []
    for function in FUNCTIONS:
        if groups and all(reason(key, function) == reason(key, groups[-1][0]) for key in CASES):
            groups[-1].append(function)
        else:
            groups.append([function])
    return groups


def rows() -> list[str]:
    """The rows of the table: families with the same marks stand in one row."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for key, case in CASES.items():
        marks = tuple("✓" if why is None else why for why in (reason(key, column[0]) for column in columns()))
        kind = "" if case.layers else "with a head" if case.labels else "without a head"
        if (name := NAMES.get(family(key))) is not None:
            together.setdefault((kind, marks), []).append(name)
    return [
        f"| {', '.join(dict.fromkeys(names))}{f': {kind}' if kind else ''} | {' | '.join(marks)} |"
        for (kind, marks), names in together.items()
    ]


def header() -> str:
    """The header of the table."""
    return f"| model | {' | '.join(', '.join(column) for column in columns())} |"


if __name__ == "__main__":
    print("\n".join([header(), "| --- " * (len(columns()) + 1) + "|", *rows()]))
