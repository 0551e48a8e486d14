"""The base class of the optimizers."""

import inspect

import torch


class Optimizer(torch.optim.Optimizer):
    """Torch's optimizer, without the import of torch.compile at its first call.

    Torch imports it, for two seconds, to keep it from tracing these four methods. Nothing here compiles an optimizer.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)
