"""Two runs at once over one root, each a process with its own Prefect server, while ``verify`` and ``gc --delete`` go
round and round: both succeed, with the files that a single run makes.

``python -m tests.concurrency --rounds 20`` takes the kinds of rounds in turn and says what each came to.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from lm.errors import UserError
from tasks.audit import delete, garbage, verify
from tasks.lock import in_use
from tasks.output import Ref, read_output
from tasks.records import RunRecord, read
from tasks.store import Store
from tests.deployed import PROJECT, TINY, own_environment

VARIANTS: list[dict[str, Any]] = [
    {},
    {"tokenizer": {"vocab_size": 290}, "train": {**TINY["train"], "steps": 12}},
]
KINDS = {
    "same": (0, 0),
    "different": (0, 1),
    "same over what nobody needs": (0, 0),  # outputs without a record: gc may take them away until a run begins
    "different over what nobody needs": (1, 0),
}
RUN = [sys.executable, "-c", "import sys; from flows.cli import main; sys.exit(main())", "run"]


class Rounds:
    """What all rounds share: a directory with a Prefect database, and the files that single runs make."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {**os.environ, **own_environment(directory)}
        self.environment.pop("PREFECT_API_URL", None)
        self.configs = []
        for number, changes in enumerate(VARIANTS):
            config = TINY | {"execution": {"threads": 2, "compile": False}} | changes
            self.configs.append(directory / f"{number}.yaml")
            self.configs[-1].write_text(yaml.safe_dump(config))
        self.single = directory / "single"
        for number in range(len(VARIANTS)):
            log = directory / f"{number}.log"
            assert self._start(number, self.single, log).wait() == 0, log.read_text()
        self.expected = {number: self._files(self.single, number) for number in range(len(VARIANTS))}

    def _start(self, variant: int, root: Path, log: Path) -> "subprocess.Popen[bytes]":
        command = [*RUN, "--config", str(self.configs[variant]), "--root", str(root)]
        with log.open("wb") as said:
            return subprocess.Popen(command, cwd=PROJECT, env=self.environment, stdout=said, stderr=subprocess.STDOUT)

    def play(self, kind: str) -> Counter[str]:
        """One round, in a root of its own; fails where anything differs from single runs. Returns what happened."""
        root = Path(tempfile.mkdtemp(dir=self.directory)) / "root"
        if "nobody needs" in kind:
            shutil.copytree(self.single, root)
            shutil.rmtree(root / "runs")
        store, did = Store(str(root)), Counter[str]()
        logs = [root.with_name(f"{number}.log") for number in range(2)]
        processes = [self._start(variant, root, log) for variant, log in zip(KINDS[kind], logs, strict=True)]
        while any(process.poll() is None for process in processes):
            did += _disturb(store) if root.exists() else {}
            time.sleep(1)
        for process, variant, log in zip(processes, KINDS[kind], logs, strict=True):
            assert process.returncode == 0, log.read_text()
            assert self._files(root, variant) == self.expected[variant], f"{root} has other files than a single run's"
        assert [finding for finding in verify(store) if finding.kind == "damaged"] == []
        did += _disturb(store)
        assert did["refused"] and did["verified"]
        assert {finding.place for finding in verify(store)} == set(), "after the runs and gc, nothing is left over"
        for variant in KINDS[kind]:
            assert self._files(root, variant) == self.expected[variant]
        shutil.rmtree(root.parent)
        return did

    def _files(self, root: Path, variant: int) -> dict[str, Any]:
        """What the runs of a variant made: the content of each stage, with the parts it was joined from."""
        store, found = Store(str(root)), {}
        for name in store.names("runs"):
            record = read(RunRecord, store, "runs", name) if name.endswith(".json") else None
            if record and record["config"]["tokenizer"]["vocab_size"] == (290 if variant else 300):
                for stage, use in record["stages"].items():
                    output = read_output(store, Ref(stage, use["key"]))
                    assert output.is_intact()
                    content = (use["key"], output.manifest["files"], output.manifest["ingredients"]["parameters"])
                    assert found.setdefault(stage, content) == content, "the runs of one variant differ"
        assert len(found) == 7, f"{root} lacks a run"
        return found


def _disturb(store: Store) -> "Counter[str]":
    """``verify`` and ``gc --delete`` once; the latter is refused while a run is at work."""
    damaged = [finding for finding in verify(store) if finding.kind == "damaged"]
    assert not damaged, damaged
    try:
        with in_use(store, alone=True):
            deleted = [delete(store, finding) for finding in garbage(store)]
    except UserError as error:
        assert "A run or another gc uses" in str(error), error
        return Counter({"verified": 1, "refused": 1})
    return Counter({"verified": 1, "cleaned": 1, "deleted": len(deleted)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="rounds to play")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        rounds = Rounds(Path(directory))
        for number in range(options.rounds):
            kind = list(KINDS)[number % len(KINDS)]
            started = time.monotonic()
            did = rounds.play(kind)
            print(f"{number + 1:>3}  {kind:<34}{time.monotonic() - started:>6.0f} s  {dict(did)}", flush=True)


if __name__ == "__main__":
    main()
