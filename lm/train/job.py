"""A training described by a JSON file, ``job.json``."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm.common.device import choose_device
from lm.common.errors import UserError
from lm.common.runtime import Execution
from lm.data.token_shards import TokenShards
from lm.distributed.process_group import process_group
from lm.model.config import ModelConfig
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer


@dataclass
class Job:
    """The inputs and outputs of a training. In a file, paths are relative to the file."""

    config: TrainConfig
    model: ModelConfig
    train: list[str]
    """Files of training tokens, in order."""
    valid: list[str]
    """Files of validation tokens. Empty: no validation."""
    tokenizer: str
    """Directory of the tokenizer."""
    bytes_per_token: float
    """Bytes of validation text, without separators, per token."""
    digests: dict[str, str]
    """Checksums of the input by name. A checkpoint with other checksums is refused."""
    out: str
    """Directory of checkpoints and metrics."""
    previous: list[str] = field(default_factory=list)
    """Directories of earlier attempts to resume from, the newest first."""
    execution: Execution = field(default_factory=Execution)

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read a job from JSON. Raises UserError if the file cannot be read or is not a job."""
        folder = path.absolute().parent
        try:
            job = cls(**json.loads(path.read_text(encoding="utf-8")))
            for name, section in (("config", TrainConfig), ("model", ModelConfig), ("execution", Execution)):
                setattr(job, name, section(**getattr(job, name)))
            for name in ("train", "valid", "previous"):
                setattr(job, name, [str(folder / relative) for relative in getattr(job, name)])
            job.tokenizer, job.out = str(folder / job.tokenizer), str(folder / job.out)
        except OSError as error:
            raise UserError(f"The job {path} cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is not the job of a training: {error}") from None
        return job

    def run(
        self, progress: Callable[[int], None] = lambda step: None, stop_event: threading.Event | None = None
    ) -> dict[str, Any]:
        """Train, from the newest checkpoint if there is one; see :meth:`lm.train.trainer.Trainer.run`."""
        tokenizer = Tokenizer.load(self.tokenizer)
        train, valid = (
            TokenShards([Path(name) for name in names], tokenizer.size) for names in (self.train, self.valid)
        )
        data = TrainData(train, valid if len(valid) else None, tokenizer, self.bytes_per_token, self.digests)
        out = Path(self.out)
        with process_group(choose_device(self.execution.device)) as device:
            trainer = make_trainer(self.config, self.model, data, self.execution, out, device)
            for previous in (out, *map(Path, self.previous)):
                if trainer.resume(previous):
                    break
            return trainer.run(progress, stop_event)
