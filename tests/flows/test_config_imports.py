"""Modules that the command line imports at its start import no heavy library."""

import subprocess
import sys

import pytest

from tests.helpers.training import ROOT

HEAVY = {"torch", "numba", "matplotlib", "prefect", "pyarrow"}


@pytest.mark.parametrize(
    "module", ["lm.model.config", "lm.inference.config", "lm.tokenizer.config", "lm.train.tracking", "flows.pipeline"]
)
def test_a_module_imports_no_heavy_library(module: str) -> None:
    code = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = done.stdout.split()
    assert module in imported
    assert HEAVY.isdisjoint(imported)
