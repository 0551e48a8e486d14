"""The objective of a reward model: the better answer of a pair gets a higher reward than the other."""

from typing import Self

from torch import Tensor

from lm.data.dialogs import PreferencePair
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import RewardModelConfig
from lm.posttrain.job import ObjectiveInputs, PosttrainJob
from lm.posttrain.losses.log_probs import after_last
from lm.posttrain.losses.reward_model import add_reward_head, bradley_terry_loss, compute_rewards
from lm.posttrain.objectives.pairs import PairBatch, PairObjective


class RewardModeling(PairObjective):
    """The objective that fits the Bradley–Terry model to pairs (Ouyang et al. 2022, section 3.5).

    ``model`` has a reward head, see :func:`lm.posttrain.losses.reward_model.add_reward_head`. Pairs beyond the model's
    context are left out. Raises UserError if none remains.
    """

    def __init__(self, config: RewardModelConfig, inputs: ObjectiveInputs[PreferencePair]) -> None:
        super().__init__(config.train, inputs, inputs.model.config.context_length)
        self.config = config

    @classmethod
    def from_job(cls, job: PosttrainJob, inputs: ObjectiveInputs[PreferencePair]) -> Self:
        """Return the objective of a job. The model gets a new reward head."""
        add_reward_head(inputs.model)
        return cls(RewardModelConfig(train=job.config, **job.settings), inputs)

    def padding(self, micro_batch: PairBatch) -> Tensor:
        """Return which tokens are after the answer, (B, T) bool."""
        return after_last(micro_batch.mask)

    def losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, its rewards, their margin, and whether the better answer has more."""
        chosen_P, rejected_P = compute_rewards(model, batch.ids, batch.mask).chunk(2)
        metrics = {"chosen_reward": chosen_P, "rejected_reward": rejected_P, "margin": chosen_P - rejected_P}
        metrics = {name: value.detach() for name, value in metrics.items()}
        metrics["accuracy"] = (metrics["margin"] > 0).float()
        return bradley_terry_loss(chosen_P, rejected_P, self.config.center_weight), metrics

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Return nothing: a reward model writes no text."""
        return []
