"""Exchanges of a whole matrix and a divided one. ``main``, which ``run_ranks`` calls, is one rank."""

import torch

from lm.distributed.process_group import get_world_size
from lm.distributed.sharding import RowExchange, local_rows, shard_rows
from tests.helpers.ranks import rank_of_test


def main() -> None:
    with rank_of_test() as rank:
        torch.manual_seed(0)
        whole, divided, world_size = torch.randn(8, 8), torch.randn(5, 2), get_world_size()
        for tensors, are_whole in (([whole, divided], [True, False]), ([divided], [False]), ([whole], [True])):
            bounds = shard_rows(tensors, are_whole, [0] * world_size)
            exchange = RowExchange(tensors, bounds, torch.float32)
            gathered = [torch.empty_like(x) for x in tensors]
            rows = [local_rows(x, b) for x, b in zip(tensors, bounds, strict=True)]
            transfer = exchange.start_gather(rows)
            exchange.finish_gather(transfer, gathered)
            torch.testing.assert_close(gathered, tensors)
            assert transfer.buffer.numel() <= 1.25 * sum(x.numel() for x in tensors)
            averaged = exchange.finish_average(exchange.start_average([rank * x for x in tensors]))
            mean = (world_size - 1) / 2
            torch.testing.assert_close(averaged, [mean * x.flatten() for x in rows])
