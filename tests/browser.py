"""A headless browser on Prefect's UI, for the tests of what it shows and for the README's pictures."""

import io
import json
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import numpy as np
from PIL import Image
from playwright.sync_api import Page, sync_playwright
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.client.schemas.objects import Artifact, FlowRun
from prefect.client.schemas.responses import DeploymentResponse

from tests.deployed import Deployed, wait_for

SECONDS = 60  # a page may take this long to show something
_OPTIONS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",  # the UI counts its visits elsewhere
]
_GREEN = (33, 157, 75)  # of what is completed, in the graph
_STRIP = 12  # height of the strip of states below it, in pixels


def find_browser() -> str | None:
    """The installed Chromium or Chrome."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass(frozen=True)
class Made:
    """What the API says of a finished run; asked before there is a browser, whose event loop the client would meet."""

    run: FlowRun
    tasks: dict[str, str]  # names by id
    artifacts: dict[str, Artifact]  # by key
    deployment: DeploymentResponse


def look_up(deployed: Deployed, run_id: UUID) -> Made:
    run = deployed.flow_run(run_id)
    assert run.deployment_id is not None
    of_run = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[run_id]))
    return Made(
        run,
        {str(task.id): task.name for task in deployed.task_runs(run_id)},
        {found.key or "": found for found in deployed.client.read_artifacts(artifact_filter=of_run)},
        deployed.client.read_deployment(run.deployment_id),
    )


class Bar(NamedTuple):
    """A completed task in the picture of the graph."""

    left: int
    right: int
    y: int


class Ui:
    """The pages of Prefect's UI, in the version that the server has as its default."""

    def __init__(self, page: Page, url: str) -> None:
        with urllib.request.urlopen(f"{url}/ui-settings") as answer:
            settings = json.load(answer)
        self.page, self.base = page, url + settings[f"{settings['default_ui']}_base_url"].rstrip("/")

    def open_run(self, run: FlowRun, tab: str = "Logs") -> Page:
        self.page.goto(f"{self.base}/runs/flow-run/{run.id}?tab={tab}")
        self.page.get_by_text(run.name, exact=True).first.wait_for()
        return self.page

    def open_artifact(self, artifact: Artifact) -> Page:
        """The page of an artifact, with its pictures."""
        self.page.goto(f"{self.base}/artifacts/artifact/{artifact.id}")
        self.page.get_by_text("Progress:" if artifact.type == "progress" else "Made by run").last.wait_for()
        self.page.wait_for_function("[...document.images].every(image => image.complete)")
        return self.page

    def open_form(self, deployment: DeploymentResponse) -> Page:
        """The form that starts a run."""
        self.page.goto(f"{self.base}/deployments/deployment/{deployment.id}/run")
        self.page.get_by_text("refresh (Optional)").wait_for()  # the last of the parameters
        return self.page

    def graph(self) -> list[Bar]:
        """The bars of the graph on the open page, once they stay where they are."""
        canvas = self.page.locator("canvas")
        canvas.wait_for()
        before: list[Bar] = []

        def settled() -> list[Bar]:
            nonlocal before
            last, before = before, _bars(canvas.screenshot())
            return before if before == last else []

        return list(wait_for(settled, SECONDS, "the graph"))

    def click_graph(self, bar: Bar) -> None:
        """Select a task in the graph."""
        self.page.locator("canvas").click(position={"x": (bar.left + bar.right) / 2, "y": bar.y})


def _bars(png: bytes) -> list[Bar]:
    """The widest bar of each row of a graph."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)[:-_STRIP]
    green = np.abs(pixels - _GREEN).max(axis=2) < 12
    rows = np.flatnonzero(green.any(axis=1))
    bars = []
    for band in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1):
        if len(band) > 3:  # not a speck
            y = int(band[len(band) // 2])
            columns = np.flatnonzero(green[y])
            pieces = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
            widest = max(pieces, key=len)
            bars.append(Bar(int(widest[0]), int(widest[-1]), y))
    return bars


@contextmanager
def browse(url: str, scale: float = 1) -> Iterator[Ui]:
    """A browser with an empty page, for the UI of the server at ``url``."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=_OPTIONS)
        page = browser.new_page(viewport={"width": 1280, "height": 900}, device_scale_factor=scale)
        page.set_default_timeout(1000 * SECONDS)
        yield Ui(page, url)
        browser.close()
