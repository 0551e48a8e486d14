"""Checks of a round: the outputs on the root, the end of the runs, and their states in Prefect."""

import hashlib
import json
import re
import signal
from collections.abc import Sequence, Set
from typing import Any
from unittest.mock import patch

import fsspec
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import StateType

from tasks.maintenance.gc import delete, find_garbage
from tasks.maintenance.verify import verify
from tasks.runtime import locks
from tasks.runtime.locks import own_root
from tasks.runtime.store import Store
from tests.faults.bench import Process, poll
from tests.helpers.deployed import Server

_TRACEBACK = "Traceback (most recent call last)"
_FINAL_STATES = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}
_STATES_BY_EXIT_CODE = {0: {StateType.COMPLETED}, 2: {StateType.FAILED}}  # other codes: cancelled or crashed


def read_manifests(root: str) -> dict[str, dict[str, Any]]:
    """Return the valid manifests below a root by ``stage/key``."""
    fs, base = fsspec.core.url_to_fs(root, use_listings_cache=False)
    manifests = {}
    for path in fs.glob(f"{base}/*/*/manifest.json"):
        try:
            manifest = json.loads(fs.cat_file(path))
            manifests["/".join(path.split("/")[-3:-1])] = {**manifest, "files": manifest["files"]}
        except (ValueError, TypeError, KeyError):
            continue
    return manifests


def read_attempts(root: str) -> dict[str, str]:
    """Return the attempt of each finished output by ``stage/key``."""
    return {output: str(manifest.get("attempt")) for output, manifest in read_manifests(root).items()}


def compute_digests(root: str) -> dict[str, dict[str, str]]:
    """Return the sha256 of the content files of all outputs, by ``stage/key`` and path."""
    fs, base = fsspec.core.url_to_fs(root, use_listings_cache=False)
    digests: dict[str, dict[str, str]] = {}
    for output, manifest in read_manifests(root).items():
        attempt = f"{base}/{output}/{manifest['attempt']}"
        paths = {path.removeprefix(f"{attempt}/"): path for path in fs.find(attempt)}
        files = {file["path"] for file in manifest["files"]}
        digests[output] = {
            name: hashlib.sha256(fs.cat_file(paths[name])).hexdigest() if name in paths else "missing" for name in files
        }
    return digests


def check_outputs(expected: dict[str, dict[str, str]], root: str) -> list[str]:
    """Return the differences between the outputs below a root and those of a reference run."""
    digests = compute_digests(root)
    problems = [f"output {output} is missing" for output in expected.keys() - digests.keys()]
    problems += [f"output {output} is unexpected" for output in digests.keys() - expected.keys()]
    for output in expected.keys() & digests.keys():
        for name in sorted(expected[output].keys() | digests[output].keys()):
            if expected[output].get(name) != digests[output].get(name):
                problems.append(f"{output}: {name} differs")
    return sorted(problems)


def check_exit(run: Process, exit_codes: Set[int], pattern: str) -> list[str]:
    """Return the problems with the end of a run after a fault.

    The run must succeed, or exit with one of ``exit_codes`` and a message of ``textmill:`` that matches ``pattern``. A
    traceback is always a problem.
    """
    problems = []
    if run.code not in exit_codes | {0}:
        problems.append(f"the run ended with exit code {run.code}")
    if _TRACEBACK in run.output:
        problems.append("the run printed a traceback")
    if run.code not in (0, -9):
        message = run.output.rpartition("textmill: ")[2] if "textmill: " in run.output else ""
        if not re.search(pattern, message, re.IGNORECASE):
            problems.append(f"the message does not name the cause: {message!r}")
    return problems


def check_maintenance(root: str) -> list[str]:
    """Run ``verify``, delete the garbage, and run ``verify`` again. Return what is damaged, or left after that."""
    store = Store(root)
    problems = [f"verify: {finding}" for finding in verify(store) if finding.kind == "damaged"]
    with patch.object(locks, "LEASE_SECONDS", 0.5), own_root(store) as check:  # no run is at work
        for finding in find_garbage(store):
            check()
            delete(store, finding)
    # The records of killed runs stay.
    left = [finding for finding in verify(store) if (finding.kind, finding.path[:5]) != ("unfinished", "runs/")]
    return problems + [f"after gc: {finding}" for finding in left]


def check_prefect(server: Server, run: Process, stages: Sequence[str], reports_state: bool) -> list[str]:
    """Return the wrong states of a run and of its tasks in Prefect.

    If the run could not report its state, any final state is right. A run that was killed may still have the state
    Running: an automation changes it after ten minutes without a heartbeat.
    """
    client, problems = server.client, ["Prefect was not queried"]
    of_killed = {StateType.RUNNING, StateType.PENDING} if run.code == -signal.SIGKILL else set()
    for _ in poll(10):  # the states of tasks arrive later, as events
        problems = []
        for flow_run in client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run.name]))):
            state = flow_run.state_type
            allowed = _FINAL_STATES
            if reports_state:
                allowed = _STATES_BY_EXIT_CODE.get(run.code or 0, {StateType.CRASHED, StateType.CANCELLED})
            if set(stages) <= set(run.finished):  # the fault came after all stages, so the run may be completed
                allowed = allowed | {StateType.COMPLETED}
            if state not in allowed | of_killed:
                problems.append(f"Prefect has the state {flow_run.state_name} for a run with exit code {run.code}")
            tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])))
            problems += [
                f"Prefect has the state {task.state_name} for the task {task.name}"
                for task in tasks
                if task.state_type not in _FINAL_STATES | of_killed
            ]
        if not problems:
            break
    return problems
