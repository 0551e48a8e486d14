"""The base class of the optimizers, and the tensors that they update."""

import inspect

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


def local_shard(x: Tensor) -> Tensor:
    """Return this rank's shard of ``x``: of a DTensor its local tensor, of any other tensor all of it.

    In-place operations on views of a DTensor may change a copy.
    """
    local: Tensor = x.to_local() if hasattr(x, "to_local") else x
    return local
