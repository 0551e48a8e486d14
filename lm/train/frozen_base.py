"""The frozen model of a training that learns an adapter: its checkpoint, and what such a training cannot do."""

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch

from lm.checkpoint.adapter_base import read_adapter, write_base
from lm.checkpoint.safe_load import check_weights_are_finite, load_weights
from lm.checkpoint.training_checkpoint import load_model, read_description, read_weights, weights_digest
from lm.common.errors import UserError
from lm.common.execution import Execution
from lm.distributed.process_group import get_rank
from lm.model.adapter import adapted_layers, add_adapter, make_reference, trained_parameters, wrap_layers
from lm.model.config import AdapterConfig, ModelConfig
from lm.model.transformer import TransformerLM

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FrozenBase:
    """The checkpoint of the model below an adapter. The adapter's checkpoints hold its digest and not its weights."""

    checkpoint: Path
    digest: str
    adapter: AdapterConfig

    @classmethod
    def adapt(cls, model: TransformerLM, checkpoint: Path, adapter: AdapterConfig, max_lr: float) -> Self | None:
        """Add ``adapter`` to ``model``, which :func:`load_start` loaded from ``checkpoint``; None if it is off.

        Logs the number of trained parameters, and the peak learning rate ``max_lr``. Raises UserError for an unknown
        target, and if the checkpoint is damaged.
        """
        if not adapter.is_on:
            return None
        description = read_description(checkpoint)
        if description is None:
            raise UserError(f"{checkpoint} is not an intact checkpoint.")
        total = sum(parameter.numel() for parameter in model.parameters())
        add_adapter(model, adapter)
        check_weights_are_finite(model.state_dict(), str(checkpoint))
        trained = sum(parameter.numel() for parameter in trained_parameters(model).values())
        log.info(
            "Training an adapter of rank %d on %d linear layers: %s parameters, %.2f %% of the model's. The learning "
            "rate rises to %g; by default it is 10 times that of a full training.",
            adapter.rank,
            len(adapted_layers(model)),
            f"{trained:,}",
            100 * trained / total,
            max_lr,
        )
        return cls(checkpoint, weights_digest(description), adapter)

    def write(self, out: Path) -> None:
        """Write where the base is to the directory of the adapter's checkpoints."""
        if get_rank() == 0:
            write_base(out, self.checkpoint)

    @property
    def description(self) -> dict[str, Any]:
        """The entry ``adapter`` of a checkpoint's description."""
        return {"adapter": {**asdict(self.adapter), "base": self.digest}}


def load_start(
    checkpoint: Path, device: torch.device, adapter: AdapterConfig, config: ModelConfig | None = None
) -> TransformerLM:
    """Load the model that a training starts from, in training mode; ``config`` replaces its own.

    The base of an adapter of fewer bits stays in its files until :meth:`FrozenBase.adapt` converts it.
    """
    is_mapped = adapter.is_on and adapter.dtype != "float32" and device.type == "cpu"
    return load_model(checkpoint, device, config=config, is_mapped=is_mapped).train()


def load_beside(checkpoint: Path, model: TransformerLM, base: FrozenBase | None) -> TransformerLM:
    """Load a model to the device of ``model``, as :func:`lm.checkpoint.training_checkpoint.load_model` does.

    If it is an adapter over the frozen ``base`` of ``model``, rounded to the same dtype, it shares that base's weights.
    """
    description = read_description(checkpoint) or {}
    about = description.get("adapter", {})
    # A training may change the rotary frequencies, for example.
    is_same = base and (about.get("base"), about.get("dtype")) == (base.digest, base.adapter.dtype)
    if not is_same or ModelConfig(**description["model"]) != model.config:
        return load_model(checkpoint, model.token_embeddings.weight.device)
    name, weights = str(checkpoint), read_weights(checkpoint, description)
    check_weights_are_finite(weights, name)
    layers = {key.rpartition(".")[0] for key in weights}
    shared = wrap_layers(make_reference(model), layers, read_adapter(about, weights, name)[0])
    load_weights(shared, weights, name)
    return shared.eval()


def refuse_tensor_parallel(execution: Execution, adapter: AdapterConfig) -> None:
    """Raise UserError if ``execution`` divides the matrices around which ``adapter`` is put."""
    if adapter.is_on and execution.tensor_parallel > 1:
        raise UserError(
            f"execution.tensor_parallel is {execution.tensor_parallel}, but a training with an adapter needs whole "
            "matrices; set it to 1."
        )
