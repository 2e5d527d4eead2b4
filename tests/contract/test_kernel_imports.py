"""Kernels import torch alone, so that they run in a process of another engine."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import tl_layersim as lsim

PACKAGE = Path(lsim.__file__).parent
SCRIPT = """
import importlib, sys
import einops, lazy_loader, numpy, torch
before = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
    new = {module.split(".")[0] for module in set(sys.modules) - before} - {*sys.stdlib_module_names, "tl_layersim"}
    assert not new, (name, new)
"""


def has_kernels(path: Path) -> bool:
    return "kernel" in path.stem or "lain functions of torch" in (ast.get_docstring(ast.parse(path.read_text())) or "")


def test_kernels_import_torch_alone():
    paths = [path.relative_to(PACKAGE.parent) for path in sorted(PACKAGE.rglob("*.py")) if has_kernels(path)]
    names = [".".join(path.with_suffix("").parts) for path in paths]
    assert {"tl_layersim.analyzers._cosine_kernel", "tl_layersim.analyzers._hsic"} <= set(names)
    assert len(names) > 12
    command = [sys.executable, "-c", SCRIPT, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=PACKAGE.parent)
    assert done.returncode == 0, done.stderr
