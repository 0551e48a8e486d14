"""A head that reads one number from each hidden state: a reward, or the value of a state."""

import torch
from torch import Tensor, nn
from torch.types import Device

from lm.model.linear import truncated_normal_
from lm.model.roles import Role


class ScalarHead(nn.Module):
    """Map hidden states to numbers: ``h · weight + bias``, in float32 also under autocast.

    ``weight`` (d_model,) is initialized from N(0, ``std``²) truncated at ±3 std, or with zeros; ``bias`` is 0.
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
        """(..., d_model) → (...)."""
        return (hidden_states.float() * self.weight).sum(-1) + self.bias
