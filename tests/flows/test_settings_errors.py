"""Mistakes in Prefect's settings and a deleted working directory are one message, not a traceback."""

import os
import subprocess
from pathlib import Path

import pytest
from prefect import flow
from prefect.settings import PREFECT_API_URL, PREFECT_SERVER_ALLOW_EPHEMERAL_MODE, temporary_settings

from flows.prefect_support.settings_errors import explain_settings_error
from lm.common.errors import UserError
from tests.helpers.deployed import TEXTMILL, own_environment
from textmill.cli.local_run import run_flow
from textmill.cli.main import main

SHELL_LINES = "if true; then\n  make all\nfi\n" * 5


@flow
def empty() -> None:
    """Do nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variable", "file", "content", "message"),
    [
        ("PREFECT_TASKS_DEFAULT_RETRIES", ".env", SHELL_LINES, "PREFECT_TASKS_DEFAULT_RETRIES is 'many'"),
        ("PREFECT_API_REQUEST_TIMEOUT", "", "", "PREFECT_API_REQUEST_TIMEOUT is 'many'"),
        ("PREFECT_LOGGING_LEVEL", "", "", "PREFECT_LOGGING_LEVEL is 'MANY'"),
        ("", ".env", "PREFECT_TASKS_DEFAULT_RETRIES=many\n", "default_retries in {home}/.env is 'many'"),
        ("", "profiles.toml", 'active = "x\n', "{home}/profiles.toml: Illegal character"),
        ("", "pyproject.toml", "[tool.prefect\n", "{home}/pyproject.toml: Expected"),
        ("", "prefect.toml", "[api\n", "{home}/prefect.toml: Expected"),
        ("", ".env", "\udcff\udcfe\0", "{home}/.env: 'utf-8' codec"),
    ],
)
def test_a_mistake_in_a_setting_is_one_message(
    tmp_path: Path, variable: str, file: str, content: str, message: str
) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    if file:
        (foreign / file).write_bytes(content.encode(errors="surrogateescape"))
    environment = os.environ | own_environment(tmp_path) | ({variable: "many"} if variable else {})
    command = [*TEXTMILL, "run", "--root", str(tmp_path / "root")]
    environment["PREFECT_PROFILES_PATH"] = str(foreign / "profiles.toml")
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    done = subprocess.run(command, cwd=foreign, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("textmill: Prefect's settings cannot be read: "), done.stderr
    assert message.format(home=foreign) in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_an_error_of_another_place_is_not_explained() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("many")
    assert explain_settings_error(caught.value) is None


def test_a_temporary_server_that_is_switched_off_is_named() -> None:
    settings = temporary_settings({PREFECT_SERVER_ALLOW_EPHEMERAL_MODE: False}, restore_defaults={PREFECT_API_URL})
    with settings, pytest.raises(UserError, match="PREFECT_SERVER_ALLOW_EPHEMERAL_MODE is false, and PREFECT_API_URL"):
        run_flow(empty)


@pytest.mark.parametrize("command", ["plan", "verify"])
def test_a_deleted_working_directory_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "deleted").mkdir()
    monkeypatch.chdir(tmp_path / "deleted")
    (tmp_path / "deleted").rmdir()
    assert main([command]) == 2
    assert "The working directory cannot be used: No such file" in capsys.readouterr().err
