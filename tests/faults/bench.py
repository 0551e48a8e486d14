"""What the rounds share: a kept Prefect server, an object store, the sources, and an undisturbed run to compare with;
and the real pipeline as a process, whose words are followed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import fsspec
import yaml

from lm.demo_corpus import demo_stories
from tests.deployed import PROJECT, TINY, Server
from tests.faults.object_store import KEYS, ObjectStore

_TICK = 0.02  # seconds
_LONG = 240.0  # seconds until a run counts as hung: compiling the kernels, on a busy machine
BUCKET = "faults"
CONFIG: dict[str, Any] = {
    "chunk": {"target_bytes": 60_000},
    "tokenizer": {"vocab_size": 600},
    "model": TINY["model"],
    "train": TINY["train"] | {"steps": 200, "eval_interval": 40, "checkpoint_interval": 30},
    "sample": {"prompts": ["Once", "One day"], "max_new_tokens": 60},
    "execution": {"threads": 1, "compile": False, "log_interval": 1000},
}


def ticks(seconds: float) -> Iterator[None]:
    """Come back every few milliseconds for so long, time in which the machine stopped all of us not counted."""
    for _ in range(int(seconds / _TICK)):
        yield
        time.sleep(_TICK)


class Process:
    """A ``textmill run``: its lines as they come, and the stages that they say are done."""

    def __init__(self, arguments: list[str], zygote: subprocess.Popen[str], fifo: Path) -> None:
        self.lines: list[str] = []
        self.done: list[str] = []
        self.name = ""
        self.code: int | None = None
        """The exit code; None while it runs."""
        assert zygote.stdin is not None and zygote.stdout is not None
        os.mkfifo(fifo)
        zygote.stdin.write(json.dumps([["run", *arguments], str(fifo)]) + "\n")
        zygote.stdin.flush()
        self.id = int(zygote.stdout.readline())
        self._threads = [
            threading.Thread(target=self._read, args=(fifo,), daemon=True),
            threading.Thread(target=self._wait, args=(zygote.stdout,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, fifo: Path) -> None:
        with fifo.open(encoding="utf-8", errors="replace") as said:
            for line in said:
                self.lines.append(line.rstrip("\n"))
                if found := re.match(r"\S+  (\w+) is (?:made, in|cached:)", line):
                    self.done.append(found.group(1))
                elif found := re.match(r"\S+  Run (\S+):", line):
                    self.name = found.group(1)
        fifo.unlink()

    def _wait(self, codes: IO[str]) -> None:
        self.code = int(codes.readline())

    def reaches(self, condition: Callable[[], bool]) -> bool:
        """Wait until ``condition`` holds; False where the process ended before or seems to hang."""
        for _ in ticks(_LONG):
            if condition():
                return True
            if self.code is not None:
                break
        return condition()

    def ends(self) -> bool:
        """Wait for the end; one that does not come is a hang, and made."""
        is_over = any(self.code is not None for _ in ticks(_LONG))
        if not is_over:
            os.kill(self.id, signal.SIGABRT)  # it says where
            any(self.code is not None for _ in ticks(5))
        self.kill()
        return is_over

    def kill(self) -> None:
        """End it, where it has not, and take in its last words."""
        if self.code is None:
            os.killpg(self.id, signal.SIGKILL)
        for thread in self._threads:
            thread.join(10)

    def others(self) -> list[int]:
        """Ids of the processes that it has started and that are still there."""
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = path.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == self.id and fields[0] != "Z":  # its session
                found.append(int(path.parent.name))
        return found

    @property
    def said(self) -> str:
        return "\n".join(self.lines)


class Bench:
    """Everything that is started once."""

    def __init__(self, home: Path) -> None:
        home.mkdir(parents=True, exist_ok=True)
        self.home = home
        self.server = Server(home)
        self.objects = ObjectStore()
        s3 = KEYS | {"AWS_ENDPOINT_URL": self.objects.url}
        self._own = patch.dict(os.environ, s3)  # for the judge
        self._own.start()
        self._zygote = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.zygote"],
            cwd=PROJECT,
            # By default their clients would try for longer than a round.
            env=self.server.environment | s3 | {"AWS_MAX_ATTEMPTS": "2", "PREFECT_CLIENT_MAX_RETRIES": "2"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.source = home / "train.txt"  # used where it lies
        self.source.write_text("".join(demo_stories(1200)), encoding="utf-8")
        valid = home / "valid.jsonl"  # copied
        stories = "".join(demo_stories(100, seed=1)).split("<|endoftext|>\n")[:-1]
        valid.write_text("".join(json.dumps({"text": story}) + "\n" for story in stories), encoding="utf-8")
        data = {"train": [str(self.source)], "valid": [str(valid)]}
        (home / "config.yaml").write_text(yaml.safe_dump({"data": data, **CONFIG}), encoding="utf-8")
        self._undisturbed("first")  # which compiles, and so tells nothing of how long a stage takes
        self.reference = self._undisturbed("reference")
        record = json.loads((self.reference / "runs" / "latest.json").read_text())
        self.seconds = {stage: about["seconds"] for stage, about in record["stages"].items()}

    def close(self) -> None:
        self._zygote.communicate()
        self.objects.close()
        self.server.close()
        self._own.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()

    def start(self, root: str) -> Process:
        """Run the whole pipeline below ``root``."""
        arguments = ["--config", str(self.home / "config.yaml"), "--root", root]
        return Process(arguments, self._zygote, self.home / f"{time.monotonic_ns()}.fifo")

    def forget(self) -> None:
        """Have Prefect forget the results of tasks."""
        shutil.rmtree(self.home / "prefect" / "storage", ignore_errors=True)

    def _undisturbed(self, name: str) -> Path:
        run = self.start(str(self.home / name))
        run.ends()
        assert run.code == 0, run.said
        return self.home / name

    def bucket(self, name: str) -> str:
        """The URL of a root on the object store."""
        fs = fsspec.filesystem("s3")
        if not fs.exists(BUCKET):
            fs.mkdir(BUCKET)
        return f"s3://{BUCKET}/{name}"
