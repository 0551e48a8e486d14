"""A hook of mkdocs: pages that do not lie in ``docs/``, and links to them. ``mkdocs.yml`` names this file.

The files of ``docs/`` stay readable where they are: their links lead to files of the repository. On the site, a link to
a file with a page leads to the page. Other files have none, and ``mkdocs build --strict`` refuses a link to them.
"""

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))  # the command mkdocs, unlike python -m mkdocs, does not look here

from tools.option_reference import option_pages  # noqa: E402

_PAGES = {  # of the repository, to the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "license.md",
    "benchmarks/RESULTS.md": "results.md",
    "benchmarks/GPU.md": "results-gpu.md",
    "examples": "examples.md",
}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)|(?<= src=\")(?!\w+:)([^\"]+)")


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made from other files, and the reference to the navigation."""
    rooms = sorted(path.parent.name for path in (_ROOT / "lm").glob("*/__init__.pyi"))
    pages = {page: _read(_ROOT / source) for source, page in _PAGES.items()}
    pages |= {f"reference/{name}": text for name, text in option_pages().items()}
    pages |= {f"reference/lm-{name}.md": _room_page(name) for name in rooms}
    for page, text in pages.items():
        files.append(File.generated(config, page, content=text))
    reference = next(item["Reference"] for item in config.nav if "Reference" in item)
    reference += [page for page in pages if page.startswith("reference/")]
    return files


def _read(path: Path) -> str:
    if path.is_dir():
        programs = sorted(path.glob("*.py"))
        return "# Examples\n\n" + "\n\n".join(f"## {one.name}\n\n```python\n{one.read_text()}```" for one in programs)
    text = path.read_text(encoding="utf-8")
    return text if path.suffix else f"# Licence\n\n{text}"


def _room_page(room: str) -> str:
    """Return the page of the public names of a room of ``lm``, which mkdocstrings fills."""
    stub = (_ROOT / "lm" / room / "__init__.pyi").read_text(encoding="utf-8")
    names = re.findall(r"^from \.([\w.]+) import (\w+)", stub, re.MULTILINE)
    return f"# lm.{room}\n\n" + "\n\n".join(f"::: lm.{room}.{module}.{name}" for module, name in names) + "\n"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links within the site."""
    sources = {site: source for source, site in _PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    here = posixpath.dirname(page.file.src_uri)

    def replace(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link.group()))
        on_site = _PAGES.get(target, target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}")
        return posixpath.relpath(on_site, here or ".")

    return markdown if source.startswith("docs/reference/") else _LINK.sub(replace, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Return the HTML of a page without the roles of docstrings, such as ``:func:`` before a name."""
    return re.sub(r":(?:func|class|mod|meth|data|attr|exc):(?=<code>)", "", html)
