"""The container of a GGUF file: its metadata and its tensors, in a memory-mapped file.

Counts, lengths and offsets are checked against the size of the file before they are used: a file may be damaged, or
made to harm. Source: the specification of GGUF, ``docs/gguf.md`` of ggml.
"""

import mmap
import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lm.checkpoint.gguf.quantized_blocks import BLOCKS, dequantize
from lm.checkpoint.safe_load import refuse_lfs_pointer
from lm.common.errors import UserError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}  # by kind
_FLOAT_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TYPES = {0: "F32", 1: "F16", 30: "BF16"} | {block.number: name for name, block in BLOCKS.items()}
_OTHER_TYPES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    39: "MXFP4",
    40: "NVFP4",
    41: "Q1_0",
}


class StoredTensor(NamedTuple):
    """Where a tensor is in the file."""

    type_name: str
    """``F32``, ``F16``, ``BF16`` or a name of :data:`lm.checkpoint.gguf.quantized_blocks.BLOCKS`."""
    shape: tuple[int, ...]
    """The slowest dimension first, as in torch."""
    start: int
    """Position of its first byte in the file."""
    num_bytes: int


class GGUFFile(Mapping[str, Tensor]):
    """The tensors of a GGUF file by name, each read and dequantized when it is looked up, and the metadata.

    Quantized tensors become float32, others keep their dtype. Raises UserError if the file is missing, damaged, in an
    unknown version, or has a tensor of an unsupported type.
    """

    metadata: dict[str, Any]
    """Numbers, texts, lists of texts, and arrays of numbers. A float32 is the shortest decimal that it rounds from."""

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_lfs_pointer(path)
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise UserError(f"{path} cannot be read: {error}. It must be a complete GGUF file.") from None
        reader = _Reader(path, self._data)
        try:
            num_tensors, num_fields = reader.read_counts()
            self.metadata = reader.read_metadata(num_fields)
            self.stored = reader.read_tensors(num_tensors, _read_alignment(path, self.metadata))
        except (struct.error, ValueError) as error:  # ValueError: a length that no buffer has
            raise UserError(f"{path} is damaged: {error}. Download or write the file again.") from None

    def __getitem__(self, name: str) -> Tensor:
        stored = self.stored[name]
        data = np.frombuffer(self._data, np.uint8, stored.num_bytes, stored.start)
        if dtype := _FLOAT_DTYPES.get(stored.type_name):
            flat = torch.from_numpy(data.copy()).view(dtype)  # a copy: torch has no read-only memory
        else:
            flat = torch.from_numpy(dequantize(data, stored.type_name))
        return flat.view(stored.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def is_gguf(path: Path) -> bool:
    """Return whether ``path`` is a file whose name says that it is GGUF."""
    return path.suffix == ".gguf" and path.is_file()


def _read_alignment(path: Path, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 8 or alignment & (alignment - 1):
        raise UserError(f"{path}: general.alignment is {alignment!r}; it must be a power of two of at least 8.")
    return alignment


class _Reader:
    """Reads the header of a file from its first byte on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._position = path, data, 0

    def read_counts(self) -> tuple[int, int]:
        """Return the number of tensors and of metadata."""
        magic, version = self._unpack("4sI")
        if magic != _MAGIC:
            raise UserError(f"{self._path} is not a GGUF file: it does not begin with GGUF.")
        if version not in _VERSIONS:
            raise UserError(
                f"{self._path} has version {version} of GGUF; textmill reads {' and '.join(map(str, _VERSIONS))} in "
                "little-endian order. Convert it again with a current llama.cpp."
            )
        num_tensors, num_fields = self._unpack("QQ")
        return num_tensors, num_fields

    def read_metadata(self, number: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for _ in range(number):  # the file ends before many more than it has
            name = self._read_string()
            if name in metadata:
                raise ValueError(f"the metadata have {name!r} twice")
            (kind,) = self._unpack("I")
            metadata[name] = self._read_array() if kind == _ARRAY else self._read_value(kind)
        return metadata

    def read_tensors(self, number: int, alignment: int) -> dict[str, StoredTensor]:
        tensors: dict[str, StoredTensor] = {}
        for _ in range(number):
            name = self._read_string()
            if name in tensors:
                raise ValueError(f"it has the tensor {name!r} twice")
            (num_dimensions,) = self._unpack("I")
            if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
                raise ValueError(f"{name} has {num_dimensions} dimensions")
            shape = self._unpack(f"{num_dimensions}Q")[::-1]
            if 0 in shape:
                raise ValueError(f"{name} has no numbers")
            kind, offset = self._unpack("IQ")
            if kind not in _TYPES:
                raise UserError(
                    f"{self._path}: {name} has the type {_OTHER_TYPES.get(kind, kind)}, which textmill does not read; "
                    f"use a file of the same model with tensors of {', '.join(_TYPES.values())}."
                )
            if offset % alignment:
                raise ValueError(f"the offset {offset} of {name} is not aligned")
            tensors[name] = StoredTensor(_TYPES[kind], shape, offset, _count_bytes(name, _TYPES[kind], shape))
        first = -(-self._position // alignment) * alignment
        tensors = {name: tensor._replace(start=first + tensor.start) for name, tensor in tensors.items()}
        self._check_places(tensors)
        return tensors

    def _check_places(self, tensors: dict[str, StoredTensor]) -> None:
        """Raise ValueError if a tensor is not in the file, or overlaps another: each byte is one tensor's at most, so
        that the tensors need no more memory than the file allows."""
        end, before = 0, ""
        for name, tensor in sorted(tensors.items(), key=lambda item: item[1].start):
            if tensor.start < end:
                raise ValueError(f"{name} overlaps {before}")
            end, before = tensor.start + tensor.num_bytes, name
            if end > len(self._data):
                raise ValueError(f"it ends within {name}; {end - len(self._data):,} bytes are missing")

    def _unpack(self, form: str) -> tuple[Any, ...]:
        """Return little-endian values. Raises struct.error at the end of the file."""
        values = struct.unpack_from(f"<{form}", self._data, self._position)
        self._position += struct.calcsize(f"<{form}")
        return values

    def _read_string(self) -> str:
        (length,) = self._unpack("Q")
        start = self._position
        if length > len(self._data) - start:
            raise ValueError(f"a text of {length:,} bytes goes beyond its end")
        self._position += length
        return self._data[start : self._position].decode("utf-8", "replace")

    def _read_value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._read_string()
        if kind not in _NUMBERS:
            raise ValueError(f"it has metadata of the unknown kind {kind}")
        (value,) = self._unpack(_NUMBERS[kind])
        return float(str(np.float32(value))) if _NUMBERS[kind] == "f" else value  # 1e-5, not 9.99999974e-06

    def _read_array(self) -> Any:
        kind, count = self._unpack("IQ")
        if kind == _STRING:
            if count > (len(self._data) - self._position) // 8:  # each has a length
                raise ValueError(f"a list of {count:,} texts goes beyond its end")
            return [self._read_string() for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"it has a list of the unknown kind {kind}")
        dtype = np.dtype(f"<{_NUMBERS[kind]}") if _NUMBERS[kind] != "?" else np.dtype(np.uint8)
        if count > (len(self._data) - self._position) // dtype.itemsize:
            raise ValueError(f"a list of {count:,} numbers goes beyond its end")
        start = self._position
        self._position += count * dtype.itemsize
        return np.frombuffer(self._data[start : self._position], dtype)


def _count_bytes(name: str, type_name: str, shape: tuple[int, ...]) -> int:
    """Return the bytes of a tensor. Raises ValueError if its rows are not whole blocks."""
    if dtype := _FLOAT_DTYPES.get(type_name):
        return prod(shape) * dtype.itemsize
    block = BLOCKS[type_name]
    if shape[-1] % block.num_numbers:
        raise ValueError(f"{name} has rows of {shape[-1]} numbers, which are not blocks of {type_name}")
    return prod(shape) // block.num_numbers * block.num_bytes
