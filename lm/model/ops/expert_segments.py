"""Feed-forward networks of experts as one product for each segment of sorted pairs. The fast form on CPUs."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from lm.model.ops.linear import linear_forward, linear_weight_grad


class ExpertSegments(torch.autograd.Function):
    """``apply(x, gates, w1, w2, w3, tokens, places, counts, activation)`` → (N, D).

    ``gates`` (N k,), ``tokens``, ``places`` and ``counts`` are in the order of
    :class:`lm.model.ops.experts.SortedPairs`. The gates multiply the input of the last matrix, so that the backward pass
    needs no output of an expert.
    """

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
        function = _backward_op if torch.compiler.is_compiling() else _backward
        saved = ctx.saved_tensors  # activation checkpointing computes them once only
        *grads, grad_w3 = function(grad, *saved, ctx.activation)
        return *grads, None if saved[4] is None else grad_w3, None, None, None, None


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
    """Return the output, and ``w1 x`` and ``w3 x`` of the sorted pairs, (N k, d) each, for the backward pass."""
    inner = x.new_empty(len(tokens), w1.shape[1])
    values = torch.empty_like(inner) if w3 is not None else x.new_empty(0)
    outputs = x.new_empty(len(tokens), x.shape[1])
    end = 0
    for expert, start, end in _segments(counts):
        rows = x.index_select(0, tokens[start:end])
        gate = linear_forward(rows, w1[expert])
        inner[start:end] = gate
        hidden = F.silu(gate) if activation == "silu" else F.relu(gate).square_()
        if w3 is not None:
            value = linear_forward(rows, w3[expert])
            values[start:end] = value
            hidden *= value
        hidden *= gates[start:end, None]
        outputs[start:end] = linear_forward(hidden, w2[expert])
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
    for expert, start, end in _segments(counts):
        rows, grad_out = (source.index_select(0, tokens[start:end]) for source in (x, grad))
        scale, gate = gates[start:end, None].to(x.dtype), inner[start:end]
        active = F.silu(gate) if activation == "silu" else F.relu(gate).square_()
        hidden = active * values[start:end] if w3 is not None else active
        grad_hidden = linear_forward(grad_out, w2[expert].T)  # of the hidden units times the gate
        grad_gates[start:end] = (grad_hidden * hidden).sum(-1)
        grad_w2[expert] = linear_weight_grad(hidden * scale, grad_out)
        grad_hidden *= scale
        if w3 is not None:
            grad_value = grad_hidden * active
            grad_hidden *= values[start:end]
            grad_w3[expert] = linear_weight_grad(rows, grad_value)
        if activation == "silu":
            grad_gate = torch.ops.aten.silu_backward(grad_hidden, gate)
        else:
            grad_gate = grad_hidden * F.relu(gate) * 2
        grad_w1[expert] = linear_weight_grad(rows, grad_gate)
        part = linear_forward(grad_gate, w1[expert].T)
        if w3 is not None:
            part += linear_forward(grad_value, w3[expert].T)
        grad_rows[start:end] = part
    grad_rows[end:] = 0
    return _sum_pairs(grad_rows, places), grad_gates, grad_w1, grad_w2, grad_w3


def _segments(counts: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield (expert, first pair, end) of each expert that has pairs."""
    start = 0
    for expert, count in enumerate(counts.tolist()):
        if count:
            yield expert, start, start + count
            start += count


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
    inner = x.new_empty(len(tokens), w1.shape[1])
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
