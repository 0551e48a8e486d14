"""Fully sharded data parallel training: ZeRO stages 2 and 3 (Rajbhandari et al. 2020; Zhao et al. 2023, FSDP)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lm.distributed.process_group import get_world_size
from lm.distributed.sharding import Bounds, RowExchange, Transfer, local_rows, shard_rows


class FSDP(nn.Module):
    """Wraps a module. Each rank keeps only its rows of each matrix; all rows are gathered when the matrix is used.

    Vectors and scalars, such as norm weights and biases, are not sharded: they are small. Their gradients are
    averaged over the ranks.

    A unit is an element of a ``ModuleList``, or any other module with parameters of its own. Its weights are gathered
    ahead of its forward pass and of its backward pass, and freed after each; its gradients are averaged over the ranks
    during the backward pass, and each rank keeps its rows. With ``is_resharded_after_forward`` False the weights stay
    between the two passes, which saves a third of the traffic (ZeRO stage 2). Parameters that need no gradient are
    gathered and freed in the same way, and nothing is sent for their gradients.

    Outside of the passes the parameters of ``module`` are this rank's rows, and all vectors: give them to the
    optimizer. They are float32 if the weights are; with ``compute_dtype`` they are cast before they are gathered,
    except those in ``uncast``, and floating-point arguments of :meth:`forward` are cast too. Gradients travel in
    ``reduce_dtype``, that of the gathered weights by default, and those of several micro-batches are added in it. The
    matrices in ``whole`` belong to one rank each, for an optimizer that needs whole matrices. Weights and buffers start
    as those of rank 0.

    All ranks must call the units in the same order. Call :meth:`finish_gradient_synchronization` after the backward
    pass.
    """

    def __init__(
        self,
        module: nn.Module,
        compute_dtype: torch.dtype | None = None,
        *,
        reduce_dtype: torch.dtype | None = None,
        whole: Collection[nn.Parameter] = (),
        uncast: Collection[nn.Parameter] = (),
        is_resharded_after_forward: bool = True,
    ) -> None:
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._is_resharded_after_forward = is_resharded_after_forward
        self._is_synchronizing = True
        kept = set(module.parameters() if compute_dtype is None else uncast)
        dtypes = {p: p.dtype if p in kept or compute_dtype is None else compute_dtype for p in module.parameters()}
        self._units, self._units_of = _make_units(module, set(whole), dtypes, reduce_dtype)
        self._calls: list[nn.Module] = []  # of the modules in self._units_of, in the order of a forward pass
        self._is_order_known = False  # after the first backward pass
        self._last_call = -1  # place of the last call in the order
        self._place: dict[nn.Module, int] = {}  # of the last call of each module
        self._differentiated: set[int] = set()  # places of the calls whose outputs need gradients
        # The same on all ranks, also if a rank does not use a unit.
        self._reduction_order = [unit for unit in self._units[::-1] if not unit.is_frozen]
        self._reductions = 0  # units whose gradients have been sent in this backward pass
        self._is_callback_queued = False
        for unit in self._units:
            unit.on_gradients = self._send_gradients
        for user in self._units_of:
            user.register_forward_pre_hook(self._before_forward, with_kwargs=True)
            user.register_forward_hook(lambda user, _, out: self._after_forward(user, out), always_call=True)

    @property
    def bounds(self) -> dict[nn.Parameter, Bounds]:
        """The rows of each rank, for each parameter that is sharded."""
        sharded = [unit for unit in self._units if unit.bounds]
        return {shard: bounds for unit in sharded for shard, bounds in zip(unit.shards, unit.bounds, strict=True)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.compute_dtype is not None:
            args, kwargs = tree_map(self._cast, (args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        is_float = isinstance(value, Tensor) and value.is_floating_point()
        return value.to(self.compute_dtype) if is_float else value

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients locally in backward passes, e.g. of all micro-batches except the last one."""
        self._is_synchronizing = False
        try:
            yield
        finally:
            self._is_synchronizing = True

    def finish_gradient_synchronization(self) -> None:
        """Wait until each rank has its rows of the averaged gradients. A parameter without a gradient on this rank
        contributes zeros."""
        for unit in self._reduction_order[self._reductions :]:
            unit.send_gradients()
        for unit in self._units:
            unit.receive_gradients()
            unit.free()
        self._reductions = 0
        self._end_backward()  # a backward pass that failed does not call back

    def gather_full_params(self) -> dict[str, Tensor]:
        """Return all parameters by name, unsharded, on every rank. They do not change with the module's."""
        return dict(self.iterate_full_params())

    def iterate_full_params(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters as :meth:`gather_full_params` has them, unit by unit, to save memory."""
        names: dict[nn.Parameter, list[str]] = {}
        for name, p in self.module.named_parameters(remove_duplicate=False):
            names.setdefault(p, []).append(name)
        for unit in self._units:
            for shard, copy in zip(unit.shards, unit.gather_copies(), strict=True):
                yield from ((name, copy) for name in names[shard])

    def _before_forward(self, user: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return the arguments for the call."""
        if _is_in_backward_pass():  # activation checkpointing calls the module again
            self._gather(user)
            return args, kwargs
        self._last_call = self._place[user] = self._find_place(user)
        self._gather(user, ahead=self._last_call + 1)
        if not torch.is_grad_enabled() or not any(unit.is_frozen for unit in self._units_of[user]):
            return args, kwargs
        return tree_map(lambda value: self._free_frozen_after_backward(user, value), (args, kwargs))

    def _free_frozen_after_backward(self, user: nn.Module, value: Any) -> Any:
        """Return an argument of a call. When the backward pass of the call is over, frozen weights are freed: they have
        no gradient whose arrival could tell."""
        needs_gradient = isinstance(value, Tensor) and value.requires_grad
        return _CallAfterBackward.apply(value, lambda: self._free_frozen(user)) if needs_gradient else value

    def _free_frozen(self, user: nn.Module) -> None:
        for unit in self._units_of[user]:
            if unit.is_frozen:
                unit.free()

    def _find_place(self, user: nn.Module) -> int:
        """Return the place of a new call in the order of a forward pass, in which a tied embedding is called twice."""
        following = self._last_call + 1
        if following >= len(self._calls) and not self._is_order_known and torch.is_grad_enabled():
            self._calls.append(user)
        is_next = self._calls[following : following + 1] == [user]
        return following if is_next or user not in self._calls else self._calls.index(user)

    def _after_forward(self, user: nn.Module, out: Any) -> None:
        if _is_in_backward_pass():
            return  # its weights are needed again at once
        for tensor in tree_leaves(out) if torch.is_grad_enabled() else ():
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                self._differentiated.add(self._place[user])
                tensor.register_hook(lambda _, place=self._place[user]: self._before_backward(user, place))
        if self._is_resharded_after_forward or not torch.is_grad_enabled():
            for unit in self._units_of[user]:
                unit.free()

    def _before_backward(self, user: nn.Module, place: int) -> None:
        if not self._is_callback_queued:
            self._is_callback_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._after_backward)
        self._gather(user, ahead=place - 1 if place - 1 in self._differentiated else -1)

    def _gather(self, user: nn.Module, ahead: int = -1) -> None:
        """Gather what ``user`` uses, and begin to gather for the call at the place ``ahead``, if there is one."""
        for unit in self._units_of[user]:
            unit.gather()
        if 0 <= ahead < len(self._calls):
            for unit in self._units_of[self._calls[ahead]]:
                unit.start_gather()

    def _end_backward(self) -> None:
        self._is_callback_queued, self._is_order_known, self._last_call = False, True, -1

    def _after_backward(self) -> None:
        self._end_backward()
        for unit in self._units:
            unit.free()  # a unit without gradients is still gathered
            if not self._is_synchronizing:
                unit.keep_gradients()

    def _send_gradients(self, unit: "_Unit") -> None:
        unit.free()
        while self._is_synchronizing and self._reductions < len(self._reduction_order):
            if self._reduction_order[self._reductions].missing_gradients:
                break
            self._reduction_order[self._reductions].send_gradients()
            if self._reductions:  # frees the buffer of the one before
                self._reduction_order[self._reductions - 1].receive_gradients()
            self._reductions += 1


class _Unit:
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
        self.locations, self.bounds = locations, bounds
        rows: Sequence[Tensor] = params
        if bounds:
            rows = [local_rows(p.detach(), b) for p, b in zip(params, bounds, strict=True)]
        self.shards = [nn.Parameter(r.detach().clone(), p.requires_grad) for p, r in zip(params, rows, strict=True)]
        self.full = [nn.Parameter(torch.empty_like(p, dtype=dtype), p.requires_grad) for p in params]
        self.on_gradients: Callable[[_Unit], None] = lambda unit: None
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

    @property
    def rows(self) -> list[Tensor]:
        return [shard.detach() for shard in self.shards]

    def start_gather(self) -> None:
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
        self._reduction = self._reduce_exchange.start_average(self._take_gradients())

    def receive_gradients(self) -> None:
        self.expect_gradients()
        if self._reduction is None:
            return
        rows = self._reduce_exchange.finish_average(self._reduction)
        self._reduction = None
        for shard, grad in zip(self.shards, rows, strict=True):
            if shard.numel():  # a rank without rows has no gradient: optimizers skip it
                grad = grad.view_as(shard).to(shard.dtype)
                shard.grad = grad if shard.grad is None else shard.grad + grad


def _make_units(
    module: nn.Module,
    whole: set[nn.Parameter],
    dtypes: dict[nn.Parameter, torch.dtype],
    reduce_dtype: torch.dtype | None,
) -> tuple[list[_Unit], dict[nn.Module, tuple[_Unit, ...]]]:
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
    units: dict[nn.Parameter, _Unit] = {}
    loads, reduce_group = [0] * get_world_size(), dist.new_group()
    for (_, _, dtype, are_vectors, _), group in groups.items():
        bounds = [] if are_vectors else shard_rows(group, [p in whole for p in group], loads)
        unit = _Unit(group, [locations[p] for p in group], bounds, dtype, reduce_dtype, reduce_group)
        units |= dict.fromkeys(group, unit)
    used = {user: tuple(dict.fromkeys(units[p] for p in params)) for user, params in users.items()}
    return list(dict.fromkeys(units.values())), used


class _CallAfterBackward(torch.autograd.Function):
    """Returns its input. Calls a function in the backward pass, after the operations that the input goes to.

    Also after all others of the same call of a module, for autograd goes from the latest operation to the earliest.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return grad, None


def _is_in_backward_pass() -> bool:
    return torch._C._current_graph_task_id() != -1


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
