"""One small file of every kind, as this version writes it: python -m tests.files tests/files/written

Run again with each version that changes what is written. Processes of `tests.running.processes` do not import a `__main__.py`.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import tl_layersim as lsim
from tl_layersim.core import LayerCurve, LayerMatrix, Result
from tl_layersim.core.file_format import write as write_heads
from tl_layersim.stitching.stitch import StitchExperiment
from tl_layersim.training import train_adapters

from ..inputs.views import provenance
from ..models.tiny_models import tiny_tokenizer

WORDS = 30
LAYERS = ("blocks.0.hook_resid_pre", "blocks.0.hook_resid_post", "blocks.1.hook_resid_post")


def model(seed: int = 0):
    """A random Llama of 2 blocks and width 8."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=8,
        vocab_size=WORDS,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=2,
    )
    found = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            if parameter.dim() > 1:
                parameter.mul_(5)
    found.tokenizer = tiny_tokenizer(WORDS)
    return found


def rows(count: int = 8, length: int = 8) -> torch.Tensor:
    return torch.randint(3, WORDS, (count, length), generator=torch.Generator().manual_seed(0))


def traced():
    import nnsight

    one = model()
    return nnsight.TransformersModel(one, task="text-generation", tokenizer=one.tokenizer)


def results() -> dict[str, Result]:
    """One result of every class, by the name of its file."""
    one, data = model(), rows()
    layers = [lsim.CKA(minibatch=16), lsim.Cosine(), lsim.LogitLens(), lsim.Saturation(), lsim.ExitCurve(thresholds=(0.5, 0.9))]
    layers += [lsim.Trajectory(), lsim.NeuralCollapse(classes=3), lsim.BlockCoupling(k=(2, 4), method="dense")]
    found = dict(lsim.analyze(one, data, layers))
    same = {"layers": LAYERS, "provenance": provenance()}
    square = torch.arange(9, dtype=torch.float64).view(3, 3)
    found["layer_matrix"] = LayerMatrix(values=square, column_layers=LAYERS, **same)
    found["layer_curve"] = LayerCurve(values=torch.tensor([0.0, torch.nan, -torch.inf]).double(), **same)
    found["prediction_grid"] = lsim.prompts.prediction_grid(one, "w3 w4 w5")
    found["trajectory_pca"] = lsim.prompts.trajectory_pca(one, "w3 w4 w5 w6")
    found["block_jacobians"] = lsim.prompts.block_jacobians(one, data[0])
    found["coupling_matrices"] = lsim.prompts.coupling_matrices(one, data[0], k=2)
    found["stitch"] = lsim.stitch(one, model(1), lsim.Data(data, batch_size=2), at=(0, 0), fit="lstsq")
    found["stitch_grid"] = lsim.stitch_grid({"a": one, "b": model(1)}, lsim.Data(data, batch_size=2), adapter="identity")
    found["adapters"] = train_adapters(traced(), lsim.Data(data, batch_size=2), steps=2, rank=1)
    found["finetune"] = lsim.finetune_aligned(model(), lsim.Data(data, batch_size=2), lsim.AlignedTraining(steps=2, warmup=0))
    change = lsim.evaluate_layers(one, model(1), data, continuations=lsim.training.Continuations(["w3 w4"], new_tokens=6))
    return found | {"layer_change": change["layers"], "generation_quality": change["generation"]}


def checkpoints(folder: Path) -> None:
    """One file of every kind that a call goes on from; some of calls that were interrupted."""
    one, data = model(), rows()
    analyzers = [lsim.CKA(minibatch=8), lsim.Cosine()]

    def interrupted(*_):
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt), mock.patch.object(lsim.CKA, "compute", interrupted):
        lsim.analyze(one, lsim.Data(data, batch_size=2), analyzers, checkpoint=folder / "analysis.checkpoint")
    with suppress(KeyboardInterrupt), mock.patch.object(StitchExperiment, "_evaluate", interrupted):
        lsim.stitch(
            one,
            model(1),
            lsim.Data(data, batch_size=2),
            at=(0, 0),
            training=lsim.stitching.StitchTraining(steps=2),
            checkpoint=folder / "stitch.checkpoint",
        )
    lsim.stitch_grid(
        {"a": one, "b": model(1)},
        lsim.Data(data, batch_size=2),
        layers=[0],
        fit="lstsq",
        checkpoint=folder / "stitch_grid.checkpoint",
    )
    training = lsim.AlignedTraining(steps=2, warmup=0)
    lsim.finetune_aligned(model(), lsim.Data(data, batch_size=2), training, checkpoint=folder / "finetune.checkpoint")
    train_adapters(traced(), lsim.Data(data, batch_size=2), steps=2, rank=1, checkpoint=folder / "adapters.checkpoint")
    write_heads(folder / "heads.safetensors", "heads", {}, {"layer 1": torch.eye(3)})


def run_on_a_server(folder: Path) -> None:
    """A run of two jobs, one of which has arrived; the server is the small one of the tests."""
    from ..remote.helpers import Small

    with tempfile.TemporaryDirectory() as place:
        small = Small(Path(place))
        try:
            small.set(faults=["", "", "silent"])
            run = lsim.analyze(
                lsim.open_model(small.model(), remote=small.url, tokens_per_request=24),
                lsim.Data(rows(6, 12), batch_size=1),
                [lsim.Cosine(center="none")],
                blocking=False,
            )
            with suppress(TimeoutError):
                run.result(4)
            run.save(folder / "remote_run.run")
        finally:
            small.stop()


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = results()
    for name, result in found.items():
        result.save(folder / f"{name}.safetensors")
    lsim.Report({name: found[name] for name in ("cka", "saturation")}).save(folder / "report.safetensors")
    checkpoints(folder)
    run_on_a_server(folder)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
