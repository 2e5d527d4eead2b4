"""The small server as tests start it, and what they ask of it."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path

import torch

import tl_layersim as lsim
from tl_layersim.analyzers import Analyzer
from tl_layersim.core import LayerCurve

from ..docs.helpers import ROOT, blocks
from ..models.tiny_models import tiny_gpt2, tiny_llama, tiny_tokenizer
from ..ndif.server import free_ports
from ..running.options import called
from ..running.processes import started

QUICK = [lsim.CKA(minibatch=32), lsim.Cosine(center="none")]
# Without pools of rows, so that a batch has as many rows as a forward pass.
SINGLE = [lsim.Cosine(center="none"), lsim.Trajectory()]


class Small:
    """The small server, and the folders of the models that it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        [port] = free_ports(1)
        self.url, self._port = f"http://127.0.0.1:{port}", port
        for name, model in (("llama", tiny_llama()), ("gpt2", tiny_gpt2())):
            model.save_pretrained(folder / name)
            tiny_tokenizer().save_pretrained(folder / name)
        self.start()

    def start(self) -> None:
        path = Path(__file__).with_name("small_ndif.py")
        self._process = started(f"import runpy; runpy.run_path({str(path)!r}, run_name='__main__')", str(self._port))
        # Importing transformers takes long on a machine with other work.
        end = time.monotonic() + 1200
        while self._process.is_alive() and time.monotonic() < end:
            try:
                urllib.request.urlopen(self.url + "/ping", timeout=30)
                return
            except OSError:
                time.sleep(0.1)
        raise RuntimeError("the small server did not come up")

    def stop(self) -> None:
        self._process.kill()
        self._process.join()

    def set(self, **settings) -> dict[str, int]:
        """Settings anew, what is not named as at the start; gives how many requests there were since the last call."""
        request = urllib.request.Request(self.url + "/control", json.dumps(settings).encode(), method="POST")
        return json.load(urllib.request.urlopen(request, timeout=300))

    def model(self, name: str = "llama", **here):
        from nnsight import TransformersModel
        from nnsight.modeling import huggingface
        from transformers import AutoTokenizer

        path = str(self.folder / name)
        # nnsight would ask a hub what this repository is really called.
        huggingface._ID_CACHE[path] = path
        return TransformersModel(path, task="text-generation", tokenizer=AutoTokenizer.from_pretrained(path), **here)


def local(small, data, analyzers, name="llama", **options):
    return called(lsim.analyze, small.model(name, dispatch=True, dtype=torch.float32), data, analyzers, **options)


def lsim_analyzer(function):
    """An analyzer of one kernel, as a user writes it."""
    from dataclasses import dataclass

    @dataclass(frozen=True)
    class Own(Analyzer):
        name = "own"

        def kernel(self, first):
            return function

        def compute(self, sums, run):
            return LayerCurve(values=sums["norm"] / sums["count"], layers=run.layers, provenance=run.provenance)

    return Own()


def mean_norm(view):
    return {"norm": view.activations.double().norm(dim=-1).sum(1), "count": torch.tensor(view.activations.shape[1])}


def run_page(name: str) -> None:
    """The code of the page about NDIF, on another model."""
    page = ROOT / "docs/ndif.md"
    found = {}
    for block in blocks(page):
        exec(compile(block.replace("meta-llama/Llama-3.1-70B", name), page.name, "exec"), found)
    assert set(found["report"].values.shape) == {len(found["report"].layers)}


def here(small, name):
    return small.model(name, dispatch=True, dtype=torch.float32)
