"""A step of few tokens on a CPU as one call of a compiled kernel for each thread: :mod:`lm.kernels.whole_step`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm.inference.cpu_decode import flat_array, thread_pool
from lm.inference.kv_cache import KVCache, decode_step
from lm.kernels import whole_step as kernels
from lm.kernels.decode_step import KVCache as CacheArrays
from lm.kernels.whole_step import Network, Step
from lm.model.norm import RMSNorm
from lm.model.transformer import TransformerLM

_MIN_BYTES_FOR_THREADS = 1 << 22  # of the weights; below, waking a thread takes longer than it saves
_PORTIONS_OF_THREAD = 4  # with more, taking them costs more than the waits for the last one


class FlatWeights(nn.Module):
    """The weights of a model after :mod:`lm.inference.packed` replaced its matrices, as the kernel needs them.

    The matrices become views of one array. The kernel is to compute up to ``max_tokens`` at a time. It is a module only
    because the model holds it: it has no forward pass.
    """

    def __init__(self, model: TransformerLM, max_tokens: int) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        layers: Any = model.layers
        head: Any = model.lm_head
        matrices = [m for layer in layers for m in _matrices(layer)] + [head]
        norms = [norm for layer in layers for norm in (layer.ln1, layer.ln2)] + [model.ln_final]
        qk_norms = [norm for layer in layers for norm in (layer.attn.q_norm, layer.attn.k_norm)]
        gains = [norm.weight for norm in qk_norms if isinstance(norm, RMSNorm)]
        self.network = Network(
            weights=_share_array(matrices),
            scales=_join([matrix.scale for matrix in matrices if matrix.scale is not None]),
            gains=_join([norm.weight for norm in norms]),
            biases=_join([matrix.bias for matrix in matrices if matrix.bias is not None]),
            attention=layers[0].attn.kernel.layer._replace(norm_weights=_join(gains)),
            num_layers=len(layers),
            d_model=model.config.d_model,
            d_ff=model.config.d_ff,
            vocab_size=len(head.weight),
            eps=model.config.norm_eps,
        )

    @staticmethod
    def is_possible(model: TransformerLM) -> bool:
        """Return whether the kernel has the options of ``model``, and its weights are there in the plain layout."""
        return model.config.has_llama_blocks and getattr(model.lm_head, "weight", None) is not None


def _matrices(layer: Any) -> list[Any]:
    return [layer.attn.qkv_proj, layer.attn.output_proj, layer.ffn.w1_w3, layer.ffn.w2]


def _share_array(matrices: Sequence[Any]) -> np.ndarray[Any, Any]:
    """Return the weights of ``matrices`` as one array, and make the weight of each a view of it."""
    flat = torch.empty(sum(matrix.weight.numel() for matrix in matrices), dtype=matrices[0].weight.dtype)
    start = 0
    for matrix in matrices:
        end = start + matrix.weight.numel()
        matrix.weight = flat[start:end].view(matrix.weight.shape).copy_(matrix.weight)
        start = end
    return flat_array(flat)


def _join(tensors: Sequence[Tensor]) -> np.ndarray[Any, Any]:
    return flat_array(torch.cat([tensor.detach().float().flatten() for tensor in tensors] or [torch.empty(0)]))


class CompiledStep:
    """Computes up to ``max_tokens`` new tokens with the kernel."""

    def __init__(self, model: TransformerLM, weights: FlatWeights, cache: KVCache) -> None:
        self._model, self._network, self._cache = model, weights.network, cache
        self.max_tokens, network = weights.max_tokens, weights.network
        attention, length = network.attention, cache.keys.shape[3]
        sizes = {
            "x": network.d_model,
            "change": network.d_model,
            "qkv": (attention.heads + 2 * attention.kv_heads) * attention.width,
            "attended": attention.heads * attention.width,
            "gate": network.d_ff,
            "value": network.d_ff,
            "logits": network.vocab_size,
        }
        num_threads = torch.get_num_threads() if network.weights.nbytes > _MIN_BYTES_FOR_THREADS else 1
        self._step = Step(
            tokens=0,
            portions=1 if num_threads == 1 else num_threads * _PORTIONS_OF_THREAD,
            has_logits=False,
            progress=np.zeros(2 * (kernels.SECTIONS_OF_LAYER * network.num_layers + 1), np.int64),
            **{name: np.empty(self.max_tokens * size, np.float32) for name, size in sizes.items()},
        )
        normed = np.empty((num_threads, self.max_tokens * network.d_model), np.float32)
        scratch = np.empty((num_threads, 2 * attention.width + length + 4), np.float32)
        self._threads = list(zip(normed, scratch, strict=True))

    def decode(self, inputs: Tensor, max_position: int) -> Tensor:
        """Return logits (B, V) as :func:`lm.inference.kv_cache.decode_step` does. The next call overwrites them."""
        ids, positions = inputs
        if len(ids) > self.max_tokens:
            return decode_step(self._model, self._cache, inputs, max_position)
        step = self._run(ids, torch.arange(len(ids)), positions, has_logits=True)
        return self._model.cap_logits(self._rows(step.logits, len(ids)))

    def hidden_states(self, ids: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """Compute tokens (N,) at ``positions`` (N,) of ``rows`` (N,) of the cache; return hidden states (N, D)."""
        step = self._run(ids, rows, positions, has_logits=False)
        out: Tensor = self._model.ln_final(self._rows(step.x, len(ids)).to(self._cache.keys.dtype))
        return out

    def _run(self, ids: Tensor, rows: Tensor, positions: Tensor, has_logits: bool) -> Step:
        step = self._step._replace(tokens=len(ids), has_logits=has_logits)
        step.progress.fill(0)
        self._rows(step.x, len(ids))[:] = self._model.token_embeddings(ids)
        _, num_rows, _, length, _ = self._cache.keys.shape
        cache = CacheArrays(
            flat_array(self._cache.keys),
            flat_array(self._cache.values),
            num_rows,
            length,
            rows.numpy(),
            positions.numpy(),
        )
        jobs: list[tuple[Any, ...]] = [(self._network, cache, step, *own) for own in self._threads]
        futures = [thread_pool().submit(kernels.run_step, *job) for job in jobs[1:]]
        kernels.run_step(*jobs[0])
        for future in futures:
            if not future.cancel():  # the step is complete even if a thread did not begin
                future.result()
        return step

    def _rows(self, array: np.ndarray[Any, Any], count: int) -> Tensor:
        """Return the first rows of a buffer."""
        return torch.from_numpy(array).view(self.max_tokens, -1)[:count]


@contextmanager
def resting_torch_threads() -> Iterator[None]:
    """Run torch's operators in one thread.

    Its other threads spin for milliseconds after each operator, on the processors that the kernel needs next.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)
