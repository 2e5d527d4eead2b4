"""The shape of the house: imports run one way, importing is light, every public name is documented."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import tl_layersim as lsim

PACKAGE = Path(lsim.__file__).parent
# A room may import rooms of its own floor and of those below. Results draw and print themselves only when asked to.
FLOORS = [
    {"errors", "sums", "pairs", "hsic", "unembed", "calls"},
    {"storage", "typed", "jacobian", "where", "adapter"},
    {"results", "spectrum"},
    {"source", "plotting", "distributed", "coupling"},
    {"rows", "lens", "guards", "report", "checkpoint", "demo"},
    {"data"},
    {"analyzer", "labels", "layout"},
    {"analyzers", "sources"},
    {"prepare", "outcome", "exchange"},
    {"passes"},
    {"jobs"},
    {"engine", "capability", "stitching", "early_exit"},
    {"probe", "prompt", "relation"},
    {"blocks", "training"},
    {"cli", "__init__"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
LAZY = {("results", "plotting"), ("results", "report")}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p.name != "make_demo.py")


def imports(path: Path) -> set[tuple[str, str, bool]]:
    """(what, for packages of this one the room, whether at module level) of every import that is not for types only."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    top = {id(node) for node in tree.body}
    found = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {(alias.name.split(".")[0], "", id(node) in top) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                parts = path.relative_to(PACKAGE).parts[: len(path.relative_to(PACKAGE).parts) - node.level]
                target = [*parts, *(node.module or "").split(".")]
                found.add(("tl_layersim", next((p for p in target if p), ""), id(node) in top))
            else:
                found.add(((node.module or "").split(".")[0], "", id(node) in top))
    return found


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    here = room(path)
    for what, target, at_top in imports(path):
        if what == "tl_layersim" and target and target != here and (here, target) not in LAZY:
            assert FLOOR[target] < FLOOR[here], f"{here} imports {target}"
        if what in ("transformer_lens", "nnsight"):
            # typed looks at nnsight only when it is there already.
            assert here in ("sources", "training", "typed"), f"{here} imports {what}"
            assert not at_top, f"{path} imports {what} before it is needed"
        assert what != "pickle"


def test_every_room_has_a_floor():
    assert {room(path) for path in modules()} == set(FLOOR)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_one_idea_one_file(path):
    assert len(path.read_text().splitlines()) < 450


def test_importing_is_light():
    script = (
        "import sys, time; start = time.perf_counter(); import tl_layersim; took = time.perf_counter() - start\n"
        "heavy = {'torch', 'transformers', 'transformer_lens', 'nnsight', 'datasets', 'plotly', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\nassert took < 0.2, took\n"
        "tl_layersim.analyze, tl_layersim.CKA, tl_layersim.load\n"
        "heavy = {'transformers', 'transformer_lens', 'nnsight', 'datasets'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("first", ["import nnsight", "import transformer_lens", "import tl_layersim as l; l.attach"])
def test_the_order_of_imports_does_not_matter(first):
    script = f"{first}\nimport tl_layersim as lsim\nassert callable(lsim.analyze) and callable(lsim.attach)\n"
    if "nnsight" in first:
        script += "assert hasattr(object, 'save')\n"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", lsim.__all__)
def test_every_public_name_is_documented(name):
    thing = getattr(lsim, name)
    if name == "Kernel":
        return
    assert inspect.getdoc(thing)
    if inspect.isclass(thing):
        for member, value in vars(thing).items():
            inherited = any(member in vars(base) and getattr(base, member).__doc__ for base in thing.__mro__[1:])
            if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
                assert value.__doc__ or inherited, f"{name}.{member}"


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'LogitLense'"):
        lsim.LogitLense  # noqa: B018
    assert set(lsim.__all__) <= set(dir(lsim))
