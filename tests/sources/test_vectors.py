"""`from_vectors`: vectors that were recorded elsewhere, in place of a model."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import save_file

import tl_layersim as lsim
from tl_layersim.analyzers import find_analyzers

from .. import oracles

ROWS = 300
WIDTH = 12
CLASSES = 3
# Analyzers that call the blocks of a model again, which the model of recorded vectors allows.
CALLS_BLOCKS = ("block_coupling", "skip_effect")
OPTIONS = {
    "intervention_effect": {"lens": False},
    "linear_probe": {"labels": "data"},
    "neural_collapse": {"labels": "data"},
    "cka": {"permutations": 39},
}


def tables(rows: tuple[int, ...] = (ROWS,), seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Vectors of three sites, of which each shares a part with the one before."""
    generator = torch.Generator().manual_seed(seed)
    by_site = {}
    vectors = torch.zeros(*rows, WIDTH)
    for site in ("layer 3", "layer 9", "layer 10"):
        vectors = 0.5 * vectors + torch.randn(*rows, WIDTH, generator=generator)
        by_site[site] = vectors.to(dtype)
    return by_site


def labels_of(rows: int = ROWS) -> torch.Tensor:
    return torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(1))


class Lookup(torch.nn.Module):
    """A block that returns recorded vectors."""

    def __init__(self, table: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)

    def forward(self, hidden, index):
        return self.table[index]


class Recorded(torch.nn.Module):
    """A model whose residual stream is the recorded vectors, found by the numbers of its inputs."""

    def __init__(self, by_site: dict[str, torch.Tensor]) -> None:
        super().__init__()
        first, *later = [vectors.reshape(-1, vectors.shape[-1]) for vectors in by_site.values()]
        self.register_buffer("first", first)
        self.layers = torch.nn.ModuleList(map(Lookup, later))

    def forward(self, inputs_embeds, attention_mask=None):
        index = inputs_embeds[..., 0].long()
        hidden = self.first[index]
        for layer in self.layers:
            hidden = layer(hidden, index)
        return hidden


def model_and_data(by_site, mask=None, groups=None, labels=None):
    """The model of recorded vectors, and the data for it."""
    shape = next(iter(by_site.values())).shape[:-1]
    rows, positions = (*shape, 1)[:2]
    index = torch.arange(rows * positions, dtype=torch.float32).reshape(rows, positions, 1)
    columns = {"inputs_embeds": index}
    if mask is not None:
        columns["attention_mask"] = mask
    if labels is not None:
        columns["labels"] = labels
    module = Recorded(by_site)
    opened = lsim.open_model(module, layers=[f"layers.{number}" for number in range(len(module.layers))])
    return opened, lsim.Data(columns, groups=groups, batch_size=256)


def ended(rows: int, positions: int) -> torch.Tensor:
    """A mask of rows that end early, by up to half of their positions."""
    lengths = positions - torch.arange(rows) % (positions // 2)
    return (torch.arange(positions) < lengths[:, None]).long()


def result_or_error(call):
    """The result of a call, or the error by which the package refuses it."""
    try:
        return call()
    except lsim.LayersimError as error:
        return error


KINDS = {
    "samples": {},
    "groups": {"groups": [number // 3 % 40 for number in range(ROWS)]},
    "positions": {"shape": (40, 8), "mask": ended(40, 8)},
    "half": {"dtype": torch.bfloat16},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.covering
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(find_analyzers()))
def test_vectors_give_the_numbers_of_a_model_that_returns_them(name, kind):
    given = dict(KINDS[kind])
    shape = given.pop("shape", (ROWS,))
    by_site = tables(shape, dtype=given.pop("dtype", torch.float32))
    analyzer = find_analyzers()[name](**OPTIONS.get(name, {}))
    labels = labels_of(shape[0])
    vectors = lsim.from_vectors(by_site, **given, labels=labels)
    model, data = model_and_data(by_site, **given, labels=labels)

    def of_vectors():
        if analyzer.needs.models == "two":
            return lsim.compare(vectors, lsim.from_vectors(by_site), analyzers=analyzer)
        return lsim.analyze(vectors, analyzers=analyzer)[name]

    def of_model():
        if analyzer.needs.models == "two":
            return lsim.compare(model, lsim.open_model(model.model, layers=model.layers), data, analyzer)
        return lsim.analyze(model, data, analyzer)[name]

    found = result_or_error(of_vectors)
    if isinstance(found, lsim.LayersimError):
        assert type(analyzer).__name__ in str(found)
        assert name in CALLS_BLOCKS or isinstance(result_or_error(of_model), lsim.LayersimError)
        return
    expected = of_model()
    for field in expected.tensor_fields():
        np.testing.assert_array_equal(getattr(found, field).numpy(), getattr(expected, field).numpy(), err_msg=field)
    assert found.layers == tuple(by_site)
    assert found.provenance.tokens == expected.provenance.tokens
    assert found.provenance.texts == expected.provenance.texts


def test_two_sources_of_vectors_equal_the_formula():
    a = tables(seed=0)
    b = tables(seed=1)
    expected = oracles.oracle_cka(
        [np.stack([x.double().numpy() for x in a.values()])], [np.stack([x.numpy() for x in b.values()])], exact=True
    )
    found = lsim.compare(lsim.from_vectors(a), lsim.from_vectors(b), analyzers=lsim.CKA(estimator="exact"))
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-7)


def test_a_grid_of_vectors_has_the_distances_of_its_pairs():
    sources = {name: lsim.from_vectors(tables(seed=seed)) for seed, name in enumerate("abc")}
    grid = lsim.compare_grid(sources, analyzer=lsim.CKA())
    for row, column in ((0, 1), (0, 2)):
        pair = lsim.compare(sources["abc"[row]], sources["abc"[column]], analyzers=lsim.CKA())
        assert abs(float(grid.values[row, column]) - pair.distance()) < 1e-9


def test_a_probe_reads_the_labels_of_the_vectors():
    by_site = tables()
    # The class is the sign of a dimension of the last site.
    labels = (by_site["layer 10"][:, 0] > 0).long()
    probe = lsim.linear_probe(lsim.from_vectors(by_site, labels=labels))
    assert probe.labels == (0, 1)
    assert float(probe.accuracy[-1]) > float(probe.accuracy[0]) + 0.1
    with pytest.raises(lsim.LayersimError, match="`data` is None"):
        lsim.linear_probe(torch.nn.Identity())


def test_sites_may_have_different_widths():
    x = tables()["layer 3"]
    narrow = lsim.from_vectors({"wide": x, "narrow": x[:, :5]}, name="two widths")
    found = lsim.analyze(narrow, analyzers=lsim.CKA(estimator="exact"))["cka"]
    # Columns of zeros change no Gram matrix.
    padded = torch.nn.functional.pad(x[:, :5], (0, WIDTH - 5))
    expected = oracles.oracle_cka([torch.stack([x, padded]).double().numpy()], exact=True)
    np.testing.assert_allclose(found.values, expected["values"], atol=1e-7)
    assert found.provenance.model == "two widths"
    for analyzer in (lsim.Cosine(), lsim.Trajectory()):
        with pytest.raises(lsim.LayersimError, match=type(analyzer).__name__):
            lsim.analyze(narrow, analyzers=analyzer)


def write_safetensors(by_site, folder):
    save_file(by_site, folder / "x.safetensors")
    return folder / "x.safetensors"


def write_npz(by_site, folder):
    np.savez(folder / "x.npz", **{site: x.numpy() for site, x in by_site.items()})
    return folder / "x.npz"


def write_folder(by_site, folder):
    for site, x in by_site.items():
        np.save(folder / f"{site}.npy", x.numpy())
    return folder


def memory_maps(by_site, folder):
    write_folder(by_site, folder)
    return {site: np.load(folder / f"{site}.npy", mmap_mode="r") for site in by_site}


def part_of_a_memory_map(by_site, folder):
    # The second half of a larger map, whose offset is that of the whole.
    maps = memory_maps({site: torch.cat([-x, x]) for site, x in by_site.items()}, folder)
    return {site: whole[ROWS:] for site, whole in maps.items()}


FORMS = {
    "arrays": lambda by_site, folder: {site: x.numpy() for site, x in by_site.items()},
    "big-endian arrays": lambda by_site, folder: {site: x.numpy().astype(">f4") for site, x in by_site.items()},
    "Fortran arrays": lambda by_site, folder: {site: np.asfortranarray(x.numpy()) for site, x in by_site.items()},
    "tables": lambda by_site, folder: {site: pandas.DataFrame(x.numpy()) for site, x in by_site.items()},
    "memory maps": memory_maps,
    "parts of memory maps": part_of_a_memory_map,
    "safetensors": write_safetensors,
    "npz": write_npz,
    "folder": write_folder,
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_same_vectors_gives_the_same_numbers(form, tmp_path):
    by_site = tables()
    expected = lsim.analyze(lsim.from_vectors(by_site), analyzers=lsim.Cosine(center="none"))["cosine"]
    vectors = lsim.from_vectors(FORMS[form](by_site, tmp_path))
    found = lsim.analyze(vectors, analyzers=lsim.Cosine(center="none"))["cosine"]
    np.testing.assert_array_equal(found.values, expected.values)
    # Layer 10 comes behind layer 9 in files too.
    assert found.layers == tuple(by_site)
    names = {"safetensors": "x.safetensors", "npz": "x.npz", "folder": tmp_path.name}
    assert found.provenance.model == names.get(form, "vectors")
    assert found.provenance.weights_hash == expected.provenance.weights_hash


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int16, torch.int64, torch.bool])
def test_numbers_of_every_type_are_read_exactly(dtype, tmp_path):
    # Whole numbers, which each of the types holds; 2**40 + 1 needs float64.
    values = torch.randint(-100, 100, (40, 4), generator=torch.Generator().manual_seed(0)).to(dtype)
    if dtype == torch.int64:
        values[0, 0] = 2**40 + 1
    save_file({"x": values}, tmp_path / "x.safetensors")
    from_file = lsim.from_vectors(tmp_path / "x.safetensors")
    from_memory = lsim.from_vectors({"x": values})
    for source in (from_file, from_memory):
        read = source.arrays["x"].rows(0, 40)
        assert torch.equal(read.double(), values.double())
        assert source.dtype == (torch.float64 if dtype in (torch.float64, torch.int64) else torch.float32)


def test_columns_of_missing_numbers_are_named_by_their_row():
    table = pandas.DataFrame({"a": pandas.array([1, 2, None, 4] * 10, dtype="Int64"), "b": np.arange(40)})
    with pytest.raises(lsim.LayersimError, match=r"'second'.*\b2, 6, 10, 14\b"):
        lsim.analyze(lsim.from_vectors({"first": np.eye(40), "second": table}), analyzers=lsim.CKA())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_vectors_that_are_not_finite_are_named_with_site_and_row(value):
    by_site = tables()
    by_site["layer 9"][270, 3] = value
    with pytest.raises(lsim.LayersimError, match=r"'layer 9'.* 270\b"):
        lsim.analyze(lsim.from_vectors(by_site), analyzers=lsim.CKA())


def test_large_numbers_are_finite():
    # Their sum overflows float32.
    x = 1e38 * torch.rand(40, WIDTH, generator=torch.Generator().manual_seed(0))
    found = lsim.analyze(lsim.from_vectors({"x": x, "y": x}), analyzers=lsim.Cosine(center="none"))
    np.testing.assert_allclose(found["cosine"].values, 1, atol=1e-6)


def changed(by_site):
    other = {site: x.clone() for site, x in by_site.items()}
    other["layer 9"][-1, -1] += 1
    return other


def test_shards_have_the_numbers_of_the_whole(tmp_path):
    vectors = lsim.from_vectors(tables((512,)))
    analyzers = [lsim.CKA(minibatch=32), lsim.EffectiveRank()]
    whole = lsim.analyze(vectors, analyzers=analyzers, intervals=True)
    for number in range(2):
        path = tmp_path / f"{number}.safetensors"
        lsim.analyze(vectors, analyzers=analyzers, intervals=True, shard=(number, 2), save_to=path)
    merged = lsim.merge(tmp_path)
    for name, result in whole.items():
        np.testing.assert_array_equal(merged[name].values, result.values)
        np.testing.assert_array_equal(merged[name].interval("values").low, result.interval("values").low)


def test_shards_of_other_vectors_are_refused(tmp_path):
    by_site = tables()
    for number, x in enumerate((by_site, changed(by_site))):
        path = tmp_path / f"{number}.safetensors"
        lsim.analyze(lsim.from_vectors(x), analyzers=lsim.CKA(), shard=(number, 2), save_to=path)
    with pytest.raises(lsim.LayersimError, match="weights"):
        lsim.merge(tmp_path)


def test_a_checkpoint_of_vectors_that_changed_in_place_is_refused(tmp_path):
    by_site = tables()
    vectors = lsim.from_vectors(by_site)
    path = tmp_path / "checkpoint.safetensors"
    first = lsim.analyze(vectors, analyzers=lsim.CKA(), checkpoint=path)["cka"]
    again = lsim.analyze(vectors, analyzers=lsim.CKA(), checkpoint=path)["cka"]
    np.testing.assert_array_equal(again.values, first.values)
    by_site["layer 9"][-1, -1] += 1
    with pytest.raises(lsim.LayersimError, match="weights"):
        lsim.analyze(vectors, analyzers=lsim.CKA(), checkpoint=path)


def test_groups_hold_samples_together():
    # Four samples of each group are nearly equal, and groups are independent.
    generator = torch.Generator().manual_seed(0)
    noise = 0.01 * torch.randn(2, 64, 4, WIDTH, generator=generator)
    x, y = (torch.randn(2, 64, 1, WIDTH, generator=generator) + noise).reshape(2, 256, WIDTH)
    groups = [f"text {number // 4}" for number in range(256)]
    alone = lsim.analyze(lsim.from_vectors({"x": x, "y": y}), analyzers=lsim.CKA())["cka"]
    grouped = lsim.analyze(lsim.from_vectors({"x": x, "y": y}, groups=groups), analyzers=lsim.CKA())["cka"]
    assert (alone.provenance.texts, grouped.provenance.texts) == (256, 64)
    # Pairs within a group make unrelated sites look alike.
    assert float(grouped.values[0, 1]) < float(alone.values[0, 1]) - 0.05


@pytest.fixture(scope="module")
def recorded(llama):
    """Rows of tokens, and what a model makes of them at each site, `row pos width`."""
    tokens = torch.randint(3, 100, (24, 10), generator=torch.Generator().manual_seed(0))
    sampled = lsim.vectors(llama, tokens)
    return tokens, {site: torch.tensor(x).reshape(24, 10, -1) for site, x in sampled.items()}


@pytest.mark.parametrize(
    ("positions", "of_rows"),
    [("all", None), ("mean", lambda x: x.mean(1)), ("last", lambda x: x[:, -1]), (slice(2, 4), None), ("mean", None)],
)
def test_vectors_are_paired_with_the_rows_of_a_model(llama, recorded, positions, of_rows):
    tokens, by_site = recorded
    data = lsim.Data(tokens, positions=positions)
    expected = lsim.compare(llama, llama, data, lsim.CKA(minibatch=16))
    vectors = lsim.from_vectors({site: x if of_rows is None else of_rows(x) for site, x in by_site.items()})
    found = lsim.compare(vectors, llama, data, lsim.CKA(minibatch=16))
    np.testing.assert_allclose(found.values, expected.values, atol=1e-6)
    assert (found.layers, found.column_layers) == (tuple(by_site), expected.layers)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x[:, 0]}), model, tokens, lsim.CKA()),
            "10 counted.*row 0",
        ),
        (lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x}), model, tokens[:7], lsim.CKA()), "7 rows.*24"),
        (lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x}), model, iter(tokens), lsim.CKA()), "`data`.*24"),
        (
            lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x[:, :6]}), model, tokens, lsim.CKA()),
            "position 6 of row 0",
        ),
        (
            lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x}, mask=ended(24, 10)), model, tokens, lsim.CKA()),
            "position 9 of row 1",
        ),
        (
            lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x}), model, lsim.Data(tokens, seq_len=5), lsim.CKA()),
            "position 5 of row 0",
        ),
        (
            lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x}, groups=range(24)), model, tokens, lsim.CKA()),
            "`groups`",
        ),
        (
            lambda model, tokens, x: lsim.compare(lsim.from_vectors({"a": x}), model, analyzers=lsim.CKA()),
            "`data` is None.*model_b",
        ),
        (lambda model, tokens, x: lsim.analyze(model, analyzers=lsim.CKA()), "`data` is None"),
        (lambda model, tokens, x: lsim.analyze(lsim.from_vectors({"a": x}), [lsim.CKA()]), "`analyzers` is None"),
        (lambda model, tokens, x: lsim.analyze(lsim.from_vectors({"a": x}), analyzers=lsim.CKA(), at="z"), "`at` is 'z'"),
        (lambda model, tokens, x: lsim.analyze(lsim.from_vectors({"a": x}), analyzers="neural_collapse"), "next_token"),
        (
            lambda model, tokens, x: lsim.analyze(lsim.from_vectors({"a": x}), analyzers=lsim.NeuralCollapse(labels="data")),
            "from_vectors",
        ),
        (
            lambda model, tokens, x: lsim.compare(
                lsim.from_vectors({"a": x}), lsim.from_vectors({"a": x[1:]}), analyzers=lsim.CKA()
            ),
            "24 x 10 and 23 x 10",
        ),
        (
            lambda model, tokens, x: lsim.compare(
                lsim.from_vectors({"a": x}, groups=range(24)),
                lsim.from_vectors({"a": x}, groups=[0] * 24),
                analyzers=lsim.CKA(),
            ),
            "`groups`",
        ),
    ],
)
def test_what_does_not_match_is_refused(llama, recorded, call, named):
    tokens, by_site = recorded
    with pytest.raises(lsim.LayersimError, match=named):
        call(llama, tokens, next(iter(by_site.values())))


def objects_in_a_file(folder):
    np.save(folder / "x.npy", np.array([{}], dtype=object), allow_pickle=True)
    return folder


@pytest.mark.parametrize(
    ("given", "options", "named"),
    [
        (np.zeros((4, 4)), {}, "`vectors`"),
        ({}, {}, "`vectors`"),
        ({"a": np.zeros(4)}, {}, r"'a'.*shape 4\b"),
        ({"a": np.zeros((4, 2, 2, 2))}, {}, "'a'.*4 x 2 x 2 x 2"),
        ({"a": np.zeros((4, 2)), "b": np.zeros((5, 2))}, {}, "'b'.*5 x 2.*'a'.*4 x 2"),
        ({"a": np.array([["x"]])}, {}, "'a'"),
        ({"a": torch.zeros(4, 2, dtype=torch.complex64)}, {}, "'a'.*complex64"),
        ({"a": pandas.DataFrame({"n": [1], "text": ["x"]})}, {}, "'a'.*'text'"),
        (
            {"a": pandas.DataFrame(np.eye(3), index=[0, 1, 2]), "b": pandas.DataFrame(np.eye(3), index=[0, 2, 1])},
            {},
            "'b'.*index.*'a'",
        ),
        ({"a": pandas.DataFrame(np.eye(3))}, {"groups": pandas.Series("xyz", index=[2, 1, 0])}, "`groups`.*index"),
        ({"a": pandas.DataFrame(np.eye(3))}, {"labels": pandas.Series([0, 1, 1], index=[2, 1, 0])}, "`labels`.*index"),
        ({"a": np.ma.masked_array(np.eye(3), mask=np.eye(3))}, {}, "'a'.*masked"),
        ({1: np.eye(3), "1": np.eye(3)}, {}, "'1'"),
        ({"a": np.zeros((4, 2))}, {"mask": np.ones((4, 2))}, "`mask`"),
        ({"a": np.zeros((4, 2, 3))}, {"mask": np.ones((4, 3))}, r"`mask`.*\(4, 3\).*\(4, 2\)"),
        ({"a": np.zeros((4, 2))}, {"groups": [0, 1]}, r"`groups`.*\b2\b.*\b4\b"),
        ({"a": np.zeros((4, 2))}, {"labels": [0, 1]}, r"`labels`.*\(2,\).*\(4,\)"),
        ({"a": np.zeros((4, 2))}, {"labels": [0.5, 1, 1, 1]}, "`labels`"),
        ("missing.safetensors", {}, "missing.safetensors"),
        (objects_in_a_file, {}, "objects"),
    ],
)
def test_what_holds_no_vectors_is_refused(given, options, named, tmp_path):
    with pytest.raises(lsim.LayersimError, match=named):
        lsim.from_vectors(given(tmp_path) if callable(given) else given, **options)


SPARSE = """
import resource, sys
import numpy as np
import tl_layersim as lsim

rows, width, path = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
whole = np.lib.format.open_memmap(path, "w+", np.float32, (rows, width))
# Numbers in the first page of each row; the rest of the file is a hole.
for start in range(0, rows, 256):
    whole[start : start + 256, :1024] = np.random.default_rng(start).normal(size=(len(whole[start : start + 256]), 1024))
    whole.flush()
del whole
vectors = {"x": np.load(path, mmap_mode="r")}

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

small = {"x": np.random.default_rng(0).normal(size=(300, width)).astype("f4")}
lsim.analyze(lsim.from_vectors(small), analyzers=lsim.CKA())
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")
before = peak_before = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
lsim.analyze(lsim.from_vectors(vectors), analyzers=lsim.CKA())
after = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
print(after - before)
"""


@pytest.mark.heavy("a sparse file of 2 GB")
def test_vectors_larger_than_the_bound_are_read_in_batches(tmp_path):
    arguments = [str(8192), str(65536), str(tmp_path / "x.npy")]
    done = subprocess.run([sys.executable, "-c", SPARSE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kilobytes = int(done.stdout)
    assert kilobytes < 500_000
