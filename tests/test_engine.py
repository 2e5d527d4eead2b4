"""One run from end to end: refusals, two passes, interrupts and checkpoints, several processes."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import transformers

import tl_layersim as lsim
from tl_layersim import passes
from tl_layersim.sources.hooked import HookedSource

from .conftest import provenance, random_tokens, tiny_llama, tiny_tokenizer, worst


def analyzers():
    return [lsim.Cosine(), lsim.CKA(minibatch=16)]


def test_batch_size_does_not_matter_where_no_minibatches_are_drawn():
    model, data = tiny_llama(), list(random_tokens(7, 11))
    runs = [lsim.analyze(model, data, [lsim.Cosine(), lsim.CKA(estimator="exact")], batch_size=b) for b in (1, 3, 16)]
    for name in ("cosine", "cka"):
        assert worst(runs[0][name], runs[1][name]) < 1e-6
        assert worst(runs[0][name], runs[2][name]) < 1e-6


def test_provenance_says_what_was_measured_on_what():
    report = lsim.analyze(tiny_llama(), random_tokens(5, 11), analyzers(), batch_size=2, skip_first=1)
    p = report["cka"].provenance
    assert (p.tokens, p.sequences, p.batches, p.seed) == (50, 5, 3, 0)
    assert (p.dtype, p.source) == ("torch.float32", "LlamaForCausalLM")
    assert p.options["minibatch"] == 16
    assert p.options["skip_first"] == 1
    assert set(p.versions) >= {"tl_layersim", "torch", "transformers", "nnsight"}
    assert p.seconds > 0
    assert len(p.config_hash) == 12
    assert len(p.data) == 64
    other = lsim.analyze(tiny_llama(layers=2), random_tokens(5, 11), "cka")["cka"].provenance
    assert other.config_hash != p.config_hash


def test_names_stand_for_analyzers_and_the_nearest_is_suggested():
    assert set(lsim.analyze(tiny_llama(), random_tokens(), ["cosine", lsim.CKA()])) == {"cosine", "cka"}
    with pytest.raises(lsim.LayersimError, match=r"no such analyzer(.|\n)*'cosin'(.|\n)*did you mean 'cosine'"):
        lsim.analyze(tiny_llama(), random_tokens(), "cosin")
    for typo in ("cosine,cka", "CKA"):
        with pytest.raises(lsim.LayersimError, match=r"did you mean \[?'c"):
            lsim.analyze(tiny_llama(), random_tokens(), typo)
    with pytest.raises(lsim.LayersimError, match="'cka' twice"):
        lsim.analyze(tiny_llama(), random_tokens(), ["cka", lsim.CKA(minibatch=8)])
    with pytest.raises(lsim.LayersimError, match="No analyzer was given"):
        lsim.analyze(tiny_llama(), random_tokens(), [])


@pytest.mark.parametrize("data", [[], torch.empty(0, 5, dtype=torch.long), {"input_ids": [], "attention_mask": []}])
def test_empty_data_is_refused(data):
    with pytest.raises(lsim.LayersimError, match=r"data is empty(.|\n)*0 rows"):
        lsim.analyze(tiny_llama(), data, analyzers())


def test_data_of_which_nothing_counts_is_refused():
    data = {"input_ids": random_tokens(), "attention_mask": torch.zeros(8, 20)}
    with pytest.raises(lsim.LayersimError, match="empty"):
        lsim.analyze(tiny_llama(), data, analyzers())
    with pytest.raises(lsim.LayersimError, match=r"No token is left(.|\n)*8 rows, 0 counted(.|\n)*skip_first="):
        lsim.analyze(tiny_llama(), random_tokens(), analyzers(), skip_first=20)


def test_a_generator_has_no_second_pass():
    with pytest.raises(
        lsim.LayersimError, match=r"reads the data twice(.|\n)*generator(.|\n)*list\(data\), or Cosine\(center=\"none\"\)"
    ):
        lsim.analyze(tiny_llama(), (row for row in random_tokens()), "cosine")
    one = lsim.analyze(tiny_llama(), (row for row in random_tokens()), lsim.Cosine(center="none"))
    two = lsim.analyze(tiny_llama(), random_tokens(), lsim.Cosine(center="none"))
    assert worst(one["cosine"], two["cosine"]) == 0


def test_data_that_is_gone_or_other_on_the_second_pass_is_noticed():
    with pytest.raises(lsim.LayersimError, match=r"not the same on the second pass(.|\n)*160 tokens, then 0"):
        lsim.analyze(tiny_llama(), [iter(random_tokens())], "cosine")

    class Fickle:
        seed = 0

        def __iter__(self):
            self.seed += 1
            return iter(random_tokens(seed=self.seed))

    with pytest.raises(lsim.LayersimError, match=r"not the same on the second pass(.|\n)*160 tokens, then 160 others"):
        lsim.analyze(tiny_llama(), Fickle(), "cosine")


def test_models_with_other_tokens_do_not_compare():
    a, b = tiny_llama(), tiny_llama(seed=1)
    a.tokenizer, b.tokenizer = tiny_tokenizer(), tiny_tokenizer(90)
    with pytest.raises(lsim.LayersimError, match=r"read different tokens(.|\n)*is token(.|\n)*same tokenizer"):
        lsim.compare(a, b, ["w3 w4 w5 w6"], "cka")
    b.tokenizer = tiny_tokenizer()
    assert lsim.compare(a, b, ["w3 w4 w5 w6"], "cka").samples == 5
    wide = transformers.LlamaForCausalLM(transformers.LlamaConfig(**a.config.to_dict() | {"vocab_size": 120}))
    with pytest.warns(lsim.LayersimWarning, match="vocabularies have 100 and 120 entries"):
        lsim.compare(a, wide, random_tokens(), "cka")
    with pytest.raises(lsim.LayersimError, match=r"relates layers of one model(.|\n)*CKA"):
        lsim.compare(a, b, ["w3 w4 w5 w6"], "cosine")


def test_wrong_types_are_refused_at_the_door():
    with pytest.raises(lsim.LayersimError, match=r"does not take this for batch_size(.|\n)*batch_size='16'(.|\n)*int"):
        lsim.analyze(tiny_llama(), random_tokens(), "cka", batch_size="16")


class Stopped(KeyboardInterrupt):
    pass


@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_an_interrupted_run_goes_on_and_ends_with_the_same_numbers(at, tmp_path, monkeypatch):
    """Four batches twice over: the interrupt falls into the first pass or into the second."""
    model, data, path = tiny_llama(), list(random_tokens(8, 11)), tmp_path / "run.safetensors"
    undisturbed = lsim.analyze(model, data, analyzers(), batch_size=2)
    calls = []
    run = HookedSource.run

    def interrupted(self, batch, kernels):
        calls.append(1)
        if len(calls) == at + 1:
            raise Stopped
        return run(self, batch, kernels)

    monkeypatch.setattr(HookedSource, "run", interrupted)
    with pytest.raises(Stopped) as caught:
        lsim.analyze(model, data, analyzers(), batch_size=2, checkpoint=path)
    assert "the same call goes on from there" in caught.value.__notes__[0]
    assert path.exists()
    report = lsim.analyze(model, data, analyzers(), batch_size=2, checkpoint=path)
    assert len(calls) == 8 + 1
    for name in report:
        assert worst(report[name], undisturbed[name]) == 0
        assert report[name].provenance.tokens == undisturbed[name].provenance.tokens
        assert report[name].provenance.data == undisturbed[name].provenance.data
    # A run that is complete is read back without a forward pass.
    again = lsim.analyze(model, data, analyzers(), batch_size=2, checkpoint=path)
    assert len(calls) == 9
    assert worst(again["cka"], undisturbed["cka"]) == 0


def test_a_killed_process_loses_at_most_the_time_between_saves(tmp_path):
    script = tmp_path / "run.py"
    path = tmp_path / "run.safetensors"
    script.write_text(
        textwrap.dedent(
            f"""
            import time
            import tl_layersim as lsim
            from tl_layersim import checkpoint, passes
            from tl_layersim.sources.hooked import HookedSource
            from tests.conftest import random_tokens, tiny_llama
            passes.SECONDS_BETWEEN_SAVES = 0.0
            run = HookedSource.run
            def slow(self, batch, kernels):
                time.sleep(0.2)
                return run(self, batch, kernels)
            HookedSource.run = slow
            data = list(random_tokens(40, 11))
            lsim.analyze(tiny_llama(), data, lsim.Cosine(center="none"), batch_size=2, checkpoint={str(path)!r})
            """
        )
    )
    root = os.path.dirname(os.path.dirname(__file__))
    process = subprocess.Popen([sys.executable, str(script)], env=os.environ | {"PYTHONPATH": root}, cwd=root)
    deadline = time.monotonic() + 120
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    model, data = tiny_llama(), list(random_tokens(40, 11))
    resumed = lsim.analyze(model, data, lsim.Cosine(center="none"), batch_size=2, checkpoint=path)
    whole = lsim.analyze(model, data, lsim.Cosine(center="none"), batch_size=2)
    assert worst(resumed["cosine"], whole["cosine"]) == 0


def test_a_checkpoint_of_another_run_or_other_data_is_refused(tmp_path):
    path, model, data = tmp_path / "run.safetensors", tiny_llama(), list(random_tokens(8, 11))
    lsim.analyze(model, data, "cka", checkpoint=path)
    with pytest.raises(lsim.LayersimError, match=r"belongs to another run(.|\n)*'minibatch': 8(.|\n)*'minibatch': 256"):
        lsim.analyze(model, data, lsim.CKA(minibatch=8), checkpoint=path)
    with pytest.raises(lsim.LayersimError, match=r"given:    data: skip_first: 1\n  expected: data: skip_first: 0\n"):
        lsim.analyze(model, data, "cka", checkpoint=path, skip_first=1)
    with pytest.raises(lsim.LayersimError, match="no place to go"):
        lsim.analyze(model, data, "cka", checkpoint=tmp_path / "nowhere" / "run")
    partial = tmp_path / "partial.safetensors"
    source = HookedSource(model)
    run = source.run
    seen = []

    def stop(batch, kernels):
        seen.append(1)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return run(batch, kernels)

    source.run = stop
    with pytest.raises(KeyboardInterrupt):
        lsim.analyze(source, data, "cka", batch_size=2, checkpoint=partial)
    with pytest.raises(lsim.LayersimError, match="not that of the checkpoint"):
        lsim.analyze(model, data[::-1], "cka", batch_size=2, checkpoint=partial)


def test_a_full_disk_does_not_end_a_run(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tl_layersim.storage.save_file", full)
    monkeypatch.setattr(passes, "SECONDS_BETWEEN_SAVES", 0.0)
    path = tmp_path / "run.safetensors"
    with pytest.warns(RuntimeWarning, match=r"goes on without a new checkpoint(.|\n)*No space left"):
        report = lsim.analyze(tiny_llama(), random_tokens(8, 11), "cka", checkpoint=path)
    assert report["cka"].samples == 88
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A real limit on the size of files, in a process of its own."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        import tl_layersim as lsim
        from tests.conftest import provenance
        import torch
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = sys.argv[1]
        def curve(n):
            return lsim.LayerCurve(values=torch.zeros(n, dtype=torch.float64), layers=("a",) * n, provenance=provenance())
        curve(3).save(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        try:
            curve(100_000).save(path)
        except OSError as error:
            print(error)
        print(len(lsim.load(path).values))
        """
    )
    root = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.safetensors")],
        env=os.environ | {"PYTHONPATH": root},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Could not write" in done.stdout
    assert "What stood there before is unchanged" in done.stdout
    assert done.stdout.strip().endswith("3")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_processes_give_what_one_gives(ranks, tmp_path):
    """Three ranks and two batches: one of them has nothing to add."""
    script = tmp_path / "rank.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import torch.distributed as dist
            import tl_layersim as lsim
            from tests.conftest import random_tokens, tiny_llama
            dist.init_process_group("gloo")
            data = list(random_tokens(4, 11))
            report = lsim.analyze(tiny_llama(), data, [lsim.Cosine(), lsim.CKA(minibatch=16)], batch_size=2)
            report.save(f"{sys.argv[1]}/{dist.get_rank()}.safetensors")
            dist.destroy_process_group()
            """
        )
    )
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    root = os.path.dirname(os.path.dirname(__file__))
    common = os.environ | {
        "PYTHONPATH": root,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    processes = [
        subprocess.Popen([sys.executable, str(script), str(tmp_path)], env=common | {"RANK": str(rank)}, cwd=root)
        for rank in range(ranks)
    ]
    assert [process.wait(timeout=240) for process in processes] == [0] * ranks
    alone = lsim.analyze(tiny_llama(), list(random_tokens(4, 11)), analyzers(), batch_size=2)
    for rank in range(ranks):
        report = lsim.load_report(tmp_path / f"{rank}.safetensors")
        for name in ("cosine", "cka"):
            assert worst(report[name], alone[name]) < 1e-12
            assert report[name].provenance.tokens == 44


def test_a_finished_checkpoint_answers_for_its_own_data_and_weights_only(tmp_path):
    model, data, path = tiny_llama(), list(random_tokens(8, 11)), tmp_path / "run"
    lsim.analyze(model, data, "cka", batch_size=2, checkpoint=path)
    for other in (data[::-1], data[:4], [*data, data[0]]):
        with pytest.raises(lsim.LayersimError, match="not that of the checkpoint"):
            lsim.analyze(model, other, "cka", batch_size=2, checkpoint=path)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight += 0.01
    with pytest.raises(lsim.LayersimError, match="belongs to another run"):
        lsim.analyze(model, data, "cka", batch_size=2, checkpoint=path)


def test_weights_have_a_hash_of_their_own():
    hashes = {lsim.analyze(tiny_llama(seed=s), random_tokens(), "cka")["cka"].provenance.weights_hash for s in (0, 0, 1)}
    assert len(hashes) == 2


@pytest.mark.parametrize("setting", ["new", "old"])
def test_a_users_precision_setting_is_kept_and_not_used(setting):
    """In a process of its own: torch lets its two ways of saying it not be mixed."""
    say = {
        "new": "torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = 'tf32'",
        "old": "torch.set_float32_matmul_precision('medium')",
    }[setting]
    script = (
        "import torch, tl_layersim as lsim\n"
        "from tests.conftest import random_tokens, tiny_llama\n"
        f"{say}\n"
        "mkldnn = torch.backends.mkldnn.matmul\n"
        "before, seen = mkldnn.fp32_precision, []\n"
        "def kernel(view):\n"
        "    seen.append(mkldnn.fp32_precision)\n"
        "    return {'n': torch.tensor(1)}\n"
        "view = lsim.View(torch.ones(2, 3, 4), torch.arange(3), torch.zeros(3), torch.arange(3))\n"
        "lsim.reduce({'k': kernel}, view)\n"
        "lsim.analyze(tiny_llama(), random_tokens(), 'cka')\n"
        "print(seen, mkldnn.fp32_precision == before)\n"
    )
    root = os.path.dirname(os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {"PYTHONPATH": root},
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == "['ieee'] True", done.stderr


def analyzer(**parts):
    """An analyzer made of a kernel and a compute, as a user might write it badly."""
    body = {"name": "mine", "kernel": lambda self, first: parts["give"], "compute": lambda self, sums, run: parts.get("back")}
    return dataclasses.dataclass(frozen=True)(type("Mine", (lsim.Analyzer,), body | parts.get("body", {})))()


def grows(view):
    return {"x": view.residual.sum((0, 2))}


BAD_ANALYZERS = {
    "a class": (lambda: lsim.CKA, r"object, not its class(.|\n)*CKA\(\)"),
    "no name": (lambda: analyzer(give=grows, body={"name": ""}), r"no name that a report can use(.|\n)*mine"),
    "a slash in its name": (lambda: analyzer(give=grows, body={"name": "a/b"}), "no name that a report can use"),
    "a kernel of lists": (lambda: analyzer(give=lambda v: [1]), r"kernel of 'mine' returned cannot be added"),
    "a kernel of numbers": (lambda: analyzer(give=lambda v: {"x": 1.0}), r"cannot be added up(.|\n)*'x' is a float"),
    "sums that grow": (lambda: analyzer(give=grows), r"cannot be added up(.|\n)*shape(.|\n)*sum over the token axis"),
    "no result": (
        lambda: analyzer(give=lambda v: {"n": torch.tensor(1)}, back=torch.zeros(3)),
        r"compute returned no result(.|\n)*Tensor",
    ),
    "a set of options": (
        lambda: analyzer(give=grows, body={"__annotations__": {"which": set}, "which": frozenset({1})}),
        r"option cannot be recorded(.|\n)*frozenset",
    ),
    "an option of the data": (
        lambda: analyzer(give=grows, body={"__annotations__": {"pack": bool}, "pack": True}),
        r"option that the data has too(.|\n)*pack",
    ),
}


@pytest.mark.parametrize("case", BAD_ANALYZERS)
def test_a_bad_analyzer_is_named(case):
    make, text = BAD_ANALYZERS[case]
    with pytest.raises(lsim.LayersimError, match=text):
        lsim.analyze(tiny_llama(), [*random_tokens(2, 9), random_tokens(1, 5)[0]], [make()], batch_size=2)


def test_a_result_that_does_not_fit_its_layers_is_refused():
    names = ("a", "b", "c")
    with pytest.raises(lsim.LayersimError, match=r"values does not fit its axes(.|\n)*\(2,\)(.|\n)*\(3,\): residual"):
        lsim.LayerCurve(values=torch.zeros(2, dtype=torch.float64), layers=names, provenance=provenance())


def test_a_source_has_its_own_place():
    with pytest.raises(lsim.LayersimError, match="own layers and its own place"):
        lsim.analyze(HookedSource(tiny_llama()), random_tokens(), "cka", remote=True)
    found = lsim.analyze(HookedSource(tiny_llama()), ["w3 w4 w5 w6"], "cosine", tokenizer=tiny_tokenizer())
    assert found["cosine"].provenance.tokens == 5
    with pytest.raises(lsim.LayersimError, match=r"no tokenizer(.|\n)*from_pretrained"):
        lsim.analyze(tiny_llama(), ["w3"], "cosine", tokenizer="gpt2")


def test_a_module_without_a_mask_refuses_padding():
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = torch.nn.Embedding(100, 8)
            self.parts = torch.nn.ModuleList([torch.nn.Linear(8, 8)])

        def forward(self, tokens):
            return self.parts[0](self.words(tokens))

    with pytest.raises(lsim.LayersimError, match=r"takes no attention mask(.|\n)*batch_size=1"):
        lsim.analyze(Own(), [[3, 4, 5], [3, 4]], "cosine", layers=["parts.0"])
