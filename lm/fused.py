"""Fast forms of what costs a training step most beside its matrix products: fewer passes over memory, less kept.

Each equals the plain form beside its caller or in the tests, forward and backward. Under ``torch.compile``, which
fuses for itself, the callers take the plain forms.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_CHUNK_BYTES = {"cpu": 1 << 24, "cuda": 1 << 30}  # of float32 logits at a time: half a cache; enough for a GPU
_ONEDNN = torch.backends.mkldnn.is_available()
_HAS_BFLOAT16 = _ONEDNN and torch.ops.mkldnn._is_mkldnn_bf16_supported()
_PART = 1 << 18  # elements of a tensor that a processor's cache holds, and of a few more besides


def _has_onednn(x: Tensor) -> bool:
    """Whether products of float32 matrices are oneDNN's: twice as fast as MKL's, torch's choice, where the processor
    is not of MKL's maker. Not for a few rows, whose product is done before oneDNN has begun."""
    rows = x.numel() // x.shape[-1]
    return x.device.type == "cpu" and x.dtype == torch.float32 and rows >= 64 and _ONEDNN


@torch.library.custom_op("textmill::onednn_product", mutates_args=())
def _onednn_product(x: Tensor, weight: Tensor) -> Tensor:
    """``x weightᵀ`` by oneDNN, for a compiled graph: torch's compiler takes its operator with constant weights only."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found


@_onednn_product.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """``x weightᵀ``."""
    if not _has_onednn(x):
        return x @ weight.T
    if torch.compiler.is_compiling():
        return _onednn_product(x, weight)
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return _product(gradient, weight.T), _weight_gradient(x.flatten(0, -2), gradient.flatten(0, -2))


def _weight_gradient(x: Tensor, gradient: Tensor) -> Tensor:
    """``gradientᵀ x`` (V, D), the wider factor in the place where oneDNN is fast."""
    if gradient.shape[-1] > x.shape[-1]:
        return _product(x.T, gradient.T).T
    return _product(gradient.T, x.T)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x weightᵀ``: (..., D), (V, D) → (..., V)."""
    if _has_onednn(x) and not torch.is_autocast_enabled("cpu"):
        product: Tensor = _Linear.apply(x, weight)
        return product
    return F.linear(x, weight)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result and what each row was multiplied by."""
    h = x.float()
    mean_square = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square_().div_(h.shape[-1])
    scale = mean_square.add_(eps).rsqrt_()
    return (h * scale).mul_(weight).to(x.dtype), scale


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = _rms_norm(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed, gradient = x.float() * scale, gradient.float()
        product = (gradient * normed).flatten(0, -2)
        of_weight = product.sum(0).to(weight.dtype)
        along = torch.mv(product, weight.float()).div_(x.shape[-1]).view(scale.shape)
        of_x = (gradient * weight).sub_(normed.mul_(along)).mul_(scale)
        return of_x.to(x.dtype), of_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / sqrt(mean(x²) + eps) · weight`` over the last dimension, in float32; the shape and dtype of ``x``."""
    if not torch.is_grad_enabled():
        return _rms_norm(x, weight, eps)[0]
    normed: Tensor = _RmsNorm.apply(x, weight, eps)
    return normed


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        for part_gate, part_up, part_out in _parts(gate, up, out):
            torch.ops.aten.silu.out(part_gate, out=part_out)
            part_out.mul_(part_up)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate, of_up = torch.empty_like(gate), torch.empty_like(up)
        for part, part_gate, part_up, part_of_gate, part_of_up in _parts(
            gradient.contiguous(), gate, up, of_gate, of_up
        ):
            torch.mul(part, F.silu(part_gate), out=part_of_up)
            torch.ops.aten.silu_backward.grad_input(part * part_up, part_gate, grad_input=part_of_gate)
        return of_gate, of_up


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """``silu(gate) ⊙ up``, both of one shape."""
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    product: Tensor = _SwiGlu.apply(gate, up)
    return product


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, some rows of each at a time on a processor, whose cache these fit."""
    flat = [tensor.view(-1, tensor.shape[-1]) for tensor in tensors]
    rows = max(1, _PART // flat[0].shape[-1]) if flat[0].device.type == "cpu" else len(flat[0])
    return zip(*(tensor.split(rows) for tensor in flat), strict=True)


_SCORES = 1 << 19  # of attention at a time, in bfloat16: they and their gradients stay in a processor's cache
_QUERIES = 256  # at a time, so that most of the keys that lie after them are left out
_LONGEST = 1024  # in tokens; for twice as many torch's is as fast


@torch.library.custom_op("textmill::causal_attention", mutates_args=())
def _causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention (N, T, K) of N heads, each query to the keys up to its own."""
    out = torch.empty_like(v)
    for heads, rows, seen in _blocks(q):
        weights = _attention_weights(q[heads, rows], k[heads, seen], rows.start)
        torch.bmm(weights, v[heads, seen], out=out[heads, rows])
    return out


@torch.library.custom_op("textmill::causal_attention_backward", mutates_args=())
def _causal_attention_backward(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``q``, ``k``, ``v``; the weights are computed once more."""
    scale, gradient = q.shape[-1] ** -0.5, gradient.contiguous()
    of_q, of_k, of_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for heads, rows, seen in _blocks(q):
        weights = _attention_weights(q[heads, rows], k[heads, seen], rows.start)
        of_weights = torch.bmm(gradient[heads, rows], v[heads, seen].mT)
        of_scores = torch._softmax_backward_data(of_weights, weights, -1, q.dtype).mul_(scale)
        torch.bmm(of_scores, k[heads, seen], out=of_q[heads, rows])
        more_of_k, more_of_v = torch.bmm(of_scores.mT, q[heads, rows]), torch.bmm(weights.mT, gradient[heads, rows])
        if seen.stop == q.shape[1]:  # the first block
            of_k[heads], of_v[heads] = more_of_k, more_of_v
        else:
            of_k[heads, seen] += more_of_k
            of_v[heads, seen] += more_of_v
    return of_q, of_k, of_v


def _blocks(q: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """Heads, queries and the keys that these see, as many as ``_SCORES`` allow at a time; the last queries first."""
    count, length, _ = q.shape
    queries = min(length, _QUERIES)
    at_once = max(1, _SCORES // (queries * length))
    for head in range(0, count, at_once):
        for end in range(length, 0, -queries):
            start = max(0, end - queries)
            yield slice(head, head + at_once), slice(start, end), slice(0, end)


def _attention_weights(q: Tensor, k: Tensor, start: int) -> Tensor:
    """Softmax of the scores of queries ``start`` … and the keys up to the last of them."""
    scores = torch.bmm(q, k.mT).mul_(q.shape[-1] ** -0.5)
    ahead = scores.new_full((q.shape[1], q.shape[1]), float("-inf")).triu_(1)
    scores[..., start:] += ahead
    return scores.softmax(-1)


@_causal_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.empty_like(v)


@_causal_attention_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


_causal_attention.register_autograd(
    lambda ctx, gradient: _causal_attention_backward(*ctx.saved_tensors, gradient),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """``softmax(q kᵀ / sqrt(K)) v``, each query with the keys up to its own: (B, H, T, K), by H / H' heads of ``k`` and
    ``v`` (B, H', T, K) → (B, H, T, K).

    In bfloat16 on a processor by its matrix products, which torch's fused attention there does not use; elsewhere
    torch's.
    """
    shares = q.shape[-3] // k.shape[-3]
    is_ours = q.device.type == "cpu" and q.dtype == torch.bfloat16 and _HAS_BFLOAT16 and q.shape[-2] <= _LONGEST
    if not is_ours:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shares > 1)
    if shares > 1:
        k, v = (x.repeat_interleave(shares, -3) for x in (k, v))
    out: Tensor = _causal_attention(*(x.reshape(-1, *x.shape[-2:]) for x in (q, k, v)))
    return out.view(q.shape)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, softcap: float, options: tuple[torch.dtype, bool]
    ) -> Tensor:
        dtype, wants_gradients = options
        with torch.autocast(x.device.type, enabled=False):
            rows = max(1, _CHUNK_BYTES.get(x.device.type, 1 << 27) // (4 * len(weight)))
            inputs, matrix = x.to(dtype), weight.to(dtype)
            of_x = torch.empty_like(inputs) if wants_gradients else None
            of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_gradients else None
            total = torch.zeros((), device=x.device)
            for start in range(0, len(x), rows):
                part, wanted = inputs[start : start + rows], targets[start : start + rows, None]
                logits = _product(part, matrix).float()
                if softcap:
                    squeezed = logits.div_(softcap).tanh_()
                    logits = squeezed * softcap
                greatest, of_target = logits.amax(-1, keepdim=True), logits.gather(-1, wanted)
                gradient = logits.sub_(greatest).exp_()
                of_sum = gradient.sum(-1, keepdim=True)
                total += (of_sum.log() + greatest - of_target).sum()
                if of_x is None or of_weight is None:
                    continue
                gradient.scatter_add_(-1, wanted, -of_sum).div_(of_sum)
                if softcap:
                    gradient.mul_(1 - squeezed.square_())
                gradient = gradient.to(dtype)
                of_x[start : start + rows] = _product(gradient, matrix.T)
                of_weight += _weight_gradient(part, gradient)
            ctx.save_for_backward(of_x, of_weight)
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        of_x, of_weight = ctx.saved_tensors
        scale = gradient / len(of_x)
        return of_x * scale, of_weight * scale, None, None, None


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, softcap: float = 0.0) -> Tensor:
    """Mean cross-entropy, in nats, of the logits ``x weightᵀ`` and ``targets``; a float32 scalar.

    ``x`` (N, D) float, ``weight`` (V, D), ``targets`` int (N,). The logits, within ± ``softcap`` if it is not 0, exist
    a few rows at a time: their gradient is taken as soon as they are there. Under autocast the products are in its
    dtype.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    wants_gradients = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)  # within, it is not enabled
    loss: Tensor = _LinearCrossEntropy.apply(x, weight, targets, softcap, (dtype, wants_gradients))
    return loss
