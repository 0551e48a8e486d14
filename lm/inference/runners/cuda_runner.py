"""The runner for NVIDIA GPUs: decode steps as CUDA graphs, of Triton kernels for a small batch.

Launching kernels one by one takes longer than computing a few rows. A graph has fixed shapes, so the numbers of rows
and keys are rounded up to powers of two. The extra keys are masked. The extra rows have page 0, which belongs to no
sequence; their content does not matter. The Triton kernels, five to eight a layer, are in
:mod:`lm.inference.runners.decode_triton`.

Shapes: B sequences, D d_model, H query heads, G key and value heads, K head_dim, V vocabulary.
"""

import logging
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.inference.kv_cache import PAGE_TOKENS, KVCache
from lm.inference.runners.torch_runner import TorchRunner
from lm.model.attention import MultiHeadSelfAttention
from lm.model.config import ModelConfig
from lm.model.feed_forward import SwiGLU
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)

_MIN_KEYS = 64
_MAX_ROWS = 16  # of a matmul on tensor cores; with more, cuBLAS is faster
_SPLIT_ELEMENTS = 1 << 14  # of the keys that a program of the attention reads; a longer row is split among several
_BLOCK_SPLITS = 16
# Of a model, that the Triton kernels compute; others must have their defaults.
_OPTIONS = frozenset(
    [
        *("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"),
        *("qk_norm", "qkv_bias", "norm_eps", "tied_embeddings", "zero_init_residual", "logit_softcap"),
        *("position_encoding", "rope_theta", "rope_scaling", "rotary_fraction"),
    ]
)
# Outputs and inputs of a tile of a matmul, its warps, and the stages of its pipeline.
_TILE_OF_ROW, _TILE_OF_ROWS = (4, 1024, 8, 3), (16, 256, 4, 4)


class JoinedAttention(MultiHeadSelfAttention):
    """Attention with the projections of queries, keys and values as views of one matrix, ``qkv``."""

    def __init__(self, attention: MultiHeadSelfAttention) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(attention.__dict__)
        projections: list[Any] = [self.q_proj, self.k_proj, self.v_proj]
        self.qkv = _join([projection.weight for projection in projections])
        has_bias = projections[0].bias is not None
        self.qkv_bias = _join([projection.bias for projection in projections]) if has_bias else None
        self.output_proj.weight.data = self.output_proj.weight.data.contiguous()


class JoinedSwiGLU(SwiGLU):
    """SwiGLU with w1 and w3 as views of one matrix, ``w1_w3``."""

    def __init__(self, ffn: SwiGLU) -> None:
        nn.Module.__init__(self)
        self.__dict__.update(ffn.__dict__)
        self.w1_w3 = _join([self.w1.weight, self.w3.weight])
        self.w2.weight.data = self.w2.weight.data.contiguous()


def _join(parameters: list[Tensor]) -> Tensor:
    """Return the parameters as one tensor, and make each a view of it."""
    joined = torch.cat([parameter.detach() for parameter in parameters])
    for parameter, part in zip(parameters, joined.split([len(parameter) for parameter in parameters]), strict=True):
        parameter.data = part
    return joined


def join_layers(model: TransformerLM) -> None:
    """Join the matrices with the same input, and store all row-major, as the Triton kernels read them."""
    layers: Any = model.layers
    for layer in layers:
        layer.attn, layer.ffn = JoinedAttention(layer.attn), JoinedSwiGLU(layer.ffn)
    model.head_weight.data = model.head_weight.data.contiguous()


class CudaRunner(TorchRunner):
    """Replays decode steps as CUDA graphs. A graph is captured when its shape first occurs.

    It runs :class:`TritonStep` if the layers are joined and the rows are few enough, else torch's operators.
    """

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._rows, self._row_pages = cache.page_table.shape
        self._pages = torch.zeros_like(cache.tables)  # of the sequences, then page 0
        self._inputs = torch.zeros(2, self._rows, dtype=torch.int64, device=cache.keys.device)
        layers: Any = model.layers
        self._triton_step = TritonStep(model, cache) if isinstance(layers[0].ffn, JoinedSwiGLU) else None
        self._graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None  # shared memory: only one graph runs at a time

    def decode(self, inputs_2B: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) of one new token in each of the first B rows. The next call overwrites them."""
        count = inputs_2B.shape[1]
        rows = min(next_power_of_two(count), self._rows)
        keys = min(max(_MIN_KEYS, next_power_of_two(max_position + 1)), self._row_pages * PAGE_TOKENS)
        # Extra rows have position 0: one of an earlier step may lie beyond the keys.
        self._inputs[:, :count], self._inputs[:, count:rows] = inputs_2B, 0
        self._pages[:, :count], self._pages[:, count:rows] = self.cache.tables[:, :count], 0
        with torch.cuda.device_of(self._inputs):
            if (rows, keys) not in self._graphs:
                self._graphs[rows, keys] = self._capture(rows, keys)
            graph, logits = self._graphs[rows, keys]
            graph.replay()
        return logits[:count]

    def _compute(self, rows: int, keys: int) -> Tensor:
        inputs_2B, pages_ABM = self._inputs[:, :rows], self._pages[:, :rows]
        if self._triton_step is not None and rows <= self._triton_step.max_rows:
            return self._triton_step(inputs_2B, pages_ABM[0], keys - 1)
        return self.decode_pages(inputs_2B, pages_ABM, keys - 1)

    def _capture(self, rows: int, keys: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        side_stream = torch.cuda.Stream()
        side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side_stream):
            self._compute(rows, keys)  # warm-up: libraries allocate their workspaces
        torch.cuda.current_stream().wait_stream(side_stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: another thread, such as one that prefetches batches, may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=side_stream, capture_error_mode="thread_local"):
            logits = self._compute(rows, keys)
        self._pool = graph.pool()
        return graph, logits


class TritonStep:
    """Computes one new token in each of B ≤ ``max_rows`` sequences in ``cache``, for a model with joined layers.

    The result is that of :meth:`TorchRunner.decode_pages`, with fewer roundings to the dtype of the weights. With
    several rows, tensor cores would round float32 to TF32, so in float32 ``max_rows`` is 1.
    """

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        config, head_dim = model.config, model.config.resolved_head_dim
        self.max_rows = _MAX_ROWS if cache.keys.itemsize == 2 else 1
        self._split_keys = max(1, _SPLIT_ELEMENTS // next_power_of_two(head_dim))
        rope, empty = model.rope, cache.keys.new_empty(0)
        self._angles = (rope.cos, rope.sin) if rope else (empty, empty)
        self._attention = {
            "eps": config.norm_eps,
            "scale": head_dim**-0.5,
            "num_pages": cache.keys.shape[2],
            "row_pages": cache.page_table.shape[1],
            "heads": config.num_heads,
            "kv_heads": config.kv_heads,
            "HEAD_DIM": head_dim,
            "PADDED_HEAD_DIM": next_power_of_two(head_dim),
            "HAS_NORM": config.qk_norm,
            "HAS_ROPE": rope is not None,
            "SPLIT_KEYS": self._split_keys,
            "PAGE_TOKENS": PAGE_TOKENS,
            "num_warps": 8,
        }

    def __call__(self, inputs_2B: Tensor, pages_BM: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V), float32.

        ``inputs_2B`` are ids and positions, at most ``max_position``; ``pages_BM`` are as wide as the page table.
        """
        ids_B, positions_B = inputs_2B
        if len(ids_B) > self.max_rows:
            raise ValueError(f"{len(ids_B)} rows are more than {self.max_rows}")
        eps, model = self._model.config.norm_eps, self._model
        layers: Any = model.layers
        x_BD = model.embed(ids_B)
        for layer, keys, values in zip(layers, self._cache.keys, self._cache.values, strict=True):
            attn, ffn = layer.attn, layer.ffn
            qkv = matmul(x_BD, attn.qkv, norm_weight=layer.ln1.weight, eps=eps, bias=attn.qkv_bias)
            attended = self._attend(attn, qkv, keys, values, pages_BM, positions_B, max_position)
            x_BD = matmul(attended, attn.output_proj.weight, residual=x_BD)
            hidden = matmul(x_BD, ffn.w1_w3, norm_weight=layer.ln2.weight, eps=eps, is_gated=True)
            x_BD = matmul(hidden, ffn.w2.weight, residual=x_BD)
        final_norm: Any = model.ln_final
        logits_BV = matmul(x_BD, model.head_weight, norm_weight=final_norm.weight, eps=eps, dtype=torch.float32)
        return model.cap_logits(logits_BV)

    def _attend(
        self,
        layer: Any,
        qkv: Tensor,
        keys: Tensor,
        values: Tensor,
        pages_BM: Tensor,
        positions_B: Tensor,
        max_position: int,
    ) -> Tensor:
        """Queries, keys and values (B, (H + 2 G) K) → (B, H K). The keys and values enter the cache."""
        rows, heads, head_dim = len(qkv), self._model.config.num_heads, self._model.config.resolved_head_dim
        splits = max_position // self._split_keys + 1
        out = qkv.new_empty(rows, heads * head_dim)
        target = out if splits == 1 else qkv.new_empty(rows, heads, splits, head_dim + 2, dtype=torch.float32)
        norms = [norm.weight if isinstance(norm, RMSNorm) else qkv for norm in (layer.q_norm, layer.k_norm)]
        _kernels().attend[rows * heads, splits](
            qkv,
            keys,
            values,
            pages_BM,
            positions_B,
            *self._angles,
            *norms,
            target,
            **self._attention,
            IS_WHOLE=splits == 1,
        )
        if splits > 1:
            sizes = {name: self._attention[name] for name in ("HEAD_DIM", "PADDED_HEAD_DIM")}
            _kernels().combine_splits[(rows * heads,)](target, out, splits, **sizes, BLOCK_SPLITS=_BLOCK_SPLITS)
        return out


def matmul(
    x: Tensor,
    weight: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    is_gated: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``residual + norm(x) weightᵀ + bias`` (B, outputs), of ``dtype``, by default that of ``x``.

    ``x`` (B, inputs) has at most ``_MAX_ROWS`` rows, ``weight`` is (outputs, inputs), or twice that if gated.

    The norm is RMSNorm with ``norm_weight`` (inputs,) and ``eps``. If ``is_gated``, the first and second half of the
    weight give x₁ and x₂, and the result is ``silu(x₁) ⊙ x₂``.
    """
    (outputs, inputs), rows = weight.shape, len(x)
    if rows > _MAX_ROWS:
        raise ValueError(f"{rows} rows are more than {_MAX_ROWS}")
    if rows > 1 and norm_weight is not None:  # each program would compute it for all rows again
        x, norm_weight = F.rms_norm(x, norm_weight.shape, norm_weight, eps), None
    outputs = outputs // 2 if is_gated else outputs
    out = torch.empty((rows, outputs), dtype=dtype or x.dtype, device=x.device)
    block_outputs, block_inputs, warps, stages = _TILE_OF_ROW if rows == 1 else _TILE_OF_ROWS
    _kernels().matmul[(-(-outputs // block_outputs),)](
        x,
        weight,
        x if norm_weight is None else norm_weight,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
        rows,
        PADDED_ROWS=1 if rows == 1 else _MAX_ROWS,
        OUTPUTS=outputs,
        INPUTS=inputs,
        HAS_NORM=norm_weight is not None,
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
    from lm.inference.runners import decode_triton

    return decode_triton


def can_use_triton(model: TransformerLM) -> bool:
    """Return whether the kernels have the options of ``model``, and work here."""
    head = model.head_weight
    has_dtype = head.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return not model.config.unusual_options(_OPTIONS) and has_dtype and _works(head.device, head.dtype)


@cache
def _works(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the kernels run on ``device``; with a warning if Triton is there and they do not."""
    config = ModelConfig(4, 2 * _SPLIT_ELEMENTS // 64, 64, 1, 1, d_ff=4)  # the longest row has two splits
    with torch.random.fork_rng([device] if device.type == "cuda" else []):  # the weights change no draw of the caller
        model = TransformerLM(config, device, dtype).requires_grad_(False)
    try:
        _kernels()
        with torch.cuda.device_of(model.head_weight), torch.inference_mode():
            join_layers(model)
            cache = KVCache(config, 2, config.context_length, device, dtype)
            step = TritonStep(model, cache)
            for rows in {1, min(2, step.max_rows)}:
                inputs, pages = torch.zeros(2, rows, dtype=torch.int64, device=device), cache.page_table[:rows]
                for last in (0, config.context_length - 1):  # in one split, and in several
                    step(inputs, pages, last).sum().item()
    except ModuleNotFoundError:
        return False
    except Exception as error:  # of many kinds: Triton compiles C, and the GPU may lack an instruction or memory
        log.warning("Triton does not work here, decoding runs without it: %s", str(error).partition("\n")[0])
        return False
    return True


def next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``, from 1."""
    return 1 << (number - 1).bit_length()
