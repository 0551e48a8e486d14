from .ddp import DDP as DDP
from .fsdp import FSDP as FSDP
from .launch import run_processes as run_processes
from .zero import ShardedOptimizer as ShardedOptimizer
