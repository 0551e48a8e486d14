"""A model made ready to generate: its weights in the form in which few rows are multiplied by them fastest.

Drawing a token reads every weight once, so what counts is how fast memory is read. torch's own product of a matrix and
few rows reaches half of that on processors; oneDNN's, with the weights in its own order, nearly all, the better the
larger the matrix: so those that multiply the same input are joined.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm import decode
from lm.cache import OneMore
from lm.fused import causal_attention
from lm.layers import Attend, Embedding, Linear, MultiHeadSelfAttention, RMSNorm, SwiGLU
from lm.model import TransformerLM

_FEW = 1 << 16  # numbers, above which torch's operators are worth their calls
_ROWS = 8  # that oneDNN shall expect: for 1 it would leave a float32 matrix as it is, and read it slower


class _PackedLinear(nn.Module):
    """The product with one or several layers' weights, joined, which are in oneDNN's order alone."""

    def __init__(self, *layers: Linear | Embedding) -> None:
        super().__init__()
        self.sizes = [len(layer.weight) for layer in layers]
        weight = torch.cat([layer.weight.detach() for layer in layers])
        # Not a parameter: nothing else can read it.
        self._packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        rows = x.flatten(0, -2)
        padded = F.pad(rows, (0, 0, 0, extra)) if (extra := _extra(len(rows))) else rows
        found: Tensor = torch.ops.mkldnn._linear_pointwise(padded, self._packed[0], None, "none", [], "")
        return found[: len(rows)].unflatten(0, x.shape[:-1])


def _extra(rows: int) -> int:
    """Rows to add, so that of each power of two there are eight numbers of them: for each that it meets oneDNN keeps
    megabytes of its own, and prompts of all lengths would fill the memory with it."""
    return -rows % (1 << max(0, (rows - 1).bit_length() - 4))


class _PackedAttention(MultiHeadSelfAttention):
    def __init__(self, attention: MultiHeadSelfAttention) -> None:
        nn.Module.__init__(self)  # with no weights of its own
        self.d_k, self.rope = attention.d_k, attention.rope
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self._joined = _PackedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output_proj = _PackedLinear(attention.output_proj)  # type: ignore[assignment]
        self._attend = decode.Attention(attention)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._joined(x).split(self._joined.sizes, -1)

    def forward(self, x: Tensor, token_positions: Tensor | None = None, attend: Attend = causal_attention) -> Tensor:
        if not isinstance(attend, OneMore):
            return super().forward(x, token_positions, attend)
        return self.output_proj(self._attend(self._joined(x), attend))


class _PackedSwiGLU(SwiGLU):
    def __init__(self, ffn: SwiGLU) -> None:
        nn.Module.__init__(self)
        self._joined = _PackedLinear(ffn.w1, ffn.w3)
        self.w2 = _PackedLinear(ffn.w2)  # type: ignore[assignment]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._joined(x).chunk(2, -1)


class _FastNorm(RMSNorm):
    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.eps, self.weight = norm.eps, norm.weight
        self._of_few = decode.Norm(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self._of_few(x) if x.numel() < _FEW else super().forward(x)


def prepare(model: TransformerLM, dtype: torch.dtype | None = None) -> TransformerLM:
    """Make ``model`` itself one that only generates, in ``dtype``, by default that of its embedding; returns
    it.

    It cannot be trained or saved any more.
    """
    model.requires_grad_(False)
    first = next(model.parameters())
    dtype = dtype or first.dtype
    for parameter in model.parameters():  # not the buffers: rotary angles stay float32
        parameter.data = parameter.data.to(dtype)
    if first.device.type == "cpu" and _packs(dtype):
        decode.compile_kernels(dtype)
        _pack(model)
        if model.lm_head is None:
            model.lm_head = _PackedLinear(model.token_embeddings)  # type: ignore[assignment]
    return model


def _packs(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _pack(module: nn.Module) -> None:
    for name, child in list(module.named_children()):
        if isinstance(child, MultiHeadSelfAttention):
            setattr(module, name, _PackedAttention(child))
        elif isinstance(child, RMSNorm):
            setattr(module, name, _FastNorm(child))
        elif isinstance(child, SwiGLU):
            setattr(module, name, _PackedSwiGLU(child))
        elif isinstance(child, Linear):
            setattr(module, name, _PackedLinear(child))
        else:
            _pack(child)
