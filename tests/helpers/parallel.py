"""Small trainings that are divided among processes. ``main``, which ``run_ranks`` calls, is one rank of the cases in
``cases.json`` of a directory."""

import json
import sys
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor

from lm.common.execution import Execution, ParallelKind
from lm.distributed.plan import parallelize
from lm.distributed.process_group import all_reduce_mean, get_rank, get_world_size
from lm.model.adapter import add_adapter
from lm.model.config import AdapterConfig, ModelConfig, MoEConfig, Multipliers
from lm.model.transformer import TransformerLM
from lm.train.config import TrainConfig
from lm.train.optimizers import make_optimizers, whole_parameters
from tests.helpers.ranks import rank_of_test, run_ranks

_BATCH, _CONTEXT, _VOCAB = 8, 12, 33
_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "gemma": {
        "norm_placement": "sandwich",
        "feed_forward": "geglu",
        "zero_centered_norm": True,
        "attention_softcap": 3.0,
        "sliding_window": 5,
        "global_interval": 2,
        "local_rope_theta": 30.0,
        "multipliers": Multipliers(4.0, 0.5),
    },
    "olmo2": {"norm_placement": "output", "qk_norm_per_head": False, "rotary_fraction": 0.5},
    "values": {"value_residual": True},
    "experts": {"moe": MoEConfig(4, 2, num_shared_experts=1, shared_gate=True)},  # a gate has one row
}


@dataclass(frozen=True)
class Case:
    """A training."""

    kind: ParallelKind
    is_tied: bool = False
    optimizer: str = "adamw"
    is_double: bool = False
    has_checkpointing: bool = False
    steps: int = 5
    is_compiled: bool = False
    """Test the compilation of the loss before the first step, as the trainer does. Nothing is compiled."""
    options: Literal["", "gemma", "olmo2", "values", "experts"] = ""
    """Options of the model, as a family has them."""
    adapter: Literal["", "float32", "bfloat16", "nf4"] = ""
    """Dtype of the frozen base of an adapter. Empty: all weights are trained."""
    micro_batches: int = 2
    has_autocast: bool = False
    """Compute matmuls in bfloat16."""

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())


def tokens_of(step: int) -> Tensor:
    """Return the tokens of a step: (B, T + 1)."""
    return torch.randint(_VOCAB, (_BATCH, _CONTEXT + 1), generator=torch.Generator().manual_seed(step))


def train(case: Case) -> dict[str, Tensor]:
    """Train a new model on random tokens; return its weights, and the losses and norms of all steps."""
    torch.manual_seed(0 if get_rank() == 0 else 1)  # the weights start as those of rank 0
    model_config = ModelConfig(
        _VOCAB,
        _CONTEXT,
        d_model=16,
        num_layers=3,
        num_heads=2,
        d_ff=24,
        qk_norm=True,
        qkv_bias=True,
        tied_embeddings=case.is_tied,
        **_OPTIONS[case.options],
    )
    config = TrainConfig(optimizer=case.optimizer, max_lr=0.001, max_grad_norm=0.5)  # type: ignore[arg-type]
    dtype = torch.float64 if case.is_double else torch.float32
    model = TransformerLM(model_config, dtype=dtype)
    if case.adapter:
        add_adapter(model, AdapterConfig(rank=3, alpha=24, dtype=case.adapter))
    execution = Execution(activation_checkpointing=case.has_checkpointing)
    whole = whole_parameters(model, config)
    parallel = parallelize(model, execution, case.kind, whole, torch.bfloat16 if case.has_autocast else None)
    optimizers = make_optimizers(model, config, parallel)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if "eps" in group:
            group["eps"] = 1e-4  # with a smaller one the first steps depend on the gradients' rounding

    def loss_of(part: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=case.has_autocast):
            return model.loss(part[:, :-1], part[:, 1:])

    if case.is_compiled:
        with patch("torch.compile", lambda function: function):
            parallel.compile_loss(loss_of, tokens_of(0)[:1])
    figures = []
    for step in range(case.steps):
        parts = tokens_of(step).chunk(get_world_size())[get_rank()].chunk(case.micro_batches)
        losses = []
        for number, part in enumerate(parts, start=1):
            with parallel.no_sync() if number < len(parts) else nullcontext():
                loss = loss_of(part) / len(parts)
                loss.backward()
            losses.append(loss.detach())
        parallel.finish_gradient_synchronization()
        norm = parallel.clip_grad_norm(config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        figures.append(torch.stack([all_reduce_mean(torch.stack(losses).sum()), norm]))
    return dict(parallel.iterate_full_weights()) | {"figures": torch.stack(figures)}


def run_cases(directory: Path, cases: list[Case], world_size: int) -> list[list[dict[str, Tensor]]]:
    """Run all cases, several ranks in new processes; return the results of each rank, by case."""
    if world_size == 1:
        return [[train(case)] for case in cases]
    directory.mkdir()
    (directory / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    run_ranks("tests.helpers.parallel", directory, world_size=world_size)
    return [
        [torch.load(directory / f"{case.name}-{rank}.pt", weights_only=True) for rank in range(world_size)]
        for case in cases
    ]


def main() -> None:
    directory = Path(sys.argv[1])
    with rank_of_test() as rank:
        for fields in json.loads((directory / "cases.json").read_text()):
            case = Case(**fields)
            torch.save(train(case), directory / f"{case.name}-{rank}.pt")
