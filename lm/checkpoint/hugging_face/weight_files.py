"""Read the tensors of Hugging Face's files: safetensors, or else ``pytorch_model.bin``; FP8 with its scales."""

from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lm.checkpoint.external_weights import read_json_object, refuse_other_formats
from lm.checkpoint.safe_load import WEIGHT_DTYPES, is_state_dict, map_safetensors, read_tensors
from lm.common.errors import UserError

_FILES = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth")  # the first that is there, whole or indexed
_FP8 = torch.float8_e4m3fn
_SCALES = ("weight_scale_inv", "weight_scale")  # of DeepSeek, and of llm-compressor; both are factors of the weights
_UNUSED_SCALES = ("input_scale", "output_scale", "k_scale", "v_scale")  # of activations and of the KV cache
_BLOCK = [128, 128]  # rows and columns with one scale, if the config does not say


def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the memory-mapped tensors of one file, or of the files that its index names, without running code. The
    memory of one of safetensors is free when it is dropped.

    Safetensors come before ``pytorch_model.bin``. Raises UserError if files are missing or damaged, or hold anything
    but tensors.
    """
    tensors: dict[str, Tensor] = {}
    for path in _find_files(directory):
        if path.suffix == ".safetensors":
            tensors |= map_safetensors(path)
            continue
        content = read_tensors(path, mmap=True)
        if not is_state_dict(content):
            raise UserError(f"{path} is not a model's weights: expected a dict of plain tensors by name.")
        tensors |= content
    return tensors


def _find_files(directory: Path) -> list[Path]:
    for name in _FILES:
        if (path := directory / name).exists():
            return [path]
        if (index := directory / f"{name}.index.json").exists():
            files = read_json_object(index).get("weight_map")
            if not isinstance(files, dict):
                raise UserError(f"{index} has no weight_map, the file of each tensor.")
            if outside := [name for name in files.values() if not isinstance(name, str) or Path(name).name != name]:
                raise UserError(f"{index} names {outside[0]!r}; each file must lie in {directory} itself.")
            return sorted({directory / name for name in files.values()})
    refuse_other_formats(directory)
    return [directory / _FILES[0]]  # its reader says that it is missing


class DequantizedWeights(UserDict[str, Tensor]):
    """The ``tensors`` of a model, those in FP8 multiplied by their scales, to float32, when they are looked up.

    A scale is one number, one for each row, or one for each block of ``weight_block_size`` in the config. Scales of
    activations are left out. Raises UserError if a scale is missing or does not fit its matrix.
    """

    def __init__(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any], directory: Path) -> None:
        self._directory = directory
        quantization = config.get("quantization_config")
        block = quantization.get("weight_block_size") if isinstance(quantization, dict) else None
        self._block = block or _BLOCK
        names = {name: self._find_scale(tensors, name) for name, tensor in tensors.items() if tensor.dtype == _FP8}
        self._scales = {name: (tensors[scale].float(), rows, columns) for name, (scale, rows, columns) in names.items()}
        used = {scale for scale, *_ in names.values()}
        prefixes = {name.removesuffix("weight") for name in names}
        used |= {f"{prefix}{name}" for prefix in prefixes for name in _UNUSED_SCALES}
        super().__init__({name: tensor for name, tensor in tensors.items() if name not in used})

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._scales:
            return self.data[name]
        weight = self.data[name].float()
        scales, rows, columns = self._scales[name]
        scales = scales.reshape(-(-len(weight) // rows), -1)
        if scales.shape[1] == 1:
            return weight.mul_(scales.repeat_interleave(rows, 0)[: len(weight)])
        for part, scale in zip(weight.split(rows), scales, strict=True):  # no second array of the matrix's size
            part.mul_(scale.repeat_interleave(columns)[: weight.shape[1]])
        return weight

    def _find_scale(self, tensors: Mapping[str, Tensor], name: str) -> tuple[str, int, int]:
        """Return the name of the scales of a matrix, and the rows and columns that have one of them."""
        names = [f"{name.removesuffix('weight')}{scale}" for scale in _SCALES]
        shape, found = tensors[name].shape, next((scale for scale in names if scale in tensors), None)
        if found is None or len(shape) != 2 or 0 in shape:
            raise UserError(
                f"{self._directory}: {name} is float8 without {names[0]}, the scales of a matrix; use all files of one "
                "model."
            )
        scales, block = tensors[found], self._block
        if scales.dtype not in WEIGHT_DTYPES:
            raise UserError(f"{self._directory}: {found} is {scales.dtype}; scales must be floating-point.")
        grids = {(): (shape[0], shape[1]), (1,): (shape[0], shape[1]), (1, 1): (shape[0], shape[1])}
        if isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block):
            grids[-(-shape[0] // block[0]), -(-shape[1] // block[1])] = (block[0], block[1])
        grids |= {(shape[0], 1): (1, shape[1]), (shape[0],): (1, shape[1])}
        if tuple(scales.shape) not in grids:
            raise UserError(
                f"{self._directory}: {found} has the shape {tuple(scales.shape)}, which is neither one scale of "
                f"{name}, {tuple(shape)}, nor one for each row or each block of {block}; use the model's own config."
            )
        return (found, *grids[tuple(scales.shape)])
