"""The kernels of :mod:`lm.kernels.decode` for tensors: what a step of one token more computes besides the products."""

from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lm.cache import OneMore
from lm.kernels import compiling
from lm.kernels import decode as kernels
from lm.kernels.decode import Stored
from lm.layers import MultiHeadSelfAttention, RMSNorm

_SHARED = 1 << 24  # bytes of a layer's keys and values, above which it is worth to wake more threads


def _numbers(x: Tensor) -> Stored:
    """A tensor's numbers in a row, as the kernels take them: float32, or bfloat16 as uint16."""
    found: Stored = (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).reshape(-1).numpy()
    return found


class Norm:
    """:class:`lm.layers.RMSNorm` of few rows."""

    def __init__(self, norm: RMSNorm) -> None:
        self._weight, self._eps = _numbers(norm.weight.detach()), norm.eps

    def __call__(self, x: Tensor) -> Tensor:
        """(..., D) → the same shape and dtype."""
        out = torch.empty(x.shape, dtype=x.dtype)
        kernels.normalize(_numbers(x), self._weight, self._eps, _numbers(out))
        return out


class Attention:
    """What is between the projections of a :class:`lm.layers.MultiHeadSelfAttention`, for one token more in each row:
    norms, turning, and the attention to those that are there."""

    def __init__(self, attention: MultiHeadSelfAttention) -> None:
        weight = attention.q_proj.weight.detach()
        self._width, self._heads = attention.d_k, len(weight) // attention.d_k
        norms = [norm for norm in (attention.q_norm, attention.k_norm) if isinstance(norm, RMSNorm)]
        self._gains = _numbers(torch.cat([norm.weight.detach() for norm in norms]) if norms else weight[:0])
        self._eps = norms[0].eps if norms else 0.0
        rope, nothing = attention.rope, torch.empty(0)
        self._cos, self._sin = _numbers(rope.cos if rope else nothing), _numbers(rope.sin if rope else nothing)

    def __call__(self, qkv: Tensor, place: OneMore) -> Tensor:
        """Put the keys and values of ``qkv`` (B, 1, (H + 2 kv heads) K) at their ``place``; (B, 1, H K) of its
        queries."""
        rows, width, (_, kv_heads, length, _) = len(qkv), self._width, place.keys.shape
        out = torch.empty((rows, 1, self._heads * width), dtype=qkv.dtype)
        about = (self._gains, self._eps, self._cos, self._sin)
        arrays = (_numbers(place.keys), _numbers(place.values), place.positions.numpy())
        shape = (self._heads, kv_heads, length, width)
        read = 2 * rows * kv_heads * place.longest * width * qkv.itemsize
        threads = torch.get_num_threads() if read > _SHARED else 1
        ends = [rows * kv_heads * part // threads for part in range(threads + 1)]
        scratch = np.empty((threads, 2 * width + place.longest + 4), np.float32)
        parts = zip(ends, ends[1:], scratch, strict=False)
        jobs = [(_numbers(qkv), *about, *arrays, shape, *part, _numbers(out)) for part in parts]
        others = [_pool().submit(kernels.attend, *job) for job in jobs[1:]]  # type: ignore[arg-type]
        kernels.attend(*jobs[0])
        for other in others:
            other.result()
        return out


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, torch.get_num_threads() - 1))


def compile_kernels(dtype: torch.dtype) -> None:
    """Compile what tensors of ``dtype`` will need, with a word about it."""
    with compiling(f"{str(dtype).removeprefix('torch.')} decoding"):
        zeros = torch.zeros(1, 1, 2, 2, dtype=dtype)
        Norm(RMSNorm(2, dtype=dtype))(zeros)
        attend = Attention(MultiHeadSelfAttention(2, 1, dtype=dtype))
        attend(torch.zeros(1, 1, 6, dtype=dtype), OneMore(zeros, zeros, torch.tensor([0]), 0))
