"""The Markdown report of a run."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from tasks.pages.markdown import cell, code, escape_markdown, format_size, table
from tasks.runtime.output import Output


def report_text(record: dict[str, Any], outputs: dict[str, Output], failure: str = "", has_pages: bool = True) -> str:
    """Return the report of a run: a table of its stages, then the pages of the stages that this run made."""
    stages = record["stages"]
    rows = []
    for name, output in outputs.items():
        stage, made = stages[name], output.manifest["made"]
        origin = f"{made['run']}, {made['at']}"
        rows.append((name, stage["state"], f"{stage['seconds']:,.1f}", figures_line(output), origin))
    made = [name for name in outputs if stages[name]["state"] == "made"]
    pages = [f"## {name}\n\n{page_of(outputs[name])}" for name in made] if has_pages else []
    return "\n\n".join(
        [
            f"# Run {record['name']}",
            f"Root: {_link(record['root'])}",
            *([f"**The run failed:** {escape_markdown(failure)}"] if failure else []),
            table(("stage", "state", "seconds", "figures", "made by"), rows),
            *pages,
        ]
    )


def format_figures(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the figures of a manifest as text: ``train tokens 1,234``, ``train 1.9 MB``. Omit missing figures and zero
    counts."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from format_figures(value, f"{prefix}{name} ")
        elif value or isinstance(value, float):  # an accuracy of 0.0 is a result
            text = code(value) if isinstance(value, str) else cell(value)
            yield f"{prefix}{format_size(value)}" if name == "bytes" else f"{prefix}{name.replace('_', ' ')} {text}"


def figures_line(output: Output) -> str:
    """Return the figures of an output in one line."""
    return ", ".join(format_figures(output.manifest["figures"]))


def page_of(output: Output) -> str:
    """Return the page of an output and its origin. If the page is lost, return the figures instead."""
    page = output.page or "- " + "\n- ".join(format_figures(output.manifest["figures"]))
    made = output.manifest["made"]
    return (
        f"{page}\n\nMade by run `{made['run']}` on {made['host']} at {made['at']} in {made['seconds']:,.1f} s. "
        f"Files: {_link(output.url)}"
    )


def _link(place: str) -> str:
    """Return a short link to a place, and its full path to copy: browsers follow no link to a local file."""
    url = place if "://" in place else f"file://{quote(place)}"
    return f"[…/{'/'.join(part[:12] for part in place.split('/')[-3:])}]({url})\n\n```\n{place}\n```"
