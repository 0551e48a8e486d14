"""Prepare a model for generation: its weights, in a form in which products with few rows are fast.

On GPUs that is the form of :mod:`lm.inference.gpu_step`. On CPUs a decoding step reads every weight once, so memory
bandwidth limits its speed. :mod:`lm.inference.compiled_step` reads them as fast as memory gives them, in the plain
layout. Products with many rows are faster with oneDNN, in a memory layout of its own; the model then has both, unless
they would take a quarter of the machine's memory. Larger matrices are faster, so matrices with the same input are
concatenated. Weights of 8 bits, and of 16 where the CPU cannot multiply them, are those of :mod:`lm.inference.narrow`.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.hardware.memory import machine_memory
from lm.inference.compiled_step import FlatWeights
from lm.inference.config import Quantization
from lm.inference.cpu_decode import AttentionKernel, NormKernel, multiply_few_rows
from lm.inference.engine import Generation, generate
from lm.inference.gpu_step import GpuWeights
from lm.inference.kv_cache import CachedAttention
from lm.inference.narrow import NarrowLinear
from lm.kernels.jit import log_compilation
from lm.model.attention import AttentionFunction, MultiHeadSelfAttention
from lm.model.config import ModelConfig
from lm.model.feed_forward import SwiGLU
from lm.model.linear import Linear
from lm.model.moe import Experts
from lm.model.norm import RMSNorm
from lm.model.ops.causal_attention import causal_attention
from lm.model.ops.matmul import count_padding_rows
from lm.model.transformer import TransformerLM

_MAX_KERNEL_NUMEL = 1 << 16  # larger tensors are faster with torch's operators
MakeLinear = Callable[..., nn.Module]  # PackedLinear or NarrowLinear
_MAX_KERNEL_ROWS = 4
_MAX_STEP_TOKENS = 64  # with more, oneDNN is faster; with AVX-512 it computes more at a time, so fewer are left
_NUM_PROMPT_TOKENS = 20  # more than few rows
_EXPECTED_ROWS = 8  # oneDNN's hint for the layout; with 1 it keeps the slower plain layout for float32


class PackedLinear(nn.Module):
    """The product with several concatenated matrices, or with one, in oneDNN's layout.

    ``biases``, one for each matrix, are added. With ``has_both``, the matrices are kept in the plain layout too, for
    products with few rows.
    """

    scale = None

    def __init__(self, *weights: Tensor, biases: Sequence[Tensor] = (), has_both: bool = True) -> None:
        super().__init__()
        weight = torch.cat([weight.detach() for weight in weights])
        self.in_features = weight.shape[1]
        self.weight = weight if has_both else None
        self.bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        # In a list and so not a parameter: other operators cannot read this layout.
        self._packed = [torch.ops.mkldnn._reorder_linear_weight(weight, _EXPECTED_ROWS)]

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        rows = x.flatten(0, -2)
        if self.weight is not None and len(rows) <= _MAX_KERNEL_ROWS:
            out = multiply_few_rows(self.weight, rows)
            return (out if self.bias is None else out + self.bias).unflatten(0, x.shape[:-1])
        padding = count_padding_rows(len(rows))
        padded = F.pad(rows, (0, 0, 0, padding)) if padding else rows
        out = torch.ops.mkldnn._linear_pointwise(padded, self._packed[0], self.bias, "none", [], "")
        return out[: len(rows)].unflatten(0, x.shape[:-1])


class _PackedAttention(MultiHeadSelfAttention):
    def __init__(self, attention: MultiHeadSelfAttention, make_linear: MakeLinear) -> None:
        nn.Module.__init__(self)  # skips the creation of weights
        self.d_k, self.rope = attention.d_k, attention.rope
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        layers = (attention.q_proj, attention.k_proj, attention.v_proj)
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._sizes = [len(layer.weight) for layer in layers]
        self.qkv_proj = make_linear(*(layer.weight for layer in layers), biases=biases)
        self.output_proj = make_linear(attention.output_proj.weight)  # type: ignore[assignment]
        self.kernel = AttentionKernel(attention)

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv_proj(x).split(self._sizes, -1)

    def forward(
        self, x: Tensor, token_positions: Tensor | None = None, attend: AttentionFunction = causal_attention
    ) -> Tensor:
        if not isinstance(attend, CachedAttention):
            return super().forward(x, token_positions, attend)
        return self.output_proj(self.kernel(self.qkv_proj(x), attend))


class _PackedSwiGLU(SwiGLU):
    def __init__(self, ffn: SwiGLU, make_linear: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.w1_w3 = make_linear(ffn.w1.weight, ffn.w3.weight)
        self.w2 = make_linear(ffn.w2.weight)  # type: ignore[assignment]

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.w1_w3(x).chunk(2, -1)


class _PackedExperts(Experts):
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


def _pack_matrix(layer: Linear, make_linear: MakeLinear) -> nn.Module:
    return make_linear(layer.weight, biases=[] if layer.bias is None else [layer.bias])


class _KernelNorm(RMSNorm):
    def __init__(self, norm: RMSNorm, make_linear: MakeLinear) -> None:
        nn.Module.__init__(self)
        self.eps, self.weight = norm.eps, norm.weight
        self._kernel = NormKernel(norm)

    def forward(self, x: Tensor) -> Tensor:
        return self._kernel(x) if x.numel() < _MAX_KERNEL_NUMEL else super().forward(x)


_REPLACEMENTS: dict[type[nn.Module], Callable[..., nn.Module]] = {
    MultiHeadSelfAttention: _PackedAttention,
    RMSNorm: _KernelNorm,
    SwiGLU: _PackedSwiGLU,
    Experts: _PackedExperts,
    Linear: _pack_matrix,
}


def prepare_for_inference(
    model: TransformerLM, dtype: torch.dtype | None = None, quantization: Quantization = "none"
) -> TransformerLM:
    """Convert ``model`` in place to ``dtype`` (default: the embedding's) and packed weights, and return it.

    The quantization bfloat16 is that dtype. With int8 the matrices are int8, all else is float32. On a GPU, matrices
    with the same input become views of one, if the kernels of :mod:`lm.inference.gpu_step` can compute the model. It
    can no longer be trained, saved, cast or moved. Raises UserError for int8 on another device than the CPU.
    """
    model.requires_grad_(False)
    first = next(model.parameters())
    if quantization == "int8" and first.device.type != "cpu":
        raise UserError(
            f"The quantization int8 is for CPUs, and the model is on {first.device}: choose the device cpu, or the "
            "quantization bfloat16 or none."
        )
    dtype = {"int8": torch.float32, "bfloat16": torch.bfloat16}.get(quantization, dtype or first.dtype)
    for parameter in model.parameters():  # the rotary buffers stay float32
        parameter.data = parameter.data.to(dtype)
    if first.device.type == "cpu" and dtype in (torch.float32, torch.bfloat16):
        make_linear = _choose_linear(model, dtype, quantization)
        compile_kernels(dtype, quantization)
        _pack(model, make_linear)
    if first.device.type == "cuda" and GpuWeights.is_possible(model):
        model.gpu_weights = GpuWeights(model)
        torch.cuda.empty_cache()  # of the matrices before they were joined
    return model


def _choose_linear(model: TransformerLM, dtype: torch.dtype, quantization: Quantization) -> MakeLinear:
    has_onednn = torch.backends.mkldnn.is_available()
    if dtype == torch.bfloat16:
        has_onednn = has_onednn and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if quantization == "int8" or not has_onednn:
        return partial(NarrowLinear, quantization=quantization)
    bytes_of_both = 2 * sum(parameter.nbytes for parameter in model.parameters())
    return partial(PackedLinear, has_both=bytes_of_both < machine_memory() / 4)


def compile_kernels(dtype: torch.dtype, quantization: Quantization = "none") -> None:
    """Compile the kernels for models of ``dtype``, and log it."""
    name = "int8" if quantization == "int8" else str(dtype).removeprefix("torch.")
    with log_compilation(f"{name} decoding"):
        for norm_placement in ("pre", "post"):  # with the kernel of a whole step, and without it
            config = ModelConfig(2, _NUM_PROMPT_TOKENS + 1, 2, 1, 1, d_ff=2, norm_placement=norm_placement)
            model = TransformerLM(config, dtype=dtype).requires_grad_(False)
            _pack(model, _choose_linear(model, dtype, quantization))
            generate(model, [Generation([0] * _NUM_PROMPT_TOKENS, 2)])


def _pack(model: TransformerLM, make_linear: MakeLinear) -> None:
    _replace_modules(model, make_linear)
    if model.lm_head is None:
        model.lm_head = make_linear(model.token_embeddings.weight)  # type: ignore[assignment]
    if FlatWeights.is_possible(model):
        is_faster = isinstance(model.lm_head, NarrowLinear) or torch.backends.cpu.get_cpu_capability() == "AVX2"
        model.flat_weights = FlatWeights(model, _MAX_STEP_TOKENS if is_faster else _MAX_KERNEL_ROWS)


def _replace_modules(module: nn.Module, make_linear: MakeLinear) -> None:
    for name, child in list(module.named_children()):
        if getattr(child, "role", None) == "router":
            continue  # computes in float32, whatever the dtype
        if replacement := _REPLACEMENTS.get(type(child)):
            setattr(module, name, replacement(child, make_linear))
        else:
            _replace_modules(child, make_linear)
