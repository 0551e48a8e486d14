"""Measured memory of small trainings. ``main``, which ``run_ranks`` calls, measures one rank of the cases in
``cases.json`` of a directory."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lm.common.execution import Execution, ParallelKind
from lm.distributed.plan import parallelize
from lm.model.adapter import add_adapter
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.transformer import TransformerLM
from lm.train.adapter_memory import predict_adapter_memory
from lm.train.config import TrainConfig
from lm.train.optimizers import make_average, make_optimizers, whole_parameters
from lm.train.training_memory import TrainingMemory, predict_training_memory
from tests.helpers.memory import peak_of_later_calls
from tests.helpers.ranks import rank_of_test


@dataclass(frozen=True)
class Case:
    """A training of one micro-batch per step and rank, or several."""

    parallel: ParallelKind = "none"
    model: dict[str, Any] = field(default_factory=dict)
    vocab_size: int = 512
    sequences: int = 8
    optimizer: Literal["adamw", "muon", "normuon", "soap_muon"] = "adamw"
    is_bfloat16: bool = False
    has_checkpointing: bool = False
    gradient_accumulation_steps: int = 1
    average_tail: float = 0.0
    adapter: dict[str, Any] = field(default_factory=dict)

    @property
    def config(self) -> ModelConfig:
        defaults = {"context_length": 128, "d_model": 128, "num_layers": 4, "num_heads": 4, "d_ff": 352}
        return ModelConfig(self.vocab_size, **{**defaults, **self.model})

    @property
    def training(self) -> TrainConfig:
        return TrainConfig(
            batch_size=self.gradient_accumulation_steps,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            optimizer=self.optimizer,
            average_tail=self.average_tail,
            precision="bfloat16" if self.is_bfloat16 else "float32",
        )

    @property
    def execution(self) -> Execution:
        return Execution(activation_checkpointing=self.has_checkpointing)

    def predict(self, world_size: int) -> TrainingMemory:
        return predict_training_memory(
            self.sequences, self.execution, self.training, self.config, self.parallel, world_size, "cpu"
        )

    def predict_peak(self, world_size: int = 1) -> int:
        """Return the predicted peak of a process, which may train an adapter."""
        if not self.adapter:
            return self.predict(world_size).peak
        adapter = AdapterConfig(**self.adapter)
        arguments = self.sequences, self.execution, self.training, self.config, adapter
        return predict_adapter_memory(*arguments, self.parallel, world_size, "cpu").peak


def measure_peak(case: Case) -> int:
    """Return the peak bytes of tensors in a step of this rank that is not the first."""
    torch.manual_seed(0)
    x = torch.zeros(case.sequences, case.config.context_length, dtype=torch.int64)

    def make_step() -> Callable[[], None]:
        model = TransformerLM(case.config)
        if case.adapter:
            add_adapter(model, AdapterConfig(**case.adapter))
        autocast_dtype = torch.bfloat16 if case.is_bfloat16 and not case.adapter else None
        whole = whole_parameters(model, case.training)
        parallel = parallelize(model, case.execution, case.parallel, whole, autocast_dtype)
        optimizers = make_optimizers(model, case.training, parallel)
        if average := make_average(model, case.training):
            optimizers.append(average)

        def step() -> None:
            for number in range(case.gradient_accumulation_steps):
                is_last = number + 1 == case.gradient_accumulation_steps
                with nullcontext() if is_last else parallel.no_sync():
                    with torch.autocast("cpu", torch.bfloat16, enabled=case.is_bfloat16):
                        loss = model.loss(x, x)
                    loss.backward()
            parallel.finish_gradient_synchronization()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

        return step

    return peak_of_later_calls(make_step)


def main() -> None:
    directory = Path(sys.argv[1])
    with rank_of_test() as rank:
        cases = [Case(**fields) for fields in json.loads((directory / "cases.json").read_text())]
        (directory / f"{rank}.json").write_text(json.dumps([measure_peak(case) for case in cases]))
