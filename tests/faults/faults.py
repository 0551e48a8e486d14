"""The faults. Each is injected while a stage runs, and is undone before the run is repeated."""

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import fsspec

from tests.faults.bench import Bench, Process
from tests.faults.checks import read_manifests
from tests.faults.flows import ALL_STAGES, PIPELINE, TestedFlow
from tests.faults.zygote import KERNEL_LINE
from tests.helpers.cluster import kill_group

_MOUNT_COMMAND = ["mount", "-t", "tmpfs", "-o", "size=32m", "tmpfs"]


@dataclass
class Scene:
    """The state of a round that a fault can change."""

    bench: Bench
    rng: random.Random
    stage: str
    root: str
    environment: dict[str, str | None] = field(default_factory=dict)
    """Changes of the environment of the runs."""
    runs: list[Process] = field(default_factory=list)
    damaged: set[str] = field(default_factory=set)
    """``stage/key`` of the outputs that the fault has damaged."""

    def start(self) -> Process:
        """Run the flow. The fault is injected into the first run."""
        self.runs.append(self.bench.start(self.root, self.environment))
        return self.runs[-1]


class Fault:
    """A fault: ``prepare`` runs before the flow, ``inject`` while it runs, ``undo`` after its end."""

    exit_codes: Set[int] = frozenset({2})
    """The exit codes, other than 0, that a run with this fault may have."""
    message = ""
    """A regular expression for the error message."""
    excluded: ClassVar[dict[str, str]] = {}
    """The stages without this fault, with the reason."""
    damages_output = False
    """Whether it damages the output of the stage, so that it must be injected after the stage."""
    reports_state = True
    """Whether the run can report its final state to Prefect."""
    on_s3 = False
    on_dask = True
    """Whether it may hit a run on a Dask cluster, with its root on the object store."""
    on_threads = True

    def prepare(self, scene: Scene) -> None: ...

    def inject(self, scene: Scene) -> None: ...

    def undo(self, scene: Scene) -> None: ...


def command_works(command: list[str], undo: list[str]) -> bool:
    """Return whether this user may run the command on a directory."""
    with tempfile.TemporaryDirectory() as directory:
        works = bool(shutil.which(command[0]))
        works = works and not subprocess.run([*command, directory], capture_output=True).returncode
        if works:
            subprocess.run([*undo, directory], check=True)
    return works


class Signal(Fault):
    message = "stopped"

    def __init__(self, number: signal.Signals, code: int) -> None:
        self.number, self.exit_codes = number, {code}

    def inject(self, scene: Scene) -> None:
        send_signal(scene.runs[0], self.number)


class SignalInKernel(Fault):
    """A signal while the main thread is inside a kernel, where Python calls no signal handler."""

    message = "stopped"
    exit_codes = frozenset({129, 130, 143})

    def inject(self, scene: Scene) -> None:
        run = scene.runs[0]
        os.kill(run.id, signal.SIGUSR1)
        if run.wait_until(lambda: KERNEL_LINE in run.lines) and run.code is None:
            send_signal(run, scene.rng.choice([signal.SIGHUP, signal.SIGINT, signal.SIGTERM]))


def send_signal(run: Process, number: signal.Signals) -> None:
    """Send a signal as a terminal does, to all processes of the run, or as ``kill`` does."""
    if number in (signal.SIGINT, signal.SIGHUP):
        os.killpg(run.id, number)
    else:
        os.kill(run.id, number)


class DiskFull(Fault):
    """The root has its own file system, which is full except for some kilobytes."""

    on_dask = False
    message = "No space left on device"

    def prepare(self, scene: Scene) -> None:
        Path(scene.root).mkdir()
        subprocess.run([*_MOUNT_COMMAND, scene.root], check=True)

    def inject(self, scene: Scene) -> None:
        with Path(scene.root, "ballast").open("wb", buffering=0) as ballast:
            for size in (1 << 20, 1 << 12):
                with suppress(OSError):
                    while ballast.write(bytes(size)):
                        pass
            free_bytes = scene.rng.choice([0, scene.rng.randrange(300_000)])
            ballast.truncate(max(0, ballast.tell() - free_bytes))

    def undo(self, scene: Scene) -> None:
        Path(scene.root, "ballast").unlink(missing_ok=True)


class FileLimit(Fault):
    """A limit on the size of a file. It replaces the full disk if no file system can be mounted."""

    on_dask = False
    message = "File too large"

    def inject(self, scene: Scene) -> None:
        limit = scene.rng.randrange(2000)
        resource.prlimit(scene.runs[0].id, resource.RLIMIT_FSIZE, (limit, limit))


class Unwritable(Fault):
    """The files below the root cannot be written. The superuser ignores file modes, so they become immutable for it."""

    on_dask = False
    message = "Operation not permitted|Permission denied"

    def __init__(self) -> None:
        self.command, self.undo_command = ["chattr", "-f", "+i"], ["chattr", "-f", "-i"]
        if os.geteuid():
            self.command, self.undo_command = ["chmod", "a-w"], ["chmod", "u+w"]
        elif not command_works(self.command, self.undo_command):
            self.excluded = dict.fromkeys(ALL_STAGES, "files cannot be made immutable here")  # type: ignore[misc]

    def inject(self, scene: Scene) -> None:
        subprocess.run([*self.command, "-R", scene.root], check=False)

    def undo(self, scene: Scene) -> None:
        subprocess.run([*self.undo_command, "-R", scene.root], check=False)


class SourceRemoved(Fault):
    message = "(train.txt|dialogs.jsonl) does not exist"
    excluded: ClassVar = dict.fromkeys(
        ("merge", "train", "sample", "sft", "preference", "reinforce", "evaluate"), "it reads no source"
    )

    def inject(self, scene: Scene) -> None:
        scene.bench.source.rename(scene.bench.source.with_suffix(".away"))

    def undo(self, scene: Scene) -> None:
        if (away := scene.bench.source.with_suffix(".away")).exists():
            away.rename(scene.bench.source)


class Damage(Fault):
    """One or two files of the output of a stage are damaged."""

    message = "damaged|no manifest"
    damages_output = True

    def __init__(self, kind: str) -> None:
        self.kind = kind
        one_file = dict.fromkeys(("chunk", "sample", "evaluate"), "it writes only one file")
        self.excluded = one_file if kind == "swap" else {}  # type: ignore[misc]

    def inject(self, scene: Scene) -> None:
        rng = scene.rng
        manifests = {
            output: manifest
            for output, manifest in read_manifests(scene.root).items()
            if output.startswith(scene.stage)
        }
        files = {
            f"{scene.root}/{output}/{manifest['attempt']}/{file['path']}": (output, file["sha256"])
            for output, manifest in manifests.items()
            for file in (*manifest["files"], *manifest["records"])
            if file["bytes"]
        }
        path = rng.choice(sorted(files))
        damaged = [path]
        if self.kind == "manifest":
            manifest_path = f"{scene.root}/{files[path][0]}/manifest.json"
            data = read_file(manifest_path)
            others = [b"", data[: rng.randrange(len(data))], b"[1]", b"{}", b"null"]
            overwrite(manifest_path, rng.choice([flip_bit(data, rng), rng.choice(others)]))
        elif self.kind == "flip":
            overwrite(path, flip_bit(read_file(path), rng))
        elif self.kind == "truncate":
            data = read_file(path)
            overwrite(path, data[: rng.randrange(len(data))])
        elif self.kind == "delete":
            fs, place = fsspec.core.url_to_fs(path)
            fs.rm_file(place)
        elif self.kind == "swap":
            other = rng.choice([other for other in sorted(files) if files[other][1] != files[path][1]])
            first, second = read_file(path), read_file(other)
            overwrite(path, second)
            overwrite(other, first)
            damaged.append(other)
        scene.damaged |= {files[file][0] for file in damaged}


def read_file(path: str) -> bytes:
    """Return the content of a local file or of a URL."""
    fs, place = fsspec.core.url_to_fs(path)
    return bytes(fs.cat_file(place))


def overwrite(path: str, data: bytes) -> None:
    """Overwrite a file: a local one in place, as a failing disk does."""
    if "://" in path:
        fs, place = fsspec.core.url_to_fs(path)
        fs.pipe_file(place, data)
        return
    with Path(path).open("r+b") as file:
        file.write(data)
        file.truncate()


def flip_bit(data: bytes, rng: random.Random) -> bytes:
    i = rng.randrange(len(data))
    return data[:i] + bytes([data[i] ^ 1 << rng.randrange(8)]) + data[i + 1 :]


class ServerKilled(Fault):
    """Prefect's server is down for some seconds, or until the run has ended."""

    message = "Prefect's server at .* cannot be reached"
    reports_state = False

    def inject(self, scene: Scene) -> None:
        scene.bench.server.kill({"server"})
        if scene.rng.random() < 0.5:
            time.sleep(scene.rng.uniform(0, 2))
            scene.bench.server.start_missing("server")

    def undo(self, scene: Scene) -> None:
        scene.bench.server.start_missing("server")


class TemporaryServerKilled(Fault):
    """The runs have no server, and the temporary one that Prefect starts for the first is killed."""

    message = "Prefect's temporary server has ended or does not answer"
    on_dask = False

    def prepare(self, scene: Scene) -> None:
        home = str(scene.bench.home / "temporary")
        scene.environment = {
            "PREFECT_API_URL": None,
            "PREFECT_HOME": home,
            "PREFECT_SERVER_LOGGING_LEVEL": "CRITICAL",  # the default of textmill
        }

    def inject(self, scene: Scene) -> None:
        for process_id in scene.runs[0].temporary_servers():
            os.kill(process_id, signal.SIGKILL)


class StoreFails(Fault):
    """All or some requests to the object store fail, for some seconds or until the run ends."""

    message = "The (root|checkpoints) .* cannot be (reached|used)"
    on_s3 = True

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def inject(self, scene: Scene) -> None:
        rng = scene.rng
        scene.bench.objects.fail(self.kind, rng.choice([0.2, 0.5, 1.0]), rng.randrange(1 << 30))
        if rng.random() < 0.7 or self.kind == "slow":  # a slow store causes no error
            time.sleep(rng.uniform(0.5, 5))
            scene.bench.objects.recover()

    def undo(self, scene: Scene) -> None:
        scene.bench.objects.recover()


class WorkerKilled(Fault):
    """A worker of the cluster is killed. The run goes on."""

    on_threads = False
    exit_codes = frozenset[int]()

    def inject(self, scene: Scene) -> None:
        assert scene.bench.cluster
        kill_group(scene.rng.choice([worker for worker in scene.bench.cluster.workers if worker.poll() is None]))


class SchedulerKilled(Fault):
    """The scheduler of the cluster is killed."""

    on_threads = False
    message = "The Dask scheduler at .* is lost|The cluster at .* does not answer"

    def inject(self, scene: Scene) -> None:
        assert scene.bench.cluster
        kill_group(scene.bench.cluster.scheduler)


FAULTS: dict[str, Fault] = {
    "SIGKILL": Signal(signal.SIGKILL, -9),
    "SIGTERM": Signal(signal.SIGTERM, 143),
    "SIGINT": Signal(signal.SIGINT, 130),
    "SIGHUP": Signal(signal.SIGHUP, 129),
    "signal in kernel": SignalInKernel(),
    "disk full": DiskFull() if command_works(_MOUNT_COMMAND, ["umount"]) else FileLimit(),
    "unwritable": Unwritable(),
    "source removed": SourceRemoved(),
    **{kind: Damage(kind) for kind in ("flip", "truncate", "delete", "swap", "manifest")},
    "server killed": ServerKilled(),
    "temporary server killed": TemporaryServerKilled(),
    "worker killed": WorkerKilled(),
    "scheduler killed": SchedulerKilled(),
    **{f"S3 {kind}": StoreFails(kind) for kind in ("500", "reset", "slow")},
}


def list_cases(flow: TestedFlow = PIPELINE, on_dask: bool = False) -> list[tuple[str, str]]:
    """Return all cases, (stage, fault), of a flow whose runs use threads or a Dask cluster."""
    faults = {name: fault for name, fault in FAULTS.items() if (fault.on_dask if on_dask else fault.on_threads)}
    return [(stage, name) for name, fault in faults.items() for stage in flow.stages if stage not in fault.excluded]
