"""Linear and embedding layers (CS336 assignment 1, section 3), heads, and the roles of parameters.

A module states the role of its parameters as its attribute ``role``, that of a bias as ``bias_role``. Optimizers,
parameter counts and the Hugging Face exporter follow the roles, not names or shapes.
Shapes: B batch, T tokens, D d_model, V vocabulary, N = B · T.
"""

import math
from collections.abc import Callable
from typing import Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.types import Device

from lm.model.initialization import truncated_normal_
from lm.model.ops.cross_entropy import linear_cross_entropy
from lm.model.ops.matmul import linear

Role = Literal["embedding", "query_key", "value_output", "feed_forward", "router", "norm", "bias", "head"]
"""query_key: a matrix whose output is rotated by position. value_output: the other matrices of attention. feed_forward:
a matrix, or a stack of the matrices of experts. router: the matrix that scores experts. norm: the weight of a norm."""
HIDDEN_MATRICES: frozenset[Role] = frozenset(["query_key", "value_output", "feed_forward"])


class Linear(nn.Module):
    """``y = x Wᵀ``, with ``has_bias`` plus a bias. ``weight`` is (out_features, in_features), initialized from
    N(0, 2 / (in + out)) truncated at ±3 standard deviations, ``bias`` (out_features,) with zeros.

    ``role`` is the weight's role in a model. None: the layer is not part of one.
    """

    bias_role: Role = "bias"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        role: Role | None = None,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.role = role
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        truncated_normal_(self.weight, math.sqrt(2 / (in_features + out_features)))
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if has_bias else None

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        out_features, in_features = self.weight.shape
        return out_features, in_features

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) → (..., out_features)."""
        out = linear(x, self.weight)
        return out if self.bias is None else out + self.bias.to(out.dtype)  # autocast keeps the bias in float32


class Embedding(nn.Module):
    """Look up rows of ``weight`` (num_embeddings, embedding_dim), initialized from N(0, 1) truncated at ±3."""

    role: Role = "embedding"

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device: Device = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_embeddings, embedding_dim, device=device, dtype=dtype))
        truncated_normal_(self.weight, 1.0)

    def forward(self, token_ids: Tensor) -> Tensor:
        """Integer ids (...) → (..., embedding_dim)."""
        return F.embedding(token_ids, self.weight)


class Head(Linear):
    """The language-model head: logits of hidden states, or their loss."""

    def forward(self, x: Tensor, targets: Tensor | None = None, softcap: float = 0.0) -> Tensor:
        """Hidden states (..., D) → logits (..., V), without ``softcap``.

        With ``targets`` (N,) for ``x`` (N, D): the mean loss, see
        :func:`lm.model.ops.cross_entropy.linear_cross_entropy`.
        """
        return linear(x, self.weight) if targets is None else linear_cross_entropy(x, self.weight, targets, softcap)


class TiedEmbedding(Embedding):
    """An embedding whose weight is also the head's: token ids are looked up, and hidden states go to the head.

    Both are calls of one module, so that what wraps the module, such as :class:`lm.distributed.FSDP`, sees both.
    """

    def forward(self, x: Tensor, targets: Tensor | None = None, softcap: float = 0.0) -> Tensor:
        """Integer ids (...) → (..., D); for floating-point ``x`` as :class:`Head`."""
        if not x.is_floating_point():
            return F.embedding(x, self.weight)
        return linear(x, self.weight) if targets is None else linear_cross_entropy(x, self.weight, targets, softcap)


class ScalarHead(nn.Module):
    """Map hidden states to numbers: ``h · weight + bias``, in float32 also under autocast.

    ``weight`` (D,) is initialized from N(0, ``std``²) truncated at ±3 std, or with zeros; ``bias`` is 0.
    """

    role: Role = "head"
    bias_role: Role = "bias"

    def __init__(self, d_model: int, std: float = 0.0, device: Device = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_model, device=device))
        self.bias = nn.Parameter(torch.zeros((), device=device))
        if std:
            truncated_normal_(self.weight, std)

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(..., D) → (...)."""
        return (hidden_states.float() * self.weight).sum(-1) + self.bias


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
