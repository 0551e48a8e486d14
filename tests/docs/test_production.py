"""The guide to production: systemd accepts its units, and the variables of its deployments fit the schemas of pools."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from flows.config import PipelineConfig

PAGE = (Path(__file__).parents[2] / "docs" / "production.md").read_text(encoding="utf-8")
UNITS = dict(re.findall(r"^`/etc/systemd/system/(.+?)`.*?```ini\n(.*?)```", PAGE, re.MULTILINE | re.DOTALL))
DEPLOYMENTS = {
    entry["name"]: entry
    for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    for entry in yaml.safe_load(block)["deployments"]
}


def verify(directory: Path, change: tuple[str, str] = ("", "")) -> str:
    """Return what systemd says about the units, with the programs of this environment, after a replacement of text."""
    programs = str(Path(sys.executable).parent)
    for name, text in UNITS.items():
        unit = text.replace("/opt/textmill/.venv/bin", programs).replace("User=textmill", "User=root").replace(*change)
        (directory / name).write_text(unit, encoding="utf-8")
    command = ["systemd-analyze", "verify", "--man=no", *(str(directory / name) for name in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "\n".join(
        line for line in (done.stdout + done.stderr).splitlines() if str(directory) in line or "textmill" in line
    )


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    assert set(UNITS) == {"textmill-server.service", "textmill-worker.service"}
    assert verify(tmp_path) == ""
    assert "KilMode" in verify(tmp_path, ("KillMode", "KilMode"))


def check_variables(variables: dict[str, Any], schema: dict[str, Any]) -> None:
    jsonschema.validate(variables, schema | {"additionalProperties": False})


def test_the_variables_for_docker_fit_the_schema_of_its_pool() -> None:
    import prefect.server.api.collections_data as data

    text = (Path(next(iter(data.__path__))) / "views" / "aggregate-worker-metadata.json").read_text(encoding="utf-8")
    schema = json.loads(text)["prefect-docker"]["docker"]["default_base_job_configuration"]["variables"]
    check_variables(DEPLOYMENTS["in-docker"]["work_pool"]["job_variables"], schema)
    with pytest.raises(jsonschema.ValidationError):
        check_variables({"imag": "mill"}, schema)


def test_the_variables_for_slurm_fit_the_schema_of_its_pool() -> None:
    slurm = pytest.importorskip(
        "prefect_slurm.worker", reason="needs prefect-slurm, which every Prefect server would load"
    )
    schema = slurm.SlurmWorker.get_default_base_job_template()["variables"]
    check_variables(DEPLOYMENTS["on-slurm"]["work_pool"]["job_variables"], schema)


def test_the_parameters_of_the_deployments_are_valid() -> None:
    assert set(DEPLOYMENTS) == {"in-docker", "on-slurm"}
    for entry in DEPLOYMENTS.values():
        assert entry["entrypoint"] == "flows.pipeline.pipeline" and set(entry["parameters"]) == {"root", "config"}
        PipelineConfig.validate(entry["parameters"]["config"])
