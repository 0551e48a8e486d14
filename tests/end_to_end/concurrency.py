"""Two runs at once over one root, each in its own process, while ``verify`` and ``gc --delete`` run in a loop. Both
runs must succeed and make the same files as a single run.

``python -m tests.end_to_end.concurrency --rounds 20`` plays the kinds of rounds in turn.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from lm.common.errors import UserError
from tasks.maintenance.gc import delete, find_garbage
from tasks.maintenance.verify import verify
from tasks.runtime.locks import lock_root
from tasks.runtime.output import Ref, read_output
from tasks.runtime.schemas import RunRecord, read_record
from tasks.runtime.store import Store
from tests.helpers.deployed import TEXTMILL, TINY, own_environment
from tests.helpers.processes import PROJECT

CONFIGS: list[dict[str, Any]] = [
    {},
    {"tokenizer": {"vocab_size": 290}, "train": {**TINY["train"], "steps": 12}},
]
VOCAB_SIZES = [300, 290]
KINDS = {  # the configurations of the two runs
    "same": (0, 0),
    "different": (0, 1),
    "same over garbage": (0, 0),  # the root has outputs without a run record: gc may delete them until a run starts
    "different over garbage": (1, 0),
}


class Rounds:
    """A directory with a Prefect database, and the outputs of single runs to compare with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, **own_environment(directory)}
        self.environment.pop("PREFECT_API_URL", None)
        self.config_paths = []
        for number, changes in enumerate(CONFIGS):
            config = TINY | {"execution": {"threads": 2, "compile": False}} | changes
            self.config_paths.append(directory / f"{number}.yaml")
            self.config_paths[-1].write_text(yaml.safe_dump(config))
        self.single_root = directory / "single"
        for number in range(len(CONFIGS)):
            log = directory / f"{number}.log"
            assert self._start(number, self.single_root, log).wait() == 0, log.read_text()
        self.expected = {number: self._outputs(self.single_root, number) for number in range(len(CONFIGS))}

    def _start(self, number: int, root: Path, log_path: Path) -> "subprocess.Popen[bytes]":
        command = [*TEXTMILL, "run", "--config", str(self.config_paths[number]), "--root", str(root)]
        with log_path.open("wb") as log:
            return subprocess.Popen(command, cwd=PROJECT, env=self.environment, stdout=log, stderr=subprocess.STDOUT)

    def play(self, kind: str) -> Counter[str]:
        """Play one round in a new root. Fail if a run's outputs differ from a single run's. Return counts of events."""
        root = Path(tempfile.mkdtemp(dir=self.directory)) / "root"
        if "garbage" in kind:
            shutil.copytree(self.single_root, root)
            shutil.rmtree(root / "runs")
        store, events = Store(str(root)), Counter[str]()
        logs = [root.with_name(f"{number}.log") for number in range(2)]
        processes = [self._start(number, root, log) for number, log in zip(KINDS[kind], logs, strict=True)]
        while any(process.poll() is None for process in processes):
            events += _verify_and_collect_garbage(store) if root.exists() else {}
            time.sleep(1)
        for process, number, log in zip(processes, KINDS[kind], logs, strict=True):
            assert process.returncode == 0, log.read_text()
            assert self._outputs(root, number) == self.expected[number], f"{root} differs from a single run's root"
        assert [finding for finding in verify(store) if finding.kind == "damaged"] == []
        events += _verify_and_collect_garbage(store)
        assert events["refused"] and events["verified"]
        assert {finding.path for finding in verify(store)} == set(), "gc leaves nothing behind"
        for number in KINDS[kind]:
            assert self._outputs(root, number) == self.expected[number]
        shutil.rmtree(root.parent)
        return events

    def _outputs(self, root: Path, number: int) -> dict[str, Any]:
        """Return the content of each stage that the runs of a configuration made."""
        store = Store(str(root))
        outputs: dict[str, Any] = {}
        for name in store.list_names("runs"):
            record = read_record(RunRecord, store, "runs", name) if name.endswith(".json") else None
            if record and record["config"]["tokenizer"]["vocab_size"] == VOCAB_SIZES[number]:
                for stage, entry in record["stages"].items():
                    output = read_output(store, Ref(stage, entry["key"]))
                    assert output.is_intact()
                    content = (entry["key"], output.manifest["files"], output.manifest["ingredients"]["parameters"])
                    assert outputs.setdefault(stage, content) == content, "two runs of one configuration differ"
        assert len(outputs) == 7, f"{root} lacks a run"
        return outputs


def _verify_and_collect_garbage(store: Store) -> "Counter[str]":
    damaged = [finding for finding in verify(store) if finding.kind == "damaged"]
    assert not damaged, damaged
    try:
        with lock_root(store, exclusive=True):
            deleted = [delete(store, finding) for finding in find_garbage(store)]
    except UserError as error:  # gc is refused while a run uses the root
        assert "A run or another gc uses" in str(error), error
        return Counter({"verified": 1, "refused": 1})
    return Counter({"verified": 1, "cleaned": 1, "deleted": len(deleted)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rounds = Rounds(Path(directory))
        for number in range(options.rounds):
            kind = list(KINDS)[number % len(KINDS)]
            started = time.monotonic()
            events = rounds.play(kind)
            print(f"{number + 1:>3}  {kind:<24}{time.monotonic() - started:>6.0f} s  {dict(events)}", flush=True)


if __name__ == "__main__":
    main()
