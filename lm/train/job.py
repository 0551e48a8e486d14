"""A training described by a JSON file, ``job.json``: of local paths, or of URLs on an object store."""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm.checkpoint.mirror import CheckpointMirror
from lm.common.cache import cache_directory
from lm.common.device import choose_device
from lm.common.errors import UserError
from lm.common.runtime import Execution
from lm.data.remote_files import fetch_directory, fetch_files, read_file
from lm.data.token_shards import TokenShards
from lm.distributed.process_group import barrier, get_rank, process_group
from lm.model.config import ModelConfig
from lm.tokenizer.tokenizer import Tokenizer
from lm.train.config import TrainConfig
from lm.train.pretraining import TrainData, make_trainer


@dataclass
class Job:
    """The inputs and outputs of a training. In a file, paths are URLs, or relative to the file."""

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
    checksums: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the token files that are URLs."""
    mirror: str = ""
    """URL to which the checkpoints are copied as they are saved. Default: ``out``, if that is a URL."""
    execution: Execution = field(default_factory=Execution)

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, place: str | Path) -> "Job":
        """Read a job from JSON, a local file or a URL. Raises UserError if it cannot be read or is not a job."""
        name = str(place) if "://" in str(place) else str(Path(place).absolute())
        folder = name.rpartition("/")[0]

        def absolute(path: str) -> str:
            return path if "://" in path else folder if path == "." else os.path.join(folder, path)

        try:
            content = json.loads(read_file(name))
            job = cls(**content)
            for section_name, section in (("config", TrainConfig), ("model", ModelConfig), ("execution", Execution)):
                setattr(job, section_name, section(**getattr(job, section_name)))
            for list_name in ("train", "valid", "previous"):
                setattr(job, list_name, [absolute(path) for path in getattr(job, list_name)])
            job.checksums = {absolute(path): checksum for path, checksum in job.checksums.items()}
            job.tokenizer, job.out = absolute(job.tokenizer), absolute(job.out)
        except OSError as error:
            raise UserError(f"The job {place} cannot be read: {error.strerror or error}.") from None
        except UserError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{place} is not the job of a training: {error}") from None
        return job

    def run(
        self, progress: Callable[[int], None] = lambda step: None, stop_event: threading.Event | None = None
    ) -> dict[str, Any]:
        """Train, from the newest checkpoint if there is one; see :meth:`lm.train.trainer.Trainer.run`."""
        tokenizer = Tokenizer.load(fetch_directory(self.tokenizer))
        train, valid = (TokenShards(paths, tokenizer.size) for paths in self._fetch_tokens())
        data = TrainData(train, valid if len(valid) else None, tokenizer, self.bytes_per_token, self.digests)
        out, mirror = self._open_out()
        with process_group(choose_device(self.execution.device)) as device:
            if mirror:
                _exchange_checkpoints(mirror)
            trainer = make_trainer(self.config, self.model, data, self.execution, out, device)
            for previous in (out, *map(Path, self.previous)):
                if trainer.resume(previous):
                    break
            with mirror.running() if mirror and get_rank() == 0 else nullcontext():
                return trainer.run(progress, stop_event)

    def _fetch_tokens(self) -> tuple[list[str], list[str]]:
        """Return the files of training and validation tokens: local copies of URLs if the disk may hold them."""
        max_bytes = self.execution.download_cache << 30
        paths = fetch_files([*self.valid, *self.train], self.checksums, max_bytes)
        return paths[len(self.valid) :], paths[: len(self.valid)]

    def _open_out(self) -> tuple[Path, CheckpointMirror | None]:
        """Return the local directory of the checkpoints, and the mirror if they are copied."""
        if "://" in self.out:
            local = cache_directory() / "jobs" / hashlib.sha256(self.out.encode()).hexdigest()[:32]
            return local, CheckpointMirror(local, self.mirror or self.out)
        return Path(self.out), CheckpointMirror(Path(self.out), self.mirror) if self.mirror else None


def _exchange_checkpoints(mirror: CheckpointMirror) -> None:
    """Give all machines the same checkpoints, those of the mirror and of the machine of rank 0."""
    if get_rank() == 0:
        mirror.download()
        mirror.upload()
    barrier()
    if get_rank() and os.environ.get("LOCAL_RANK") == "0":
        mirror.download()
    barrier()
