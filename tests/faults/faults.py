"""The faults: each strikes a run at a moment of a stage, and is undone before the run is repeated."""

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from tests.deployed import STAGES
from tests.faults.bench import Bench, Process
from tests.faults.judge import manifests

_MOUNT = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs"]


@dataclass
class Scene:
    """A round as a fault finds it."""

    bench: Bench
    rng: random.Random
    stage: str
    root: str
    runs: list[Process] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    """``stage/key`` of the outputs that the fault has harmed."""

    def start(self) -> Process:
        """Run the pipeline; the first such run is the one to strike."""
        self.runs.append(self.bench.start(self.root))
        return self.runs[-1]


class Fault:
    """``prepare`` before the run, ``inject`` at the moment, ``undo`` when the run has ended."""

    codes: ClassVar[set[int]] = {2}
    """How a run may end for it, but for well."""
    says = ""
    """What its message then matches."""
    not_in: ClassVar[dict[str, str]] = {}
    """Stages in which it makes no sense, and why."""
    harms_output = False
    """Whether it strikes what the stage has made, and so after the stage."""
    is_told = True
    """Whether Prefect can be told how the run ends."""
    on_s3 = False

    def prepare(self, scene: Scene) -> None: ...

    def inject(self, scene: Scene) -> None: ...

    def undo(self, scene: Scene) -> None: ...


def works(do: list[str], undo: list[str]) -> bool:
    """Whether we may do this to a directory here."""
    with tempfile.TemporaryDirectory() as place:
        done = bool(shutil.which(do[0])) and not subprocess.run([*do, place], capture_output=True).returncode
        if done:
            subprocess.run([*undo, place], check=True)
    return done


class Signal(Fault):
    says = "stopped"

    def __init__(self, number: signal.Signals, code: int) -> None:
        self.number, self.codes = number, {code}

    def inject(self, scene: Scene) -> None:
        os.kill(scene.runs[0].id, self.number)


class DiskFull(Fault):
    """The root's own disk, filled but for some kilobytes."""

    says = "No space left on device"

    def prepare(self, scene: Scene) -> None:
        Path(scene.root).mkdir()
        subprocess.run([*_MOUNT, scene.root], check=True)

    def inject(self, scene: Scene) -> None:
        with Path(scene.root, "ballast").open("wb", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while ballast.write(bytes(size)):
                        pass
            left = scene.rng.choice([0, scene.rng.randrange(300_000)])
            ballast.truncate(max(0, ballast.tell() - left))

    def undo(self, scene: Scene) -> None:
        Path(scene.root, "ballast").unlink(missing_ok=True)


class FileLimit(Fault):
    """No file may grow past some bytes: the full disk of a machine on which none can be mounted."""

    says = "File too large"

    def inject(self, scene: Scene) -> None:
        limit = scene.rng.randrange(2000)
        resource.prlimit(scene.runs[0].id, resource.RLIMIT_FSIZE, (limit, limit))


class Unwritable(Fault):
    """All of the root made immutable, as root ignores the modes of files; for another user, their modes."""

    says = "Operation not permitted|Permission denied"

    def __init__(self) -> None:
        self.on, self.off = ["chattr", "-f", "+i"], ["chattr", "-f", "-i"]
        if os.geteuid():
            self.on, self.off = ["chmod", "a-w"], ["chmod", "u+w"]
        elif not works(self.on, self.off):
            self.not_in = dict.fromkeys(STAGES, "files cannot be made immutable here")  # type: ignore[misc]

    def inject(self, scene: Scene) -> None:
        subprocess.run([*self.on, "-R", scene.root], check=False)

    def undo(self, scene: Scene) -> None:
        subprocess.run([*self.off, "-R", scene.root], check=False)


class SourceRemoved(Fault):
    says = "train.txt does not exist"
    not_in: ClassVar = dict.fromkeys(("merge", "train", "sample"), "it reads no text")

    def inject(self, scene: Scene) -> None:
        scene.bench.source.rename(scene.bench.source.with_suffix(".away"))

    def undo(self, scene: Scene) -> None:
        if (away := scene.bench.source.with_suffix(".away")).exists():
            away.rename(scene.bench.source)


class Damage(Fault):
    """What a stage has made is harmed, in one of its files or two."""

    says = "damaged|no manifest"
    harms_output = True

    def __init__(self, how: str) -> None:
        self.how = how
        one_file = dict.fromkeys(("chunk", "sample"), "it makes a single file")
        self.not_in = one_file if how == "swap" else {}  # type: ignore[misc]

    def inject(self, scene: Scene) -> None:
        rng = scene.rng
        found = {place: about for place, about in manifests(scene.root).items() if place.startswith(scene.stage)}
        files = {
            Path(scene.root, place, manifest["attempt"], file["path"]): (place, file["sha256"])
            for place, manifest in found.items()
            for file in (*manifest["files"], *manifest["records"])
            if file["bytes"]
        }
        path = rng.choice(sorted(files))
        harmed = [path]
        if self.how == "manifest":
            manifest_path = Path(scene.root, files[path][0], "manifest.json")
            data = manifest_path.read_bytes()
            others = [b"", data[: rng.randrange(len(data))], b"[1]", b"{}", b"null"]
            replaced(manifest_path, rng.choice([flipped(data, rng), rng.choice(others)]))
        elif self.how == "flip":
            replaced(path, flipped(path.read_bytes(), rng))
        elif self.how == "truncate":
            os.truncate(path, rng.randrange(path.stat().st_size))
        elif self.how == "delete":
            path.unlink()
        elif self.how == "swap":
            other = rng.choice([other for other in sorted(files) if files[other][1] != files[path][1]])
            first, second = path.read_bytes(), other.read_bytes()
            replaced(path, second)
            replaced(other, first)
            harmed.append(other)
        scene.damaged |= {files[file][0] for file in harmed}


def replaced(path: Path, data: bytes) -> None:
    """Write over a file in place, as a disk that fails does."""
    with path.open("r+b") as file:
        file.write(data)
        file.truncate()


def flipped(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


class ServerKilled(Fault):
    """Prefect's server is gone, for some seconds or until the run has ended."""

    says = "Prefect's server at .* cannot be reached"
    is_told = False

    def inject(self, scene: Scene) -> None:
        scene.bench.server.kill({"server"})
        if scene.rng.random() < 0.5:
            time.sleep(scene.rng.uniform(0, 2))
            scene.bench.server.start_missing("server")

    def undo(self, scene: Scene) -> None:
        scene.bench.server.start_missing("server")


class StoreFails(Fault):
    """The object store that holds the root fails: each time, or sometimes; for some seconds, or until the run ends."""

    says = "The root .* cannot be (reached|used)"
    on_s3 = True

    def __init__(self, how: str) -> None:
        self.how = how

    def inject(self, scene: Scene) -> None:
        rng = scene.rng
        scene.bench.objects.fail(self.how, rng.choice([0.2, 0.5, 1.0]), rng.randrange(1 << 30))
        if rng.random() < 0.7 or self.how == "slow":  # slow for ever is only slow
            time.sleep(rng.uniform(0.5, 5))
            scene.bench.objects.mend()

    def undo(self, scene: Scene) -> None:
        scene.bench.objects.mend()


FAULTS: dict[str, Fault] = {
    "SIGKILL": Signal(signal.SIGKILL, -9),
    "SIGTERM": Signal(signal.SIGTERM, 143),
    "SIGINT": Signal(signal.SIGINT, 130),
    "disk full": DiskFull() if works(_MOUNT, ["umount"]) else FileLimit(),
    "unwritable": Unwritable(),
    "source removed": SourceRemoved(),
    **{how: Damage(how) for how in ("flip", "truncate", "delete", "swap", "manifest")},
    "server killed": ServerKilled(),
    **{f"S3 {how}": StoreFails(how) for how in ("500", "reset", "slow")},
}


def pairs() -> list[tuple[str, str]]:
    """Every stage and fault that make sense together."""
    return [(stage, name) for name, fault in FAULTS.items() for stage in STAGES if stage not in fault.not_in]
