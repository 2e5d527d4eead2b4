"""What a type checker tells the author of a script about this package."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from . import typed_user

ROOT = Path(__file__).parents[2]


def check(script: str, folder: Path) -> str:
    """What `mypy --strict` prints for a script in a folder outside of the repository."""
    # Libraries that the package's own check skips are skipped here too.
    [skipped] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(skipped['module'])}]\nfollow_imports = skip\n")
    (folder / "script.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "script.py"],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy: pip install tl_layersim[dev]")
def test_a_script_has_the_types_that_it_expects(tmp_path):
    found = check(Path(typed_user.__file__).read_text(), tmp_path)
    assert found.startswith("Success"), found
    wrong = "import tl_layersim as lsim\nlsim.analyze(None, ['a'], lsim.CKA(), batchsize=2)\nlsim.analyze(None, ['a'], 5)\n"
    found = check(wrong, tmp_path)
    assert "script.py:2: error: No overload variant" in found, found
    assert "script.py:3: error: No overload variant" in found, found


def test_the_script_runs():
    assert typed_user.main() == ["cosine", "cka", "cosine"]
