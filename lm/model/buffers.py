"""Buffers whose precision does not follow that of the model."""

from collections.abc import Callable
from typing import Self

from torch import Tensor, nn


class BuffersKeepDtype(nn.Module):
    """A module whose own buffers keep their dtype when the model is cast, e.g. by ``model.to(torch.bfloat16)``."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        originals = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, original in originals.items():
            applied = self._buffers[name]
            if original is not None and applied is not None and applied.dtype != original.dtype:
                self._buffers[name] = original.to(applied.device)
        return self
