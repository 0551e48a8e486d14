"""One round: inject a fault into a run, undo the fault, repeat the run, and check both."""

import json
import random
import shutil
import subprocess
import traceback
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import fsspec

from tests.faults.bench import Bench, Process, poll
from tests.faults.checks import (
    check_exit,
    check_maintenance,
    check_outputs,
    check_prefect,
    compute_digests,
    read_attempts,
)
from tests.faults.faults import FAULTS, Scene, list_cases
from tests.faults.flows import TestedFlow

_CHILDREN_SECONDS = 10.0  # until the process of the rewards notices that a killed run is gone


@dataclass
class Round:
    """The result of a round."""

    number: int
    stage: str
    fault: str
    hit: str = ""
    """The stage that ran when the fault was injected, or whose output it damaged; ``after`` if all had finished."""
    problems: list[str] = field(default_factory=list)
    output: str = ""


def choose_case(flow: TestedFlow, seed: int, number: int, on_dask: bool = False) -> tuple[str, str]:
    """Return the stage and the fault of a round. The cases come in a new random order after each pass."""
    cases = list_cases(flow, on_dask)
    shuffle, i = divmod(number, len(cases))
    return random.Random(f"{seed} turn {shuffle}").sample(cases, len(cases))[i]


@cache
def _expected_digests(reference: Path) -> dict[str, dict[str, str]]:
    return compute_digests(str(reference))


def run_round(bench: Bench, seed: int, number: int, stage: str, name: str) -> Round:
    """Run a round and check it."""
    fault, rng, result = FAULTS[name], random.Random(f"{seed} round {number}"), Round(number, stage, name)
    home = bench.home / f"round-{number}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    root = bench.bucket(f"{seed}-{number}") if fault.on_s3 or bench.cluster else str(home / "root")
    scene = Scene(bench, rng, stage, root)
    fault.prepare(scene)
    try:
        first = scene.start()
        _wait_for_injection(scene, fault.damages_output, first)
        finished = list(first.finished)
        is_running = first.code is None
        fault.inject(scene)
        result.hit = stage if fault.damages_output else _running_stage(bench.flow, finished, is_running)
        if not first.wait():
            result.problems.append("the run hung")
        if not any(not first.children() for _ in poll(_CHILDREN_SECONDS)):
            result.problems.append(f"the run left the processes {first.children()}")
        if is_running:
            result.problems += check_exit(first, fault.exit_codes, fault.message)
        fault.undo(scene)
        bench.repair_cluster()
        before = {output: attempt for output, attempt in read_attempts(root).items() if output not in scene.damaged}
        second = scene.start()
        if not second.wait():
            result.problems.append("the second run hung")
        elif second.code != 0 or "Traceback" in second.output:
            result.problems.append(f"the second run ended with exit code {second.code}")
        else:
            after = read_attempts(root)
            result.problems += [f"{output} was made again" for output in before if after.get(output) != before[output]]
            result.problems += _check_cached(scene, finished, first.name)
            result.problems += check_outputs(_expected_digests(bench.reference), root)
            if bench.cluster:
                result.problems += check_maintenance(root)
                result.problems += check_outputs(_expected_digests(bench.reference), root)
        result.problems += check_prefect(bench.server, first, bench.flow.stages, fault.reports_state)
        result.problems += check_prefect(bench.server, second, bench.flow.stages, reports_state=True)
        result.output = f"{first.output}\n-- second run:\n{second.output}"
    except Exception:
        result.problems.append("the test suite failed")
        result.output = traceback.format_exc()
    finally:
        for run in scene.runs:
            run.kill()
        fault.undo(scene)
        bench.repair_cluster()
        while Path(root).is_mount():
            subprocess.run(["umount", root], check=True)
        shutil.rmtree(home)
    return result


def _wait_for_injection(scene: Scene, is_after: bool, run: Process) -> None:
    """Wait until a stage runs, and for a random share of its usual time.

    If ``is_after``, wait for a random later stage or the end of the run.
    """
    stages = scene.bench.flow.stages
    later = [*stages[stages.index(scene.stage) + 1 :], None] if is_after else [scene.stage]
    stage = scene.rng.choice(later)
    # At most 60 % of the measured time, as this run may be faster than the reference run.
    seconds = 0.6 * scene.rng.random() * (scene.bench.seconds[stage] if stage else 0)
    if stage is None:
        run.wait_until(lambda: False)
    elif stage == stages[0]:
        run.wait_until(lambda: bool(run.name))
    else:
        run.wait_until(lambda: stages[stages.index(stage) - 1] in run.finished)
    for _ in poll(seconds):
        if run.code is not None:
            break


def _running_stage(flow: TestedFlow, finished: list[str], is_running: bool) -> str:
    return next((stage for stage in flow.stages if stage not in finished), "after") if is_running else "after"


def _check_cached(scene: Scene, finished: list[str], first_name: str) -> list[str]:
    """Return the stages whose output was finished and intact, but was not taken from the cache."""
    with fsspec.open(f"{scene.root}/runs/latest.json", "r", encoding="utf-8") as file:
        record = json.load(file)
    if record["name"] == first_name:  # the second run found all outputs cached, so it left no record
        return []
    states = {stage: summary["state"] for stage, summary in record["stages"].items()}
    damaged = {output.partition("/")[0] for output in scene.damaged}
    return [f"{stage} is {states[stage]}" for stage in finished if stage not in damaged and states[stage] != "cached"]
