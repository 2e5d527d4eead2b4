"""Processes that hold one model together run the same batches; whole copies of a model take turns."""

from __future__ import annotations

import textwrap

import pytest
import torch

import tl_layersim as lsim

from ..inputs.views import worst
from ..models.tiny_models import random_tokens, tiny_llama
from ..running.processes import run_in_group

pytestmark = pytest.mark.heavy("several processes")

RANKS = 2
ANALYZERS = [lsim.Cosine(), lsim.CKA(minibatch=16)]
MODELS = {
    "DeviceMesh": """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
        model = tiny_llama()
        plan = {"gate_proj": ColwiseParallel(), "up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
        for block in model.model.layers:
            parallelize_module(block.mlp, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)
        """,
    "tp_plan": """
        from transformers import AutoModelForCausalLM
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", tp_plan="auto", dtype="float32").eval()
        """,
    "FSDP": """
        from torch.distributed.fsdp import fully_shard
        model = tiny_llama()
        for block in model.model.layers:
            fully_shard(block)
        """,
    "copies": """
        model = tiny_llama()
        """,
}

# nnsight 0.8.1 cannot load a model with transformers' DistributedConfig of 5.23; it traces one that is in parts already.
MODELS["nnsight"] = (
    MODELS["DeviceMesh"]
    + """
        from tests.models.wrapped_models import nnsight
        model = nnsight(model)
        """
)


MEASURE = """
        seen = []
        inner = model._module if "nnsight" in type(model).__module__ else model
        inner.model.register_forward_pre_hook(lambda m, args, kwargs: seen.append(1), with_kwargs=True)
        data = lsim.Data(list(random_tokens(37, 11)), batch_size=2)
        report = lsim.analyze(model, data, [lsim.Cosine(), lsim.CKA(minibatch=16)])
        report.save(f"{folder}/{kind}-{rank}.safetensors")
        say(f"{kind} passes", len(seen))
        report = lsim.analyze(model, data, lsim.CKA(minibatch=16), at="attn_out")
        report.save(f"{folder}/{kind}-{rank}-attn_out.safetensors")
        for family in ("q", "z", "mlp_post"):
            with refusal(f"{kind} {family}"):
                report = lsim.analyze(model, random_tokens(4, 11), lsim.CKA(minibatch=16), at=family)
                report.save(f"{folder}/{kind}-{rank}-{family}.safetensors")
        """
OTHERS = {
    "lens": MODELS["tp_plan"]
    + """
        with refusal("lens"):
            found = lsim.analyze(model, lsim.Data(random_tokens(4, 11), batch_size=2), lsim.LogitLens())
            found.save(f"{folder}/lens-{rank}.safetensors")
        """,
    "functions": MODELS["tp_plan"]
    + """
        for name, result in functions(model).items():
            result.save(f"{folder}/{name}-{rank}.safetensors")
        """,
    "training": MODELS["DeviceMesh"]
    + """
        with refusal("training"):
            lsim.finetune_aligned(model, lsim.Data(random_tokens(8, 11), batch_size=2), lsim.AlignedTraining(steps=1))
        """,
    "agree": """
        from tl_layersim.core.distributed import agree
        say("deal", agree([frozenset()]), agree([frozenset({0, 1}), frozenset()]))
        with refusal("overlap"):
            agree([frozenset({0, 1}) if rank == 0 else frozenset()])
        """,
}
START = """
        import contextlib, sys
        import torch.distributed as dist
        import tl_layersim as lsim
        from tests.engine.test_model_parallel import functions
        from tests.models.tiny_models import random_tokens, tiny_llama
        dist.init_process_group("gloo")
        folder, rank = sys.argv[1], dist.get_rank()
        def say(*words):
            print(*words, file=open(f"{folder}/said-{rank}", "a"))
        @contextlib.contextmanager
        def refusal(what):
            try:
                yield
            except lsim.LayersimError as error:
                say(what, "refused:", error)
        """


def functions(model):
    """Functions beside `analyze` that take a model which several processes hold together."""
    tokens = random_tokens(8, 11)
    with torch.no_grad(), lsim.attach(model, [lsim.LogitLens()]) as probe:
        model(tokens)
    return {
        "attach": probe.results()["logit_lens"],
        "compare": lsim.compare(model, tiny_llama(), tokens, lsim.CKA(minibatch=16)),
        "front": lsim.stitch(model, tiny_llama(), tokens, at=(1, 1), fit="lstsq"),
        "back": lsim.stitch(tiny_llama(), model, tokens, at=(1, 1), fit="lstsq"),
        "jacobians": lsim.prompts.block_jacobians(model, tokens[0], layers=[1]),
    }


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A folder with what two processes of a gloo group made of all of the above; they start once, which takes longest."""
    folder = tmp_path_factory.mktemp("group")
    tiny_llama().save_pretrained(folder / "model")
    parts = [START, *(f"kind = {kind!r}\n" + textwrap.dedent(setup + MEASURE) for kind, setup in MODELS.items())]
    parts += [*OTHERS.values(), "dist.destroy_process_group()"]
    run_in_group("\n".join(textwrap.dedent(part) for part in parts), RANKS, str(folder))
    return folder


def said(group, rank):
    return (group / f"said-{rank}").read_text().splitlines()


@pytest.mark.parametrize("kind", MODELS)
def test_every_way_to_spread_a_model_gives_what_one_process_gives(kind, group):
    """Three pools of 16, 16 and 5 rows, of which one is left over for one of two processes; two rows a forward pass."""
    alone = lsim.analyze(tiny_llama(), lsim.Data(list(random_tokens(37, 11)), batch_size=2), ANALYZERS)
    reports = [lsim.load(group / f"{kind}-{rank}.safetensors") for rank in range(RANKS)]
    for name in alone:
        assert worst(reports[0][name], reports[1][name]) == 0
        assert worst(reports[0][name], alone[name]) < 1e-5
        assert reports[0][name].provenance.tokens == 37 * 11
        assert reports[0][name].provenance.weights_hash == reports[1][name].provenance.weights_hash

    passes = sorted(line for rank in range(RANKS) for line in said(group, rank) if line.startswith(f"{kind} passes"))
    # The first look and the main one; copies take turns, parts do not. One row is watched before each run. Processes that share
    # weights compare no row with itself alone; FSDP and copies do.
    expected = {"copies": (18, 24), "FSDP": (40, 40)}
    assert passes == [f"{kind} passes {n}" for n in expected.get(kind, (39, 39))]


@pytest.mark.parametrize("kind", MODELS)
def test_sites_inside_blocks_of_a_model_that_is_spread(kind, group):
    alone = lsim.analyze(
        tiny_llama(), lsim.Data(list(random_tokens(37, 11)), batch_size=2), lsim.CKA(minibatch=16), at="attn_out"
    )["cka"]
    for rank in range(RANKS):
        result = lsim.load(group / f"{kind}-{rank}-attn_out.safetensors")["cka"]
        assert worst(result, alone) < 1e-4
        assert result.layers == alone.layers


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("family", ["z", "mlp_post"])
def test_sites_that_are_divided_among_processes_are_refused(kind, family, group):
    """The DeviceMesh of these tests divides the MLPs alone; FSDP gathers weights, so that all activations are whole."""
    divided = {"tp_plan": ("q", "z", "mlp_post"), "DeviceMesh": ("mlp_post",), "nnsight": ("mlp_post",)}.get(kind, ())
    refusals = [any(line.startswith(f"{kind} {family} refused: `at`") for line in said(group, r)) for r in (0, 1)]
    assert refusals == [family in divided] * 2

    if family not in divided:
        alone = lsim.analyze(tiny_llama(), random_tokens(4, 11), lsim.CKA(minibatch=16), at=family)["cka"]
        assert worst(lsim.load(group / f"{kind}-0-{family}.safetensors")["cka"], alone) < 1e-5


def test_other_functions_give_what_they_give_on_the_whole_model(group):
    for name, alone in functions(tiny_llama()).items():
        for rank in range(RANKS):
            assert worst(lsim.load(group / f"{name}-{rank}.safetensors"), alone) < 1e-4, name


def test_a_lens_over_a_model_in_parts_is_that_of_the_whole_model(group):
    alone = lsim.analyze(tiny_llama(), lsim.Data(random_tokens(4, 11), batch_size=2), lsim.LogitLens())["logit_lens"]
    for rank in range(RANKS):
        assert worst(lsim.load(group / f"lens-{rank}.safetensors")["logit_lens"], alone) < 1e-5


def test_training_of_a_model_in_parts_is_refused(group):
    for rank in range(RANKS):
        assert any(line.startswith("training refused: `model` ") and "[0, 1]" in line for line in said(group, rank))


def test_processes_that_form_no_whole_copies_are_refused(group):
    for rank in range(RANKS):
        deal = f"deal Deal(copy={rank}, copies=2, leads=True) Deal(copy=0, copies=1, leads={rank == 0})"
        assert deal in said(group, rank)
        assert any(line.startswith("overlap refused: `model` ") and "[0, 1]" in line for line in said(group, rank))
