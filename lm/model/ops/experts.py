"""Feed-forward networks of experts, each for the tokens that chose it (Gale et al. 2022, MegaBlocks: without padding
to a capacity).

The pairs of a token and one of its experts are sorted by expert. Each expert multiplies its segment of the sorted
pairs: one matmul after the other, the fast form on CPUs, or all in one kernel of a GPU.
Shapes: N tokens, D d_model, F inner width of an expert, E experts, A experts of a token (top_k), P = N · A pairs,
R rows of the grouped matmuls.
"""

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model import functional
from lm.model.ops.matmul import count_padding_rows, linear_forward, linear_weight_grad, runs_on_mkl

Activation = Literal["silu", "relu2"]

_GROUP_ROWS = 8  # rows of a group, and widths, are multiples of this: CUDA's kernel needs multiples of 16 bytes


class ExpertWeights(NamedTuple):
    """Stacks of the matrices of E experts."""

    w1: Tensor
    """(E, F, D)"""
    w2: Tensor
    """(E, D, F)"""
    w3: Tensor | None
    """(E, F, D), of a gated network."""


def mix_experts(
    x_ND: Tensor, chosen_NA: Tensor, gates_NA: Tensor, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Return for each token the sum of the outputs of its experts, each times its gate: (N, D).

    ``chosen`` int64 are different experts of a token; number E stands for none. Gradients flow to ``x``, ``gates`` and
    ``weights``. Under autocast the matmuls have its dtype.
    """
    if torch.is_autocast_enabled(x_ND.device.type):
        dtype = torch.get_autocast_dtype(x_ND.device.type)
        w3 = None if weights.w3 is None else weights.w3.to(dtype)
        x_ND, weights = x_ND.to(dtype), ExpertWeights(weights.w1.to(dtype), weights.w2.to(dtype), w3)
    if has_grouped_kernel(x_ND, weights.w1):
        return mix_experts_grouped(x_ND, chosen_NA, gates_NA, weights, activation)
    num_experts = len(weights.w1)
    if x_ND.is_cuda and torch.cuda.is_current_stream_capturing():  # a CUDA graph cannot know the sizes of segments
        gates_by_expert = gates_NA.new_zeros(len(x_ND), num_experts + 1).scatter(1, chosen_NA, gates_NA)
        return functional.mix_experts(x_ND, gates_by_expert[:, :-1], *weights, activation)
    pairs = sort_pairs(chosen_NA, num_experts)
    gates_P = gates_NA.flatten()[pairs.order]
    out_ND: Tensor = _mix_segments(x_ND, gates_P, *weights, pairs.tokens, pairs.places, pairs.counts, activation)[0]
    return out_ND


def has_grouped_kernel(x_ND: Tensor, weight_EFD: Tensor) -> bool:
    """Return whether torch has a grouped matmul for ``x`` and ``weight`` that needs no help of the host."""
    is_aligned = all(width % _GROUP_ROWS == 0 for width in weight_EFD.shape[1:]) and len(weight_EFD) < 1024
    is_supported = x_ND.is_cuda and x_ND.dtype == torch.bfloat16 and hasattr(F, "grouped_mm")
    # Hopper and Blackwell: on other GPUs the kernel waits for the host.
    return is_aligned and is_supported and torch.cuda.get_device_capability(x_ND.device)[0] in (9, 10)


class SortedPairs(NamedTuple):
    """Pairs of a token and an expert, sorted by expert and then by token."""

    order: Tensor
    """(P,) int64: index of each pair in the flat ``chosen``."""
    tokens: Tensor
    """(P,) int64: token of each pair."""
    places: Tensor
    """(N, A) int64: place of each pair of ``chosen`` in this order."""
    counts: Tensor
    """(E,) int64: pairs of each expert. Pairs without an expert come last and are not counted."""


def sort_pairs(chosen_NA: Tensor, num_experts: int) -> SortedPairs:
    """Sort the pairs of ``chosen``."""
    experts_P, order_P = chosen_NA.flatten().sort(stable=True)
    ranks_P = torch.arange(len(experts_P), device=experts_P.device)
    places_NA = torch.empty_like(order_P).scatter_(0, order_P, ranks_P).view(chosen_NA.shape)
    # Not by adding up: a GPU would add to few numbers from many threads.
    ends_E = torch.searchsorted(experts_P, torch.arange(num_experts, device=experts_P.device), right=True)
    counts_E = ends_E.diff(prepend=ends_E.new_zeros(1))
    return SortedPairs(order_P, order_P // chosen_NA.shape[-1], places_NA, counts_E)


def mix_experts_grouped(
    x_ND: Tensor, chosen_NA: Tensor, gates_NA: Tensor, weights: ExpertWeights, activation: Activation
) -> Tensor:
    """Return :func:`mix_experts` by torch's grouped matmuls. All shapes depend on those of the inputs alone.

    The rows of each expert are padded to a multiple of 8 by rows whose gates are 0: R rows in all. An expert without
    pairs has them too, because some GPUs leave the gradient of an empty group unwritten. Pairs without an expert come
    after all groups, where results and gradients are undefined, so they are masked.
    """
    pairs, has_expert_NA = sort_pairs(chosen_NA, len(weights.w1)), chosen_NA < len(weights.w1)
    group_rows_E = (pairs.counts.clamp(min=1) + _GROUP_ROWS - 1) // _GROUP_ROWS * _GROUP_ROWS
    ends_E = group_rows_E.cumsum(0).int()
    # The place of a pair moves by the rows that pad the groups before its own; pairs without an expert stay last.
    places_NA = pairs.places + F.pad((group_rows_E - pairs.counts).cumsum(0), (1, 0))[chosen_NA]
    row_count = chosen_NA.numel() + len(weights.w1) * _GROUP_ROWS
    tokens_NA = torch.arange(len(x_ND), device=x_ND.device)[:, None].expand_as(chosen_NA)
    tokens_R = places_NA.new_zeros(row_count).scatter(0, places_NA.flatten(), tokens_NA.flatten())
    counted_gates_NA = torch.where(has_expert_NA, gates_NA, 0)
    gates_R = gates_NA.new_zeros(row_count).scatter(0, places_NA.flatten(), counted_gates_NA.flatten())

    rows_RD: Tensor = _TakeRows.apply(x_ND, tokens_R, places_NA, has_expert_NA)
    inputs = weights.w1 if weights.w3 is None else torch.cat([weights.w1, weights.w3], 1)
    inner_RF, *values_RF = F.grouped_mm(rows_RD, inputs.mT, offs=ends_E).split(weights.w1.shape[1], -1)
    hidden_RF = F.silu(inner_RF) if activation == "silu" else F.relu(inner_RF).square()
    if values_RF:
        hidden_RF = hidden_RF * values_RF[0]
    hidden_RF = hidden_RF * gates_R[:, None].to(hidden_RF.dtype)
    outputs_RD = F.grouped_mm(hidden_RF, weights.w2.mT, offs=ends_E)
    out_ND: Tensor = _SumRows.apply(outputs_RD, tokens_R, places_NA, has_expert_NA)
    return out_ND


class _TakeRows(torch.autograd.Function):
    """Copy the row ``tokens[i]`` of (N, D) to row i of (R, D). The backward pass adds up the rows at ``places``.

    Autograd's own would add atomically, or sort the places.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, tokens_R: Tensor, places_NA: Tensor, is_counted_NA: Tensor) -> Tensor:
        ctx.save_for_backward(places_NA, is_counted_NA)
        return x_ND.index_select(0, tokens_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _sum_rows(grad_RD, *ctx.saved_tensors), None, None, None


class _SumRows(torch.autograd.Function):
    """The transpose of :class:`_TakeRows`."""

    @staticmethod
    def forward(ctx: Any, rows_RD: Tensor, tokens_R: Tensor, places_NA: Tensor, is_counted_NA: Tensor) -> Tensor:
        ctx.save_for_backward(tokens_R)
        return _sum_rows(rows_RD, places_NA, is_counted_NA)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> tuple[Tensor, None, None, None]:
        return grad_ND.index_select(0, ctx.saved_tensors[0]), None, None, None


def _sum_rows(rows_RD: Tensor, places_NA: Tensor, is_counted_NA: Tensor) -> Tensor:
    """Return the sum of the counted rows of each token: (N, D)."""
    return torch.where(is_counted_NA[..., None], rows_RD[places_NA], 0).sum(1)


class _Segment(NamedTuple):
    """The sorted pairs of an expert."""

    expert: int
    pairs: slice
    padded: slice
    """Rows of ``inner`` and ``values``, with those that pad the segment to a size that occurs often."""

    def pad(self, rows: Tensor) -> Tensor:
        """Append zeros to the last dimension, which is that of the pairs."""
        padding = self.padded.stop - self.padded.start - rows.shape[-1]
        return F.pad(rows, (0, padding)) if padding else rows


def _segments(counts_E: Tensor, is_padded: bool) -> Iterator[_Segment]:
    """Yield the segment of each expert that has pairs."""
    start = first = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            end, last = start + count, first + count + (count_padding_rows(count) if is_padded else 0)
            yield _Segment(expert, slice(start, end), slice(first, last))
            start, first = end, last


# torch.compile takes each as one operation: the sizes of segments are known at run time only.
@torch.library.custom_op("textmill::expert_segments", mutates_args=())
def _mix_segments(
    x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None,
    tokens: Tensor, places: Tensor, counts: Tensor, activation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the output (N, D), and for the backward pass ``w1 x`` and ``w3 x`` of padded segments: up to 9/8 P rows.

    ``x`` (N, D), sorted ``gates`` (P,); ``tokens``, ``places`` and ``counts`` are those of :class:`SortedPairs`. The
    gates multiply the input of the last matrix, so that the backward pass needs no output of an expert.
    """
    inner = x.new_empty(len(tokens) + len(tokens) // 8, w1.shape[1])
    values = torch.empty_like(inner) if w3 is not None else x.new_empty(0)
    outputs_PD = x.new_empty(len(tokens), x.shape[1])
    end = 0
    for segment in _segments(counts, not runs_on_mkl(x)):
        expert, end = segment.expert, segment.pairs.stop
        rows = x.index_select(0, segment.pad(tokens[segment.pairs]))  # padded by the first token, whose gate is 0 there
        inner[segment.padded] = gate = linear_forward(rows, w1[expert])
        hidden = F.silu(gate) if activation == "silu" else F.relu(gate).square_()
        if w3 is not None:
            values[segment.padded] = value = linear_forward(rows, w3[expert])
            hidden *= value
        hidden *= segment.pad(gates[segment.pairs])[:, None]
        outputs_PD[segment.pairs] = linear_forward(hidden, w2[expert])[: end - segment.pairs.start]
    outputs_PD[end:] = 0  # pairs without an expert
    return F.embedding_bag(places, outputs_PD, mode="sum"), inner, values


@torch.library.custom_op("textmill::expert_segments_backward", mutates_args=())
def _mix_segments_backward(
    grad: Tensor, x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None,
    tokens: Tensor, places: Tensor, counts: Tensor, inner: Tensor, values: Tensor, activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of ``x``, ``gates``, ``w1``, ``w2`` and ``w3``; that of a missing ``w3`` is empty."""
    grad_rows_PD = x.new_empty(len(tokens), x.shape[1])
    grad_gates = torch.zeros_like(gates)
    grad_w1, grad_w2 = torch.zeros_like(w1), torch.zeros_like(w2)
    grad_w3 = torch.zeros_like(w3) if w3 is not None else x.new_empty(0)
    end = 0
    for segment in _segments(counts, not runs_on_mkl(x)):
        expert, end = segment.expert, segment.pairs.stop
        count = end - segment.pairs.start
        indices = segment.pad(tokens[segment.pairs])
        rows, grad_out = x.index_select(0, indices), grad.index_select(0, indices)
        gate = segment.pad(gates[segment.pairs])[:, None].to(x.dtype)
        hidden = inner[segment.padded]
        active = F.silu(hidden) if activation == "silu" else F.relu(hidden).square_()
        gated = active if w3 is None else active * values[segment.padded]
        grad_hidden = linear_forward(grad_out, w2[expert].T)  # of the hidden units times the gate
        grad_gates[segment.pairs] = (grad_hidden * gated).sum(-1)[:count]
        grad_w2[expert] = linear_weight_grad(gated * gate, grad_out)
        grad_hidden *= gate
        grad_x = None
        if w3 is not None:
            grad_value = active.mul_(grad_hidden)
            grad_hidden *= values[segment.padded]
            grad_w3[expert] = linear_weight_grad(rows, grad_value)
            grad_x = linear_forward(grad_value, w3[expert].T)
        if activation == "silu":
            grad_inner = torch.ops.aten.silu_backward(grad_hidden, hidden)
        else:
            grad_inner = grad_hidden * F.relu(hidden) * 2
        grad_w1[expert] = linear_weight_grad(rows, grad_inner)
        grad_x_of_w1 = linear_forward(grad_inner, w1[expert].T)
        grad_rows_PD[segment.pairs] = (grad_x_of_w1 if grad_x is None else grad_x.add_(grad_x_of_w1))[:count]
    grad_rows_PD[end:] = 0
    return F.embedding_bag(places, grad_rows_PD, mode="sum"), grad_gates, grad_w1, grad_w2, grad_w3


@_mix_segments.register_fake
def _(
    x: Tensor, gates: Tensor, w1: Tensor, w2: Tensor, w3: Tensor | None, tokens: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    inner = x.new_empty(len(tokens) + len(tokens) // 8, w1.shape[1])
    return torch.empty_like(x), inner, torch.empty_like(inner) if w3 is not None else x.new_empty(0)


@_mix_segments_backward.register_fake
def _(grad: Tensor, x: Tensor, *others: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(0) if tensor is None else torch.empty_like(tensor) for tensor in (x, *others[:4]))


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _segments_autograd(ctx: Any, grad: Tensor, *unused: None) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # activation checkpointing computes them once only
    *grads, grad_w3 = _mix_segments_backward(grad, *saved, ctx.activation)
    return *grads, None if saved[4] is None else grad_w3, None, None, None, None


_mix_segments.register_autograd(_segments_autograd, setup_context=_save_for_backward)
