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


def check(scripts: dict[str, str], folder: Path) -> str:
    """What `mypy --strict` prints for scripts in a folder outside of the repository."""
    # Libraries that the package's own check skips are skipped here too.
    [skipped] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["overrides"]
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{','.join(skipped['module'])}]\nfollow_imports = skip\n")
    for name, script in scripts.items():
        (folder / name).write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", *scripts],
        cwd=folder,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


@pytest.mark.heavy("mypy")
@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy: pip install tl_layersim[dev]")
def test_a_script_has_the_types_that_it_expects(tmp_path):
    wrong = "import tl_layersim as lsim\nlsim.analyze(None, ['a'], lsim.CKA(), batchsize=2)\nlsim.analyze(None, ['a'], 5)\n"
    found = check({"script.py": Path(typed_user.__file__).read_text(), "wrong.py": wrong}, tmp_path)
    errors = {line.split(": error:")[0] for line in found.splitlines() if ": error:" in line}
    assert errors == {"wrong.py:2", "wrong.py:3"}, found


@pytest.mark.heavy("a process")
def test_the_script_runs():
    assert typed_user.main() == ["cosine", "cka", "cosine"]
