"""Data parallel training: two processes share each batch, and average their gradients.

``python examples/ddp.py`` trains the same model in one process and in two, and prints the largest difference of their
weights. Some seconds on two cores.
"""

import os
import socket
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lm.distributed import DDP
from lm.model import ModelConfig, TransformerLM, cross_entropy
from lm.optim import SGD

WORLD_SIZE, STEPS, BATCH_SIZE = 2, 20, 16
CONFIG = ModelConfig(vocab_size=64, context_length=32, d_model=64, num_layers=2, num_heads=4, d_ff=192)


def train(rank: int, world_size: int) -> TransformerLM:
    """Train with this rank's share of each batch. Return the model, which is the same on all ranks."""
    torch.manual_seed(0)
    model = TransformerLM(CONFIG)
    parallel = DDP(model) if world_size > 1 else None
    optimizer = SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens_BT = torch.randint(64, (BATCH_SIZE, 33), generator=generator).tensor_split(world_size)[rank]
        loss = cross_entropy((parallel or model)(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        loss.backward()  # sends the gradients of the last layers while it computes those of the first
        if parallel:
            parallel.finish_gradient_synchronization()
        optimizer.step()
        optimizer.zero_grad()
    return model


def run_rank(rank: int, port: int, directory: str) -> None:
    """Train in one process of the group, and save the weights of rank 0."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=WORLD_SIZE)
    torch.set_num_threads(1)
    model = train(rank, WORLD_SIZE)
    if rank == 0:
        torch.save(model.state_dict(), Path(directory, "weights.pt"))
    dist.destroy_process_group()


def main() -> None:
    """Compare training in two processes with training in one."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as directory:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(run_rank, (port, directory), nprocs=WORLD_SIZE)
        weights = torch.load(Path(directory, "weights.pt"), weights_only=True)
    expected = train(0, 1).state_dict()
    difference = max((weights[name] - expected[name]).abs().max().item() for name in expected)
    print(f"largest difference: {difference:.1e}")


if __name__ == "__main__":
    main()
