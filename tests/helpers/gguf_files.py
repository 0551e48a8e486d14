"""GGUF files with changed metadata and tensors. Tests that import it are skipped without the library."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

gguf = pytest.importorskip("gguf", reason="the gguf library is not installed")

Change = Callable[[dict[str, Any], dict[str, Any]], Any]
"""Changes in place the metadata, {name: (value, types)}, and the tensors, {name: (data, type)}."""


def rewrite(path: Path, change: Change) -> Path:
    """Write a GGUF file again, with metadata and tensors that ``change`` has changed in place."""
    reader = gguf.GGUFReader(path)
    fields: dict[str, Any] = {
        name: (field.contents(), field.types)
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.") and name != "general.architecture"
    }
    tensors = {tensor.name: (tensor.data, tensor.tensor_type) for tensor in reader.tensors}
    architecture = {"name": reader.fields["general.architecture"].contents()}
    fields["architecture"] = architecture
    change(fields, tensors)
    del fields["architecture"]
    changed = path.with_name("changed.gguf")
    writer = gguf.GGUFWriter(changed, architecture["name"])
    for name, (value, types) in fields.items():
        writer.add_key_value(name, value, types[0], types[1] if len(types) > 1 else None)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return changed


def with_field(name: str, value: Any, kind: str = "UINT32") -> Change:
    types = [gguf.GGUFValueType.ARRAY] * isinstance(value, list) + [gguf.GGUFValueType[kind]]
    return lambda fields, _: fields.update({name: (value, types)})


def renamed(name: str) -> Change:
    return lambda fields, _: fields["architecture"].update(name=name)


def without(name: str) -> Change:
    return lambda fields, tensors: fields.pop(name, None) or tensors.pop(name)


def with_tensor(name: str, tensor: torch.Tensor) -> Change:
    return lambda _, tensors: tensors.update({name: (tensor.numpy(), gguf.GGMLQuantizationType.F32)})
