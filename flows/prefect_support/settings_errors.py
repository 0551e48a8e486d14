"""Mistakes in Prefect's settings, which Prefect reads when it is imported. This module does not import it."""

import logging
import os
import tomllib
import warnings
from pathlib import Path
from traceback import walk_tb
from typing import Any

from lm.common.errors import UserError


def find_prefect_home() -> Path:
    """Return Prefect's directory."""
    return Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()


def settings_files() -> list[Path]:
    """Return the files that exist and can have settings of Prefect."""
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH") or find_prefect_home() / "profiles.toml")
    files = [profiles, *map(Path, (".env", "prefect.toml", "pyproject.toml"))]
    return [file for file in files if file.is_file()]


def mute_settings_errors() -> None:
    """Have Prefect print nothing about mistakes that :func:`explain_settings_error` names.

    Prefect also reads a .env of other programs, and logs each line there that is no assignment.
    """
    for name in ("dotenv", "prefect.plugins"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "Failed to load profiles", UserWarning)


def explain_settings_error(error: BaseException) -> UserError | None:
    """Return a UserError that names the variable or the file if Prefect's settings raised ``error``, else None."""
    modules = (str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__))
    if not isinstance(error, ValueError) or not any(module.startswith("prefect.settings") for module in modules):
        return None
    if problems := _describe_values(error) or _describe_files():
        return UserError(f"Prefect's settings cannot be read: {' '.join(problems)}")
    places = ", ".join(["environment variables PREFECT_…", *map(str, settings_files())])
    return UserError(f"Prefect's settings cannot be read: {error}. They come from: {places}.")


def _describe_values(error: Any) -> list[str]:
    """Return a description of each value that pydantic refuses."""
    problems = []
    for problem in error.errors() if hasattr(error, "errors") else []:
        if problem["type"] == "default_factory_not_called":  # it follows from another problem
            continue
        field, value = "_".join(map(str, problem["loc"])), str(problem["input"])
        names = [
            name
            for name, text in os.environ.items()
            if name.startswith("PREFECT_") and name.endswith(field.upper()) and text.upper() == value.upper()
        ]
        files = [file for file in settings_files() if value.lower() in file.read_text(errors="replace").lower()]
        places = names or [f"{field} in {file.absolute()}" for file in files] or [field]
        problems.append(f"{' or '.join(places)} is {value!r}. {problem['msg']}.")
    return problems


def _describe_files() -> list[str]:
    """Return a description of each file that is no text or no TOML."""
    problems = []
    for file in settings_files():
        try:
            text = file.read_text(encoding="utf-8")
            if file.suffix == ".toml":
                tomllib.loads(text)
        except (OSError, ValueError) as error:
            problems.append(f"{file.absolute()}: {error}. Repair the file.")
    return problems
