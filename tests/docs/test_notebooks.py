"""The notebooks in ``docs/notebooks``: kept without outputs, on public names of ``lm`` alone, and they run."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LIBRARIES = {"matplotlib", "numpy", "torch"}


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    content = json.loads(path.read_text(encoding="utf-8"))
    return [cell for cell in content["cells"] if cell["cell_type"] == kind]


def test_there_is_a_notebook() -> None:
    assert "first-model" in {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_no_outputs_and_imports_public_names_of_lm_alone(path: Path) -> None:
    code = cells(path, "code")
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    trees = [ast.parse("".join(cell["source"])) for cell in code]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    modules = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    modules += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    others = {module for module in modules if module.partition(".")[0] not in sys.stdlib_module_names}
    of_lm = {module for module in others if module.startswith("lm.")}
    assert of_lm and all(module.count(".") == 1 for module in of_lm)
    assert {module.partition(".")[0] for module in others - of_lm} <= LIBRARIES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_links_of_a_notebook_lead_somewhere(path: Path) -> None:
    text = "\n".join("".join(cell["source"]) for cell in cells(path, "markdown"))
    links = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert links and [link for link in links if not (path.parent / link).exists()] == []


@pytest.mark.slow
def test_the_first_model_learns_and_writes(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="ipykernel, which runs notebooks, is not installed")
    nbclient = pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed")
    nbformat = pytest.importorskip("nbformat", reason="nbformat, which reads notebooks, is not installed")
    notebook = nbformat.read(ROOT / "docs" / "notebooks" / "first-model.ipynb", as_version=4)
    nbformat.validate(notebook)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.get("text", "") for output in outputs)
    [bits_per_byte] = re.findall(r"^bits per byte: (\S+)$", text, re.MULTILINE)
    assert 0.1 < float(bits_per_byte) < 0.35
    assert len(re.findall(r"^temperature \S+: Once upon a time", text, re.MULTILINE)) == 3
    assert not any(tmp_path.iterdir()), "it leaves nothing behind in its directory"
