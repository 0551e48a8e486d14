"""Fully sharded data parallel training: ZeRO stages 2 and 3 (Rajbhandari et al. 2020; Zhao et al. 2023, FSDP)."""

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lm.distributed.fsdp_units import Unit, has_memory, make_units
from lm.distributed.sharding import Bounds


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
    as those of rank 0. ``late`` are parameters without memory: its iterator fills one after the other with its first
    numbers, and each rank keeps its rows before the next.

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
        late: Iterable[nn.Parameter] = (),
    ) -> None:
        super().__init__()
        self.module, self.compute_dtype = module, compute_dtype
        for tensor in (*module.parameters(), *module.buffers()):
            if has_memory(tensor):
                dist.broadcast(tensor.detach(), 0)
        self._is_resharded_after_forward = is_resharded_after_forward
        self._is_synchronizing = True
        kept = set(uncast)
        dtypes = {p: p.dtype if compute_dtype is None or p in kept else compute_dtype for p in module.parameters()}
        self._units, self._units_of = make_units(module, set(whole), dtypes, reduce_dtype)
        places = {p: (unit, index) for unit in self._units for index, p in enumerate(unit.initial)}
        for p in late:
            dist.broadcast(p.detach(), 0)
            unit, index = places[p]
            unit.set_rows(index, p.detach())
            p.untyped_storage().resize_(0)
        for unit in self._units:
            unit.initial.clear()
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

    def _send_gradients(self, unit: Unit) -> None:
        unit.free()
        while self._is_synchronizing and self._reductions < len(self._reduction_order):
            if self._reduction_order[self._reductions].missing_gradients:
                break
            self._reduction_order[self._reductions].send_gradients()
            if self._reductions:  # frees the buffer of the one before
                self._reduction_order[self._reductions - 1].receive_gradients()
            self._reductions += 1


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
