"""Runs that are cancelled: they stop soon and leave no process, and the next run goes on from what they finished."""

from pathlib import Path
from uuid import UUID

from tests.deployed import STAGES, TINY, Deployed, slow_to_encode, wait_for

# Steps are part of what a training is; it is only ever cancelled here, so there may be as many as it never makes.
ENDLESS = TINY | {"train": TINY["train"] | {"steps": 100_000, "eval_interval": 100_000, "checkpoint_interval": 20}}


def cancel(deployed: Deployed, run_id: UUID) -> None:
    """Cancel a run as a user does: it is gone within 10 s, and soon after Prefect says so."""
    assert deployed.processes(run_id)
    done = deployed.prefect("flow-run", "cancel", str(run_id))
    assert done.returncode == 0, done.stdout + done.stderr
    wait_for(lambda: not deployed.processes(run_id), 10, "no process of the cancelled run")
    wait_for(lambda: deployed.flow_run(run_id).state_name == "Cancelled", 60, "the state Cancelled")


def test_cancelled_while_it_encodes(prefect_deployed: Deployed, tmp_path: Path) -> None:
    # A chunk of 8 MB in each of 3 threads would take 15 s to its end.
    config = slow_to_encode(tmp_path / "slow.txt", chunks=3, chunk_bytes=8 << 20, threads=3)
    root = str(tmp_path / "root")
    first = prefect_deployed.start("full", root=root, config=config, until="encode")

    def is_encoding() -> bool:
        states = prefect_deployed.states(first)
        return states.get("encode chunk 1/1") == "Completed" and states.get("encode valid chunk 3/3") == "Running"

    wait_for(is_encoding, 90, "encode")
    cancel(prefect_deployed, first)
    assert "Running" not in prefect_deployed.states(first).values()

    second = prefect_deployed.start("full", root=root, config=config, until="encode")
    wait_for(lambda: prefect_deployed.flow_run(second).state_name == "Completed", 90, "the second run")
    states = prefect_deployed.states(second)
    assert states["encode chunk 1/1"] == "Cached"
    assert states["encode valid chunk 3/3"] == "Completed"
    assert {states[stage] for stage in STAGES[: STAGES.index("encode")]} == {"Cached"}


def test_cancelled_while_it_trains(prefect_deployed: Deployed, tmp_path: Path) -> None:
    root = tmp_path / "root"
    first = prefect_deployed.start("full", root=str(root), config=ENDLESS)
    wait_for(lambda: prefect_deployed.states(first).get("train") == "Running", 90, "train")
    wait_for(lambda: list(root.glob("train/*/*/step-*")), 60, "a checkpoint")
    cancel(prefect_deployed, first)
    assert "Running" not in prefect_deployed.states(first).values()

    second = prefect_deployed.start("full", root=str(root), config=ENDLESS)
    wait_for(lambda: is_resumed(prefect_deployed, second), 60, "the log of a resumed training")
    cancel(prefect_deployed, second)


def is_resumed(deployed: Deployed, run_id: UUID) -> bool:
    lines = [line.message for line in deployed.logs(run_id)]
    return any(line.startswith("Training resumes at step ") for line in lines)
