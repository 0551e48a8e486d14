"""The runner for CPUs: a few new tokens take one call per thread of the kernel :mod:`lm.kernels.decode.fused_step`.

Shapes: B sequences, N new tokens, D d_model, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.hardware.kernel_threads import thread_pool
from lm.inference.kv_cache import KVCache, Tokens
from lm.inference.runners.cpu_layers import (
    MAX_SMALL_BATCH,
    JoinedLinear,
    LowPrecisionLinear,
    flat_array,
    join_floats,
)
from lm.inference.runners.torch_runner import TorchRunner
from lm.kernels.decode import fused_step
from lm.kernels.decode.fused_step import Adapters, Network, Step
from lm.kernels.decode.norm_attention import AttentionLayer, CacheArrays, count_scratch
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM

_MAX_FUSED_TOKENS = 64  # with more, oneDNN is faster; with AVX-512 it computes more at a time, so fewer are left
_MIN_BYTES_FOR_THREADS = 1 << 22  # of the weights; below, waking a thread takes longer than it saves
# Of a model, that the kernel computes; others must have their defaults.
_OPTIONS = frozenset(
    [
        *("vocab_size", "context_length", "d_model", "num_layers", "num_heads", "num_kv_heads", "head_dim", "d_ff"),
        *("qk_norm", "qkv_bias", "norm_eps", "tied_embeddings", "zero_init_residual", "logit_softcap"),
        *("position_encoding", "rope_theta", "rope_scaling", "rotary_fraction", "global_interval", "global_rope"),
        *("sliding_window", "local_rope_theta", "multipliers", "zero_centered_norm"),
        "value_residual",
    ]
)
_CHUNKS_PER_THREAD = 4  # with more, taking them costs more than the waits for the last one


def can_fuse(model: TransformerLM) -> bool:
    """Return whether the kernel supports ``model``, after its layers were replaced by the layers for CPUs."""
    head: Any = model.lm_head
    is_known = not model.config.unusual_options(_OPTIONS)
    return is_known and isinstance(head, JoinedLinear) and head.weight is not None


def share_weights(model: TransformerLM) -> None:
    """Move all matrices into one array, as the kernel reads them. The weight of each layer becomes a view of it."""
    matrices = _matrices(model)
    flat = torch.empty(sum(matrix.weight.numel() for matrix in matrices), dtype=matrices[0].weight.dtype)
    for matrix, part in zip(matrices, flat.split([matrix.weight.numel() for matrix in matrices]), strict=True):
        matrix.weight = part.view(matrix.weight.shape).copy_(matrix.weight)


def _matrices(model: TransformerLM) -> list[Any]:
    layers: Any = model.layers
    of_layers = [[layer.attn.qkv_proj, layer.attn.output_proj, layer.ffn.w1_w3, layer.ffn.w2] for layer in layers]
    return [*(matrix for matrices in of_layers for matrix in matrices), model.lm_head]


def _describe_adapters(model: TransformerLM, attention: AttentionLayer) -> Adapters:
    """Describe the adapters of a model for the kernel."""
    stacks = [layer.adapters.stack if hasattr(layer, "adapters") else None for layer in _matrices(model)[:-1]]
    heads = np.cumsum([attention.heads, attention.kv_heads, attention.kv_heads]) * attention.head_dim
    d_model, d_ff = model.config.d_model, model.config.d_ff
    first = next(filter(None, stacks), None)
    return Adapters(
        numbers=first.numbers if first else np.empty(0, np.float32),
        starts=np.array([(stack.a_start, stack.b_start) if stack else (-1, -1) for stack in stacks], np.int64).ravel(),
        ends=np.array([*heads, d_model, d_ff, 2 * d_ff, d_model], np.int64),
        rank=int(first.rank) if first else 0,
    )


def _create_network(model: TransformerLM) -> Network:
    """Describe a model with shared weights for the kernel."""
    layers: Any = model.layers
    matrices, config = _matrices(model), model.config
    norms = [norm for layer in layers for norm in (layer.ln1, layer.ln2)] + [model.ln_final]
    qk_norms = [norm for layer in layers for norm in (layer.attn.q_norm, layer.attn.k_norm)]
    shapes = [layer.attn.shape for layer in layers]
    ropes = [rope for rope in {model.rope: None, model.local_rope: None} if rope is not None]
    starts = {rope: index * ropes[0].cos.numel() for index, rope in enumerate(ropes)}
    num_weights = sum(matrix.weight.numel() for matrix in matrices)
    sums = [layer.attn.value_sum.weight for layer in layers if layer.attn.value_sum is not None]  # not in the first
    return Network(
        weights=flat_array(matrices[0].weight.as_strided((num_weights,), (1,), 0)),
        scales=join_floats([matrix.scale for matrix in matrices if matrix.scale is not None]),
        norm_weights=join_floats([norm.gain for norm in norms]),
        biases=join_floats([matrix.bias for matrix in matrices if matrix.bias is not None]),
        attention=shapes[0]._replace(
            norm_weights=join_floats([norm.gain for norm in qk_norms if isinstance(norm, RMSNorm)]),
            cos=join_floats([rope.cos for rope in ropes]),
            sin=join_floats([rope.sin for rope in ropes]),
            table_starts=np.array([starts.get(layer.attn.rope, -1) for layer in layers]),
            windows=np.concatenate([shape.windows for shape in shapes]),
        ),
        num_layers=len(layers),
        d_model=config.d_model,
        d_ff=config.d_ff,
        vocab_size=len(matrices[-1].weight),
        eps=config.norm_eps,
        residual_multiplier=config.factors.residual,
        value_weights=join_floats([torch.zeros(2), *sums] if sums else []),
        adapters=_describe_adapters(model, shapes[0]),
    )


def _describe_cache(cache: KVCache) -> CacheArrays:
    """Describe a cache for the kernel, without new tokens."""
    layers, none = cache.layers, np.empty(0, np.int64)
    return CacheArrays(
        keys=flat_array(cache.all_keys),
        values=flat_array(cache.all_values),
        starts=np.array([layer.keys_GPCK.storage_offset() - cache.all_keys.storage_offset() for layer in layers]),
        num_pages=np.array([layer.keys_GPCK.shape[1] for layer in layers]),
        tables=flat_array(cache.tables),
        table_starts=np.array([layer.table * cache.page_table.numel() for layer in layers]),
        row_pages=cache.page_table.shape[1],
        rows=none,
        positions=none,
    )


class CpuRunner(TorchRunner):
    """Computes up to ``max_tokens`` new tokens with the kernel, more with torch."""

    def __init__(self, model: TransformerLM, cache: KVCache) -> None:
        super().__init__(model, cache)
        self._network = network = _create_network(model)
        self._arrays = _describe_cache(cache)
        is_faster = isinstance(model.lm_head, LowPrecisionLinear) or torch.backends.cpu.get_cpu_capability() == "AVX2"
        self.max_tokens = _MAX_FUSED_TOKENS if is_faster else MAX_SMALL_BATCH
        attention = network.attention
        sizes = {
            "x": network.d_model,
            "change": network.d_model,
            "first_values": attention.kv_heads * attention.head_dim if len(network.value_weights) else 0,
            "qkv": (attention.heads + 2 * attention.kv_heads) * attention.head_dim,
            "attended": attention.heads * attention.head_dim,
            "gate": network.d_ff,
            "value": network.d_ff,
            "logits": network.vocab_size,
            "low_rank": int(max(network.adapters.ends)) if network.adapters.rank else 0,
        }
        num_phases = fused_step.PHASES_PER_LAYER + (4 if network.adapters.rank else 0)
        num_threads = torch.get_num_threads() if network.weights.nbytes > _MIN_BYTES_FOR_THREADS else 1
        self._step = Step(
            tokens=0,
            chunks=1 if num_threads == 1 else num_threads * _CHUNKS_PER_THREAD,
            has_logits=False,
            adapters=np.empty(0, np.int64),
            progress=np.zeros(2 * (num_phases * network.num_layers + 1), np.int64),
            **{name: np.empty(self.max_tokens * size, np.float32) for name, size in sizes.items()},
        )
        normed = np.empty((num_threads, self.max_tokens * network.d_model), np.float32)
        scratch_size = max(count_scratch(attention, cache.page_table.shape[1]), 3 * network.adapters.rank)
        scratch = np.empty((num_threads, scratch_size), np.float32)
        self._threads = list(zip(normed, scratch, strict=True))

    def decode(self, inputs_2B: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) of one new token in each of the first B rows. The next call overwrites them."""
        ids_B, positions_B = inputs_2B
        if len(ids_B) > self.max_tokens:
            return super().decode(inputs_2B, max_position)
        step = self._run(ids_B, torch.arange(len(ids_B)), positions_B, has_logits=True)
        return self.model.cap_logits(self._rows(step.logits, len(ids_B)))

    def extend(self, rows: Sequence[int], tokens: Sequence[Tokens], starts: Sequence[int]) -> list[Tensor]:
        """Compute new tokens of several sequences, and return their hidden states (T, D)."""
        lengths = [len(new) for new in tokens]
        if sum(lengths) > self.max_tokens:
            return super().extend(rows, tokens, starts)
        self.cache.check_chunk(max(lengths))
        positions_N = torch.cat([torch.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        rows_N = torch.tensor(rows).repeat_interleave(torch.tensor(lengths))
        ids_N = torch.tensor([token for new in tokens for token in new])
        step = self._run(ids_N, rows_N, positions_N, has_logits=False)
        hidden_ND: Tensor = self.model.ln_final(self._rows(step.x, len(ids_N)).to(self.cache.keys.dtype))
        return list(hidden_ND.split(lengths))

    @contextmanager
    def sampling_context(self, batch_size: int) -> Iterator[None]:
        """Run torch's operators in one thread if the batch is small.

        Its other threads spin for milliseconds after each operator, on the CPUs that the kernel needs next.
        """
        num_threads = torch.get_num_threads()
        if batch_size <= self.max_tokens:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            if batch_size <= self.max_tokens:
                torch.set_num_threads(num_threads)

    def _run(self, ids_N: Tensor, rows_N: Tensor, positions_N: Tensor, has_logits: bool) -> Step:
        adapters_N = self.cache.adapters_of(rows_N.tolist())
        step = self._step._replace(tokens=len(ids_N), has_logits=has_logits)
        if adapters_N is not None:
            step = step._replace(adapters=adapters_N.numpy())
        step.progress.fill(0)
        self._rows(step.x, len(ids_N))[:] = self.model.embed(ids_N)
        cache = self._arrays._replace(rows=rows_N.numpy(), positions=positions_N.numpy())
        jobs: list[tuple[Any, ...]] = [(self._network, cache, step, *own) for own in self._threads]
        futures = [thread_pool().submit(fused_step.run_step, *job) for job in jobs[1:]]
        fused_step.run_step(*jobs[0])
        for future in futures:
            if not future.cancel():  # the step is complete even if a thread did not begin
                future.result()
        return step

    def _rows(self, array: np.ndarray[Any, Any], count: int) -> Tensor:
        """Return the first rows of a buffer."""
        return torch.from_numpy(array).view(self.max_tokens, -1)[:count]
