"""A training as a job in a file, for machines and processes that know nothing else.

``python -m lm.train JOB.json`` trains on one device, ``torchrun --nproc-per-node N -m lm.train JOB.json`` on N. The
stage ``train`` writes such a file where it trains. SIGTERM and Ctrl-C finish the step and save, and the same command
goes on from there; the first then exits with code 75.
"""

import argparse
import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lm.device import choose_device
from lm.distributed import joined
from lm.errors import UserError
from lm.execution import Execution
from lm.model import ModelConfig
from lm.recipe import TrainConfig
from lm.shards import TokenShards
from lm.tokenizer import Tokenizer
from lm.trainer import Interrupted, TrainData, Trainer

INTERRUPTED = 75  # exit code: stopped and saved; the same command goes on (EX_TEMPFAIL of sysexits.h)
SAYS = "lm.train: "  # before the one message of a training that ends early
PARENT = "TEXTMILL_PARENT"  # environment variable, set where the end of standard input is the end of our parent
_GRACE = 20.0  # seconds that are left then to finish the step and save

log = logging.getLogger(__name__)


@dataclass
class Job:
    """What a training reads and where it writes. Paths in a file are relative to it."""

    config: TrainConfig
    model: ModelConfig
    train: list[str]
    """Files of training tokens, in order."""
    valid: list[str]
    """Files of validation tokens; none: there is no validation."""
    tokenizer: str
    """Directory of the tokenizer."""
    bytes_per_token: float
    """Of the validation text, separators not counted."""
    digests: dict[str, str]
    """Of what is read; a checkpoint of other digests is refused."""
    out: str
    """Directory of the checkpoints and figures."""
    previous: list[str] = field(default_factory=list)
    """Directories of earlier attempts, the newest first, that the training may go on from."""
    execution: Execution = field(default_factory=Execution)

    def write(self, path: Path) -> None:
        """Write the job as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read a job; raises UserError for a file that is none."""
        folder = path.absolute().parent
        try:
            job = cls(**json.loads(path.read_text(encoding="utf-8")))
            sections = {"config": TrainConfig, "model": ModelConfig, "execution": Execution}
            for name, kind in sections.items():
                setattr(job, name, kind(**getattr(job, name)))
            for name in ("train", "valid", "previous"):
                setattr(job, name, [str(folder / place) for place in getattr(job, name)])
            job.tokenizer, job.out = str(folder / job.tokenizer), str(folder / job.out)
        except OSError as error:
            raise UserError(f"The job {path} cannot be read: {error.strerror}.") from None
        except (ValueError, TypeError, RecursionError) as error:
            raise UserError(f"{path} is not the job of a training: {error}") from None
        return job

    def run(
        self, progress: Callable[[int], None] = lambda step: None, stopping: threading.Event | None = None
    ) -> dict[str, Any]:
        """Train, going on from the newest checkpoint there is; see :meth:`lm.trainer.Trainer.run`."""
        tokenizer = Tokenizer.load(self.tokenizer)
        train, valid = (
            TokenShards([Path(name) for name in names], tokenizer.size) for names in (self.train, self.valid)
        )
        data = TrainData(train, valid if len(valid) else None, tokenizer, self.bytes_per_token, self.digests)
        out = Path(self.out)
        with joined(choose_device(self.execution.device)) as device:
            trainer = Trainer(self.config, self.model, data, self.execution, out, device)
            any(trainer.resume(previous) for previous in (out, *map(Path, self.previous)))
            return trainer.run(progress, stopping)


@contextmanager
def stopped_by_signals(stopping: threading.Event) -> Iterator[list[int]]:
    """Within it, the first SIGINT or SIGTERM sets ``stopping`` and is added to the list given; the next one does what
    it did before. Signals come to the main thread: in another one this changes nothing."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def handle(number: int, frame: Any) -> None:
        if received:
            signal.signal(number, handlers[signal.Signals(number)])
            signal.raise_signal(number)
        received.append(number)
        stopping.set()

    handlers = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end_with_parent(stopping: threading.Event) -> None:
    """Stop when the process that holds the other end of standard input has ended, however it did."""
    os.read(0, 1)  # not by way of sys.stdin, whose lock would hold up the end of this process
    stopping.set()
    time.sleep(_GRACE)
    os._exit(INTERRUPTED)


def main(arguments: list[str] | None = None) -> int:
    """Run the job of a file; returns 0, 2 for a user's mistake, or INTERRUPTED."""
    parser = argparse.ArgumentParser(prog="python -m lm.train", description=__doc__)
    parser.add_argument("job", type=Path, help="JSON file that the stage train wrote")
    options = parser.parse_args(arguments)
    stopping = threading.Event()
    if os.environ.get(PARENT):
        threading.Thread(target=_end_with_parent, args=(stopping,), daemon=True).start()
    is_first = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.INFO if is_first else logging.ERROR, format="%(message)s")
    try:
        with stopped_by_signals(stopping):
            job = Job.read(options.job)
            with options.job.open("rb") as file:
                with suppress(OSError):  # of a file system without locks
                    fcntl.flock(file, fcntl.LOCK_SH)  # textmill gc leaves alone what somebody trains
                job.run(stopping=stopping)
    except UserError as error:
        print(f"{SAYS}{error}", file=sys.stderr)
        return 2
    except Interrupted as stop:
        print(f"{SAYS}{stop}", file=sys.stderr)
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
