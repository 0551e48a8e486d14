from .ddp import DDP as DDP
from .fsdp import FSDP as FSDP
from .launch import run_processes as run_processes
from .pipeline_parallel import PipelineParallel as PipelineParallel
from .plan import parallelize as parallelize
from .tensor_parallel import apply_tensor_parallel as apply_tensor_parallel
from .tensor_parallel import gather_full_params as gather_full_params
from .zero import ShardedOptimizer as ShardedOptimizer
