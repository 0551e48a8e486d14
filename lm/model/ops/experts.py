"""Feed-forward networks of experts, each for the tokens that chose it (Gale et al. 2022, MegaBlocks: without padding
to a capacity).

The pairs of a token and one of its experts are sorted by expert. Each expert multiplies its segment of the sorted
pairs: one product after the other, or all in one kernel of a GPU.
"""

from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model import functional
from lm.model.ops.expert_segments import mix_expert_segments

Activation = Literal["silu", "relu2"]

_GROUP_ROWS = 8  # rows of a group, and widths, are multiples of this: CUDA's kernel needs multiples of 16 bytes
_CAPABILITIES = (9, 10)  # Hopper and Blackwell: on other GPUs torch's grouped product waits for the host
_MAX_GROUPS = 1023  # of torch's grouped product


class ExpertWeights(NamedTuple):
    """Stacks of the matrices of E experts of width d."""

    w1: Tensor
    """(E, d, D)"""
    w2: Tensor
    """(E, D, d)"""
    w3: Tensor | None
    """(E, d, D), of a gated network."""


def mix_experts(x: Tensor, chosen: Tensor, gates: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    """Return for each token the sum of the outputs of its experts, each times its gate: (N, D).

    ``x`` (N, D). ``chosen`` (N, k) int64 are different experts of a token; number E stands for none. ``gates`` (N, k)
    are their weights. Gradients flow to ``x``, ``gates`` and ``weights``. Under autocast the products have its dtype.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        w3 = None if weights.w3 is None else weights.w3.to(dtype)
        x, weights = x.to(dtype), ExpertWeights(weights.w1.to(dtype), weights.w2.to(dtype), w3)
    if has_grouped_kernel(x, weights.w1):
        return mix_experts_grouped(x, chosen, gates, weights, activation)
    if x.is_cuda and torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot know the sizes of segments
        by_expert = gates.new_zeros(len(x), len(weights.w1) + 1).scatter(1, chosen, gates)
        return functional.mix_experts(x, by_expert[:, :-1], *weights, activation)
    pairs = sort_pairs(chosen, len(weights.w1))
    sorted_gates = gates.flatten()[pairs.order]
    return mix_expert_segments(x, sorted_gates, *weights, pairs.tokens, pairs.places, pairs.counts, activation)


def has_grouped_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether torch has a grouped product for ``x`` and ``weight`` (E, d, D) that needs no help of the host."""
    is_aligned = all(width % _GROUP_ROWS == 0 for width in weight.shape[1:]) and len(weight) <= _MAX_GROUPS
    is_supported = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    return is_aligned and is_supported and torch.cuda.get_device_capability(x.device)[0] in _CAPABILITIES


class SortedPairs(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and then by token."""

    order: Tensor
    """(N k,) int64: index of each pair in the flat ``chosen``."""
    tokens: Tensor
    """(N k,) int64: token of each pair."""
    places: Tensor
    """(N, k) int64: place of each pair of ``chosen`` in this order."""
    counts: Tensor
    """(E,) int64: pairs of each expert. Pairs without an expert come last and are not counted."""


def sort_pairs(chosen: Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of ``chosen`` (N, k)."""
    flat = chosen.flatten()
    experts, order = flat.sort(stable=True)
    ranks = torch.arange(len(flat), device=flat.device)
    places = torch.empty_like(order).scatter_(0, order, ranks).view(chosen.shape)
    # Not by adding up: a GPU would add to few numbers from many threads.
    ends = torch.searchsorted(experts, torch.arange(num_experts, device=flat.device), right=True)
    return SortedPairs(order, order // chosen.shape[-1], places, ends.diff(prepend=ends.new_zeros(1)))


def mix_experts_grouped(
    x: Tensor, chosen: Tensor, gates: Tensor, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Return :func:`mix_experts` by torch's grouped products. All shapes depend on those of the inputs alone.

    The rows of each expert are padded to a multiple of 8 by rows whose gates are 0. An expert without pairs has them
    too, because some GPUs leave the gradient of an empty group unwritten. Pairs without an expert come after all
    groups, where results and gradients are undefined, so they are masked.
    """
    pairs, has_expert = sort_pairs(chosen, len(weights.w1)), chosen < len(weights.w1)
    group_rows = (pairs.counts.clamp(min=1) + _GROUP_ROWS - 1) // _GROUP_ROWS * _GROUP_ROWS
    ends = group_rows.cumsum(0).int()
    # The place of a pair moves by the rows that pad the groups before its own; pairs without an expert stay last.
    places = pairs.places + F.pad((group_rows - pairs.counts).cumsum(0), (1, 0))[chosen]
    row_count = chosen.numel() + len(weights.w1) * _GROUP_ROWS
    pair_tokens = torch.arange(len(x), device=x.device)[:, None].expand_as(chosen)
    tokens = places.new_zeros(row_count).scatter(0, places.flatten(), pair_tokens.flatten())
    chosen_gates = torch.where(has_expert, gates, 0)
    row_gates = gates.new_zeros(row_count).scatter(0, places.flatten(), chosen_gates.flatten())

    rows: Tensor = _TakeRows.apply(x, tokens, places, has_expert)
    inputs = weights.w1 if weights.w3 is None else torch.cat([weights.w1, weights.w3], 1)
    inner, *values = F.grouped_mm(rows, inputs.mT, offs=ends).split(weights.w1.shape[1], -1)
    hidden = F.silu(inner) if activation == "silu" else F.relu(inner).square()
    if values:
        hidden = hidden * values[0]
    hidden = hidden * row_gates[:, None].to(hidden.dtype)
    out: Tensor = _SumRows.apply(F.grouped_mm(hidden, weights.w2.mT, offs=ends), tokens, places, has_expert)
    return out


class _TakeRows(torch.autograd.Function):
    """Copy the row ``tokens[i]`` of (N, D) to row i. The backward pass adds up the rows at ``places``.

    Autograd's own would add atomically, or sort the places.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: Tensor, places: Tensor, is_counted: Tensor) -> Tensor:
        ctx.save_for_backward(places, is_counted)
        return x.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_rows(grad, *ctx.saved_tensors), None, None, None


class _SumRows(torch.autograd.Function):
    """The transpose of :class:`_TakeRows`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tokens: Tensor, places: Tensor, is_counted: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        return _sum_rows(rows, places, is_counted)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return grad.index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum_rows(rows: Tensor, places: Tensor, is_counted: Tensor) -> Tensor:
    """Return the sum of the rows at the ``places`` (N, k) of each token that are counted: (N, D)."""
    return torch.where(is_counted[..., None], rows[places], 0).sum(1)
