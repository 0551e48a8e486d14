"""Units of FSDP: weights that are gathered, freed and reduced together."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.distributed.process_group import get_rank, get_world_size
from lm.distributed.sharding import Bounds, RowExchange, Transfer, local_rows, shard_rows


class Unit:
    """Weights that are gathered, freed and reduced together; all need gradients, or none does. ``shards`` are this
    rank's rows of them, or, without ``bounds``, all of each vector."""

    def __init__(
        self,
        params: list[nn.Parameter],
        locations: list[list[tuple[nn.Module, str]]],
        bounds: list[Bounds],
        dtype: torch.dtype,
        reduce_dtype: torch.dtype | None,
        reduce_group: dist.ProcessGroup,
    ) -> None:
        self.locations, self.bounds, self.initial = locations, bounds, params
        if bounds:
            rank = get_rank()
            rows = [p.new_empty(b[rank + 1] - b[rank], *p.shape[1:]) for p, b in zip(params, bounds, strict=True)]
        else:
            rows = [torch.empty_like(p) for p in params]
        self.shards = [nn.Parameter(x, p.requires_grad) for p, x in zip(params, rows, strict=True)]
        for index, p in enumerate(params):
            if has_memory(p):
                self.set_rows(index, p.detach())
        self.full = [nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad) for p in params]
        self.on_gradients: Callable[[Unit], None] = lambda unit: None
        self._gather_exchange = RowExchange(self.full, bounds, dtype)
        self._reduce_exchange = RowExchange(self.full, bounds, reduce_dtype or dtype, reduce_group)
        self._gather: Transfer | None = None
        self._reduction: Transfer | None = None
        self._kept: list[Tensor | None] = [None] * len(self.full)  # gradients of earlier micro-batches
        self._is_gathered = True
        self.is_frozen = not params[0].requires_grad
        for p in () if self.is_frozen else self.full:
            p.register_post_accumulate_grad_hook(self._count_gradient)
        self.expect_gradients()
        self.free()

    def set_rows(self, index: int, whole: Tensor) -> None:
        """Take this rank's rows of a whole parameter."""
        rows = local_rows(whole, self.bounds[index]) if self.bounds else whole
        self.shards[index].detach().copy_(rows)

    @property
    def rows(self) -> list[Tensor]:
        """This rank's rows of each parameter."""
        return [shard.detach() for shard in self.shards]

    def start_gather(self) -> None:
        """Begin to gather the parameters."""
        if not self._is_gathered and self._gather is None:
            self._gather = self._gather_exchange.start_gather(self.rows)

    def gather(self) -> None:
        """Gather the modules' parameters."""
        if self._is_gathered:
            return
        transfer = self._gather or self._gather_exchange.start_gather(self.rows)
        for p in self.full:
            p.untyped_storage().resize_(p.numel() * p.itemsize)
        # Copies through .data: autograd must not take the weights that it has saved for changed.
        self._gather_exchange.finish_gather(transfer, [p.data for p in self.full])
        self._gather, self._is_gathered = None, True
        self._set_parameters(self.full)

    def gather_copies(self) -> list[Tensor]:
        """Return the unsharded weights in the dtype of the shards, as new tensors."""
        copies = [torch.empty_like(p, dtype=s.dtype) for p, s in zip(self.full, self.shards, strict=True)]
        exchange = RowExchange(self.full, self.bounds, self.shards[0].dtype)
        exchange.finish_gather(exchange.start_gather(self.rows), copies)
        return copies

    def free(self) -> None:
        """Make the modules' parameters this rank's rows, and free the memory of the others."""
        if self._gather is not None:  # gathered ahead and not used
            self._gather.wait()
            self._gather = None
        if self._is_gathered:
            self._is_gathered = False
            self._set_parameters(self.shards)
            for p in self.full:
                p.untyped_storage().resize_(0)

    def _set_parameters(self, parameters: list[nn.Parameter]) -> None:
        for parameter, locations in zip(parameters, self.locations, strict=True):
            for module, name in locations:
                module._parameters[name] = parameter

    def expect_gradients(self) -> None:
        """Count the gradients of a backward pass from its beginning."""
        self.missing_gradients = 0 if self.is_frozen else len(self.full)

    def keep_gradients(self) -> None:
        """Let later backward passes add to these gradients: in the dtype in which they travel."""
        self.expect_gradients()
        dtype = self._reduce_exchange.dtype
        if dtype != self.full[0].dtype:
            self._kept = [None if grad is None else grad.to(dtype) for grad in self._take_gradients()]

    def _take_gradients(self) -> list[Tensor | None]:
        """Return the gradients, with those that were kept, and drop them."""
        grads = list(self._kept)
        for index, (p, kept) in enumerate(zip(self.full, self._kept, strict=True)):
            if p.grad is not None:
                grads[index] = p.grad if kept is None else kept.add_(p.grad)
            p.grad = None
        self._kept = [None] * len(grads)
        return grads

    def _count_gradient(self, _: Tensor) -> None:
        self.missing_gradients -= 1
        if not self.missing_gradients:
            self.on_gradients(self)

    def send_gradients(self) -> None:
        """Begin to average the gradients over the ranks."""
        self._reduction = self._reduce_exchange.start_average(self._take_gradients())

    def receive_gradients(self) -> None:
        """Wait for this rank's rows of the averages."""
        self.expect_gradients()
        if self._reduction is None:
            return
        rows = self._reduce_exchange.finish_average(self._reduction)
        self._reduction = None
        for shard, grad in zip(self.shards, rows, strict=True):
            if shard.numel():  # a rank without rows has no gradient: optimizers skip it
                grad = grad.view_as(shard).to(shard.dtype)
                shard.grad = grad if shard.grad is None else shard.grad + grad


def make_units(
    module: nn.Module,
    whole: set[nn.Parameter],
    dtypes: dict[nn.Parameter, torch.dtype],
    reduce_dtype: torch.dtype | None,
) -> tuple[list[Unit], dict[nn.Module, tuple[Unit, ...]]]:
    """Return the units, and the units that a module uses in its forward pass.

    Parameters of a unit have one dtype, and one in ``dtypes`` when they are gathered; they are either sharded or
    vectors, and either need gradients or do not. A parameter of several modules belongs to the unit of the first.
    """
    locations: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    groups: dict[tuple[nn.Module, torch.dtype, torch.dtype, bool, bool], list[nn.Parameter]] = {}
    users: dict[nn.Module, list[nn.Parameter]] = {}
    for part, root in _find_roots(module).items():
        for name, p in part._parameters.items():
            if p is not None:
                if p not in locations:
                    groups.setdefault((root, p.dtype, dtypes[p], p.ndim < 2, p.requires_grad), []).append(p)
                locations.setdefault(p, []).append((part, name))
                users.setdefault(root, []).append(p)
    units: dict[nn.Parameter, Unit] = {}
    loads, reduce_group = [0] * get_world_size(), dist.new_group()
    for (_, _, dtype, are_vectors, _), group in groups.items():
        bounds = [] if are_vectors else shard_rows(group, [p in whole for p in group], loads)
        unit = Unit(group, [locations[p] for p in group], bounds, dtype, reduce_dtype, reduce_group)
        units |= dict.fromkeys(group, unit)
    used = {user: tuple(dict.fromkeys(units[p] for p in params)) for user, params in users.items()}
    return list(dict.fromkeys(units.values())), used


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has the memory for its numbers."""
    return tensor.untyped_storage().nbytes() >= tensor.nbytes


def _find_roots(module: nn.Module) -> dict[nn.Module, nn.Module]:
    """Map each module to the outermost element of a ModuleList that it is part of, or to itself."""
    roots = {module: module}

    def visit(parent: nn.Module, element: nn.Module | None) -> None:
        for child in parent.children():
            if child not in roots:
                root = element or (child if isinstance(parent, nn.ModuleList) else None)
                roots[child] = root or child
                visit(child, root)

    visit(module, None)
    return roots
