"""Whether a round went well: what the runs left on the root, what they said, and what Prefect says of them."""

import hashlib
import json
import re
from typing import Any

import fsspec
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.objects import StateType

from tests.deployed import STAGES, Server
from tests.faults.bench import Process, ticks

_TRACEBACK = "Traceback (most recent call last)"
_ENDS = {StateType.COMPLETED, StateType.FAILED, StateType.CANCELLED, StateType.CRASHED}
_OF_CODE = {0: {StateType.COMPLETED}, 2: {StateType.FAILED}}  # any other code: stopped or dead


def manifests(root: str) -> dict[str, dict[str, Any]]:
    """The manifests below a root by ``stage/key``, the malformed ones left out."""
    fs, base = fsspec.core.url_to_fs(root, use_listings_cache=False)
    found = {}
    for path in fs.glob(f"{base}/*/*/manifest.json"):
        try:
            manifest = json.loads(fs.cat_file(path))
            found["/".join(path.split("/")[-3:-1])] = {**manifest, "files": manifest["files"]}
        except (ValueError, TypeError, KeyError):
            continue
    return found


def attempts(root: str) -> dict[str, str]:
    """The attempt that made each finished output."""
    return {place: str(manifest.get("attempt")) for place, manifest in manifests(root).items()}


def digests(root: str) -> dict[str, dict[str, str]]:
    """sha256, as they are now, of all files that are the content of outputs, by ``stage/key``."""
    fs, base = fsspec.core.url_to_fs(root, use_listings_cache=False)
    found: dict[str, dict[str, str]] = {}
    for place, manifest in manifests(root).items():
        attempt = f"{base}/{place}/{manifest['attempt']}"
        here = {path.removeprefix(f"{attempt}/"): path for path in fs.find(attempt)}
        files = {file["path"] for file in manifest["files"]}
        found[place] = {
            name: hashlib.sha256(fs.cat_file(here[name])).hexdigest() if name in here else "missing" for name in files
        }
    return found


def differences(expected: dict[str, dict[str, str]], root: str) -> list[str]:
    """In what the outputs below a root differ from those of an undisturbed run."""
    found = digests(root)
    wrong = [f"no output {place}" for place in expected.keys() - found.keys()]
    wrong += [f"an output of another key: {place}" for place in found.keys() - expected.keys()]
    for place in expected.keys() & found.keys():
        for name in sorted(expected[place].keys() | found[place].keys()):
            if expected[place].get(name) != found[place].get(name):
                wrong.append(f"{place}: {name} differs")
    return sorted(wrong)


def last_words(run: Process, codes: set[int], says: str) -> list[str]:
    """What is wrong with how a run ended that a fault has hit: it succeeds, or with one of ``codes`` and for 2, a
    user's mistake, one message of ``textmill:`` that matches ``says``; and never with a traceback."""
    wrong = []
    if run.code not in codes | {0}:
        wrong.append(f"it ended with code {run.code}")
    if _TRACEBACK in run.said:
        wrong.append("it left a traceback")
    if run.code not in (0, -9):
        message = run.said.rpartition("textmill: ")[2] if "textmill: " in run.said else ""
        if not re.search(says, message, re.IGNORECASE):
            wrong.append(f"its message names no cause: {message!r}")
    return wrong


def wrong_in_prefect(server: Server, run: Process, is_told: bool) -> list[str]:
    """What Prefect says of a run that is not so, once a later one has settled it; where the run could not tell how it
    ended, only that it has."""
    client, wrong = server.client, ["Prefect was not asked"]
    for _ in ticks(10):  # the states of tasks are sent as events
        wrong = []
        for flow_run in client.read_flow_runs(flow_run_filter=FlowRunFilter(name=FlowRunFilterName(any_=[run.name]))):
            state = flow_run.state_type
            fits = _OF_CODE.get(run.code or 0, {StateType.CRASHED, StateType.CANCELLED}) if is_told else _ENDS
            if set(STAGES) <= set(run.done):  # it was struck when all was done, and Prefect may know that
                fits = fits | {StateType.COMPLETED}
            if state not in fits:
                wrong.append(f"Prefect says {flow_run.state_name} of a run that ended with code {run.code}")
            tasks = client.read_task_runs(flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=[flow_run.id])))
            wrong += [
                f"Prefect says {task.state_name} of {task.name}" for task in tasks if task.state_type not in _ENDS
            ]
        if not wrong:
            break
    return wrong
