"""Results of servers as files: what is read, and what is refused before memory is allocated."""

from __future__ import annotations

import io
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
import zstandard

from tl_layersim.remote.failures import DamagedAnswer, UnsafeAnswer
from tl_layersim.remote.result_reader import decompressed, read_result

LARGEST = 2**20


def saved(value, **options) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def remade(content: bytes, change, compression=zipfile.ZIP_STORED) -> bytes:
    """A file of torch.save with other records: `change` gets a dict of them."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        records = {info.filename: file.read(info) for info in file.infolist()}
    records = change(records) or records
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as file:
        for name, record in records.items():
            file.writestr(name, record)
    return buffer.getvalue()


def with_pickle(instructions: bytes) -> bytes:
    return remade(saved({}), lambda records: records | {"archive/data.pkl": instructions})


GRID = torch.arange(12.0, dtype=torch.float64).view(3, 4)
READABLE = {
    "floats": GRID,
    "transposed": GRID.T,
    "slice": GRID[1:, ::2],
    "expanded": torch.ones(1, 1).expand(3, 4),
    "no axes": torch.tensor(3),
    "empty": torch.empty(0, 4),
    "bools": torch.tensor([True, False]),
    "halves": torch.ones(2, dtype=torch.float16),
    "brains": torch.ones(2, dtype=torch.bfloat16),
    "complex": torch.ones(2, dtype=torch.complex64),
    "bytes": torch.arange(3, dtype=torch.uint8),
    "gradient": torch.ones(2, requires_grad=True),
}


@pytest.mark.parametrize("name", READABLE)
@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_are_read_exactly(name, protocol):
    value = READABLE[name]
    found = read_result(saved([value, {"again": value}], pickle_protocol=protocol), LARGEST)
    for one in (found[0], found[1]["again"]):
        assert torch.equal(one, value.detach())
        assert one.dtype == value.dtype
        assert one.is_contiguous()
        assert not one.requires_grad


def test_plain_data_is_read_exactly():
    value = {"a": [1, -(2**40), 1.5, True, None, "text", b"bytes"], "b": (1, (2, {}), []), "c": float("inf")}
    assert read_result(saved(value), LARGEST) == value


class Runs:
    def __reduce__(self):
        return exec, ("raise SystemExit",)


UNSAFE = {
    "code": Runs(),
    "expanded": torch.zeros(1).expand(10**12),
    "many expanded": [torch.zeros(1).expand(10**5)] * 10,
    "meta": torch.empty(3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.ones(2)),
    "subclass": torch.ones(2).as_subclass(type("Own", (torch.Tensor,), {"__module__": __name__})),
    "module": torch.nn.Linear(1, 1),
    "ordered dict": OrderedDict(a=1),
    "set": {1, 2},
    "complex number": 1j,
    "names that are no texts": {1: 2},
    "dtype": torch.float64,
    "device": torch.device("cpu"),
}
globals()["Own"] = type(UNSAFE["subclass"])


@pytest.mark.parametrize("name", UNSAFE)
def test_other_objects_are_refused_and_run_nothing(name):
    with pytest.raises(UnsafeAnswer):
        read_result(saved(UNSAFE[name]), LARGEST)


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def repeated(times: int) -> list:
    """A list that holds one list eight times, which holds one list eight times, and so on."""
    value: list = [0]
    for _ in range(times):
        value = [value] * 8
    return value


@pytest.mark.light("deep")
@pytest.mark.parametrize("value", [nested(200), repeated(12), [0] * 300_000], ids=["deep", "repeated", "long"])
def test_containers_have_limits(value):
    with pytest.raises(UnsafeAnswer):
        read_result(saved(value), LARGEST)


INSTRUCTIONS = {
    # A place in the memory of the unpickler, for which it would allocate 32 GB.
    "memory": b"\x80\x02]r\xff\xff\xff\x7f.",
    "bytearray": b"\x80\x05\x96\x00\x00\x00\x00\x00\x01\x00\x00.",
    "new object": b"\x80\x02cbuiltins\nobject\n)\x81.",
    "built": b"\x80\x02}}b.",
    "extension": b"\x80\x02\x82\x01.",
}


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_instructions_that_plain_data_does_not_need_are_refused(name):
    with pytest.raises((UnsafeAnswer, DamagedAnswer)):
        read_result(with_pickle(INSTRUCTIONS[name]), LARGEST)


def of_storage(count: int, size: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int = 0) -> bytes:
    """A file with one tensor whose storage claims `count` floats and has `size` bytes."""
    content = saved(torch.zeros(3, 5))

    def change(records):
        text = records["archive/data.pkl"]
        text = text.replace(b"K\x0ftq\x05QK\x00K\x03K\x05\x86q\x06K\x05K\x01\x86", b"%b")
        claimed = pickle.dumps(count, 2)[2:-1] + b"tq\x05Q" + pickle.dumps(offset, 2)[2:-1]
        axes = pickle.dumps(shape, 2)[2:-1].split(b"q")[0] + b"q\x06" + pickle.dumps(strides, 2)[2:-1].split(b"q")[0]
        assert b"%b" in text
        return records | {"archive/data.pkl": text.replace(b"%b", claimed + axes), "archive/data/0": bytes(size)}

    return remade(content, change)


def test_a_changed_storage_is_read_where_it_fits():
    assert torch.equal(read_result(of_storage(6, 24, (2, 3), (3, 1)), LARGEST), torch.zeros(2, 3))


@pytest.mark.parametrize(
    "claims",
    [
        (1000, 24, (2, 3), (3, 1)),
        (6, 24, (2, 4), (4, 1)),
        (6, 24, (2, 3), (3, 1), 1),
        (6, 24, (2, 3), (3, 100)),
        (5, 24, (2, 2), (2, 1)),
    ],
)
def test_tensors_beyond_their_storage_are_damaged(claims):
    with pytest.raises(DamagedAnswer):
        read_result(of_storage(*claims), LARGEST)


@pytest.mark.parametrize("part", [0, 1, 10, 0.3, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_damaged(part):
    content = saved({"a": GRID})
    end = part if isinstance(part, int) else int(part * len(content))
    with pytest.raises(DamagedAnswer):
        read_result(content[:end], LARGEST)


def test_a_changed_byte_of_a_tensor_is_damage():
    content = saved({"a": GRID})
    place = content.index(GRID.numpy().tobytes())
    with pytest.raises(DamagedAnswer):
        read_result(content[: place + 3] + b"\xff" + content[place + 4 :], LARGEST)


def test_compressed_records_are_refused():
    content = remade(saved(torch.zeros(10**6)), lambda records: records, zipfile.ZIP_DEFLATED)
    assert len(content) < 10_000
    with pytest.raises(UnsafeAnswer):
        read_result(content, 10**8)


def test_decompression_ends_at_the_limit():
    bomb = zstandard.ZstdCompressor().compress(bytes(3 * 10**8))
    assert len(bomb) < 100_000
    with pytest.raises(UnsafeAnswer):
        decompressed(bomb, LARGEST)
    # A size in the header allocates nothing.
    header = b"\x28\xb5\x2f\xfd\xe0" + (2**50).to_bytes(8, "little")
    with pytest.raises(DamagedAnswer):
        decompressed(header + bytes(10), LARGEST)


def test_a_frame_is_decompressed_exactly():
    data = torch.randint(256, (200_000,), dtype=torch.uint8).numpy().tobytes()
    assert decompressed(zstandard.ZstdCompressor(level=3).compress(data), LARGEST) == data


@pytest.mark.parametrize("part", [0, 1, 5, 0.5, 0.999])
def test_a_frame_that_was_cut_off_is_damaged(part):
    frame = zstandard.ZstdCompressor().compress(saved({"a": torch.randn(100)}))
    with pytest.raises(DamagedAnswer):
        decompressed(frame[: part if isinstance(part, int) else int(part * len(frame))], LARGEST)
