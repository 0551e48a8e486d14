"""Tensors sharded by rows, and the collectives that gather and reduce the rows.

A row is an index of the first dimension; a scalar is one row. Rank r has the rows ``bounds[r] : bounds[r + 1]``.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lm.common.phases import phase
from lm.distributed.process_group import get_rank, get_world_size

MAX_BUCKET_BYTES = 25 << 20  # of a bucket, the tensors that ranks send together

Bounds = list[int]
"""``world_size + 1`` row numbers: the first row of each rank, and the number of rows."""


def shard_rows(tensors: Sequence[Tensor], are_whole: Sequence[bool], loads: list[int]) -> list[Bounds]:
    """Shard each tensor among all ranks, or give all its rows to one rank if it is a matrix that must stay whole.

    A stack of at least as many matrices as ranks, with three dimensions, is sharded between its matrices, which stay
    whole. ``loads`` are the bytes of whole tensors that each rank has; they are updated. A whole tensor goes to the
    rank with the lowest load, the largest tensors first.
    """
    world_size = get_world_size()
    counts = [len(torch.atleast_1d(x)) for x in tensors]
    bounds = [[count * rank // world_size for rank in range(world_size + 1)] for count in counts]

    def is_divisible(stack: Tensor) -> bool:
        return stack.ndim == 3 and len(stack) >= world_size

    whole = [index for index, is_whole in enumerate(are_whole) if is_whole and not is_divisible(tensors[index])]
    for index in sorted(whole, key=lambda index: -tensors[index].nbytes):
        owner = loads.index(min(loads))
        loads[owner] += tensors[index].nbytes
        bounds[index] = [0] * (owner + 1) + [counts[index]] * (world_size - owner)
    return bounds


def local_rows(tensor: Tensor, bounds: Bounds) -> Tensor:
    """Return a view of this rank's rows."""
    rank = get_rank()
    return torch.atleast_1d(tensor)[bounds[rank] : bounds[rank + 1]]


def gradient_bucket_bytes(total_bytes: int) -> int:
    """Return the size of a full bucket, for gradients of ``total_bytes`` in total.

    A quarter and at least 1 MiB, so that most gradients are sent during the backward pass, also those of a small model.
    """
    return min(MAX_BUCKET_BYTES, max(1 << 20, total_bytes // 4))


def group_by_size(parameters: Sequence[nn.Parameter], max_bytes: int) -> list[list[nn.Parameter]]:
    """Split parameters, in order, into groups of one dtype, of ``max_bytes`` and the last parameter of the group."""
    groups: list[list[nn.Parameter]] = []
    group_bytes = 0
    for parameter in parameters:
        if not groups or group_bytes > max_bytes or groups[-1][0].dtype != parameter.dtype:
            groups.append([])
            group_bytes = 0
        groups[-1].append(parameter)
        group_bytes += parameter.nbytes
    return groups


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
    many tensors. It is padded to equal shares. If whole matrices make the shares too unequal for that, each share
    travels in a collective of its own. Without ``bounds`` the tensors are not sharded: every rank has all rows, nothing
    is gathered, and averages arrive on every rank.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        bounds: Sequence[Bounds],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.dtype, self.device, self.group = dtype, tensors[0].device, group
        self.is_sharded = bool(bounds)
        self.bounds = bounds or [[0, len(torch.atleast_1d(x))] for x in tensors]
        self.share = get_rank() if bounds else 0
        counts = [  # elements, by tensor and share
            [(stop - start) * (x.numel() // max(1, tensor_bounds[-1])) for start, stop in pairwise(tensor_bounds)]
            for x, tensor_bounds in zip(tensors, self.bounds, strict=True)
        ]
        by_share = [list(column) for column in zip(*counts, strict=True)]
        sizes = [sum(row) for row in by_share]
        padded = [max(sizes)] * len(sizes)
        self.is_padded = sum(padded) <= 1.25 * sum(sizes)
        self.shares = _consecutive_slices(padded if self.is_padded else sizes)
        self.places = [_consecutive_slices(row, share.start) for row, share in zip(by_share, self.shares, strict=True)]

    @phase("communication")
    def start_gather(self, rows: Sequence[Tensor]) -> Transfer:
        """Send this rank's rows of each tensor to all ranks."""
        buffer = torch.empty(self.shares[-1].stop, dtype=self.dtype, device=self.device)
        for x, place in zip(rows, self.places[self.share], strict=True):
            buffer[place] = x.flatten()
        works: list[Any] = []
        if self.is_sharded and self.is_padded:
            share = buffer[self.shares[self.share]]
            works = [dist.all_gather_single(buffer, share, group=self.group, async_op=True)]
        elif self.is_sharded:
            works = [dist.broadcast(part, rank, self.group, async_op=True) for rank, part in self._parts(buffer)]
        return Transfer(buffer, works, buffer)

    @phase("communication")
    def finish_gather(self, transfer: Transfer, tensors: Sequence[Tensor]) -> None:
        """Wait for the rows of all ranks, and copy them to ``tensors``."""
        transfer.wait()
        for index, x in enumerate(tensors):
            for share, (start, stop) in enumerate(pairwise(self.bounds[index])):
                rows = torch.atleast_1d(x)[start:stop]
                rows.copy_(transfer.buffer[self.places[share][index]].view_as(rows))

    @phase("communication")
    def start_average(self, tensors: Sequence[Tensor | None]) -> Transfer:
        """Begin to average unsharded tensors over the ranks. None stands for zeros."""
        buffer = torch.zeros(self.shares[-1].stop, dtype=self.dtype, device=self.device)
        for index, x in enumerate(tensors):
            if x is not None:
                for share, (start, stop) in enumerate(pairwise(self.bounds[index])):
                    buffer[self.places[share][index]] = torch.atleast_1d(x)[start:stop].flatten()
        buffer /= get_world_size()
        if not self.is_sharded:
            return Transfer(buffer, [dist.all_reduce(buffer, group=self.group, async_op=True)], buffer)
        own = buffer[self.shares[self.share]]
        if self.is_padded:
            rows = torch.empty_like(own)
            works = [dist.reduce_scatter_single(rows, buffer, group=self.group, async_op=True)]
            return Transfer(rows, works, buffer)
        works = [dist.reduce(part, rank, group=self.group, async_op=True) for rank, part in self._parts(buffer)]
        return Transfer(own, works, buffer)

    @phase("communication")
    def finish_average(self, transfer: Transfer) -> list[Tensor]:
        """Wait for the averages; return this rank's elements of each tensor, flat."""
        transfer.wait()
        rows = transfer.buffer if self.is_padded else transfer.buffer.clone()  # not to keep the shares of other ranks
        start = self.shares[self.share].start
        return [rows[place.start - start : place.stop - start] for place in self.places[self.share]]

    def _parts(self, buffer: Tensor) -> list[tuple[int, Tensor]]:
        """Return each rank that has elements, and its share of the buffer."""
        return [(rank, buffer[share]) for rank, share in enumerate(self.shares) if share.start < share.stop]


def _consecutive_slices(sizes: Sequence[int], start: int = 0) -> list[slice]:
    return [slice(*ends) for ends in pairwise(accumulate(sizes, initial=start))]
