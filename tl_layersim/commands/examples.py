"""Examples at the end of the help of each command; each fits into a terminal of 80 columns."""

from __future__ import annotations

EXAMPLES = {
    "report": (
        "tl-layersim report",
        "tl-layersim report --model gpt2 --data text.txt --intervals",
        "tl-layersim report --analyzers cka --option cka.minibatch=128 --at attn_out",
        "tl-layersim report --model meta-llama/Llama-3.1-70B --remote --batch-size 2",
        "tl-layersim report --config layersim-report/run.yaml",
    ),
    "exits": (
        "tl-layersim exits demo-aligned",
        "tl-layersim exits gpt2 --data text.txt --agreement 0.98 --intervals",
        "tl-layersim exits tuned/ --heads tuned/heads.safetensors",
    ),
    "estimate": (
        "tl-layersim estimate gpt2 --tokens 1000000",
        "tl-layersim estimate meta-llama/Llama-3.1-70B --devices 8xH100",
        "tl-layersim estimate gpt2 --time --device cuda",
    ),
    "compare": (
        "tl-layersim compare demo demo-aligned",
        "tl-layersim compare gpt2 gpt2-medium --analyzers cka,mutual_knn",
        "tl-layersim compare base/ tuned/ --analyzers cosine --at attn_out",
    ),
    "stitch": (
        "tl-layersim stitch demo demo-aligned --at 4:4 --fit lstsq",
        "tl-layersim stitch gpt2 gpt2-medium --at 6:12 --data text.txt --steps 500",
        "tl-layersim stitch base/ tuned/ --adapter identity",
    ),
    "train": (
        "tl-layersim train demo --steps 20 --lr 1e-3 --save-to tuned",
        "tl-layersim train gpt2 --data text.txt --save-to tuned --checkpoint run.ckpt",
        "tl-layersim train gpt2 --lora 8 --mixed-precision bf16 --save-to tuned",
    ),
    "show": (
        "tl-layersim show layersim-report/report.safetensors",
        "tl-layersim show report.safetensors --table cosine.to_last",
        "tl-layersim show cka.safetensors --html cka.html",
    ),
    "merge": (
        "tl-layersim merge parts/",
        "tl-layersim merge 'parts/*.safetensors' --format html,csv",
    ),
    "analyzers": ("tl-layersim analyzers",),
    "sites": (
        "tl-layersim sites",
        "tl-layersim sites gpt2",
        "tl-layersim sites gpt2 | grep attn_out",
    ),
}


def examples_of(command: str) -> str:
    """The examples of a command, as the end of its help.

    Args:
        command: its name.
    """
    return "[bold]Examples[/bold]\n\n" + "\n".join(f"  {line}" for line in EXAMPLES[command])
