"""A hub and real NDIF servers for this folder's tests. `make test-ndif` builds the server's environment and runs them.

The stand-in for the hub has to be named before huggingface_hub is imported, so it is started here, with nothing in it yet.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch

import tl_layersim as lsim

from ..models.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer
from ..real_models.files import optional_real
from .hub import Hub
from .server import Server

# Imported by the server.
collect_ignore = ["actors.py"]
PYTHON = os.environ.get("TL_LAYERSIM_NDIF_PYTHON")
if PYTHON:
    # Ray puts sockets below this folder, whose names may not be long.
    ROOT = Path(tempfile.mkdtemp(prefix="ndif", dir="/tmp"))
    (ROOT / "hub").mkdir()
    HUB = Hub(ROOT / "hub")
    os.environ |= {
        "HF_ENDPOINT": HUB.url,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HOME": str(ROOT / "client"),
        # A key such as users have: it must turn up nowhere.
        "NDIF_API_KEY": "5e1f0000-1234-4321-abcd-00000000beef",
    }


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.heavy("a real NDIF server"))
            if not PYTHON:
                item.add_marker(pytest.mark.skip(reason="needs a real NDIF server: make test-ndif"))


def slow_llama():
    """Large enough that a forward pass of it takes a good part of a second on one core."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(2)
    config = LlamaConfig(
        hidden_size=512,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=2048,
        vocab_size=100,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="session")
def hub():
    """Names of the models on it; `real/stories260K` among them where real models are at hand."""
    models = {
        "tests/llama": tiny_llama(),
        "tests/gpt2": tiny_gpt2(),
        "tests/deep": tiny_llama(layers=32),
        "tests/slow": slow_llama(),
    }
    for name, model in models.items():
        model.save_pretrained(HUB.root / name)
        tiny_tokenizer().save_pretrained(HUB.root / name)
    demo = lsim.demo_model()
    demo.save_pretrained(HUB.root / "tests/demo")
    demo.tokenizer.save_pretrained(HUB.root / "tests/demo")
    names = list(models)
    try:
        shutil.copytree(optional_real("models", "stories260K"), HUB.root / "real" / "stories260K")
        names.append("real/stories260K")
    except pytest.skip.Exception:
        pass
    yield names
    HUB.close()
    shutil.rmtree(ROOT, ignore_errors=True)


@pytest.fixture(scope="session")
def server(hub):
    """A server of float32 models without a limit."""
    with started("a") as without_limit:
        yield without_limit


@pytest.fixture
def start(hub):
    """Starts another server for one test, with the options of `Server`."""
    running = []

    def start(**options) -> Server:
        running.append(started(f"b{len(list(ROOT.glob('b*')))}", **options))
        running[-1].start()
        return running[-1]

    yield start
    for server in running:
        assert len(server.processes()) > 5
        server.stop()
        assert server.processes() == []


def started(name, **options):
    folder = ROOT / name
    folder.mkdir()
    return Server(PYTHON, folder, HUB.url, **options)


@pytest.fixture(params=["trusted", "sandboxed"])
def trust(request, monkeypatch):
    """What a server without keys is asked for; with keys it is the key that decides."""
    return ask_for(request.param, monkeypatch)


def ask_for(kind, monkeypatch):
    import json

    from nnsight.schema.request import RequestModel

    plain = RequestModel.metadata

    def metadata(self):
        return json.dumps(json.loads(plain(self)) | {"trusted": kind == "trusted"})

    monkeypatch.setattr(RequestModel, "metadata", metadata)
    return kind
