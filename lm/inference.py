"""A model made ready to generate: its weights in the form in which few rows are multiplied by them fastest.

Drawing a token reads every weight once, so what counts is how fast memory is read. torch's own product of a matrix and
a vector reaches a third of that on processors. In float32 ours does it (:mod:`lm.kernels.product`), in bfloat16 oneDNN
with the weights in its own order.
"""

import threading
import weakref
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from lm.kernels import compiling
from lm.kernels.product import SPINNING, STATE, help_out, multiply
from lm.layers import Linear
from lm.model import TransformerLM

_FEW = 64  # rows, below which oneDNN's own order of the weights is worth the copy of them


class Team:
    """This thread and others, for products of vectors and the matrices that lie in one array."""

    def __init__(self, weights: npt.NDArray[np.float32], widest: int) -> None:
        self._state = np.zeros(STATE, np.int64)
        self._weights = weights
        self._x, self._y = np.zeros((2, widest), np.float32)
        self._others = [threading.Event() for _ in range(torch.get_num_threads() - 1)]
        is_over = threading.Event()
        arrays = (self._state, self._weights, self._x, self._y)
        threads = [threading.Thread(target=_help, args=(arrays, wake, is_over), daemon=True) for wake in self._others]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _dismiss, threads, self._others, is_over)  # at the end of the process too

    def multiply(self, x: Tensor, offset: int, rows: int) -> Tensor:
        """The matrix (rows, D) at ``offset`` of the array, times ``x`` (D,), float32 both."""
        columns = len(x)
        self._x[:columns] = x.numpy()
        if self._state[SPINNING] < len(self._others):  # they rest when there was nothing to do for a while
            for wake in self._others:
                wake.set()
        with compiling("product"):
            multiply(self._state, self._weights, self._x, self._y, offset, rows, columns)
        return torch.from_numpy(self._y[:rows].copy())


def _help(arrays: tuple[npt.NDArray[np.generic], ...], wake: threading.Event, is_over: threading.Event) -> None:
    while True:
        wake.wait()
        wake.clear()
        if is_over.is_set():
            return
        help_out(*arrays)


def _dismiss(threads: list[threading.Thread], others: list[threading.Event], is_over: threading.Event) -> None:
    is_over.set()
    for wake in others:
        wake.set()
    for thread in threads:
        if thread is not threading.current_thread():  # whose turn it may be to collect garbage
            thread.join()  # a process that ends while one computes would abort


class _VectorLinear(nn.Module):
    """A float32 layer whose product with one row is its team's."""

    def __init__(self, weight: Tensor, team: Team, offset: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)  # within the team's array
        self._team, self._offset = team, offset
        self._packed: list[Tensor] = []  # oneDNN's copy, from the first time that a few rows come

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        count = x.numel() // x.shape[-1]
        if count == 1:
            return self._team.multiply(x.reshape(-1), self._offset, len(self.weight)).view(*x.shape[:-1], -1)
        if count < _FEW and not self._packed:
            self._packed = [_in_onednns_order(self.weight)]
        return _onednn_linear(x, self._packed[0] if count < _FEW else self.weight)


class _PackedLinear(nn.Module):
    """A layer in bfloat16 whose weights are in oneDNN's order alone."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self._packed = [_in_onednns_order(weight)]  # not a parameter: nothing else can read it

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        return _onednn_linear(x, self._packed[0])


def _in_onednns_order(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
    return packed


def _onednn_linear(x: Tensor, weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
    return found


def prepare(model: TransformerLM, dtype: torch.dtype | None = None) -> TransformerLM:
    """Make ``model`` itself one that only generates, in ``dtype``, by default as it is; returns it.

    It cannot be trained or saved any more, nor used by two threads at a time: its team has one job at once.
    """
    model.requires_grad_(False)
    for parameter in model.parameters():  # not the buffers: rotary angles stay float32
        parameter.data = parameter.data.to(dtype or parameter.dtype)
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return model
    layers = list(_linear_layers(model))
    if parameter.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        for parent, name, layer in layers:
            setattr(parent, name, _PackedLinear(layer.weight.detach()))
    elif parameter.dtype == torch.float32:
        weights = torch.empty(sum(layer.weight.numel() for _, _, layer in layers))
        team = Team(weights.numpy(), max(max(layer.weight.shape) for _, _, layer in layers))
        offset = 0
        for parent, name, layer in layers:
            part = weights[offset : offset + layer.weight.numel()].view(layer.weight.shape).copy_(layer.weight)
            setattr(parent, name, _VectorLinear(part, team, offset))
            offset += part.numel()
    return model


def _linear_layers(model: nn.Module) -> Iterator[tuple[nn.Module, str, Linear]]:
    """Every such layer, with the module that has it and its name there."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                yield parent, name, child
