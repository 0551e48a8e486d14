"""Pipeline parallelism: each rank has some of the blocks, and micro-batches flow through the ranks.

Sources: Huang et al. 2019 (GPipe); Narayanan et al. 2021 (1F1B, tied embeddings). The schedules are those of
``torch.distributed.pipelining``.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from lm.common.errors import UserError
from lm.distributed.process_group import get_rank, get_world_size
from lm.model.config import ModelConfig
from lm.model.flops import flops_per_token
from lm.model.functional import IGNORE_INDEX
from lm.model.transformer import TransformerLM
from lm.optim.clip import clip_grad_norm

PipelineSchedule = Literal["1f1b", "gpipe"]


class PipelineParallel:
    """Divides the blocks of ``model`` among all ranks, in place: the model keeps the modules of this rank's stage.

    The first stage also has the embedding, the last one the final norm and the head; tied embeddings are on both, and
    their gradients are summed. State-dict keys do not change. Make the optimizer of ``model`` afterwards. Weights start
    as those of rank 0. A batch runs as ``micro_batches`` parts. With ``1f1b`` a stage holds the activations of at most
    as many parts as there are stages, with ``gpipe`` of all. Raises UserError if there is one rank, if there are fewer
    blocks than ranks, with ``1f1b`` fewer parts than ranks, for a mixture of experts, or for value residuals.
    """

    def __init__(self, model: TransformerLM, micro_batches: int, schedule: PipelineSchedule = "1f1b") -> None:
        self.model, self.micro_batches, self.schedule = model, micro_batches, schedule
        self.rank, self.world_size = get_rank(), get_world_size()
        if self.world_size < 2:
            raise UserError("A pipeline needs at least 2 processes, and a process group; start them with torchrun.")
        if micro_batches < (self.world_size if schedule == "1f1b" else 1):
            raise UserError(
                f"{micro_batches} micro-batches are too few for the schedule {schedule} with {self.world_size} "
                "processes; use at least as many micro-batches as processes, or the schedule gpipe."
            )
        if model.config.moe is not None:
            raise UserError(
                "The load of the experts of model.moe is not balanced in a pipeline; use execution.parallel, e.g. fsdp."
            )
        if model.config.value_residual:
            raise UserError(
                "A pipeline does not send the values that model.value_residual needs to later stages; set it to false, "
                "or use execution.parallel, e.g. fsdp."
            )
        layers = divide_layers(model.config, self.world_size)
        self.device, self.dtype = model.token_embeddings.weight.device, model.token_embeddings.weight.dtype
        self.is_first, self.is_last = self.rank == 0, self.rank == self.world_size - 1
        self._tied_group = dist.new_group([0, self.world_size - 1]) if model.lm_head is None else None
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
        self._shapes = {name: p.shape for name, p in model.named_parameters()}
        _keep_stage(model, layers[self.rank], self.is_first, self.is_last)
        self._schedules: dict[torch.Size, PipelineScheduleSingle] = {}  # by the shape of the batch
        self._target_count = torch.ones(())

    def train_batch(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Add the gradients of the mean cross-entropy to this rank's parameters; return the mean on all ranks.

        All ranks pass the same ``token_ids`` and ``targets``, each (B, T). The mean is that of
        :meth:`lm.model.TransformerLM.loss` on the whole batch: targets equal to ``IGNORE_INDEX`` do not count, in
        whichever micro-batch they are. Raises UserError if the micro-batches do not divide the batch.
        """
        if not self._has_tied_weight():
            return self._run(token_ids, targets, is_training=True)
        weight = self.model.token_embeddings.weight
        before, weight.grad = weight.grad, None  # of earlier batches: it is the sum of both stages already
        loss = self._run(token_ids, targets, is_training=True)
        dist.all_reduce(self._tied_grad(), group=self._tied_group)
        if before is not None:
            weight.grad = before.add_(self._tied_grad())
        return loss

    def evaluate_batch(self, token_ids: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of :meth:`train_batch` without gradients."""
        with torch.no_grad():
            return self._run(token_ids, targets, is_training=False)

    def _run(self, token_ids: Tensor, targets: Tensor, is_training: bool) -> Tensor:
        if len(token_ids) % self.micro_batches:
            raise UserError(
                f"A batch of {len(token_ids)} sequences cannot be divided into {self.micro_batches} micro-batches; "
                "make it a multiple of their number."
            )
        self._target_count = (targets != IGNORE_INDEX).sum().clamp(min=1)
        schedule = self._schedules.get(token_ids.shape)
        if schedule is None:
            schedule = self._schedules[token_ids.shape] = self._make_schedule(token_ids)
        losses: list[Tensor] = []
        run = schedule.step if is_training else schedule.eval
        run(
            *([token_ids] if self.is_first else []),
            target=targets if self.is_last else None,
            losses=losses,
            return_outputs=False,
        )
        loss_dtype = torch.promote_types(self.dtype, torch.float32)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), dtype=loss_dtype, device=self.device)
        dist.broadcast(loss, self.world_size - 1)
        return loss

    def _make_schedule(self, token_ids: Tensor) -> PipelineScheduleSingle:
        ids = torch.empty(len(token_ids) // self.micro_batches, *token_ids.shape[1:], dtype=torch.long, device="meta")
        hidden_states = torch.empty(
            *ids.shape, self.model.config.d_model, dtype=self.dtype, device="meta", requires_grad=True
        )
        stage = PipelineStage(
            _Stage(self.model, self.is_first),
            self.rank,
            self.world_size,
            self.device,
            input_args=ids if self.is_first else hidden_states,
            output_args=hidden_states,
        )
        schedule_cls = Schedule1F1B if self.schedule == "1f1b" else ScheduleGPipe
        # The loss of a micro-batch is already its share of the batch's mean.
        return schedule_cls(stage, self.micro_batches, self._loss_share, scale_grads=False)

    def _loss_share(self, hidden_states: Tensor, targets: Tensor) -> Tensor:
        count = (targets != IGNORE_INDEX).sum()
        return self.model.head_loss(hidden_states, targets) * count / self._target_count

    def _has_tied_weight(self) -> bool:
        return self._tied_group is not None and (self.is_first or self.is_last)

    def _tied_grad(self) -> Tensor:
        weight = self.model.token_embeddings.weight
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        return weight.grad

    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Clip the gradients of all stages by their common norm, and return it; see :func:`lm.optim.clip_grad_norm`."""

        def sum_over_stages(square: Tensor) -> Tensor:
            if self.is_last and self._has_tied_weight():  # the first stage counts it
                square = square - torch.linalg.vector_norm(self._tied_grad()).square()
            dist.all_reduce(square)
            return square

        return clip_grad_norm(self.model.parameters(), max_norm, sum_over_stages)

    def gather_full_params(self) -> dict[str, Tensor]:
        """Return the parameters of all stages by name, on every rank, as new tensors."""
        own = dict(self.model.named_parameters())
        owners = torch.tensor([self.rank if name in own else -1 for name in self._shapes], device=self.device)
        dist.all_reduce(owners, dist.ReduceOp.MAX)
        params = {}
        for (name, shape), owner in zip(self._shapes.items(), owners.tolist(), strict=True):
            is_own = owner == self.rank
            tensor = own[name].detach().clone() if is_own else torch.empty(shape, dtype=self.dtype, device=self.device)
            dist.broadcast(tensor, owner)
            params[name] = tensor
        return params


class _Stage(nn.Module):
    """The part of a model that one rank computes: token ids or hidden states → hidden states."""

    def __init__(self, model: TransformerLM, is_first: bool) -> None:
        super().__init__()
        self.model, self.is_first = model, is_first

    def forward(self, x: Tensor) -> Tensor:
        return self.model.hidden_states(x) if self.is_first else self.model.run_layers(x)


def divide_layers(config: ModelConfig, stage_count: int) -> list[range]:
    """Return the blocks of each of at least 2 stages: consecutive, at least one, and with about the same FLOPs.

    The head costs as much as some blocks, so the last stage has fewer. Raises UserError if there are fewer blocks than
    stages, or if the vocabulary size is not set.
    """
    if config.num_layers < stage_count:
        raise UserError(
            f"model.num_layers {config.num_layers} cannot be divided among {stage_count} processes of a pipeline; "
            f"use at most {config.num_layers} processes."
        )
    head = 2 * (config.vocab_size or 0) * config.d_model
    block = (flops_per_token(config, training=False) - head) / config.num_layers

    def slowest(last: int) -> float:
        return max(last * block + head, -(-(config.num_layers - last) // (stage_count - 1)) * block)

    last = min(range(1, config.num_layers - stage_count + 2), key=slowest)
    others, rest = divmod(config.num_layers - last, stage_count - 1)
    # The larger stages come last but one: the first stages hold the activations of more micro-batches.
    counts = [others + (stage >= stage_count - 1 - rest) for stage in range(stage_count - 1)] + [last]
    return [range(sum(counts[:stage]), sum(counts[: stage + 1])) for stage in range(stage_count)]


def _keep_stage(model: TransformerLM, layers: range, is_first: bool, is_last: bool) -> None:
    """Remove the modules of other stages. The remaining blocks keep their names."""
    for index in range(len(model.layers)):
        if index not in layers:
            delattr(model.layers, str(index))
    is_tied = model.lm_head is None
    if not is_first and not (is_last and is_tied):
        del model.token_embeddings
    if not is_last:
        model.ln_final, model.lm_head, model.scalar_head = nn.Identity(), None, None
