"""Cancelled runs stop soon and leave no process, and the next run continues their work. A killed run starts again."""

import json
import os
import signal
from pathlib import Path
from uuid import UUID

import pytest
from prefect.states import Cancelling

from tests.helpers.deployed import STAGES, TINY, Deployed, slow_to_encode
from tests.helpers.limits import wait_for

# Every run with this configuration is cancelled, so it may have any number of steps.
ENDLESS = TINY | {"train": TINY["train"] | {"steps": 100_000, "eval_interval": 100_000, "checkpoint_interval": 20}}


def cancel(deployed: Deployed, run_id: UUID) -> None:
    """Cancel a run as the command of Prefect does. Its processes must end within 25 s."""
    assert deployed.processes(run_id)
    deployed.client.set_flow_run_state(run_id, Cancelling())
    wait_for(lambda: not deployed.processes(run_id), 25, "end of the cancelled run's processes")
    wait_for(lambda: deployed.flow_run(run_id).state_name == "Cancelled", 120, "state Cancelled")


@pytest.mark.long
def test_a_run_cancelled_in_encode(prefect_deployed: Deployed, tmp_path: Path) -> None:
    # In each of 3 threads, a chunk of 16 MB takes 30 s: longer than the limit in cancel().
    config = slow_to_encode(tmp_path / "slow.txt", chunks=3, chunk_bytes=16 << 20, threads=3)
    root = str(tmp_path / "root")
    done = {"encode-train 1/1": "Completed"}
    for _ in range(2):
        run = prefect_deployed.start("full", root=root, config=config, until="encode")

        def is_encoding(run: UUID = run) -> bool:
            return prefect_deployed.states(run).get("encode-valid 3/3") == "Running"

        wait_for(is_encoding, 180, "encode task")
        cancel(prefect_deployed, run)
        states = prefect_deployed.states(run)
        assert "Running" not in states.values()
        assert {name: states[name] for name in states if name.startswith("encode-train ")} == done
        done = {}  # the second run takes it from the cache
    assert {states[stage] for stage in STAGES[: STAGES.index("encode")]} == {"Cached"}


def test_a_run_cancelled_in_train(prefect_deployed: Deployed, tmp_path: Path) -> None:
    """It is one of a deployment with a schedule, which starts no second run beside it."""
    (tmp_path / "endless.yaml").write_text(json.dumps(ENDLESS), encoding="utf-8")
    command = ["deploy", "--name", "nightly", "--cron", "0 3 1 1 *", "--config", "endless.yaml", "--root", "root"]
    done = prefect_deployed.textmill(*command, directory=tmp_path)
    assert done.returncode == 0, done.stderr
    first = prefect_deployed.start("nightly")
    wait_for(lambda: prefect_deployed.states(first).get("train") == "Running", 180, "train task")
    wait_for(lambda: list(tmp_path.glob("root/train/*/*/step-*")), 120, "checkpoint")
    beside = prefect_deployed.start("nightly")
    wait_for(lambda: prefect_deployed.is_final(beside), 60, "end of the run beside it")
    assert prefect_deployed.flow_run(beside).state_name == "Cancelled"
    cancel(prefect_deployed, first)
    assert "Running" not in prefect_deployed.states(first).values()
    assert not any("Crash detected" in line.message for line in prefect_deployed.logs(first))

    second = prefect_deployed.start("nightly")
    wait_for(lambda: count_resumed(prefect_deployed, second) == 1, 120, "log line of a resumed training")
    for process_id in prefect_deployed.processes(second):
        os.kill(process_id, signal.SIGKILL)
    wait_for(lambda: count_resumed(prefect_deployed, second) == 2, 120, "log line of the training that starts again")
    run = prefect_deployed.flow_run(second)
    assert (run.run_count, run.state_name) == (2, "Running")
    trainings = [task.state_name for task in prefect_deployed.task_runs(second) if task.name == "train"]
    assert sorted(map(str, trainings)) == ["Crashed", "Running"]
    cancel(prefect_deployed, second)


def count_resumed(deployed: Deployed, run_id: UUID) -> int:
    return sum(line.message.startswith("Training resumes at step ") for line in deployed.logs(run_id))
