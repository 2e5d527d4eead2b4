"""Block Jacobians and their singular vectors: against d reverse passes through the whole block, the FLOP bound, and each other.

    python benchmarks/bench_coupling.py [--quick]

Weights are random: only shapes matter here. Both sides of each ratio run alternately in one process; the table has medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tl_layersim.activations.block_call import BlockCall, again, record_call
from tl_layersim.architectures import find_stacks
from tl_layersim.jacobians.coupling import Connections, CouplingOptions, couple, krylov, off_diagonal, top_of
from tl_layersim.jacobians.jacobian_operator import Jacobian

MEMORY = 4096.0
COLUMNS = (
    "block",
    "d reverse passes + SVD, s",
    "whole rows, batched",
    "one token + SVD",
    "one token",
    "FLOP bound",
    "naive / ours",
    "ours / bound",
    "m~ differs by",
)


def model_of(kind: str, d: int, layers: int) -> torch.nn.Module:
    """A model of a layout at the usual proportions, with a small vocabulary."""
    torch.manual_seed(0)
    ids = {"bos_token_id": 1, "eos_token_id": 1}
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_embd=d, n_head=d // 64, n_layer=layers, vocab_size=1000, **ids)).eval()
    config = LlamaConfig(
        hidden_size=d,
        num_hidden_layers=layers,
        num_attention_heads=d // 64 if d < 4096 else 32,
        num_key_value_heads=d // 64 if d < 4096 else 8,
        intermediate_size=8 * d // 3 // 64 * 64 if d < 4096 else 14336,
        vocab_size=1000,
        **ids,
    )
    return LlamaForCausalLM(config).eval()


def calls_of(model: torch.nn.Module, tokens: int) -> tuple[BlockCall, ...]:
    """What each block is given on one row of random tokens."""
    found, given = [], {}
    for path in find_stacks(model, None):
        block = model.get_submodule(path)
        block.register_forward_pre_hook(lambda m, a, k: given.update({m: (a, k)}), with_kwargs=True)
        block.register_forward_hook(lambda m, a, o: found.append(record_call(m, *given[m], o)))
    with torch.no_grad():
        model(torch.randint(3, 1000, (1, tokens)), use_cache=False)
    for module in model.modules():
        module._forward_hooks.clear()
        module._forward_pre_hooks.clear()
    return tuple(found)


def naive(call: BlockCall) -> Tensor:
    """The Jacobian at the last token by d reverse passes through every token of the block."""
    x = call.hidden.clone().requires_grad_()
    y = again(call, x)[0, -1]
    rows = [torch.autograd.grad(one, x, retain_graph=True)[0][0, -1] for one in y]
    return torch.stack(rows) - torch.eye(len(y))


def ours(call: BlockCall, narrow: bool = True) -> Tensor:
    """The same by the last token alone, or by whole rows in batches."""
    with torch.no_grad(), at_last(call, narrow) as jacobian:
        return jacobian.dense()[0]


def at_last(call: BlockCall, narrow: bool = True) -> Jacobian:
    """The Jacobian at the last token."""
    last = torch.tensor([call.hidden.shape[1] - 1])
    return Jacobian(call, torch.tensor([0]), last, last, MEMORY, single_tokens=narrow)


def bound(call: BlockCall) -> Callable[[], None]:
    """The matrix products of d tokens with each of the block's weight matrices, and nothing else."""
    weights = [p.detach() for p in call.block.parameters() if p.dim() == 2]
    d = call.hidden.shape[-1]
    inputs = [torch.randn(d, weight.shape[0]) for weight in weights]

    def run() -> None:
        for x, weight in zip(inputs, weights, strict=True):
            x @ weight

    return run


def miscoupling(a: Tensor, b: Tensor, k: int = 10) -> float:
    """m~ of one Jacobian in the singular vectors of another."""
    u, _, vh = torch.linalg.svd(b)
    off, whole = off_diagonal(u[:, :k].T @ a @ vh[:k].T, "signed")
    return float(off / whole)


def median(runs: int, *sides: Callable[[], object]) -> list[float]:
    """Median seconds of each side, run in turn."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(runs):
        for number, side in enumerate(sides):
            start = time.perf_counter()
            side()
            seconds[number].append(time.perf_counter() - start)
    return [statistics.median(one) for one in seconds]


def against_naive(kind: str, runs: int, d: int = 768, tokens: int = 128) -> None:
    """One block and token: with the singular vectors, without, and the FLOP bound."""
    first, second = calls_of(model_of(kind, d, 2), tokens)
    slow, fast = [naive(call) for call in (first, second)], [ours(call) for call in (first, second)]
    off = abs(miscoupling(*slow) - miscoupling(*fast))
    [by_passes] = median(1, lambda: torch.linalg.svd(naive(second)))
    alone, with_svd, rows, least = median(
        runs, lambda: ours(second), lambda: torch.linalg.svd(ours(second)), lambda: ours(second, narrow=False), bound(second)
    )
    print(
        f"| {kind}, d {d}, {tokens} tokens | {by_passes:.2f} | {rows:.2f} | {with_svd:.3f} | {alone:.3f} | {least:.3f} | "
        f"{by_passes / with_svd:.0f} | {alone / least:.2f} | {off:.1e} |"
    )


def against_dense(d: int, runs: int, layers: int = 2, k: int = 10, tokens: int = 64) -> None:
    """Krylov and dense: one block's singular vectors, and all of what two blocks' coupling needs."""
    calls = calls_of(model_of("llama", d, layers), tokens)

    def dense() -> object:
        with torch.no_grad(), at_last(calls[0]) as jacobian:
            return top_of(jacobian.dense(), k)

    def by_products() -> object:
        with torch.no_grad(), at_last(calls[0]) as jacobian:
            return krylov(jacobian, k, 0)

    def coupled(method: str) -> Tensor:
        at = torch.full((1, layers), tokens - 1)
        with torch.no_grad():
            found = couple(
                calls,
                Connections(torch.tensor([0]), tuple(range(layers)), at, at),
                CouplingOptions((k,), method, "signed", MEMORY, 0),
            )
        return found.off[0, 0] / found.norm[0, 0]

    whole, parts = dense(), by_products()
    seconds = median(runs, dense, by_products)
    off = float((parts.s / whole.s - 1).abs().max())
    gap = float((coupled("dense") - coupled("krylov")).abs().max())
    print(
        f"| d {d}, k {k} | {seconds[0]:.2f} | {seconds[1]:.2f} | {seconds[0] / seconds[1]:.1f} | {parts.products} "
        f"({parts.products / d:.2f} d) | {float(parts.residual):.1e} | {off:.1e} | {gap:.1e} |"
    )


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller shapes, to see that it runs")
    quick = parser.parse_args().quick
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    print(f"| {' | '.join(COLUMNS)} |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind in ("gpt2", "llama"):
        against_naive(kind, 3 if quick else 7, *((128, 16) if quick else (768, 128)))
    print("\n| Llama block | dense, s | krylov, s | ratio | products | residual | sigma differs by | m~ differs by |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for d in (256,) if quick else (2048, 4096):
        against_dense(d, 1)


if __name__ == "__main__":
    main()
