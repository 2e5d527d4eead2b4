"""NDIF's model actors on a machine without a GPU: imported by the server alone, from PYTHONPATH.

The controller hands out a made-up GPU; these actors load on the CPU instead. All the rest is the server as it is published.
"""

from __future__ import annotations

import ray
import torch
from ndif.services.ray.deployments.controller.controller import _ControllerActor
from ndif.services.ray.deployments.modeling.base import BaseModelDeployment
from ndif.services.ray.sandbox import host
from ndif.services.ray.sandbox.model import SandboxModelDeployment
from nnsight.modeling.huggingface import HuggingFaceModel

if not torch.cuda.is_available():
    # Called unguarded around every request.
    torch.cuda.synchronize = lambda *args, **kwargs: None

# A sandbox starts with named variables only; ours has to find the stand-in for the hub, as the actor does.
host.RUNNER_ENV = (*host.RUNNER_ENV, "HF_ENDPOINT", "HF_HUB_DISABLE_XET")


class OnCPU:
    """Loads where there is no GPU, whatever the controller assigned."""

    def __init__(self, *args, gpu_mem_bytes_by_id=None, **kwargs):
        super().__init__(*args, gpu_mem_bytes_by_id={}, **kwargs)

    def load_from_disk(self):
        model = HuggingFaceModel.from_model_key(
            self.model_key, dispatch=True, dtype=self.dtype_name, device="cpu", **self.kwargs
        )
        model._module.requires_grad_(False)
        return model

    def from_cache(self, gpu_mem_bytes_by_id):
        self.cached = False


@ray.remote(num_cpus=1, max_restarts=-1)
class TrustedActor(OnCPU, BaseModelDeployment):
    """Runs every request in the model's own process."""


@ray.remote(num_cpus=1, max_restarts=-1)
class SandboxActor(OnCPU, SandboxModelDeployment):
    """Runs a request that is not trusted in a process of its own, where weights are meta tensors."""


@ray.remote(num_cpus=1, num_gpus=0, max_restarts=-1, resources={"head": 1})
class Controller(_ControllerActor):
    """The published controller, which Ray would otherwise not find under this module's name."""
