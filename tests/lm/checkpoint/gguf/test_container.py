"""The container of GGUF: read as by llama.cpp's library, and refused with its cause if it is damaged."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lm.checkpoint.gguf.container import GGUFFile
from lm.checkpoint.gguf.quantized_blocks import BLOCKS
from lm.common.errors import UserError

gguf = pytest.importorskip("gguf", reason="the gguf library is not installed")
MAX = (1 << 64) - 1


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def field(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: str, *shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def write(path: Path, fields: list[bytes], tensors: list[bytes], num_bytes: int = 64, more: int = 0) -> Path:
    """Write a file whose header states ``more`` tensors and fields than it has."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors) + more, len(fields) + more * (not tensors))
    data = header + b"".join([*fields, *tensors])
    path.write_bytes(data + b"\0" * (-len(data) % 32 + num_bytes))
    return path


def test_metadata_and_tensors_are_those_of_the_library(tmp_path: Path) -> None:
    path, random = tmp_path / "model.gguf", np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    values: dict[str, Any] = {"a.text": "é\n", "a.true": True, "a.texts": ["x", "", "日本"]}
    writer.add_string("a.text", values["a.text"])
    writer.add_bool("a.true", True)
    writer.add_array("a.texts", values["a.texts"])
    for name in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"):
        values[f"a.{name}"] = 100
        getattr(writer, f"add_{name}")(f"a.{name}", 100)
    values |= {"a.float32": 1e-5, "a.float64": 1 / 3}
    writer.add_float32("a.float32", 1e-5)
    writer.add_float64("a.float64", 1 / 3)
    writer.add_array("a.numbers", [1, 2, -3])
    writer.add_tensor("f32", random.standard_normal((3, 5)).astype(np.float32))
    writer.add_tensor("f16", random.standard_normal((2, 3, 5)).astype(np.float16))
    bfloat16 = gguf.quantize(random.standard_normal((4, 8)).astype(np.float32), gguf.GGMLQuantizationType.BF16)
    writer.add_tensor("bf16", bfloat16, raw_dtype=gguf.GGMLQuantizationType.BF16)
    for name, block in BLOCKS.items():
        data = random.integers(0, 100, (3, 2 * block.num_bytes), dtype=np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path)
    assert [*file.metadata.pop("a.numbers")] == [1, 2, -3]
    assert file.metadata == {"general.architecture": "llama"} | values
    theirs = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert {*file} == theirs.keys() and len(file) == 3 + len(BLOCKS)
    for name, mine in file.items():
        expected = np.array(gguf.dequantize(theirs[name].data, theirs[name].tensor_type), np.float32)
        shape = tuple(int(size) for size in reversed(theirs[name].shape))
        assert torch.equal(mine.float(), torch.from_numpy(expected).reshape(shape))
    assert [file[name].dtype for name in ("f32", "f16", "bf16", "Q8_0")] == [
        *(torch.float32, torch.float16, torch.bfloat16, torch.float32)
    ]


U32, TEXT, LIST = 4, 8, 9


def one(value: int) -> bytes:
    return struct.pack("<I", value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b""), "cannot be read: .*It must be a complete GGUF file"),
        (lambda path: path.write_bytes(b"GGU"), "is damaged"),
        (lambda path: path.write_bytes(b"PK\3\4" + b"\0" * 99), "does not begin with GGUF"),
        (lambda path: path.write_bytes(struct.pack("<4sIQQ", b"GGUF", 1, 0, 0)), "version 1 of GGUF; .* 2 and 3"),
        (lambda path: path.write_bytes(struct.pack(">4sIQQ", b"GGUF", 3, 0, 0)), "version 50331648 of GGUF"),
        (lambda path: path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n"), "pointer of Git LFS"),
        (lambda path: write(path, [], [], more=MAX), "is damaged"),
        (lambda path: write(path, [], [tensor("a", 4)], more=MAX - 1), "is damaged"),
        (lambda path: write(path, [field("a", U32, one(1)), field("a", U32, one(1))], []), "have 'a' twice"),
        (lambda path: write(path, [field("a", 13, b"")], []), "unknown kind 13"),
        (lambda path: write(path, [field("a", TEXT, struct.pack("<Q", MAX))], []), "goes beyond its end"),
        (lambda path: write(path, [field("a", LIST, struct.pack("<IQ", TEXT, MAX))], []), "texts goes beyond"),
        (lambda path: write(path, [field("a", LIST, struct.pack("<IQ", U32, MAX))], []), "numbers goes beyond"),
        (lambda path: write(path, [field("a", LIST, struct.pack("<IQ", LIST, 1))], []), "unknown kind 9"),
        (lambda path: write(path, [field("general.alignment", U32, one(0))], []), "alignment is 0; it must be"),
        (lambda path: write(path, [field("general.alignment", U32, one(48))], []), "alignment is 48; it must"),
        (lambda path: write(path, [field("general.alignment", TEXT, text("x"))], []), "alignment is 'x'; it"),
        (lambda path: write(path, [], [tensor("a", 4), tensor("a", 4, offset=32)]), "the tensor 'a' twice"),
        (lambda path: write(path, [], [tensor("a")]), "a has 0 dimensions"),
        (lambda path: write(path, [], [tensor("a", 1, 1, 1, 1, 1)]), "a has 5 dimensions"),
        (lambda path: write(path, [], [tensor("a", 0, 1 << 62)]), "a has no numbers"),
        (lambda path: write(path, [], [tensor("a", 4, offset=8)]), "offset 8 of a is not aligned"),
        (lambda path: write(path, [], [tensor("a", 17)]), "it ends within a; 4 bytes are missing"),
        (lambda path: write(path, [], [tensor("a", MAX, MAX)]), "it ends within a"),
        (lambda path: write(path, [], [tensor("a", 4, offset=1 << 63)]), "it ends within a"),
        (lambda path: write(path, [], [tensor("a", 16), tensor("b", 8, offset=32)]), "b overlaps a"),
        (lambda path: write(path, [], [tensor("a", 33, kind=8)]), "a has rows of 33 numbers"),
        (lambda path: write(path, [], [tensor("a", 256, kind=10)]), "a has the type Q2_K, which .* Q4_K"),
        (lambda path: write(path, [], [tensor("a", 256, kind=99)]), "a has the type 99, which"),
    ],
)
def test_damage_is_refused_by_its_cause(tmp_path: Path, make: Callable[[Path], Any], message: str) -> None:
    make(tmp_path / "model.gguf")
    with pytest.raises(UserError, match=message):
        GGUFFile(tmp_path / "model.gguf")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot be read: .*No such file"):
        GGUFFile(tmp_path / "model.gguf")


def test_every_other_type_has_its_name(tmp_path: Path) -> None:
    for kind in gguf.GGMLQuantizationType:
        path = write(tmp_path / "model.gguf", [], [tensor("a", 256, kind=kind)], num_bytes=4096)
        try:
            assert GGUFFile(path).stored["a"].type_name == kind.name
        except UserError as error:
            assert f"a has the type {kind.name}, which" in str(error)
