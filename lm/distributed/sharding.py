"""Division of tensors among ranks by rows, and the collectives that gather and reduce the rows.

A row is an index of the first dimension; a scalar is one row. Rank r has the rows ``bounds[r] : bounds[r + 1]``.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lm.common.phases import in_phase
from lm.distributed.process_group import get_rank, get_world_size

_MAX_PADDING = 1.25  # of a buffer whose shares are made equal

Bounds = list[int]
"""``world_size + 1`` row numbers: the first row of each rank, and the number of rows."""


def divide_rows(tensors: Sequence[Tensor], are_whole: Sequence[bool], loads: list[int]) -> list[Bounds]:
    """Divide each tensor among all ranks, or give all its rows to one rank if it is a matrix that must stay whole.

    A stack of at least as many matrices as ranks, with three dimensions, is divided between its matrices, which stay
    whole. ``loads`` are the bytes of whole tensors that each rank has; they are updated. A whole tensor goes to the
    rank with the lowest load, the largest tensors first.
    """
    world_size = get_world_size()
    bounds = [[_row_count(x) * rank // world_size for rank in range(world_size + 1)] for x in tensors]

    def is_divisible(stack: Tensor) -> bool:
        return stack.ndim == 3 and len(stack) >= world_size

    whole = [index for index, is_whole in enumerate(are_whole) if is_whole and not is_divisible(tensors[index])]
    for index in sorted(whole, key=lambda index: -tensors[index].nbytes):
        owner = loads.index(min(loads))
        loads[owner] += tensors[index].nbytes
        bounds[index] = [0] * (owner + 1) + [_row_count(tensors[index])] * (world_size - owner)
    return bounds


def local_rows(tensor: Tensor, bounds: Bounds) -> Tensor:
    """Return a view of this rank's rows."""
    rank = get_rank()
    return (tensor if tensor.ndim else tensor[None])[bounds[rank] : bounds[rank + 1]]


def _row_count(tensor: Tensor) -> int:
    return len(tensor) if tensor.ndim else 1


class Transfer(NamedTuple):
    """A collective under way."""

    buffer: Tensor
    works: list[Any]
    source: Tensor
    """Must live until the end of the collective."""

    def wait(self) -> None:
        """Wait for the end of the collective."""
        for work in self.works:
            work.wait()


class RowExchange:
    """Collectives for the rows of some tensors. Each rank has its own rows of every tensor.

    ``tensors`` give the shapes and the device. The rows travel in one buffer of ``dtype``, so that a collective moves
    many tensors. It is padded to equal shares of the ranks. If whole tensors make the shares too unequal for that, each
    share travels in a collective of its own.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        bounds: Sequence[Bounds],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.dtype, self.device, self.group, self.rank = dtype, tensors[0].device, group, get_rank()
        counts = [  # elements, by tensor and rank
            [(stop - start) * (x.numel() // max(1, _row_count(x))) for start, stop in pairwise(tensor_bounds)]
            for x, tensor_bounds in zip(tensors, bounds, strict=True)
        ]
        by_rank = [list(column) for column in zip(*counts, strict=True)]
        sizes = [sum(row) for row in by_rank]
        padded = [max(sizes)] * len(sizes)
        self.is_padded = sum(padded) <= _MAX_PADDING * sum(sizes)
        self.shares = _consecutive_slices(padded if self.is_padded else sizes)
        self.places = [_consecutive_slices(row, share.start) for row, share in zip(by_rank, self.shares, strict=True)]
        self.bounds = bounds

    @in_phase("communication")
    def start_gather(self, rows: Sequence[Tensor]) -> Transfer:
        """Send this rank's rows of each tensor to all ranks."""
        buffer = torch.empty(self.shares[-1].stop, dtype=self.dtype, device=self.device)
        for x, place in zip(rows, self.places[self.rank], strict=True):
            buffer[place] = x.flatten()
        if self.is_padded:
            share = buffer[self.shares[self.rank]]
            works = [dist.all_gather_single(buffer, share, group=self.group, async_op=True)]
        else:
            works = [dist.broadcast(part, rank, self.group, async_op=True) for rank, part in self._parts(buffer)]
        return Transfer(buffer, works, buffer)

    @in_phase("communication")
    def finish_gather(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Wait for the rows of all ranks, and copy them to ``tensors``."""
        transfer.wait()
        for index, x in enumerate(tensors):
            for rank, (start, stop) in enumerate(pairwise(self.bounds[index])):
                rows = (x if x.ndim else x[None])[start:stop]
                rows.copy_(transfer.buffer[self.places[rank][index]].view_as(rows))

    @in_phase("communication")
    def start_average(self, tensors: Sequence[Tensor | None]) -> Transfer:
        """Begin to average whole tensors over the ranks. None stands for zeros."""
        buffer = torch.zeros(self.shares[-1].stop, dtype=self.dtype, device=self.device)
        for index, x in enumerate(tensors):
            if x is not None:
                for rank, (start, stop) in enumerate(pairwise(self.bounds[index])):
                    buffer[self.places[rank][index]] = (x if x.ndim else x[None])[start:stop].flatten()
        buffer /= len(self.shares)
        share = buffer[self.shares[self.rank]]
        if self.is_padded:
            rows = torch.empty_like(share)
            works = [dist.reduce_scatter_single(rows, buffer, group=self.group, async_op=True)]
            return Transfer(rows, works, buffer)
        works = [dist.reduce(part, rank, group=self.group, async_op=True) for rank, part in self._parts(buffer)]
        return Transfer(share, works, buffer)

    @in_phase("communication")
    def finish_average(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the averages; return this rank's elements of each tensor, flat."""
        transfer.wait()
        rows = transfer.buffer if self.is_padded else transfer.buffer.clone()  # not to keep the shares of other ranks
        start = self.shares[self.rank].start
        return [rows[place.start - start : place.stop - start] for place in self.places[self.rank]]

    def _parts(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Return each rank that has elements, and its share of the buffer."""
        return [(rank, buffer[share]) for rank, share in enumerate(self.shares) if share.start < share.stop]


class ReplicaExchange:
    """Has the methods of :class:`RowExchange`, for tensors that every rank has whole: nothing is gathered."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> None:
        self.dtype, self.device, self.group = dtype, tensors[0].device, group
        self.places = _consecutive_slices([x.numel() for x in tensors])

    def start_gather(self, rows: Sequence[Tensor]) -> Transfer:
        """Cast this rank's tensors, without traffic."""
        buffer = self._join(rows)
        return Transfer(buffer, [], buffer)

    def finish_gather(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Copy the tensors to ``tensors``."""
        for x, place in zip(tensors, self.places, strict=True):
            x.copy_(transfer.buffer[place].view_as(x))

    @in_phase("communication")
    def start_average(self, tensors: Sequence[Tensor | None]) -> Transfer:
        """Begin to average the tensors over the ranks. None stands for zeros."""
        buffer = self._join(tensors)
        buffer /= get_world_size()
        return Transfer(buffer, [dist.all_reduce(buffer, group=self.group, async_op=True)], buffer)

    @in_phase("communication")
    def finish_average(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the averages; return each tensor whole and flat, on every rank."""
        transfer.wait()
        return [transfer.buffer[place] for place in self.places]

    def _join(self, tensors: Sequence[Tensor | None]) -> Tensor:
        buffer = torch.zeros(self.places[-1].stop, dtype=self.dtype, device=self.device)
        for x, place in zip(tensors, self.places, strict=True):
            if x is not None:
                buffer[place] = x.flatten()
        return buffer


def _consecutive_slices(sizes: Sequence[int], start: int = 0) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=start))]
