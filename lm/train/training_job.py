"""A training described by a JSON file, ``job.json``: the part that is the same for all training methods."""

import hashlib
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from lm.checkpoint.mirror import CheckpointMirror, send_heartbeats
from lm.common.errors import UserError, translate_write_errors
from lm.common.execution import Execution
from lm.distributed.process_group import barrier, get_rank, process_group
from lm.files.cache_dir import cache_directory
from lm.files.urls import read_file
from lm.hardware.device import choose_device
from lm.train.config import TrainConfig
from lm.train.directory_lock import lock_directory
from lm.train.trainer import Trainer


@dataclass(kw_only=True)
class TrainingJob(ABC):
    """The inputs and outputs of a training. In a file, paths are URLs, or relative to the file."""

    config: TrainConfig
    digests: dict[str, str]
    """Checksums of the input by name. A checkpoint with other checksums is refused."""
    out: str
    """Directory of checkpoints and metrics."""
    previous: list[str] = field(default_factory=list)
    """Directories of earlier attempts to resume from, the newest first."""
    mirror: str = ""
    """URL to which the checkpoints are copied as they are saved. Default: ``out``, if that is a URL."""
    heartbeat: str = ""
    """URL of a file that is rewritten every few seconds while the job runs. Default: none."""
    execution: Execution = field(default_factory=Execution)

    module: ClassVar[str]
    """``python -m MODULE JOB`` runs the job."""
    sections: ClassVar[dict[str, type]]
    """Class of each field that is a dataclass, besides ``config`` and ``execution``."""

    @abstractmethod
    def input_files(self) -> list[str]:
        """Return the paths of all input files and directories."""

    @abstractmethod
    def map_paths(self, function: Callable[[str], str]) -> None:
        """Replace each path of an input by ``function`` of it."""

    @abstractmethod
    def make_trainer(self, out: Path, device: torch.device) -> Trainer:
        """Make the trainer, which writes to ``out``."""

    def write(self, path: Path) -> None:
        """Write the job as JSON. Raises UserError if it cannot be written."""
        with translate_write_errors(path):
            path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, place: str | Path) -> Self:
        """Read a job from JSON, a local file or a URL. Raises UserError if it cannot be read or is not a job."""
        name = str(place) if "://" in str(place) else str(Path(place).absolute())
        folder = name.rpartition("/")[0]

        def absolute(path: str) -> str:
            return path if "://" in path else folder if path == "." else os.path.join(folder, path)

        try:
            content = json.loads(read_file(name))
            job = cls(**content)
            kinds: dict[str, Callable[..., Any]] = {"config": TrainConfig, "execution": Execution.from_job}
            for section, kind in (kinds | cls.sections).items():
                setattr(job, section, kind(**getattr(job, section)))
            job.map_paths(absolute)
            job.previous = [absolute(path) for path in job.previous]
            job.out = absolute(job.out)
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
        out, mirror = self._open_out()
        with (
            process_group(choose_device(self.execution.device)) as device,
            lock_directory(out),
            send_heartbeats(self.heartbeat) if self.heartbeat and get_rank() == 0 else nullcontext(),
        ):
            if mirror:
                _exchange_checkpoints(mirror)
            trainer = self.make_trainer(out, device)
            for previous in (out, *map(Path, self.previous)):
                if trainer.resume(previous):
                    break
            with mirror.running() if mirror and get_rank() == 0 else nullcontext():
                return trainer.run(progress, stop_event)

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
