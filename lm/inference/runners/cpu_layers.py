"""The model's layers for generation on a CPU: fast matmuls of small batches, and kernels for norm and attention.

A decode step reads every weight once, so memory bandwidth limits its speed. The kernels of :mod:`lm.kernels.decode`
read row-major weights at the speed of memory. Matmuls with many rows are faster with oneDNN, in a memory layout of its
own. Larger matrices are faster, so matrices with the same input are joined.

Int8 weights have a scale for each output: the largest weight of its row, divided by 127. They are quantized after
training. A matmul of a small batch reads them as they are. With more rows, a CPU with instructions for products of 8
bits uses them: the inputs are then rounded to 8 bits too, each row with a scale of its own. On other CPUs the weights
are converted to float32, block by block, as are those in bfloat16 on CPUs without products of 16 bits. Source: Dettmers
et al. 2022 (LLM.int8(), row-wise absmax quantization).
"""

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.hardware.kernel_threads import run_in_threads, split_evenly
from lm.inference.config import Quantization
from lm.inference.kv_cache import PAGE_TOKENS
from lm.inference.runners.torch_runner import DecodeAttention
from lm.kernels.decode import norm_attention, small_batch_matmul
from lm.kernels.decode.norm_attention import AttentionLayer, CacheArrays
from lm.kernels.decode.small_batch_matmul import Matrix
from lm.kernels.jit import Stored
from lm.model.attention import AttentionFunction, MultiHeadSelfAttention
from lm.model.feed_forward import GeGLU, SwiGLU
from lm.model.linear import Head, Linear
from lm.model.moe import Experts
from lm.model.norm import RMSNorm
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.matmul import count_padding_rows

MAX_SMALL_BATCH = 4  # rows; with more, oneDNN is faster
_MAX_LOW_PRECISION_BATCH = 16  # rows; with more, converting the weights to float32 takes less time than it saves
_MAX_KERNEL_NUMEL = 1 << 16  # larger tensors are faster with torch's operators
_EXPECTED_ROWS = 8  # oneDNN's hint for the layout; with 1 it keeps the slower plain layout for float32
_BLOCK_OUTPUTS = 4096
# Of a layer's keys and values, and of a matrix; below, waking threads takes longer than it saves.
_MIN_BYTES_FOR_THREADS = 1 << 24
_MIN_BYTES_OF_MATRIX = 1 << 20
_ZERO = 128  # the uint8 that stands for 0
_NO_SCALES = np.empty(0, np.float32)
_NO_WINDOW = 1 << 40  # tokens

MakeLinear = Callable[..., nn.Module]  # OneDNNLinear, Int8Linear or LowPrecisionLinear


def flat_array(x: Tensor) -> Stored:
    """Return a view of a tensor as a flat array of its dtype; uint16 for bfloat16."""
    array: Stored = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).reshape(-1).numpy()
    return array


def join_floats(tensors: Sequence[Tensor]) -> Stored:
    """Return the numbers of ``tensors`` as one flat array of float32."""
    return flat_array(torch.cat([tensor.detach().float().flatten() for tensor in tensors] or [torch.empty(0)]))


def _flat_matrix(weight: Tensor, scale: Tensor | None) -> Matrix:
    """Return a weight (out, in) and the scales of its rows, if it has them, for kernels."""
    return Matrix(flat_array(weight), _NO_SCALES if scale is None else flat_array(scale), 0, 0, *weight.shape)


def matmul_small_batch(weight: Tensor, x: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return ``x weightᵀ`` in the dtype of ``x`` (B, in), fast if B is small.

    ``weight`` (out, in) is float32, bfloat16 or int8; ``scale`` (out,), float32, multiplies its rows.
    """
    outputs = len(weight)
    out = torch.empty((len(x), outputs))
    flat_x, flat_out = flat_array(x.float().contiguous()), flat_array(out)
    threads = torch.get_num_threads() if weight.nbytes > _MIN_BYTES_OF_MATRIX else 1
    matrix = _flat_matrix(weight, scale)
    jobs = [(matrix, flat_x, len(x), first, last, flat_out) for first, last in split_evenly(outputs, threads)]
    run_in_threads(small_batch_matmul.matmul, jobs)
    return out.to(x.dtype)


class JoinedLinear(nn.Module):
    """A linear layer of several matrices with the same input, or of one, joined; ``biases`` has one for each, or none.

    ``weight`` is None if only another layout of it is kept. ``scale`` multiplies its rows.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> None:
        super().__init__()
        self.weight: Tensor | None = torch.cat([weight.detach() for weight in weights])
        self.scale: Tensor | None = None
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self.in_features = weights[0].shape[1]


class OneDNNLinear(JoinedLinear):
    """Stores the weight in oneDNN's layout and, with ``has_both``, row-major too, for small batches."""

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = (), has_both: bool = True) -> None:
        super().__init__(weights, biases)
        # In a list and so not a parameter: other operators cannot read this layout.
        self._layout = [torch.ops.mkldnn._reorder_linear_weight(self.weight, _EXPECTED_ROWS)]
        if not has_both:
            self.weight = None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        rows = x.flatten(0, -2)
        if self.weight is not None and len(rows) <= MAX_SMALL_BATCH:
            out = matmul_small_batch(self.weight, rows)
            return (out if self.bias is None else out + self.bias).unflatten(0, x.shape[:-1])
        padding = count_padding_rows(len(rows))
        padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
        out = torch.ops.mkldnn._linear_pointwise(padded, self._layout[0], self.bias, "none", [], "")
        return out[: len(rows)].unflatten(0, x.shape[:-1])


class LowPrecisionLinear(JoinedLinear):
    """Stores the weight row-major, in its dtype or as int8."""

    weight: Tensor

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = (), quantization: Quantization = "none") -> None:
        super().__init__(weights, biases)
        if quantization == "int8":
            self.weight, self.scale = quantize(self.weight.float())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        rows = x.flatten(0, -2)
        if len(rows) > _MAX_LOW_PRECISION_BATCH:
            out = self._multiply_blocks(rows)
        else:
            out = matmul_small_batch(self.weight, rows, self.scale)
        if self.bias is not None:
            out += self.bias
        return out.unflatten(0, x.shape[:-1])

    def _multiply_blocks(self, rows: Tensor) -> Tensor:
        """Convert a block of the weight to float32 and multiply, then the next: less memory than all at once."""
        outputs, columns = self.weight.shape
        x, out = rows.float(), torch.empty((len(rows), outputs))
        matrix, block = _flat_matrix(self.weight, self.scale), torch.empty((min(_BLOCK_OUTPUTS, outputs), columns))
        flat_block = flat_array(block)
        for first in range(0, outputs, _BLOCK_OUTPUTS):
            size = min(_BLOCK_OUTPUTS, outputs - first)
            bounds = split_evenly(size, torch.get_num_threads())
            jobs = [(matrix, first + start, first + end, flat_block[start * columns :]) for start, end in bounds]
            run_in_threads(small_batch_matmul.dequantize, jobs)
            torch.mm(x, block[:size].T, out=out[:, first : first + size])
        return out.to(rows.dtype)


class Int8Linear(JoinedLinear):
    """Stores the weight as int8 in oneDNN's layout and, with ``has_both``, row-major too, for small batches.

    For CPUs with instructions for products of 8 bits; see :func:`has_int8_products`.
    """

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = (), has_both: bool = True) -> None:
        super().__init__(weights, biases)
        weight, self.scale = quantize(cast(Tensor, self.weight).float())
        self._layout = [torch.ops.onednn.qlinear_prepack(weight, None)]
        self._zero_points = torch.zeros(len(weight), dtype=torch.int64)
        self.weight = weight if has_both else None

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        rows = x.flatten(0, -2)
        if self.weight is not None and len(rows) <= MAX_SMALL_BATCH:
            out = matmul_small_batch(self.weight, rows, self.scale)
        else:
            out = self._multiply_rounded(rows)
        if self.bias is not None:
            out += self.bias
        return out.unflatten(0, x.shape[:-1])

    def _multiply_rounded(self, rows: Tensor) -> Tensor:
        """Multiply rows rounded to 8 bits. They are passed as uint8, plus 128: all CPUs multiply that by int8."""
        numbers, steps = quantize(rows)
        product: Tensor = torch.ops.onednn.qlinear_pointwise(
            *(numbers.view(torch.uint8).bitwise_xor_(_ZERO), 1.0, _ZERO),
            *(self._layout[0], self.scale, self._zero_points),
            *(None, 1.0, 0, torch.float32, "none", [], ""),
        )
        return product.mul_(steps[:, None])


def has_int8_products() -> bool:
    """Return whether the CPU has instructions for products of 8 bits, and torch a library that uses them."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_vnni_supported()


def quantize(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``rows`` (N, D) of float32 as int8, and the scale of each (N,)."""
    largest = rows.abs().amax(1)
    scale = torch.where(largest == 0, 1, largest / 127)  # a row of zeros stays one, as does one with nan
    return (rows / scale[:, None]).round_().to(torch.int8), scale


class CpuAttention(MultiHeadSelfAttention):
    """Joins the projections; a decode step runs a kernel for QK-norm, rotary positions and attention."""

    def __init__(self, attention: MultiHeadSelfAttention, make_linear: MakeLinear) -> None:
        nn.Module.__init__(self)  # skips the creation of weights
        self.head_dim, self.rope, self.rule = attention.head_dim, attention.rope, attention.rule
        self.is_plain = attention.is_plain
        self.query_factor, self.has_wide_norm = attention.query_factor, attention.has_wide_norm
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.value_sum, self.gives_values = attention.value_sum, attention.gives_values
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._sizes = [len(layer.weight) for layer in layers]
        self.qkv_proj = make_linear(*(layer.weight for layer in layers), biases=biases)
        self.output_proj = make_linear(attention.output_proj.weight)  # type: ignore[assignment]
        norms = [norm for norm in (self.q_norm, self.k_norm) if isinstance(norm, RMSNorm)]
        rope, empty = self.rope, torch.empty(0)
        self.shape = AttentionLayer(
            heads=self._sizes[0] // self.head_dim,
            kv_heads=self._sizes[1] // self.head_dim,
            head_dim=self.head_dim,
            norm_weights=join_floats([norm.gain for norm in norms]),
            eps=norms[0].eps if norms else 0.0,
            scale=self.query_factor * self.head_dim**-0.5,
            cos=flat_array(rope.cos if rope else empty),
            sin=flat_array(rope.sin if rope else empty),
            table_starts=np.array([0 if rope else -1]),
            windows=np.array([self.rule.window or _NO_WINDOW]),
        )

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """See :meth:`lm.model.attention.MultiHeadSelfAttention.project`."""
        return self.qkv_proj(x).split(self._sizes, -1)

    def forward(
        self,
        x_BTD: Tensor,
        token_positions: Tensor | None = None,
        attention_function: AttentionFunction = causal_attention,
        first_values: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See :meth:`lm.model.attention.MultiHeadSelfAttention.forward`."""
        has_kernel = not (self.has_wide_norm or self.rule.softcap or self.value_sum or self.gives_values)
        if not has_kernel or not isinstance(attention_function, DecodeAttention):
            return super().forward(x_BTD, token_positions, attention_function, first_values)
        return self.output_proj(self.attend(self.qkv_proj(x_BTD), attention_function))

    def attend(self, qkv: Tensor, cached: DecodeAttention) -> Tensor:
        """Queries, keys and values (B, 1, (H + 2 G) K) → (B, 1, H K). The keys and values enter the cache."""
        batch_size, kv_heads, head_dim = len(qkv), self.shape.kv_heads, self.shape.head_dim
        out = torch.empty((batch_size, 1, self.shape.heads * head_dim))
        keys, values, pages_BM = cached.keys_GPCK, cached.values_GPCK, cached.pages_BM
        arrays = CacheArrays(
            flat_array(keys),
            flat_array(values),
            np.zeros(1, np.int64),
            np.array([keys.shape[1]]),
            flat_array(pages_BM),
            np.zeros(1, np.int64),
            pages_BM.shape[1],
            np.arange(batch_size),
            cached.positions_B.numpy(),
        )
        num_keys = pages_BM.shape[1] * PAGE_TOKENS
        bytes_read = 2 * batch_size * kv_heads * num_keys * head_dim * keys.itemsize
        threads = torch.get_num_threads() if bytes_read > _MIN_BYTES_FOR_THREADS else 1
        scratch = np.empty((threads, norm_attention.count_scratch(self.shape, pages_BM.shape[1])), np.float32)
        flat_qkv, flat_out = flat_array(qkv.float()), flat_array(out)
        bounds = zip(split_evenly(batch_size * kv_heads, threads), scratch, strict=True)
        jobs = [(self.shape, arrays, flat_qkv, *part, own, flat_out) for part, own in bounds]
        run_in_threads(norm_attention.attend, jobs)
        return out.to(qkv.dtype)


class CpuNorm(RMSNorm):
    """Runs a kernel for small inputs."""

    def __init__(self, norm: RMSNorm, make_linear: MakeLinear | None = None) -> None:
        nn.Module.__init__(self)
        self.eps, self.weight, self.is_zero_centered = norm.eps, norm.weight, norm.is_zero_centered
        self._flat_weight = flat_array(norm.gain.detach())

    def forward(self, x: Tensor) -> Tensor:
        """(..., d_model) → same shape and dtype."""
        if x.numel() >= _MAX_KERNEL_NUMEL:
            return super().forward(x)
        out = torch.empty(x.shape, dtype=x.dtype)
        norm_attention.normalize(flat_array(x), self._flat_weight, self.eps, flat_array(out))
        return out


class _CpuSwiGLU(SwiGLU):
    def __init__(self, ffn: SwiGLU, make_linear: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.join = ffn.join
        self.w1_w3 = make_linear(ffn.w1.weight, ffn.w3.weight)
        self.w2 = make_linear(ffn.w2.weight)  # type: ignore[assignment]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.w1_w3(x).chunk(2, -1)


class _CpuExperts(Experts):
    """Computes the experts one after the other, each for the tokens that chose it."""

    def __init__(self, experts: Experts, make_linear: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.activation = experts.activation
        self._inputs = nn.ModuleList(
            make_linear(*matrices)
            for matrices in zip(*(stack for stack in (experts.w1, experts.w3) if stack is not None), strict=True)
        )
        self._outputs = nn.ModuleList(make_linear(matrix) for matrix in experts.w2)

    def forward(self, x: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in set(chosen.flatten().tolist()):
            tokens, choices = torch.where(chosen == expert)
            inner, *values = self._inputs[expert](x[tokens]).split(self._outputs[expert].in_features, -1)
            inner = F.silu(inner) if self.activation == "silu" else F.relu(inner).square()
            if values:
                inner = inner * values[0]
            weights = gates[tokens, choices, None].to(x.dtype)
            out[tokens] += weights * self._outputs[expert](inner)
        return out


CPU_LAYERS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    MultiHeadSelfAttention: CpuAttention,
    RMSNorm: CpuNorm,
    SwiGLU: _CpuSwiGLU,
    GeGLU: _CpuSwiGLU,
    Experts: _CpuExperts,
    Linear: lambda layer, make_linear: make_linear(layer.weight, biases=[] if layer.bias is None else [layer.bias]),
}
"""The form of each layer of a model; it takes the layer and how to make a linear layer."""
CPU_LAYERS[Head] = CPU_LAYERS[Linear]
