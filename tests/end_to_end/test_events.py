"""Events of runs with a server and a worker: automations that they start, and the lineage of a model."""

import json
import re
import subprocess
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prefect.client.schemas.objects import FlowRun
from prefect.events.filters import EventFilter, EventNameFilter, EventOccurredFilter, EventRelatedFilter

from flows.prefect_support import automations
from tests.helpers.deployed import TINY, Deployed
from tests.helpers.limits import wait_for
from tests.helpers.pipelines import write_corpus
from tests.helpers.posttraining import DIALOGS
from tests.helpers.processes import PROJECT
from tests.helpers.webhook import recorded_posts
from textmill.cli import tools
from textmill.cli.main import main

GUIDE = (PROJECT / "docs" / "prefect.md").read_text(encoding="utf-8")
DIVERGING = {"train": {"max_lr": 1e12}}


def guide_block(language: str, text: str) -> str:
    """Return the code of the guide that has a text."""
    (block,) = (block for block in re.findall(rf"```{language}\n(.*?)```", GUIDE, re.DOTALL) if text in block)
    return str(block)


def wait_for_run(deployed: Deployed, deployment: str) -> FlowRun:
    """Return the finished run of a deployment that has one run."""
    deployment_id = deployed.client.read_deployment_by_name(deployment).id

    def find() -> FlowRun | None:
        runs = [run for run in deployed.client.read_flow_runs() if run.deployment_id == deployment_id]
        return runs[0] if runs and runs[0].state and runs[0].state.is_final() else None

    return wait_for(find, 300, f"end of a run of {deployment}")


def asset_events(deployed: Deployed, run: FlowRun, last_stage: str) -> dict[str, Any]:
    """Return the asset events of a run by stage, after the server has written that of the last one down."""
    related = EventRelatedFilter(id=[f"prefect.flow-run.{run.id}"])
    wanted = EventFilter(event=EventNameFilter(prefix=["prefect.asset."]), related=related)

    def read() -> dict[str, Any] | None:
        page = deployed.client.read_events(wanted.model_copy(update={"occurred": EventOccurredFilter()}), limit=50)
        events = {event.resource["textmill.stage"]: event for event in page.events}
        return events if last_stage in events else None

    return wait_for(read, 60, f"event of {last_stage}")


def lineage(deployed: Deployed, key: str) -> set[str]:
    """Return the stages and the files that the program of the guide prints for an asset."""
    program = [sys.executable, "-c", guide_block("python", "prefect.asset."), key]
    done = subprocess.run(program, env=deployed.environment, capture_output=True, text=True, check=True)
    keys = done.stdout.split()
    assert len(keys) == len(set(keys)) and keys[0] == key
    return {Path(key).parent.name if re.search("/[0-9a-f]{64}$", key) else key for key in keys}


def test_events_start_runs_evaluations_and_alerts_and_show_what_a_model_was_made_from(
    prefect_deployed: Deployed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tools, "find_server_api", lambda: f"{prefect_deployed.url}/api")
    monkeypatch.setattr(automations, "SETTLE_SECONDS", 1.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    for name in ("a", "b"):
        write_corpus(tmp_path / "texts" / f"{name}.txt", 150)
    config = TINY | {"data": {"train": ["texts/*.txt"]}, "model": TINY["model"] | {"context_length": 48}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
    with recorded_posts() as (address, posts):
        options = ["--config=config.yaml", "--root=root", "--on=corpus.new", "--evaluate=addition:1-1"]
        assert main(["deploy", "--name=corpus", *options, f"--alert={address}"]) == 0
        shown = capsys.readouterr().out
        assert "on the event corpus.new" in shown and "evaluate/corpus on addition:1-1" in shown

        (event,) = json.loads(guide_block("json", "corpus.new"))  # as an object store would send it
        event |= {"id": str(uuid.uuid4()), "occurred": datetime.now(UTC).isoformat()}
        httpx.post(f"{prefect_deployed.url}/api/events", json=[event]).raise_for_status()
        run = wait_for_run(prefect_deployed, "pipeline/corpus")
        assert run.state_name == "Completed", run.state
        evaluated = wait_for_run(prefect_deployed, "evaluate/corpus")
        assert evaluated.state_name == "Completed", evaluated.state
        assert evaluated.parameters["model"] == run.name
        (summary,) = tmp_path.glob("evaluations/*/summary.json")
        assert json.loads(summary.read_text())["settings"]["task"] == "addition:1-1"
        assert posts == []

        diverged = prefect_deployed.start("corpus", config=DIVERGING)
        wait_for(lambda: posts, 300, "alert")
        (alert,) = posts
        wait_for(lambda: prefect_deployed.is_final(diverged), 60, "end of the run")
    failed = prefect_deployed.flow_run(diverged)
    assert json.loads(alert)["text"].startswith(f"{failed.name}: At step ")
    assert "the training has diverged" in json.loads(alert)["text"]

    made, used = asset_events(prefect_deployed, run, "sample"), asset_events(prefect_deployed, failed, "encode")
    before = {"ingest", "chunk", "count", "merge", "encode"}
    assert made.keys() == before | {"train", "sample"} and used.keys() == before
    assert {event.event for event in made.values()} == {"prefect.asset.materialization.succeeded"}
    assert {event.event for event in used.values()} == {"prefect.asset.referenced"}
    manifest = json.loads(Path(made["train"].resource.id.removeprefix("file://"), "manifest.json").read_text())
    assert made["train"].payload["figures"]["valid_loss"] == manifest["figures"]["valid_loss"]
    assert made["train"].payload["bytes"] == sum(file["bytes"] for file in manifest["files"])
    files = {f"file://{tmp_path}/texts/{name}.txt" for name in ("a", "b")}
    assert lineage(prefect_deployed, made["train"].resource.id) == before | {"train"} | files

    rows = [{"messages": dialog.messages} for dialog in DIALOGS]
    (tmp_path / "dialogs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parameters = {
        "root": f"{tmp_path}/root",
        "until": "sft",
        "config": {
            "base": run.name,
            "methods": ["sft"],
            "dialogs": {"train": [f"{tmp_path}/dialogs.jsonl"], "task": "", "test_problems": 4},
            "sft": {"steps": 2, "batch_size": 4, "warmup_steps": 1, "sample_prompts": ["say a"], "sample_tokens": 2},
        },
    }
    deployment = prefect_deployed.client.read_deployment_by_name("posttrain/full")
    posttrained = prefect_deployed.client.create_flow_run_from_deployment(deployment.id, parameters=parameters).id
    wait_for(lambda: prefect_deployed.is_final(posttrained), 300, "end of the post-training")
    tuned = prefect_deployed.flow_run(posttrained)
    assert tuned.state_name == "Completed", tuned.state
    key = asset_events(prefect_deployed, tuned, "sft")["sft"].resource.id
    files.add(f"file://{tmp_path}/dialogs.jsonl")
    assert lineage(prefect_deployed, key) == before | {"train", "base", "dialogs", "sft"} | files
