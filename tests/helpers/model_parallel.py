"""Small trainings of a model that is divided among processes by tensor or pipeline parallelism.
``main``, which ``run_ranks`` calls, is one rank of the cases in ``cases.json`` of a directory."""

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from lm.common.execution import Execution
from lm.distributed import PipelineParallel, apply_tensor_parallel, gather_full_params
from lm.distributed.plan import parallelize
from lm.distributed.process_group import all_reduce_mean, get_rank, get_world_size
from lm.model.config import ModelConfig, Multipliers
from lm.model.functional import IGNORE_INDEX
from lm.model.linear import HIDDEN_MATRICES
from lm.model.transformer import TransformerLM
from lm.optim import AdamW, Muon, clip_grad_norm
from tests.helpers.ranks import rank_of_test, run_ranks

_BATCH, _CONTEXT, _VOCAB = 8, 12, 33
_MAX_NORM = 0.5
_GEMMA: dict[str, Any] = {
    "zero_centered_norm": True,
    "attention_softcap": 3.0,
    "multipliers": Multipliers(4.0, 0.5, 0.9, 2.0),
    "sliding_window": 5,
    "global_interval": 2,
    "local_rope_theta": 30.0,
}
Kind = Literal["none", "tensor", "tensor+fsdp", "1f1b", "gpipe"]


@dataclass(frozen=True)
class Case:
    """A training."""

    kind: Kind
    is_tied: bool = False
    num_kv_heads: int = 4
    has_qk_norm: bool = False
    feed_forward: Literal["swiglu", "relu2"] = "swiglu"
    norm_placement: Literal["pre", "post"] = "pre"
    logit_softcap: float = 0.0
    has_checkpointing: bool = False
    is_double: bool = True
    optimizer: Literal["adamw", "muon", "torch.AdamW"] = "adamw"
    steps: int = 4
    has_biases: bool = False
    has_found_inf: bool = False
    """Tell the optimizers on the device whether to skip the step, as on a GPU."""
    batches_per_step: int = 1
    """Batches whose gradients are added."""
    is_gemma: bool = False
    """With the options of Gemma, and a residual multiplier."""
    has_value_residual: bool = False

    @property
    def name(self) -> str:
        return "-".join(str(value) for value in asdict(self).values())

    def model(self) -> TransformerLM:
        config = ModelConfig(
            _VOCAB,
            _CONTEXT,
            d_model=32,
            num_layers=5,
            num_heads=8,
            num_kv_heads=self.num_kv_heads,
            head_dim=8 if self.has_qk_norm else None,
            d_ff=48,
            qk_norm=self.has_qk_norm,
            qkv_bias=self.has_biases,
            feed_forward="geglu" if self.is_gemma else self.feed_forward,
            norm_placement="sandwich" if self.is_gemma else self.norm_placement,
            tied_embeddings=self.is_tied,
            logit_softcap=self.logit_softcap,
            value_residual=self.has_value_residual,
            **(_GEMMA if self.is_gemma else {}),
        )
        model = TransformerLM(config, dtype=torch.float64 if self.is_double else torch.float32)
        parallelize(model, Execution(activation_checkpointing=self.has_checkpointing), "none")
        return model


def batch_of_step(step: int) -> tuple[Tensor, Tensor]:
    """Return token ids and targets. The second half of the batch has fewer targets that count."""
    tokens = torch.randint(_VOCAB, (_BATCH, _CONTEXT + 1), generator=torch.Generator().manual_seed(step))
    targets = tokens[:, 1:].clone()
    targets[_BATCH // 2 :, : _CONTEXT // 2] = IGNORE_INDEX
    return tokens[:, :-1], targets


def make_optimizers(case: Case, model: TransformerLM) -> list[torch.optim.Optimizer]:
    roles = model.parameter_roles()
    hidden = [p for name, p in model.named_parameters() if case.optimizer == "muon" and roles[name] in HIDDEN_MATRICES]
    others = [p for p in model.parameters() if not any(p is q for q in hidden)]
    optimizer_cls = torch.optim.AdamW if case.optimizer == "torch.AdamW" else AdamW
    # With a smaller eps the first steps depend on the gradients' rounding.
    optimizers: list[torch.optim.Optimizer] = [optimizer_cls(others, lr=0.001, eps=1e-4, weight_decay=0.01)]
    return optimizers + ([Muon(hidden, lr=0.001)] if hidden else [])


def loss_of_batch(model: TransformerLM, ids: Tensor, targets: Tensor, data_mesh: DeviceMesh | None) -> Tensor:
    """Return the weighted loss of this rank's part of the batch. The mean over the parts is the loss of the batch."""
    if data_mesh is None:
        return model.loss(ids, targets)
    parts, rank = data_mesh.size(), data_mesh.get_local_rank()
    own_ids, own_targets = ids.chunk(parts)[rank], targets.chunk(parts)[rank]
    count, batch_count = ((x != IGNORE_INDEX).sum() for x in (own_targets, targets))
    return model.loss(own_ids, own_targets) * parts * count / batch_count


def train(case: Case) -> dict[str, Tensor]:
    """Train a new model on random tokens; return its weights, and the losses and norms of all steps.

    The parallel cross-entropy takes about 30 tokens at a time.
    """
    with patch("lm.distributed.tensor_parallel._CHUNK_BYTES", 4 * 30 * _VOCAB // get_world_size()):
        return _train(case)


def _train(case: Case) -> dict[str, Tensor]:
    # The weights start as those of rank 0. Torch's fully_shard does not send them to the other ranks.
    torch.manual_seed(0 if get_rank() == 0 or case.kind == "tensor+fsdp" else 1)
    model, data_mesh, pipeline = case.model(), None, None
    if case.kind == "tensor":
        apply_tensor_parallel(model, init_device_mesh("cpu", (get_world_size(),)))
    elif case.kind == "tensor+fsdp":
        mesh = init_device_mesh("cpu", (2, get_world_size() // 2), mesh_dim_names=("data", "tensor"))
        apply_tensor_parallel(model, mesh["tensor"])
        data_mesh = mesh["data"]
        for module in (*model.layers, model):
            fully_shard(module, mesh=data_mesh)
        register_fsdp_forward_method(model, "loss")
    elif case.kind != "none":
        pipeline = PipelineParallel(model, micro_batches=4, schedule=case.kind)
    optimizers = make_optimizers(case, model)
    figures, results = [], {}
    for step in range(case.steps):
        for batch in range(case.batches_per_step):
            ids, targets = batch_of_step(step + batch * case.steps)
            if pipeline:
                loss = pipeline.train_batch(ids, targets)
            else:
                loss = loss_of_batch(model, ids, targets, data_mesh)
                loss.backward()
        norm = pipeline.clip_grad_norm(_MAX_NORM) if pipeline else clip_grad_norm(model.parameters(), _MAX_NORM)
        for optimizer in optimizers:
            if case.has_found_inf:
                optimizer.step(None, torch.tensor(False))  # type: ignore[call-overload]
            else:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        figures += [loss.detach() if data_mesh is None else all_reduce_mean(loss.detach()), norm]
    ids, targets = batch_of_step(case.steps)
    with torch.no_grad():
        if pipeline:
            figures.append(pipeline.evaluate_batch(ids, targets))
        else:
            figures.append(model.loss(ids, targets))  # of the whole batch on every rank
            results["logits"] = model(ids)
    weights = pipeline.gather_full_params() if pipeline else gather_full_params(model)
    return weights | results | {"figures": torch.stack(figures)}


def run_cases(directory: Path, cases: list[Case], world_size: int) -> list[list[dict[str, Tensor]]]:
    """Run all cases, several ranks in new processes; return the results of each rank, by case."""
    if world_size == 1:
        return [[train(case)] for case in cases]
    directory.mkdir()
    (directory / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    run_ranks("tests.helpers.model_parallel", directory, world_size=world_size)
    return [
        [torch.load(directory / f"{case.name}-{rank}.pt", weights_only=True) for rank in range(world_size)]
        for case in cases
    ]


def check_cases(directory: Path, cases: list[Case], world_size: int) -> None:
    """Assert that the weights, losses and norms on every rank are those of one process."""
    whole_cases = list(dict.fromkeys(replace(case, kind="none", has_checkpointing=False) for case in cases))
    expected = dict(zip(whole_cases, run_cases(directory / "one", whole_cases, 1), strict=True))
    for case, results in zip(cases, run_cases(directory / "many", cases, world_size), strict=True):
        whole = expected[replace(case, kind="none", has_checkpointing=False)][0]
        for result in results:
            assert whole.keys() - result.keys() <= {"logits"}  # a pipeline returns none
            for name, tensor in result.items():
                error = (tensor - whole[name]).abs() / whole[name].abs().clamp(min=1)
                assert error.max() <= (1e-10 if case.is_double else 1e-4), f"{name} of {case}"


def main() -> None:
    directory = Path(sys.argv[1])
    with rank_of_test() as rank:
        for fields in json.loads((directory / "cases.json").read_text()):
            case = Case(**fields)
            torch.save(train(case), directory / f"{case.name}-{rank}.pt")
