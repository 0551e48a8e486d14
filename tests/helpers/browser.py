"""A headless browser, also with Prefect's UI, for tests and for the pictures of the documentation."""

import json
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from playwright.sync_api import Page, sync_playwright
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events import Event

from tests.helpers.deployed import Deployed
from tests.helpers.limits import TIMEOUT_SCALE

UI_TIMEOUT_MS = 60_000 * TIMEOUT_SCALE
_CHROMIUM_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # no telemetry of the UI
]


def find_browser() -> str | None:
    """Return the path of Chromium or Chrome."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class RunInfo:
    """The API's records of a finished run. Read them before the browser starts: both need the event loop."""

    run: FlowRun
    tasks: dict[str, str]
    """Name by id."""
    artifacts: dict[str, Artifact]
    """By key, without the name of the run."""
    deployment: DeploymentResponse


def read_run(deployed: Deployed, run_id: UUID) -> RunInfo:
    run = deployed.flow_run(run_id)
    assert run.deployment_id is not None
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
    artifacts = deployed.client.read_artifacts(artifact_filter=of_run)
    return RunInfo(
        run,
        {str(task.id): task.name for task in deployed.task_runs(run_id)},
        {(artifact.key or "").removeprefix(f"{run.name}-"): artifact for artifact in artifacts},
        deployed.client.read_deployment(run.deployment_id),
    )


class Ui:
    """The pages of the server's default UI."""

    def __init__(self, page: Page, url: str) -> None:
        with urllib.request.urlopen(f"{url}/ui-settings") as response:
            settings = json.load(response)
        self.page, self.base = page, url + settings[f"{settings['default_ui']}_base_url"].rstrip("/")

    def open_run(self, run: FlowRun, tab: str = "Logs") -> Page:
        self.page.goto(f"{self.base}/runs/flow-run/{run.id}?tab={tab}")
        self.page.get_by_text(run.name, exact=True).first.wait_for()
        return self.page

    def open_artifact(self, artifact: Artifact) -> Page:
        """Open the page of an artifact and wait for its images."""
        self.page.goto(f"{self.base}/artifacts/artifact/{artifact.id}")
        text = self.page.get_by_text("Progress:" if artifact.type == "progress" else re.compile("[Mm]ade by"))
        text.filter(visible=True).last.wait_for()  # the page also has its source, hidden
        self.page.wait_for_function("[...document.images].every(image => image.complete)")
        return self.page

    def open_event(self, event: Event) -> Page:
        """Open the page of an event."""
        self.page.goto(f"{self.base}/events/event/{event.occurred:%Y-%m-%d}/{event.id}")
        self.page.get_by_text("Related Resources").wait_for()
        return self.page

    def open_form(self, deployment: DeploymentResponse) -> Page:
        """Open the form that starts a run."""
        self.page.goto(f"{self.base}/deployments/deployment/{deployment.id}/run")
        self.page.get_by_text("refresh (Optional)").wait_for()  # the last of the parameters
        return self.page


@contextmanager
def open_page(**options: Any) -> Iterator[Page]:
    """Start a browser with an empty page. ``options`` are those of Playwright's ``new_page``."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=_CHROMIUM_OPTIONS)
        page = browser.new_page(**options)
        page.set_default_timeout(UI_TIMEOUT_MS)
        yield page
        browser.close()


@contextmanager
def open_ui(url: str, scale: float = 1) -> Iterator[Ui]:
    """Start a browser for the UI of the server at ``url``."""
    with open_page(viewport={"width": 1280, "height": 900}, device_scale_factor=scale) as page:
        yield Ui(page, url)
