"""One round: a run that a fault strikes, the fault undone, the run repeated, and all of it judged."""

import json
import random
import shutil
import subprocess
import traceback
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import fsspec

from tests.deployed import STAGES
from tests.faults.bench import Bench, Process, ticks
from tests.faults.faults import FAULTS, Scene, pairs
from tests.faults.judge import attempts, differences, digests, last_words, wrong_in_prefect


@dataclass
class Round:
    """What came of it."""

    number: int
    stage: str
    fault: str
    hit: str = ""
    """The stage that was at work when the fault struck, or whose output it harmed; ``after`` where all was done."""
    wrong: list[str] = field(default_factory=list)
    said: str = ""


def drawn(seed: int, number: int) -> tuple[str, str]:
    """Stage and fault of a round: all of them in one order after another."""
    turn, place = divmod(number, len(pairs()))
    return random.Random(f"{seed} turn {turn}").sample(pairs(), len(pairs()))[place]


@cache
def _expected(reference: Path) -> dict[str, dict[str, str]]:
    return digests(str(reference))


def play(bench: Bench, seed: int, number: int, stage: str, name: str) -> Round:
    """Play a round and judge it."""
    fault, rng, found = FAULTS[name], random.Random(f"{seed} round {number}"), Round(number, stage, name)
    home = bench.home / f"round-{number}"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    bench.forget()
    root = bench.bucket(f"{seed}-{number}") if fault.on_s3 else str(home / "root")
    scene = Scene(bench, rng, stage, root)
    fault.prepare(scene)
    try:
        struck = scene.start()
        _wait_for_moment(scene, fault.harms_output, struck)
        finished = list(struck.done)
        is_in_time = struck.code is None
        fault.inject(scene)
        found.hit = stage if fault.harms_output else _at_work(finished, is_in_time)
        if not struck.ends():
            found.wrong.append("it hung")
        if left := struck.others():
            found.wrong.append(f"it left processes {left}")
        if is_in_time:
            found.wrong += last_words(struck, fault.codes, fault.says)
        fault.undo(scene)
        before = {place: attempt for place, attempt in attempts(root).items() if place not in scene.damaged}
        again = scene.start()
        if not again.ends():
            found.wrong.append("the next run hung")
        elif again.code != 0 or "Traceback" in again.said:
            found.wrong.append(f"the next run ended with code {again.code}")
        else:
            after = attempts(root)
            found.wrong += [f"{place} was made again" for place in before if after.get(place) != before[place]]
            found.wrong += _not_cached(scene, finished)
            found.wrong += differences(_expected(bench.reference), root)
        found.wrong += wrong_in_prefect(bench.server, struck, fault.is_told)
        found.wrong += wrong_in_prefect(bench.server, again, is_told=True)
        found.said = f"{struck.said}\n-- and again:\n{again.said}"
    except Exception:
        found.wrong.append("the suite itself failed")
        found.said = traceback.format_exc()
    finally:
        for run in scene.runs:
            run.kill()
        fault.undo(scene)
        while Path(root).is_mount():
            subprocess.run(["umount", root], check=True)
        shutil.rmtree(home)
    return found


def _wait_for_moment(scene: Scene, is_after: bool, run: Process) -> None:
    """Wait until a stage is at work, and some part of its usual time; for its output, any stage that comes later."""
    later = [*STAGES[STAGES.index(scene.stage) + 1 :], None] if is_after else [scene.stage]
    stage = scene.rng.choice(later)
    # Not in its last part: a run is not always as slow as the one that was measured.
    seconds = 0.6 * scene.rng.random() * (scene.bench.seconds[stage] if stage else 0)
    if stage is None:
        run.reaches(lambda: False)
    elif stage == STAGES[0]:
        run.reaches(lambda: bool(run.name))
    else:
        run.reaches(lambda: STAGES[STAGES.index(stage) - 1] in run.done)
    for _ in ticks(seconds):
        if run.code is not None:
            break


def _at_work(finished: list[str], is_in_time: bool) -> str:
    return next((stage for stage in STAGES if stage not in finished), "after") if is_in_time else "after"


def _not_cached(scene: Scene, finished: list[str]) -> list[str]:
    """Stages that were finished and not harmed, and were not taken from the cache."""
    with fsspec.open(f"{scene.root}/runs/latest.json", "r", encoding="utf-8") as file:
        states = {stage: about["state"] for stage, about in json.load(file)["stages"].items()}
    harmed = {place.partition("/")[0] for place in scene.damaged}
    return [f"{stage} is {states[stage]}" for stage in finished if stage not in harmed and states[stage] != "cached"]
