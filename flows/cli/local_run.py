"""Flows that a command runs in its own process, with or without Prefect's server."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flows.config import PipelineConfig, StageName
from lm.common.errors import UserError

R = TypeVar("R")


def run_pipeline(
    config: PipelineConfig, root: str, until: StageName | None = None, refresh: tuple[StageName, ...] = ()
) -> dict[str, Any]:
    """Run the flow ``pipeline`` in this process and return the run's record."""
    from flows.pipeline import pipeline

    return run_flow(pipeline, config, root, until, refresh)


def run_flow(flow: Callable[..., R], *arguments: Any) -> R:
    """Run a flow in this process and return its result. Raise UserError if Prefect's server is unreachable, or its
    temporary server does not start."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings

    from flows.prefect_support.liveness import is_server_unreachable

    # Without heartbeats the flow ends up to a second earlier. The liveness lock replaces them.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            return flow(*arguments)
        except Exception as error:
            if "ephemeral Prefect API server" in str(error):
                raise UserError(
                    "Prefect's temporary server did not start in "
                    f"{get_current_settings().server.ephemeral.startup_timeout_seconds} s. Run the same command again "
                    "when the machine is less busy, or set PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS to more."
                ) from error
            if not is_server_unreachable(error):
                raise
            raise UserError(
                f"Prefect's server at {get_current_settings().api.url} cannot be reached: {error}. Finished work is "
                "kept; start the server and run the same command again, or unset PREFECT_API_URL to run without one."
            ) from error


def is_server_configured() -> bool:
    """Return whether Prefect's settings name a server. Import Prefect only if a settings file may name one."""
    if os.environ.get("PREFECT_API_URL"):
        return True
    home = Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or home / "profiles.toml")
    files = [profiles, Path(".env"), Path("prefect.toml"), Path("pyproject.toml")]
    try:
        texts = [file.read_text(encoding="utf-8", errors="replace") for file in files if file.is_file()]
    except OSError as error:
        raise UserError(
            f"{error.filename}, which may have settings of Prefect, cannot be read: {error.strerror}."
        ) from None
    if not any("PREFECT_API_URL" in text or "tool.prefect" in text or "[api]" in text for text in texts):
        return False
    from prefect.settings import get_current_settings

    return bool(get_current_settings().api.url)
