"""Balance of the load of a mixture of experts in training, and its figures.

Sources: Fedus et al. 2021 (Switch: auxiliary loss); Zoph et al. 2022 (ST-MoE: router z-loss); Wang et al. 2024 and
DeepSeek-AI 2024 (DeepSeek-V3: loss-free balance by a bias).
"""

from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from lm.distributed.process_group import all_reduce_mean
from lm.model.config import MoEConfig
from lm.model.moe import MoE
from lm.model.transformer import TransformerLM


class ExpertBalance:
    """Computes the balance losses of each micro-batch, and updates the biases once per step.

    Loads are those of all ranks, so that any number of ranks trains the same. If a micro-batch needs several forward
    passes, their counts are added.
    """

    def __init__(self, model: TransformerLM, config: MoEConfig) -> None:
        self.config = config
        self._bias_update_rate = config.bias_update_rate
        self._layers = [layer.ffn for layer in model.layers if isinstance(layer.ffn, MoE)]
        self.start_step()

    def start_step(self) -> None:
        """Forget the step before."""
        # Sums over the micro-batches of the step, see _pack. Created on the device: a copy from the host would wait.
        self._step = torch.zeros((), device=self._layers[0].router.weight.device)
        self._aux_loss = torch.zeros_like(self._step)  # without its weight, the mean over blocks and micro-batches

    def start_micro_batch(self, padding: Tensor | None) -> None:
        """Record the routings of the next forward passes, except those of tokens where ``padding`` (B, T) is true."""
        for layer in self._layers:
            layer.record_routings(padding)

    def freeze_biases(self) -> None:
        """Keep the biases from now on."""
        self._bias_update_rate = 0.0

    def loss(self, micro_batches: int) -> Tensor:
        """Return this rank's part of the balance losses of the micro-batch that just passed the model.

        The gradients of all ranks are averaged, and those of a step's ``micro_batches`` added: together they are the
        gradient of the mean over micro-batches of the weighted losses, each summed over the blocks. All ranks call this
        together.
        """
        local = _pack(self._layers)
        mean = all_reduce_mean(local.detach().clone())
        self._step = self._step.to(mean) + mean
        shares, tokens = self._shares(mean)
        self._aux_loss = self._aux_loss + self._aux_losses(shares, mean[:, 1], tokens).mean() / micro_batches
        affinities, z_sum = local[:, 1, :].float(), local[:, 2, 0].float()
        loss = torch.zeros_like(tokens)
        if self.config.aux_loss_weight:
            loss = loss + self.config.aux_loss_weight * self._aux_losses(shares, affinities, tokens).sum()
        if self.config.z_loss_weight:
            loss = loss + self.config.z_loss_weight * z_sum.sum() / tokens
        return loss / micro_batches

    @torch.no_grad()
    def update_biases(self, found_inf: Tensor) -> None:
        """Move each expert's bias towards the mean load of the step, unless ``found_inf``, a bool scalar, is true."""
        if not self._bias_update_rate:
            return
        loads = self._step[:, 0]
        updates = self._bias_update_rate * (loads.mean(-1, keepdim=True) - loads).sign() * ~found_inf
        for layer, update in zip(self._layers, updates, strict=True):
            cast(Tensor, layer.expert_bias).add_(update)

    def metrics(self) -> dict[str, Any]:
        """Return the figures of the last step; waits for the device.

        ``expert_load_max``: the highest load over the mean load, of the block where that is highest.
        ``expert_load_entropy``: of the shares of the load, 1 if all are equal; the mean over the blocks.
        ``dead_experts``: number of experts that no token chose, in all blocks. ``aux_loss`` (1 if the load is balanced)
        and ``z_loss``: without their weights; means over the blocks and the micro-batches. ``dropped_choices``: the
        share that a capacity dropped. ``expert_loads``: for each block, the load of each expert over the mean load.
        """
        step = self._step.cpu().double()  # MPS has no float64
        shares, tokens = self._shares(step)
        loads = shares * self.config.num_experts
        entropy = torch.special.entr(shares).sum(-1) / torch.tensor(self.config.num_experts).log()
        figures = {
            "expert_load_max": loads.max().item(),
            "expert_load_entropy": entropy.mean().item(),
            "dead_experts": int((loads == 0).sum()),
            "aux_loss": self._aux_loss.item(),
            "z_loss": (step[:, 2, 0] / tokens).mean().item(),
        }
        if self.config.capacity_factor is not None:
            figures["dropped_choices"] = (step[:, 2, 1].sum() / step[:, 0].sum()).item()
        return figures | {"expert_loads": [[round(load, 3) for load in layer] for layer in loads.tolist()]}

    def _aux_losses(self, shares: Tensor, affinity_sums: Tensor, tokens: Tensor) -> Tensor:
        """Return the auxiliary loss of each block, without its weight."""
        return self.config.num_experts * (shares * affinity_sums).sum(-1) / tokens

    def _shares(self, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Return each expert's share of the choices (blocks, E), and the number of tokens."""
        choices = sums[0, 0].sum().clamp(min=1)  # 0 if all is padding
        return sums[:, 0] / choices, choices / self.config.top_k


def _pack(layers: list[MoE]) -> Tensor:
    """Return the sums over all passes, (blocks, 3, E): counts; affinities; z and dropped choices, then zeros. Forget
    the routings."""
    rows = []
    passes = zip(*(layer.routings or [] for layer in layers), strict=True)
    for routing in chain.from_iterable(passes):
        scalars = torch.stack([routing.z_sum, routing.dropped.to(routing.z_sum.dtype)])
        padded = torch.cat([scalars, scalars.new_zeros(len(routing.counts) - 2)])
        rows.append(torch.stack([routing.counts.to(padded.dtype), routing.affinity_sums, padded]))
    for layer in layers:
        layer.routings = []
    return torch.stack(rows).unflatten(0, (-1, len(layers))).sum(0)
