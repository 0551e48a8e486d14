"""Torch interface of the CPU kernels for a decoding step (:mod:`lm.kernels.decode_step`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lm.inference.kv_cache import CachedAttention
from lm.kernels import decode_step as kernels
from lm.kernels import few_rows
from lm.kernels.decode_step import AttentionLayer, KVCache, Stored
from lm.kernels.few_rows import Matrix
from lm.model.attention import MultiHeadSelfAttention
from lm.model.norm import RMSNorm

# Of a layer's keys and values, and of a matrix; below, waking threads takes longer than it saves.
_MIN_BYTES_FOR_THREADS = 1 << 24
_MIN_BYTES_OF_PRODUCT = 1 << 20
_NO_SCALES = np.empty(0, np.float32)


def flat_array(x: Tensor) -> Stored:
    """Return a view of a tensor as a flat array of its dtype; uint16 for bfloat16."""
    array: Stored = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).reshape(-1).numpy()
    return array


class NormKernel:
    """:class:`lm.model.norm.RMSNorm` for few rows."""

    def __init__(self, norm: RMSNorm) -> None:
        self._weight, self._eps = flat_array(norm.weight.detach()), norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) → the same shape and dtype."""
        out = torch.empty(x.shape, dtype=x.dtype)
        kernels.normalize(flat_array(x), self._weight, self._eps, flat_array(out))
        return out


class AttentionKernel:
    """QK-norm, rotary positions and cached attention for one new token a row.

    It replaces the part of a :class:`lm.model.attention.MultiHeadSelfAttention` between the projections.
    """

    def __init__(self, attention: MultiHeadSelfAttention) -> None:
        weight, width = attention.q_proj.weight.detach(), attention.d_k
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if isinstance(norm, RMSNorm)]
        rope, empty = attention.rope, torch.empty(0)
        self.layer = AttentionLayer(
            heads=len(weight) // width,
            kv_heads=len(attention.k_proj.weight) // width,
            width=width,
            norm_weights=flat_array(torch.cat([norm.weight.detach().float() for norm in norms]) if norms else empty),
            eps=norms[0].eps if norms else 0.0,
            cos=flat_array(rope.cos if rope else empty),
            sin=flat_array(rope.sin if rope else empty),
        )

    def __call__(self, qkv: Tensor, cached: CachedAttention) -> Tensor:
        """Queries, keys and values (B, 1, (H + 2 kv heads) K) → (B, 1, H K). The keys and values enter the cache."""
        rows, kv_heads, width = len(qkv), self.layer.kv_heads, self.layer.width
        out = torch.empty((rows, 1, self.layer.heads * width))
        positions, length = cached.positions.numpy(), cached.keys.shape[2]
        kv_cache = KVCache(flat_array(cached.keys), flat_array(cached.values), rows, length, np.arange(rows), positions)
        bytes_read = 2 * rows * kv_heads * cached.max_position * width * cached.keys.itemsize
        threads = torch.get_num_threads() if bytes_read > _MIN_BYTES_FOR_THREADS else 1
        scratch = np.empty((threads, 2 * width + cached.max_position + 4), np.float32)
        parts = zip(split_evenly(rows * kv_heads, threads), scratch, strict=True)
        floats, flat_out = flat_array(qkv.float()), flat_array(out)
        jobs = [(self.layer, kv_cache, floats, *part, own, flat_out) for part, own in parts]
        run_in_threads(kernels.attend, jobs)
        return out.to(qkv.dtype)


def multiply_few_rows(weight: Tensor, rows: Tensor, scale: Tensor | None = None) -> Tensor:
    """Return the product of ``rows`` (B, in), in their dtype, with ``weight`` (out, in), float32, bfloat16 or int8.

    ``scale`` (out), float32, multiplies the rows of the weight. Fast if B is small.
    """
    outputs = len(weight)
    out = torch.empty((len(rows), outputs))
    x, flat_out = flat_array(rows.float().contiguous()), flat_array(out)
    threads = torch.get_num_threads() if weight.nbytes > _MIN_BYTES_OF_PRODUCT else 1
    matrix = flat_matrix(weight, scale)
    jobs = [(matrix, x, len(rows), first, last, flat_out) for first, last in split_evenly(outputs, threads)]
    run_in_threads(few_rows.multiply, jobs)
    return out.to(rows.dtype)


def flat_matrix(weight: Tensor, scale: Tensor | None) -> Matrix:
    """Return a weight (out, in) and the scales of its rows, if it has them, for kernels."""
    return Matrix(flat_array(weight), _NO_SCALES if scale is None else flat_array(scale), 0, 0, *weight.shape)


def split_evenly(count: int, parts: int) -> list[tuple[int, int]]:
    """Return the (start, end) of parts of ``range(count)``."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return list(zip(bounds, bounds[1:], strict=False))


def run_in_threads(kernel: Callable[..., None], jobs: Sequence[tuple[Any, ...]]) -> None:
    """Call ``kernel(*job)`` for each job: the first in this thread, the others beside it."""
    futures = [thread_pool().submit(kernel, *job) for job in jobs[1:]]
    kernel(*jobs[0])
    for future in futures:
        future.result()


@cache
def thread_pool() -> ThreadPoolExecutor:
    """Return the threads that compute beside the calling one."""
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1))
