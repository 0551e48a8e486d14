"""Feed-forward networks of experts as one product for each segment of sorted pairs. The fast form on CPUs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model.ops.matmul import count_padding_rows, linear_forward, linear_weight_grad, runs_on_mkl


def mix_expert_segments(
    x: Tensor,
    gates: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    counts: Tensor,
    activation: str,
) -> Tensor:
    """Return for each token the sum of the outputs of its experts, each times its gate: (N, D).

    ``x`` (N, D). ``gates`` (N k,), ``tokens`` (N k,), ``places`` (N, k) and ``counts`` (E,) are those of
    :class:`lm.model.ops.experts.SortedPairs`, the matrices those of :class:`lm.model.ops.experts.ExpertWeights`. The
    gates multiply the input of the last matrix, so that the backward pass needs no output of an expert.
    """
    out: Tensor = _ExpertSegments.apply(x, gates, w1, w2, w3, tokens, places, counts, activation)
    return out


class _ExpertSegments(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gates: Tensor,
        w1: Tensor,
        w2: Tensor,
        w3: Tensor | None,
        tokens: Tensor,
        places: Tensor,
        counts: Tensor,
        activation: str,
    ) -> Tensor:
        function = _forward_op if torch.compiler.is_compiling() else _forward
        out, inner, values = function(x, gates, w1, w2, w3, tokens, places, counts, activation)
        ctx.save_for_backward(x, gates, w1, w2, w3, tokens, places, counts, inner, values)
        ctx.activation = activation
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        function: Any = _backward_op if torch.compiler.is_compiling() else _backward
        saved = ctx.saved_tensors  # activation checkpointing computes them once only
        grad_x, grad_gates, grad_w1, grad_w2, grad_w3 = function(grad, *saved, ctx.activation)
        has_w3 = saved[4] is not None
        return grad_x, grad_gates, grad_w1, grad_w2, grad_w3 if has_w3 else None, None, None, None, None


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


def _segments(counts: Tensor, is_padded: bool) -> Iterator[_Segment]:
    """Yield the segment of each expert that has pairs."""
    start = first = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            end, last = start + count, first + count + (count_padding_rows(count) if is_padded else 0)
            yield _Segment(expert, slice(start, end), slice(first, last))
            start, first = end, last


def _forward(
    x: Tensor,
    gates: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    counts: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and ``w1 x`` and ``w3 x`` of the padded segments for the backward pass: up to 9/8 N k rows."""
    inner = x.new_empty(len(tokens) + len(tokens) // 8, w1.shape[1])
    values = torch.empty_like(inner) if w3 is not None else x.new_empty(0)
    outputs = x.new_empty(len(tokens), x.shape[1])
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
        outputs[segment.pairs] = linear_forward(hidden, w2[expert])[: end - segment.pairs.start]
    outputs[end:] = 0  # pairs without an expert
    return _sum_pairs(outputs, places), inner, values


def _backward(
    grad: Tensor,
    x: Tensor,
    gates: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    counts: Tensor,
    inner: Tensor,
    values: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``x``, ``gates``, ``w1``, ``w2`` and ``w3``; that of a missing ``w3`` is empty."""
    grad_rows = x.new_empty(len(tokens), x.shape[1])
    grad_gates = torch.zeros_like(gates)
    grad_w1, grad_w2 = torch.zeros_like(w1), torch.zeros_like(w2)
    grad_w3 = torch.zeros_like(w3) if w3 is not None else x.new_empty(0)
    end = 0
    for segment in _segments(counts, not runs_on_mkl(x)):
        expert, end = segment.expert, segment.pairs.stop
        indices = segment.pad(tokens[segment.pairs])
        grad_of_rows, grad_of_gates, grad_w1[expert], grad_w2[expert], grad_of_w3 = _expert_backward(
            grad.index_select(0, indices),
            x.index_select(0, indices),
            segment.pad(gates[segment.pairs])[:, None].to(x.dtype),
            inner[segment.padded],
            values[segment.padded] if w3 is not None else None,
            w1[expert],
            w2[expert],
            w3[expert] if w3 is not None else None,
            activation,
        )
        count = end - segment.pairs.start
        grad_rows[segment.pairs], grad_gates[segment.pairs] = grad_of_rows[:count], grad_of_gates[:count]
        if grad_of_w3 is not None:
            grad_w3[expert] = grad_of_w3
    grad_rows[end:] = 0
    return _sum_pairs(grad_rows, places), grad_gates, grad_w1, grad_w2, grad_w3


def _expert_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    inner: Tensor,
    values: Tensor | None,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of ``x``, the gates ``scale`` and the matrices, for the rows of one expert."""
    active = F.silu(inner) if activation == "silu" else F.relu(inner).square_()
    hidden = active if values is None else active * values
    grad_hidden = linear_forward(grad, w2.T)  # of the hidden units times the gate
    grad_gates = (grad_hidden * hidden).sum(-1)
    grad_w2 = linear_weight_grad(hidden * scale, grad)
    grad_hidden *= scale
    grad_x = grad_w3 = None
    if values is not None and w3 is not None:
        grad_value = active.mul_(grad_hidden)
        grad_hidden *= values
        grad_w3 = linear_weight_grad(x, grad_value)
        grad_x = linear_forward(grad_value, w3.T)
    if activation == "silu":
        grad_inner = torch.ops.aten.silu_backward(grad_hidden, inner)
    else:
        grad_inner = grad_hidden * F.relu(inner) * 2
    grad_w1 = linear_weight_grad(x, grad_inner)
    part = linear_forward(grad_inner, w1.T)
    return part if grad_x is None else grad_x.add_(part), grad_gates, grad_w1, grad_w2, grad_w3


def _sum_pairs(rows: Tensor, places: Tensor) -> Tensor:
    """Return the sum of the rows at the ``places`` (N, k) of each token: (N, D)."""
    return F.embedding_bag(places, rows, mode="sum")


# torch.compile takes each as one operation: the sizes of segments are known at run time only.
_forward_op = torch.library.custom_op("textmill::expert_segments", _forward, mutates_args=())
_backward_op = torch.library.custom_op("textmill::expert_segments_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(
    x: Tensor,
    gates: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    counts: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    inner = x.new_empty(len(tokens) + len(tokens) // 8, w1.shape[1])
    return torch.empty_like(x), inner, torch.empty_like(inner) if w3 is not None else x.new_empty(0)


@_backward_op.register_fake
def _(
    grad: Tensor,
    x: Tensor,
    gates: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    tokens: Tensor,
    places: Tensor,
    counts: Tensor,
    inner: Tensor,
    values: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_w3 = torch.empty_like(w3) if w3 is not None else x.new_empty(0)
    return torch.empty_like(x), torch.empty_like(gates), torch.empty_like(w1), torch.empty_like(w2), grad_w3
