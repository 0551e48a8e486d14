"""The objective of a reward model: the better answer of a pair gets a higher reward than the other."""

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from lm.data.dialogs import PreferencePair
from lm.inference.completion import Completion
from lm.model.transformer import TransformerLM
from lm.posttrain.config import RewardModelConfig
from lm.posttrain.masked import after_last
from lm.posttrain.pair_objective import PairBatch, PairObjective
from lm.posttrain.reward_model import bradley_terry_loss, compute_rewards
from lm.tokenizer.tokenizer import Tokenizer


class RewardModeling(PairObjective):
    """The objective that fits the Bradley–Terry model to pairs (Ouyang et al. 2022, section 3.5).

    ``model`` has a reward head, see :func:`lm.posttrain.reward_model.add_reward_head`. Pairs beyond the model's context
    are left out. Raises UserError if none remains.
    """

    def __init__(
        self,
        config: RewardModelConfig,
        model: TransformerLM,
        tokenizer: Tokenizer,
        train: Sequence[PreferencePair],
        valid: Sequence[PreferencePair],
        digests: dict[str, str],
    ) -> None:
        super().__init__(config.train, model, tokenizer, train, valid, digests, model.config.context_length)
        self.config = config

    def padding(self, micro_batch: PairBatch) -> Tensor:
        """Return which tokens are after the answer, (2 · pairs, T) bool."""
        return after_last(micro_batch.mask)

    def losses(self, model: TransformerLM, batch: PairBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of each pair, its rewards, their margin, and whether the better answer has more."""
        chosen, rejected = compute_rewards(model, batch.ids, batch.mask).chunk(2)
        metrics = {"chosen_reward": chosen, "rejected_reward": rejected, "margin": chosen - rejected}
        metrics = {name: value.detach() for name, value in metrics.items()}
        metrics["accuracy"] = (metrics["margin"] > 0).float()
        return bradley_terry_loss(chosen, rejected, self.config.center_weight), metrics

    def restore(self, previous: Path, step: int) -> None:
        """Do nothing: the batches follow from seed and step."""

    def sample(self, model: TransformerLM) -> list[Completion]:
        """Return nothing: a reward model writes no text."""
        return []
