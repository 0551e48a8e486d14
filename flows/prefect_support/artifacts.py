"""Markdown artifacts of a flow run."""

import logging

from flows.prefect_support.liveness import is_server_unreachable
from tasks.runs.run_report import figures_line, page_of
from tasks.runtime.output import Output

log = logging.getLogger(__name__)


class ArtifactPublisher:
    """Publishes Markdown artifacts of the current run.

    It stops after the first failure to reach Prefect's server, because each further attempt would take a minute.
    """

    def __init__(self, label: str) -> None:
        self._label = label
        self._is_server_gone = False

    def publish_stage(self, stage: str, output: Output) -> None:
        """Publish the page of a stage."""
        self.publish(stage, f"# {stage}\n\n{page_of(output)}", figures_line(output))

    def publish(self, name: str, markdown: str, description: str) -> None:
        """Publish Markdown as the artifact ``<label>-<name>``. A failure is only logged.

        Prefect's keys have no underscores: they become dashes.
        """
        if self._is_server_gone:
            return
        from prefect.artifacts import create_markdown_artifact

        try:
            key = f"{self._label}-{name}".replace("_", "-")
            create_markdown_artifact(markdown, key=key, description=description)
        except Exception as error:  # an artifact only describes outputs that exist already
            self._is_server_gone = is_server_unreachable(error)
            suffix = "; no more artifacts are published" if self._is_server_gone else ""
            log.warning("Cannot publish the artifact %s in Prefect%s: %s", name, suffix, error)
