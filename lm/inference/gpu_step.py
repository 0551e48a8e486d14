"""A decoding step of few rows on a GPU in five to eight kernels a layer: :mod:`lm.inference.gpu_step_kernels`."""

import logging
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.inference.kv_cache import KVCache
from lm.model.config import ModelConfig
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_ROWS = 16  # of a product on tensor cores; with more, cuBLAS is faster
_PART_ELEMENTS = 1 << 14  # of the keys that a program of the attention reads; a longer row is divided among several
_BLOCK_PARTS = 16
# Outputs and inputs of a tile of a product, its warps, and the stages of its pipeline.
_TILE_OF_ROW, _TILE_OF_ROWS = (4, 1024, 8, 3), (16, 256, 4, 4)
_WIDTH_OF_TRIAL = 64  # of the head of the model that tries the kernels


class _Layer(NamedTuple):
    """The weights of a block. Matrices with the same input are one."""

    norm1: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    norm2: Tensor
    w1_w3: Tensor
    w2: Tensor


class GpuWeights(nn.Module):
    """The weights of a model as :class:`GpuStep` needs them: the matrices of a layer become views of joined ones.

    It is a module, without a forward pass, because a model's attributes are declared as modules or tensors.
    """

    def __init__(self, model: TransformerLM) -> None:
        super().__init__()
        self.layers = [_join_layer(layer) for layer in model.layers]
        self.head = _contiguous(model.head_weight)

    @staticmethod
    def is_possible(model: TransformerLM) -> bool:
        """Return whether the kernels have the options of ``model``, and work here."""
        head = model.head_weight
        return model.config.has_llama_blocks and head.dtype in _DTYPES and _works(head.device, head.dtype)


def _join_layer(layer: Any) -> _Layer:
    attention, ffn = layer.attn, layer.ffn
    projections = [attention.q_proj, attention.k_proj, attention.v_proj]
    q_norm, k_norm = (
        norm.weight.detach() if isinstance(norm, RMSNorm) else None for norm in (attention.q_norm, attention.k_norm)
    )
    has_bias = projections[0].bias is not None
    return _Layer(
        norm1=layer.ln1.weight.detach(),
        qkv=_join([projection.weight for projection in projections]),
        qkv_bias=_join([projection.bias for projection in projections]) if has_bias else None,
        q_norm=q_norm,
        k_norm=k_norm,
        output=_contiguous(attention.output_proj.weight),
        norm2=layer.ln2.weight.detach(),
        w1_w3=_join([ffn.w1.weight, ffn.w3.weight]),
        w2=_contiguous(ffn.w2.weight),
    )


def _contiguous(parameter: Tensor) -> Tensor:
    """Return the parameter with its rows one after the other in memory, as the kernels read it."""
    parameter.data = parameter.data.contiguous()
    return parameter.detach()


def _join(parameters: list[Tensor]) -> Tensor:
    """Return the parameters as one tensor, and make each a view of it."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joined


class GpuStep:
    """Computes one new token in each of the first B ≤ ``max_rows`` rows of ``cache``.

    The result is that of :func:`lm.inference.kv_cache.decode_step`, with fewer roundings to the dtype of the weights.
    With several rows, tensor cores would round float32 to TF32, so in float32 ``max_rows`` is 1.
    """

    def __init__(self, model: TransformerLM, weights: GpuWeights, cache: KVCache) -> None:
        self._model, self._weights, self._cache = model, weights, cache
        config, width = model.config, model.config.head_width
        self.max_rows = _MAX_ROWS if cache.keys.itemsize == 2 else 1
        self._part_keys = max(1, _PART_ELEMENTS // next_power_of_two(width))
        rope, empty = model.rope, cache.keys.new_empty(0)
        self._angles = (rope.cos, rope.sin) if rope else (empty, empty)
        self._attention = {
            "eps": config.norm_eps,
            "scale": width**-0.5,
            "length": cache.keys.shape[3],
            "heads": config.num_heads,
            "kv_heads": config.kv_heads,
            "WIDTH": width,
            "PADDED_WIDTH": next_power_of_two(width),
            "HAS_NORM": config.qk_norm,
            "HAS_ROPE": rope is not None,
            "PART_KEYS": self._part_keys,
            "num_warps": 8,
        }

    def __call__(self, inputs: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V), float32; ``inputs`` (2, B) are ids and positions, at most ``max_position``."""
        ids, positions = inputs
        if len(ids) > self.max_rows:
            raise ValueError(f"{len(ids)} rows are more than {self.max_rows}")
        eps, model = self._model.config.norm_eps, self._model
        x: Tensor = model.token_embeddings(ids)
        for layer, keys, values in zip(self._weights.layers, self._cache.keys, self._cache.values, strict=True):
            qkv = multiply(x, layer.qkv, gain=layer.norm1, eps=eps, bias=layer.qkv_bias)
            attended = self._attend(layer, qkv, keys, values, positions, max_position)
            x = multiply(attended, layer.output, residual=x)
            hidden = multiply(x, layer.w1_w3, gain=layer.norm2, eps=eps, is_gated=True)
            x = multiply(hidden, layer.w2, residual=x)
        gain: Any = model.ln_final.weight
        return model.cap_logits(multiply(x, self._weights.head, gain=gain, eps=eps, dtype=torch.float32))

    def _attend(
        self, layer: _Layer, qkv: Tensor, keys: Tensor, values: Tensor, positions: Tensor, max_position: int
    ) -> Tensor:
        """Queries, keys and values (B, (H + 2 kv heads) K) → (B, H K). The keys and values enter the cache."""
        rows, heads, width = len(qkv), self._model.config.num_heads, self._model.config.head_width
        parts = max_position // self._part_keys + 1
        out = qkv.new_empty(rows, heads * width)
        target = out if parts == 1 else qkv.new_empty(rows, heads, parts, width + 2, dtype=torch.float32)
        gains = [qkv if gain is None else gain for gain in (layer.q_norm, layer.k_norm)]
        _kernels().attend[rows * heads, parts](
            qkv, keys, values, positions, *self._angles, *gains, target, **self._attention, IS_WHOLE=parts == 1
        )
        if parts > 1:
            sizes = {"WIDTH": width, "PADDED_WIDTH": next_power_of_two(width), "BLOCK_PARTS": _BLOCK_PARTS}
            _kernels().join_parts[(rows * heads,)](target, out, parts, **sizes)
        return out


def multiply(
    x: Tensor,
    weight: Tensor,
    *,
    gain: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``residual + norm(x) weightᵀ + bias`` (B, outputs), of ``dtype``, by default that of ``x``.

    ``x`` (B, inputs) has at most ``_MAX_ROWS`` rows, ``weight`` is (outputs, inputs), or twice that if gated.

    The norm is RMSNorm with ``gain`` (inputs,) and ``eps``. If ``is_gated``, the first and second half of the weight
    give x₁ and x₂, and the product is ``silu(x₁) ⊙ x₂``.
    """
    (outputs, inputs), rows = weight.shape, len(x)
    if rows > _MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {_MAX_ROWS}")
    if rows > 1 and gain is not None:  # each program would compute it for all rows again
        x, gain = F.rms_norm(x, gain.shape, gain, eps), None
    outputs = outputs // 2 if is_gated else outputs
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    block_outputs, block_inputs, warps, stages = _TILE_OF_ROW if rows == 1 else _TILE_OF_ROWS
    _kernels().multiply[(-(-outputs // block_outputs),)](
        x,
        weight,
        x if gain is None else gain,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        rows,
        PADDED_ROWS=1 if rows == 1 else _MAX_ROWS,
        OUTPUTS=outputs,
        INPUTS=inputs,
        HAS_NORM=gain is not None,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        BLOCK_OUTPUTS=block_outputs,
        BLOCK_INPUTS=block_inputs,
        num_warps=warps,
        num_stages=stages,
    )
    return out


def _kernels() -> ModuleType:
    """Import the kernels. Raises ModuleNotFoundError if Triton is not installed."""
    from lm.inference import gpu_step_kernels

    return gpu_step_kernels


@cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels run on ``device``; with a warning if Triton is there and they do not."""
    config = ModelConfig(4, 2 * _PART_ELEMENTS // _WIDTH_OF_TRIAL, _WIDTH_OF_TRIAL, 1, 1, d_ff=4)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the weights change no draw of the caller
        model = TransformerLM(config, device, dtype).requires_grad_(False)
    try:
        _kernels()
        with torch.cuda.device_of(model.head_weight), torch.inference_mode():
            cache = KVCache(config, 2, config.context_length, device, dtype)
            step = GpuStep(model, GpuWeights(model), cache)
            for rows in {1, min(2, step.max_rows)}:
                for last in (0, config.context_length - 1):  # in one part, and in several
                    step(torch.zeros(2, rows, dtype=torch.int64, device=device), last).sum().item()
    except ModuleNotFoundError:
        return False
    except Exception as error:  # of many kinds: Triton compiles C, and the GPU may lack an instruction or memory
        log.warning("Triton does not work here, decoding runs without it: %s", str(error).partition("\n")[0])
        return False
    return True


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, from 1."""
    return 1 << (number - 1).bit_length()
