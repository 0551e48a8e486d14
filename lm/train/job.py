"""The job of a pretraining: of local paths, or of URLs on an object store."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch

from lm.data.token_shards import TokenShards
from lm.files.remote_copies import fetch_directory, fetch_files
from lm.model.config import ModelConfig
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.pretraining import TrainData, make_trainer
from lm.train.trainer import Trainer
from lm.train.training_job import TrainingJob


@dataclass(kw_only=True)
class Job(TrainingJob):
    """The inputs and outputs of a pretraining."""

    model: ModelConfig
    train: list[str]
    """Files of training tokens, in order."""
    valid: list[str]
    """Files of validation tokens. Empty: no validation."""
    tokenizer: str
    """Directory of the tokenizer."""
    bytes_per_token: float
    """Bytes of validation text, without separators, per token."""
    start: str = ""
    """Directory of the checkpoint whose weights are the first ones. Default: a new model."""
    checksums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the token files that are URLs."""

    module: ClassVar[str] = "lm.train"
    sections: ClassVar[dict[str, type]] = {"model": ModelConfig}

    def input_files(self) -> list[str]:
        """Return the paths of the token files, the tokenizer and the checkpoint to start from."""
        return [*self.train, *self.valid, self.tokenizer, *([self.start] if self.start else [])]

    def map_paths(self, function: Callable[[str], str]) -> None:
        """Replace each path of an input by ``function`` of it."""
        self.train, self.valid = ([function(path) for path in paths] for paths in (self.train, self.valid))
        self.checksums = {function(path): checksum for path, checksum in self.checksums.items()}
        self.tokenizer = function(self.tokenizer)
        self.start = self.start and function(self.start)

    def make_trainer(self, out: Path, device: torch.device) -> Trainer:
        """Make the trainer of a new model, or of that in ``start``.

        Files at URLs are copied if the disk may hold them.
        """
        tokenizer = Tokenizer.load(fetch_directory(self.tokenizer))
        paths = fetch_files([*self.valid, *self.train], self.checksums, self.execution.download_cache << 30)
        valid, train = (
            TokenShards(part, tokenizer.size) for part in (paths[: len(self.valid)], paths[len(self.valid) :])
        )
        data = TrainData(train, valid if len(valid) else None, tokenizer, self.bytes_per_token, self.digests)
        start = Path(fetch_directory(self.start)) if self.start else None
        return make_trainer(self.config, self.model, data, self.execution, out, device, start)
