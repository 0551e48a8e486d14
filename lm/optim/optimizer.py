"""The base class of the optimizers."""

import inspect
from typing import Any

import torch
from torch import Tensor


class Optimizer(torch.optim.Optimizer):
    """Torch's optimizer, without the import of torch.compile at its first call.

    Torch imports it, for two seconds, to keep it from tracing these four methods. Nothing here compiles an optimizer.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)

    def state_shape(self, name: str, parameter: Tensor) -> torch.Size:
        """Return the shape of a tensor of a parameter's state, by its name."""
        return parameter.shape

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore ``state``. Options that it lacks, as it is from an earlier version, get their defaults."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; a resumed training would save it, and others not
        for group in self.param_groups:
            for name, value in self.defaults.items():
                group.setdefault(name, value)
