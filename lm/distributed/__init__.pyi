from .ddp import DDP as DDP
from .launch import run_processes as run_processes
