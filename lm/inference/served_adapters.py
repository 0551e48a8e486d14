"""Several adapters (LoRA) over one base: each sequence of a batch has one of them, or none.

The layers of the base stay as they are. A hook adds the low-rank change of each row's adapter to the output of a layer;
the matrices of all adapters are stacked, with zeros up to the largest rank. Sources: Hu et al. 2021 (LoRA); Chen et al.
2023 (Punica: one operation for the rows of all adapters).
Shapes: N adapters and the base, B sequences, T tokens, I inputs, O outputs, R rank, P matrices of a joined layer.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lm.common.errors import UserError
from lm.hardware.kernel_threads import run_in_threads, split_evenly
from lm.kernels.decode import low_rank
from lm.kernels.decode.low_rank import RANK_MULTIPLE, LowRankStack
from lm.model.adapter import LowRank
from lm.model.transformer import TransformerLM

_MAX_KERNEL_ROWS = 64  # with more, products of matrices are faster
_JOINED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "w1_w3": ("w1", "w3")}  # layers for CPUs

_adapters_B: ContextVar[Tensor | None] = ContextVar("adapters", default=None)


@contextmanager
def use_adapters(adapters_B: Tensor | None) -> Iterator[None]:
    """Compute with the adapters of B sequences inside the ``with`` block: int64, from 1; 0 or None: the base alone."""
    token = _adapters_B.set(adapters_B)
    try:
        yield
    finally:
        _adapters_B.reset(token)


class LayerAdapters:
    """Adds the changes of adapters to the output of a layer, as its forward hook.

    ``numbers`` holds the matrices of all layers: from ``start`` on ``a`` (N, P R, I), then ``b`` (N, R, O) with alpha /
    rank in it. ``ends`` are the ends of the P matrices in the outputs.
    """

    def __init__(self, numbers: Tensor, start: int, count: int, rank: int, columns: int, ends: Sequence[int]) -> None:
        a_shape, b_shape = (count, len(ends) * rank, columns), (count, rank, ends[-1])
        middle = start + int(np.prod(a_shape))
        self.end = middle + int(np.prod(b_shape))
        self.a, self.b = numbers[start:middle].view(a_shape), numbers[middle : self.end].view(b_shape)
        self.ends, self._rank = ends, rank
        self.stack: LowRankStack | None = None
        """The same for the kernel; None if it cannot compute with these numbers."""
        if numbers.device.type == "cpu" and numbers.dtype == torch.float32:
            places = np.array(ends, np.int64), 0, len(ends)
            self.stack = LowRankStack(numbers.numpy(), start, middle, rank, columns, *places)

    def fill(self, adapter: int, part: int, matrices: LowRank) -> None:
        """Store the matrices of an adapter for one of the P matrices of the layer."""
        first, rank = ([0, *self.ends])[part], len(matrices.a)
        self.a[adapter, part * self._rank :][:rank] = matrices.a
        self.b[adapter, :rank, first : self.ends[part]] = matrices.b.T * matrices.scale

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Return the output of the layer (..., O) with the changes."""
        adapters_B = _adapters_B.get()
        if adapters_B is None:
            return out
        x_BTI = inputs[0].reshape(len(adapters_B), -1, self.a.shape[-1]).to(self.a.dtype)
        count, length, _ = x_BTI.shape
        if self.stack and count * length <= _MAX_KERNEL_ROWS:
            changed = out.to(self.a.dtype).contiguous()
            adapters_N = adapters_B if length == 1 else adapters_B.repeat_interleave(length)
            self._add_in_place(self.stack, adapters_N, x_BTI.contiguous(), changed)
            return changed.to(out.dtype)
        inner_BTP = x_BTI.bmm(self.a[adapters_B].mT).split(self._rank, -1)
        parts = self.b[adapters_B].tensor_split(self.ends[:-1], -1)
        change_BTO = torch.cat([inner.bmm(b) for inner, b in zip(inner_BTP, parts, strict=True)], -1)
        return out + change_BTO.view(out.shape).to(out.dtype)

    def _add_in_place(self, stack: LowRankStack, adapters: Tensor, x: Tensor, out: Tensor) -> None:
        arrays = adapters.numpy(), x.view(-1).numpy(), out.view(-1).numpy()
        bounds = split_evenly(len(adapters), min(len(adapters), torch.get_num_threads()))
        inner = np.empty((len(bounds), self.a.shape[1]), np.float32)
        jobs = [(stack, *arrays[:2], *part, own, arrays[2]) for part, own in zip(bounds, inner, strict=True)]
        run_in_threads(low_rank.add_low_rank, jobs)


def attach_adapters(
    model: TransformerLM, adapters: Sequence[Mapping[str, LowRank]], shapes: Mapping[str, tuple[int, int]]
) -> None:
    """Let ``model`` compute with ``adapters``, numbered from 1: the matrices of each by the names of layers.

    ``shapes`` (O, I) are those of the linear layers before some of them were joined. The matrices are stored in
    float32, or in float64 beside such a model.
    """
    rank = -(-max(len(m.a) for adapter in adapters for m in adapter.values()) // RANK_MULTIPLE) * RANK_MULTIPLE
    layers: dict[str, list[str]] = {}  # with adapters, and the names of their matrices
    for name, _ in model.named_modules():
        prefix, _, last = name.rpartition(".")
        parts = [f"{prefix}.{part}" for part in _JOINED.get(last, (last,))]
        if any(part in adapter for part in parts for adapter in adapters):
            layers[name] = parts
    count, weight = len(adapters) + 1, model.token_embeddings.weight
    sizes = [sum(rank * sum(shapes[part]) for part in parts) for parts in layers.values()]
    dtype = torch.promote_types(weight.dtype, torch.float32)
    numbers, start = torch.zeros(count * sum(sizes), dtype=dtype, device=weight.device), 0
    for name, parts in layers.items():
        ends = np.cumsum([shapes[part][0] for part in parts]).tolist()
        layer: Any = model.get_submodule(name)
        layer.adapters = LayerAdapters(numbers, start, count, rank, shapes[parts[0]][1], ends)
        start = layer.adapters.end
        for number, adapter in enumerate(adapters, 1):
            for part, part_name in enumerate(parts):
                if part_name in adapter:
                    layer.adapters.fill(number, part, adapter[part_name])
        layer.register_forward_hook(layer.adapters)


def count_adapters(model: TransformerLM) -> int:
    """Return the number of adapters that :func:`attach_adapters` was called with."""
    stacks = (getattr(module, "adapters", None) for module in model.modules())
    return next((len(stack.a) - 1 for stack in stacks if isinstance(stack, LayerAdapters)), 0)


def check_adapter(model: TransformerLM, adapter: int) -> None:
    """Raise UserError for a number that no adapter of ``model`` has; 0 is the base."""
    count = count_adapters(model)
    if not 0 <= adapter <= count:
        raise UserError(
            f"The adapter has number {adapter}, but the model has {count}; choose 0 for the base, or one of them."
        )
