"""The tensors of Hugging Face's files whose form differs from ours: experts one by one, and matrices fused to one."""

import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from lm.checkpoint.hugging_face.architectures import BIAS_NAME, Architecture, Experts
from lm.common.errors import UserError
from lm.model.config import ModelConfig


def to_own_tensors(
    tensors: Mapping[str, Tensor], architecture: Architecture, config: ModelConfig, directory: Path
) -> Mapping[str, Tensor]:
    """Return the tensors of files with stacked experts and without fused matrices.

    Raises UserError if an expert's matrix is missing, or if a fused matrix has other rows than the config requires.
    """
    if architecture.experts:
        tensors = _join_experts(tensors, architecture.experts, directory)
    return _split_fused(tensors, architecture, config, directory) if architecture.fused else tensors


def from_own_tensors(tensors: dict[str, Tensor], architecture: Architecture) -> dict[str, Tensor]:
    """Undo :func:`to_own_tensors`."""
    if architecture.experts:
        tensors = _split_experts(tensors, architecture.experts)
    fused = {}
    for whole, parts in architecture.fused.items():
        for prefix in [
            name.removesuffix(f"{parts[0]}.weight") for name in tensors if name.endswith(f"{parts[0]}.weight")
        ]:
            fused[f"{prefix}{whole}.weight"] = torch.cat([tensors.pop(f"{prefix}{part}.weight") for part in parts])
    return tensors | fused


def _split_fused(
    tensors: Mapping[str, Tensor], architecture: Architecture, config: ModelConfig, directory: Path
) -> Mapping[str, Tensor]:
    """Return the tensors with the parts of each fused matrix, which are its rows one after the other."""
    rows = {"q_proj": config.num_heads, "k_proj": config.kv_heads, "v_proj": config.kv_heads}
    rows = {name: heads * config.resolved_head_dim for name, heads in rows.items()}
    split: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        whole = next((whole for whole in architecture.fused if name.endswith(f"{whole}.weight")), None)
        if whole is None:
            split[name] = tensor
            continue
        parts = architecture.fused[whole]
        sizes = [rows.get(part.rpartition(".")[2], config.d_ff) for part in parts]
        if tensor.ndim != 2 or len(tensor) != sum(sizes):
            raise UserError(
                f"{directory}: {name} has the shape {tuple(tensor.shape)}; the config requires "
                f"{' + '.join(map(str, sizes))} rows. Use all files of one model, with its own config."
            )
        prefix = name.removesuffix(f"{whole}.weight")
        split |= {f"{prefix}{part}.weight": piece for part, piece in zip(parts, tensor.split(sizes), strict=True)}
    return split


def _split_experts(weights: dict[str, Tensor], experts: Experts) -> dict[str, Tensor]:
    """Return ``weights``, named as in the files except for stacks of experts, with a tensor for each expert's matrix.

    Contiguous copies: safetensors stores no views. Sigmoid affinities get a bias of zeros if the model has none.
    """
    split: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        prefix, _, matrix = name.rpartition(".experts.")
        if prefix:
            for expert, part in enumerate(tensor):
                split[f"{prefix}.experts.{expert}.{experts.matrix_names[matrix]}.weight"] = part.clone()
        else:
            split[name] = tensor
        if experts.affinity == "sigmoid" and name.endswith(f"{experts.block}.gate.weight"):
            split.setdefault(f"{name.removesuffix('weight')}{BIAS_NAME}", torch.zeros(len(tensor)))
    return split


def _join_experts(weights: Mapping[str, Tensor], experts: Experts, directory: Path) -> dict[str, Tensor]:
    """Stack the matrices of experts: the reverse of :func:`_split_experts`. Raises UserError if one is missing."""
    ours_of = {theirs: ours for ours, theirs in experts.matrix_names.items()}
    pattern = re.compile(rf"(.*\.experts)\.([0-9]{{1,6}})\.({'|'.join(ours_of)})\.weight")
    stacks: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)
    joined: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if match := pattern.fullmatch(name):
            stacks[f"{match[1]}.{ours_of[match[3]]}"][int(match[2])] = tensor
        else:
            joined[name] = tensor
    for name, parts in stacks.items():
        shapes = {part.shape for part in parts.values()}
        if sorted(parts) != [*range(len(parts))] or len(shapes) > 1:
            raise UserError(f"{directory}: the experts of {name} are not complete, or their shapes differ.")
        joined[name] = torch.stack([parts[expert] for expert in range(len(parts))])
    return joined
