"""What a run shows for itself: the pages of its stages and a report that joins them, as artifacts and as a file."""

import hashlib
import logging
import threading
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

from prefect.artifacts import create_markdown_artifact

from flows.runs import is_unreachable
from tasks.output import Output, Ref, read_output
from tasks.pages import cell, code, table
from tasks.stage import Run

log = logging.getLogger(__name__)

_is_gone = threading.Event()  # Prefect's server: asked again it would hold up each stage for a minute


def show_page(stage: str, output: Output) -> None:
    """Show the page of a finished stage, made or cached, as an artifact of the run around."""
    _show(stage, f"# {stage}\n\n{_page(output)}", _what(output))


def show_report(run: Run, record: dict[str, Any], failure: str = "") -> None:
    """Write the report of a run to ``runs/<name>.md`` and show it: what each stage made, then the stages' pages. Its
    digest goes into the record, which is written once more."""
    outputs, stages = outputs_of(run, record), record["stages"]
    rows = [
        (name, stages[name]["state"], f"{stages[name]['seconds']:,.1f}", _what(output))
        for name, output in outputs.items()
    ]
    parts = [
        f"# Run {run.name}",
        f"Root: {_link(record['root'])}",
        *([f"**It failed: {failure}**"] if failure else []),
        table(("stage", "state", "seconds", "what"), rows),
        *(f"## {name}\n\n{_page(output)}" for name, output in outputs.items()),
    ]
    report = "\n\n".join(parts)
    name, data = f"{run.name}.md", report.encode()
    run.store.write_text(report, "runs", name)
    record["report"] = {"path": name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    run.store.write_json(record, "runs", f"{run.name}.json")
    _show("report", report, f"{len(outputs)} stages of run {run.name}")


def outputs_of(run: Run, record: dict[str, Any]) -> dict[str, Output]:
    """The outputs that a run's record names, by stage."""
    return {name: read_output(run.store, Ref(name, stage["key"])) for name, stage in record["stages"].items()}


def figures(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The figures of a manifest as words: ``train tokens 1,234``. Those that are zero or missing are left out."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from figures(value, f"{prefix}{name} ")
        elif value:
            text = code(value) if isinstance(value, str) else cell(value)
            yield f"{prefix}{name.replace('_', ' ')} {text}"


def _what(output: Output) -> str:
    return ", ".join(figures(output.manifest["figures"]))


def _page(output: Output) -> str:
    """The page, or where it was lost or could not be written, the figures; and where the output is from."""
    page = output.page or "- " + "\n- ".join(figures(output.manifest["figures"]))
    made = output.manifest["made"]
    return (
        f"{page}\n\nMade by run `{made['run']}` on {made['host']} at {made['at']} in {made['seconds']:,.1f} s. "
        f"Files: {_link(output.url)}"
    )


def _link(place: str) -> str:
    """A link of the last parts of a place, and the whole below it to copy: browsers follow no link to a local file."""
    url = place if "://" in place else f"file://{quote(place)}"
    return f"[…/{'/'.join(part[:12] for part in place.split('/')[-3:])}]({url})\n\n```\n{place}\n```"


def _show(key: str, markdown: str, description: str) -> None:
    if _is_gone.is_set():
        return
    try:
        create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:  # what was made is made, shown or not
        if is_unreachable(error):
            _is_gone.set()
        later = ", and no later one is tried" if _is_gone.is_set() else ""
        log.warning("The page of %s could not be shown in Prefect%s: %s", key, later, error)
