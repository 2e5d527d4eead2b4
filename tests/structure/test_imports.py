"""Importing is light, in any order."""

from __future__ import annotations

import subprocess
import sys

import pytest


def test_importing_is_light():
    script = (
        "import sys, tl_layersim\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'nnsight', 'datasets', 'plotly', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "tl_layersim.attach, tl_layersim.analyze, tl_layersim.CKA, tl_layersim.load\n"
        "heavy = {'transformers', 'transformer_lens', 'nnsight', 'datasets'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_report_is_drawn_without_an_import_by_its_user():
    script = (
        "import sys, tl_layersim as lsim\n"
        "report = lsim.Report({})\nassert 'plotly' not in sys.modules\n"
        "assert 'Report' in report._repr_html_()\nassert 'plotly' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.heavy("a process for each order")
@pytest.mark.parametrize("first", ["import nnsight", "import transformer_lens"])
def test_the_order_of_imports_does_not_matter(first):
    script = f"{first}\nimport tl_layersim as lsim\nassert callable(lsim.analyze) and callable(lsim.attach)\n"
    if "nnsight" in first:
        script += "assert hasattr(object, 'save')\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
