"""A training described by a JSON file, ``job.json``: the part that is the same for all training methods."""

import fcntl
import hashlib
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, ClassVar, Self

import torch

from lm.checkpoint.mirror import CheckpointMirror, send_heartbeats
from lm.common.errors import StorageError, UserError, translate_write_errors
from lm.common.execution import Execution
from lm.distributed.process_group import barrier, call_on_rank0, get_rank, process_group
from lm.files.cache_dir import cache_directory
from lm.files.urls import read_file
from lm.hardware.device import choose_device
from lm.model.config import AdapterConfig
from lm.train.config import TrainConfig
from lm.train.trainer import Trainer

log = logging.getLogger(__name__)

NO_MEMORY_FOR_MODEL = (
    "Memory is full before the first step: each process builds the whole model in float32, and divides it then. Use a "
    "smaller model, fewer processes on a machine, or a device with more memory."
)
"""Advice of :func:`lm.hardware.device.explain_out_of_memory` where a trainer is made."""


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
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    """The adapter to train in place of all weights. Default: none."""

    sections: ClassVar[dict[str, type]] = {}
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
        """Read a job from JSON, a local file or a URL. ``TrainingJob.read`` finds the class by the job's fields.

        Raises UserError if it cannot be read or is not a job.
        """
        name = str(place) if "://" in str(place) else str(Path(place).absolute())
        folder = name.rpartition("/")[0]

        def absolute(path: str) -> str:
            return path if "://" in path else folder if path == "." else os.path.join(folder, path)

        try:
            content = json.loads(read_file(name))
            kind = cls
            if kind is TrainingJob:
                # By a field that only they have. Named and not imported: the modules stand above this one.
                others = {"method": "lm.posttrain.job:PosttrainJob", "profiled_steps": "lm.train.profile:ProfileJob"}
                names = [name for key, name in others.items() if key in content]
                kind = resolve_name(names[0] if names else "lm.train.pretraining:Job")
            job = kind(**content)
            sections: dict[str, Callable[..., Any]] = {"config": TrainConfig, "execution": Execution.from_job}
            adapter = {"adapter": AdapterConfig} if "adapter" in content else {}  # older files have none
            for section, make_section in (sections | adapter | kind.sections).items():
                setattr(job, section, make_section(**getattr(job, section)))
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

    @contextmanager
    def prepare(self) -> Iterator[Callable[..., dict[str, Any]]]:
        """Join the process group, lock ``out``, and resume from the newest checkpoint if there is one.

        Yield the function that trains: :meth:`lm.train.trainer.Trainer.run`.
        """
        out, mirror = self._open_out()
        with (
            process_group(choose_device(self.execution.device), self.execution.tensor_parallel) as device,
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
                yield trainer.run

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


@contextmanager
def lock_directory(directory: Path) -> Iterator[None]:
    """Keep other trainings from writing to ``directory``. Rank 0 holds the lock; all ranks call this together.

    Raises UserError on all ranks if another training has the lock. The operating system frees the lock of a killed
    process. On a file system without locks this only logs a warning.
    """
    with ExitStack() as stack:
        call_on_rank0(lambda: stack.enter_context(_hold_lock(directory / "training.lock")))
        yield


@contextmanager
def _hold_lock(path: Path) -> Iterator[None]:
    """Hold the lock of a file, and delete the file at the end."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o666)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}.") from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(
                f"Another program is training in {path.parent}. Stop it or wait for its end, then start this again; "
                "it resumes from the last checkpoint."
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): do not start a second training there.", path, error.strerror)
        if os.fstat(descriptor).st_nlink:
            break
        os.close(descriptor)  # the last holder deleted the file after it was opened here
    try:
        yield
    finally:
        with suppress(OSError):  # the disk has become read-only; the next training reuses the file
            path.unlink()
        os.close(descriptor)
