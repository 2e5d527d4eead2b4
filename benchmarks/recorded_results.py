"""Results of all analyzers and functions on three models through all sources, to the last bit: write them, or compare.

A change that must not change numbers is held to this record. It belongs to one machine, so it is written there from the code
before the change, in a checkout of that commit:

    OMP_NUM_THREADS=1 python -m benchmarks.recorded_results write before.safetensors
    OMP_NUM_THREADS=1 python -m benchmarks.recorded_results compare before.safetensors
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import nnsight
import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers
from tl_layersim.training import train_adapters

ROWS = torch.randint(3, 200, (24, 20), generator=torch.Generator().manual_seed(0))
LABELS = [int(row[-1]) % 3 for row in ROWS]
RESIDUAL_ONLY = {"z": lsim.CKA(minibatch=64), "moments": lsim.EffectiveRank(), "pairs": lsim.RSA(minibatch=64)}


@cache
def model(name: str, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    if name == "llama":
        return lsim.demo_model(aligned=bool(seed))
    if name == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=4, n_head=4, vocab_size=200, n_positions=64)).eval()
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    return BertForMaskedLM(BertConfig(**small, vocab_size=200, attn_implementation="eager")).eval()


@cache
def opened(name: str, kind: str) -> Any:
    if kind in ("module", "attach"):
        return model(name)
    if kind == "bridge":
        from transformer_lens.model_bridge.sources import build_bridge_from_module

        torch.manual_seed(0)
        architecture = {"llama": "LlamaForCausalLM", "gpt2": "GPT2LMHeadModel"}[name]
        own = lsim.demo_model() if name == "llama" else model.__wrapped__(name)
        return build_bridge_from_module(own, architecture, hf_config=own.config)
    named = {"task": "text-generation", "tokenizer": lsim.demo_model().tokenizer}
    traced = nnsight.NNsight(model(name)) if name == "bert" else nnsight.TransformersModel(model(name), **named)
    return lsim.open_model(traced, remote="local") if kind == "local" else traced


def measures(name: str) -> dict[str, Any]:
    found = {
        "linear_probe": lsim.LinearProbe(labels=LABELS),
        "neural_collapse": lsim.NeuralCollapse(labels=LABELS),
        "block_coupling": lsim.BlockCoupling(k=4),
    }
    chosen = {key: found.get(key) or cls() for key, cls in find_analyzers().items() if key != "task_metrics"}
    return (
        chosen if name != "bert" else {k: v for k, v in chosen.items() if k not in ("logit_lens", "exit_curve", "saturation")}
    )


def runs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Name and call of each recorded run. What is called here is all that changes with the public functions."""
    for name in ("llama", "gpt2", "bert"):
        for kind in ("module", "bridge", "nnsight", "local"):
            if (name, kind) == ("bert", "bridge"):
                continue
            for key, one in measures(name).items():
                if kind == "local" and key == "linear_probe":
                    continue
                yield (
                    f"{name} {kind} {key}",
                    lambda a=(name, kind, key, one): analyze(opened(a[0], a[1]), {a[2]: a[3]}),
                )
            yield (
                f"{name} {kind} attn_out",
                lambda a=(name, kind): analyze(opened(*a), RESIDUAL_ONLY, at="attn_out"),
            )
        yield f"{name} heads", lambda a=name: analyze(model(a), RESIDUAL_ONLY, at="z", per_head=True)
        yield f"{name} intervals", lambda a=name: intervals(model(a))
        yield f"{name} shards", lambda a=name: shards(model(a))
        yield f"{name} attach", lambda a=name: attach(model(a))
        yield (
            f"{name} null",
            lambda a=name: analyze(
                model(a), {"cka": lsim.CKA(minibatch=64, permutations=20), "cca": lsim.CCA(permutations=20)}
            ),
        )
        yield f"{name} untrained", lambda a=name: analyze(model(a), {"cka": lsim.CKA(minibatch=64)}, baseline="untrained")
        yield (
            f"{name} compare",
            lambda a=name: lsim.compare(model(a), model(a, 1), ROWS, [lsim.CKA(), lsim.Procrustes(), lsim.CCA()]),
        )
    texts, demo, other = lsim.demo_text(), lsim.demo_model(), lsim.demo_model(aligned=True)
    pair, prompt = {"a": demo, "b": other}, "Once upon a time there was a little"
    lens = {"lens": lsim.LogitLens(), "path": lsim.Trajectory()}
    yield "texts packed", lambda: lsim.analyze(demo, lsim.Data(texts, pack=True, skip_first=2, seq_len=64), lens)
    yield "texts padded", lambda: lsim.analyze(demo, lsim.Data(texts, max_tokens=2000), lens)
    yield "texts mean", lambda: lsim.analyze(demo, lsim.Data(texts, positions="mean"), {"cka": lsim.CKA(minibatch=32)})
    yield "prediction grid", lambda: lsim.prompts.prediction_grid(demo, prompt)
    yield "trajectory pca", lambda: lsim.prompts.trajectory_pca(demo, prompt)
    yield "block jacobians", lambda: lsim.prompts.block_jacobians(demo, prompt, layers=[0, -1])
    for along in ("depth", "fixed-output", "fixed-input"):
        yield f"coupling {along}", partial(lsim.prompts.coupling_matrices, demo, prompt, k=4, along=along)
    yield "grid", lambda: lsim.compare_grid(pair, texts[:16], lsim.CKA(minibatch=64))
    lenses = [lsim.LogitLens(), lsim.CKA(minibatch=64)]
    swept = partial(lsim.sweep, pair, texts[:16], lenses)
    yield "sweep", lambda: lsim.stack(swept())["logit_lens"]["cross_entropy"].isel(layer=0, drop=True).to_pandas().to_frame()
    yield "difference", lambda: differences(pair, texts[:16])
    yield "fit", lambda: fit(lsim.analyze(demo, texts[:8], lsim.Trajectory())["trajectory"])
    yield "relate", lambda: relation({"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}, {"a": 30, "b": 42, "c": 48, "d": 60})
    quick = {"training": lsim.stitching.StitchTraining(steps=3)}
    yield "stitch", lambda: lsim.stitch(demo, other, texts[:64], at=(2, 3), **quick)
    yield "stitch sgd", lambda: lsim.stitch(demo, other, texts[:32], at=(2, 3), fit="sgd", **quick)
    yield "stitch grid", lambda: lsim.stitch_grid(pair, texts[:32], layers=[1, 5], **quick)
    yield "probe", lambda: lsim.linear_probe(demo, lsim.Data(ROWS, positions="last"), lsim.LogisticProbe(labels=LABELS))
    yield "layers", lambda: lsim.evaluate_layers(demo, other, texts[:16])
    steps = lsim.AlignedTraining(steps=3, lr=1e-4)
    yield "training", lambda: lsim.finetune_aligned(lsim.demo_model(), lsim.Data(texts[:16], batch_size=2, seq_len=32), steps)
    yield "adapters", lambda: train_adapters(opened("llama", "nnsight"), texts[:8], at=[1, 3], rank=4, steps=3)
    yield "early exit", lambda: lsim.EarlyExit(demo, threshold=0.5).generate(prompt, max_new_tokens=12)
    yield "aligned loss", lambda: lsim.training.aligned_loss(demo, ROWS)


def analyze(source: Any, chosen: Mapping[str, Any], **options: Any) -> Any:
    return lsim.analyze(source, lsim.Data(ROWS, batch_size=4), chosen, **options)


def intervals(source: Any) -> Iterator[Any]:
    report = analyze(
        source, {"cosine": lsim.Cosine(), "cka": lsim.CKA(minibatch=64), "path": lsim.Trajectory()}, intervals=True
    )
    for result in report.values():
        yield result
        yield result.interval("values")


def differences(pair: Mapping[str, Any], texts: list[str]) -> list[torch.Tensor]:
    data = lsim.Data(texts, seq_len=32, max_tokens=500)
    reports = [lsim.analyze(one, data, lsim.LogitLens(), intervals=True) for one in pair.values()]
    found = lsim.difference(*reports)["logit_lens"]
    return [torch.tensor(found[field].drop_sel(statistic="se").values) for field in ("cross_entropy", "accuracy")]


def fit(result: Any) -> torch.Tensor:
    found = lsim.many.exponential_fit(result, "norm")
    names = ("amplitude", "amplitude_se", "rate", "rate_se", "r_squared", "intercept", "slope", "linear_r_squared")
    return torch.tensor([[found[name].item() for name in names]], dtype=torch.float64)


def relation(values: Mapping[str, float], scores: Mapping[str, float]) -> dict[str, Any]:
    found = lsim.many.relate(values, scores)
    line = found.to_frame().iloc[0]
    same = ("p_value", "pearson", "pearson_p", "spearman", "spearman_p")
    columns = {"values": found.predictors.iloc[:, 0], "scores": found.scores}
    return {
        **{name: torch.tensor(column.to_numpy()) for name, column in columns.items()},
        **{name: float(line[name]) for name in same},
        "slope": float(line["coefficient"]),
        "intercept": found.intercept,
        "r_squared": found.r_squared,
        "confidence": found.confidence,
        "band": torch.tensor(found.band().to_numpy()),
    }


def shards(source: Any) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        for part in range(3):
            save_to = Path(folder) / f"{part}.safetensors"
            analyze(
                source, {"raw": lsim.Cosine(center="none"), "cka": lsim.CKA(minibatch=64)}, shard=(part, 3), save_to=save_to
            )
        return lsim.merge(folder)


def attach(source: Any) -> Any:
    with lsim.attach(source, [lsim.Cosine(center="none"), lsim.EffectiveRank()]) as probe, torch.no_grad():
        for rows in ROWS.split(4):
            source(rows)
    return probe.results()


def numbers_in(name: str, given: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every number in a result, of any depth, by the names of the fields that lead to it."""
    if isinstance(given, torch.Tensor):
        yield name, given.detach().contiguous().clone()
    elif isinstance(given, bool | int | float):
        yield name, torch.tensor(given, dtype=torch.float64)
    elif hasattr(given, "select_dtypes"):
        yield name, torch.from_numpy(given.select_dtypes("number").to_numpy(dtype="float64", copy=True)).contiguous()
    elif isinstance(given, Mapping):
        for key, value in given.items():
            yield from numbers_in(f"{name}/{key}", value)
    elif is_dataclass(given) and not isinstance(given, type):
        for one in fields(given):
            if one.name != "provenance":
                yield from numbers_in(f"{name}/{one.name}", getattr(given, one.name, None))
    elif isinstance(given, list | tuple) or hasattr(given, "__next__"):
        for i, value in enumerate(given):
            yield from numbers_in(f"{name}/{i}", value)


def record() -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, call in tqdm(list(runs()), disable=None):
        torch.manual_seed(0)
        try:
            found |= numbers_in(name, call())
        except Exception as error:
            # What is refused has no numbers; the comparison lists it as gone where it had some.
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
    return found


def main(mode: str, file: str) -> int:
    warnings.simplefilter("ignore")
    found = record()
    if mode == "write":
        save_file(found, file)
        print(f"{len(found)} tensors, {sum(one.numel() for one in found.values())} numbers")
        return 0
    before = load_file(file)
    wrong = {k for k in before.keys() & found.keys() if not torch.equal(*(t[k].nan_to_num(1e300) for t in (before, found)))}
    for title, names in (("gone", before.keys() - found.keys()), ("new", found.keys() - before.keys()), ("changed", wrong)):
        for name in sorted(names):
            same = name in wrong and before[name].shape == found[name].shape
            by = f" by {float((before[name].double() - found[name].double()).abs().nan_to_num(0).max()):.3g}" if same else ""
            print(f"{title}: {name}{by}")
    print(f"{len(before.keys() & found.keys()) - len(wrong)} of {len(before)} tensors are equal to the last bit")
    return int(bool(wrong) or bool(before.keys() - found.keys()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
