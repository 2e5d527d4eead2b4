"""A disk that is full."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap


def test_a_full_disk_leaves_the_old_file(tmp_path):
    """A real limit on the size of files, in a process of its own."""
    script = textwrap.dedent(
        """
        import resource, signal, sys
        import tl_layersim as lsim
        from tl_layersim.core import LayerCurve
        from tests.views import provenance
        import torch
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        path = sys.argv[1]
        def curve(n):
            return LayerCurve(values=torch.zeros(n, dtype=torch.float64), layers=("a",) * n, provenance=provenance())
        curve(3).save(path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        try:
            curve(100_000).save(path)
        except OSError as error:
            print(error)
        print(len(lsim.load(path).values))
        """
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "x.safetensors")],
        env=os.environ | {"PYTHONPATH": root},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Could not write" in done.stdout
    assert "An older file at this path is unchanged" in done.stdout
    assert done.stdout.strip().endswith("3")
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
