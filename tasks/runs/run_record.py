"""Records of runs, ``runs/<name>.json``: the configuration, the key of each stage's output, and how the run ended."""

import hashlib
import json
import logging
import re
import shlex
import time
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lm.common.errors import UserError, did_you_mean
from tasks.runs.run_report import report_text
from tasks.runtime.output import Output, Ref, read_output
from tasks.runtime.run_context import RunContext
from tasks.runtime.schemas import RUN_NAME, RunRecord, read_record
from tasks.runtime.store import Store

log = logging.getLogger(__name__)

_START_AND_STAGE = re.compile(r"^\d{8}-\d{6}-[a-z_]+-")


def absolute_root(root: str) -> str:
    """Return an absolute path for a local root, and a URL unchanged. Raises UserError for a path that leads nowhere."""
    if not root:
        raise UserError("--root is empty. It is a directory or a URL; without it, the root is artifacts.")
    if "://" in root:
        return root
    try:
        path = str(Path(root).expanduser().resolve())
        path.encode()  # records name it
        return path
    except (OSError, RuntimeError, UnicodeError) as error:  # a link to itself, or the home of an unknown user
        raise UserError(f"The root {root!r} cannot be used: {str(error).rstrip('.')}.") from None


def make_run(config: Any, root: str, name: str, refresh: tuple[str, ...] = ()) -> RunContext:
    """Return the description of a run that its stages get."""
    place = absolute_root(root)
    lease = name if "://" in place or config.execution.runner != "threads" else ""
    return RunContext(place, name, frozenset(refresh), config.execution, lease=lease)


def run_name(until: str | None, name: str) -> str:
    """Return ``<start time>-<last stage>-<name>``. A name that has this form already is returned unchanged."""
    if RUN_NAME.fullmatch(name):
        return name
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{until or 'full'}-{file_name(name)}"


def file_name(name: str) -> str:
    """Return a name of a run as a part of file names."""
    return re.sub(r"[^\w.-]+", "-", name, flags=re.ASCII)[:180]


def list_runs(store: Store) -> list[str]:
    """Return the names of all runs, the latest last."""
    files = [Path(file) for file in store.list_names("runs")]
    return [file.stem for file in files if file.suffix == ".json" and file.stem != "latest"]


def given_name(name: str, record: dict[str, Any] | None) -> str:
    """Return what ``textmill runs rename`` called the run ``name``; otherwise the words at the end of its name, which
    are those of ``--name``, or two that Prefect chose."""
    return (record or {}).get("title") or _START_AND_STAGE.sub("", name)


def find_run(store: Store, reference: str) -> str | None:
    """Return the name of a run. ``reference`` is this name, or the run's given name. Of several runs with one given
    name, it is the latest. Return None if there is no such run."""
    names = list_runs(store)[::-1]
    if reference in names:
        return reference
    given = file_name(reference)
    return next((name for name in names if given_name(name, read_run(store, name)) == given), None)


def require_run(store: Store, reference: str) -> str:
    """Return the name of a run, see :func:`find_run`. Raise UserError if there is no such run."""
    if run := find_run(store, reference):
        return run
    names = [given_name(name, read_run(store, name)) for name in list_runs(store)]
    raise UserError(
        f"There is no run {reference!r}{did_you_mean(reference, names)} below {store.base}. textmill runs --root "
        f"{shlex.quote(store.base)} lists the runs."
    )


def read_run(store: Store, name: str) -> dict[str, Any] | None:
    """Return the record of a run; None if it is damaged or missing."""
    return read_record(RunRecord, store, "runs", f"{name}.json")


def outputs_of(run: RunContext, record: dict[str, Any]) -> dict[str, Output]:
    """Return the outputs of a run by the name of their stage. ``record`` is the content of ``runs/NAME.json``."""
    return {name: read_output(run.store, Ref(name, stage["key"])) for name, stage in record["stages"].items()}


class Recorder:
    """Writes the record of a run after each stage, and the report at its end.

    A run that finds all outputs cached, and whose configuration and outputs are those of the last record, leaves
    nothing: its record would say the same again.
    """

    def __init__(self, run: RunContext, config: Any, until: str | None, refresh: tuple[str, ...] = ()) -> None:
        self.run = run
        self.content: dict[str, Any] = {
            "name": run.name,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "root": run.root,
            "config": asdict(config),
            "until": until,
            "refresh": list(refresh),
            "state": "running",  # that of a killed run stays
            "stages": {},
        }
        self._is_named = bool(config.chosen_name)
        self._outputs: dict[str, Output] = {}
        self._seconds: dict[Ref, float] = {}
        self._last_stage_end = time.perf_counter()

    def add(self, stage: str, ref: Ref) -> tuple[Output, bool]:
        """Record a finished stage. Return its output, and whether this run made it."""
        output = self._outputs[stage] = read_output(self.run.store, ref)
        made = output.manifest["made"]
        is_made = made["run"] == self.run.name or ref in self.run.made  # in a run of another deployment
        now = time.perf_counter()
        elapsed, self._last_stage_end = now - self._last_stage_end, now
        is_new = ref not in self._seconds  # a sweep ends with the stages of its best point again
        # A trial trains its model before the stage train is added.
        seconds = self._seconds.setdefault(ref, round(max(elapsed, made["seconds"]) if is_made else elapsed, 3))
        self.content["stages"][stage] = {"key": ref.key, "state": "made" if is_made else "cached", "seconds": seconds}
        if is_made and is_new:
            log.info("%s finished in %.1f s.", stage, seconds)
        return output, is_made

    def save(self, name: str = "") -> None:
        """Write the record, by default under the name of the run. Of one that is not finished, gc keeps the outputs."""
        self.run.store.write_json(self.content, "runs", f"{name or self.run.name}.json")

    def finish(self) -> dict[str, Any]:
        """Write the report, mark the run as the latest, and return the record.

        If the last record says the same, write nothing, and return this record with the name and the report of that.
        """
        self.content["state"] = "finished"
        if last := self._find_equal_record():
            self.run.store.delete_file("runs", f"{self.run.name}.json")
            return {**self.content, "name": last["name"], "report": last["report"]}
        self._write_report()
        self.save("latest")
        return self.content

    def stop(self) -> None:
        """Record that the run was stopped, if the root is writable."""
        self.content["state"] = "stopped"
        with suppress(UserError):
            self.save()

    def fail(self, error: BaseException) -> None:
        """Record that the run failed, with a report, if the root is writable."""
        self.content |= {"state": "failed", "error": str(error) or type(error).__name__}
        with suppress(UserError):
            self._write_report(self.content["error"])

    def table(self, failure: str = "") -> str:
        """Return the report without the pages of the stages."""
        return report_text(self.content, self._outputs, failure, has_pages=False)

    def _find_equal_record(self) -> dict[str, Any] | None:
        """Return the last record if this run made nothing, and its record would differ only in names and times."""

        def essence(record: dict[str, Any]) -> dict[str, Any]:
            keys = {name: stage["key"] for name, stage in record["stages"].items()}
            config = record["config"] if self._is_named else record["config"] | {"name": ""}
            return {name: record.get(name) for name in ("root", "until", "state")} | {"keys": keys, "config": config}

        if self.run.made or any(stage["state"] == "made" for stage in self.content["stages"].values()):
            return None
        names = [name for name in list_runs(self.run.store) if name != self.run.name]
        last = read_run(self.run.store, names[-1]) if names else None
        own = json.loads(json.dumps(self.content))  # tuples become lists
        return last if last and last.get("report") and essence(last) == essence(own) else None

    def _write_report(self, failure: str = "") -> None:
        report, name = report_text(self.content, self._outputs, failure), f"{self.run.name}.md"
        data = report.encode()
        self.run.store.write_text(report, "runs", name)
        self.content["report"] = {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        self.save()
