"""What a run shows for itself: the pages of its stages and a report that joins them, as artifacts and as a file."""

import logging
from collections.abc import Iterator
from typing import Any

from prefect.artifacts import create_markdown_artifact

from tasks.stage import Output, Ref, Run, read_output

log = logging.getLogger(__name__)


def show_page(stage: str, output: Output) -> None:
    """Show the page of a finished stage, made or cached, as an artifact of the run around."""
    if page := output.page:
        what = ", ".join(figures(output.manifest["figures"]))
        _show(stage, f"# {stage}\n\n{page}\n\n{_origin(output)}", what)


def show_report(run: Run, record: dict[str, Any], failure: str = "") -> None:
    """Write the report of a run to ``runs/<name>.md`` and show it: what each stage made, then the stages' pages."""
    outputs = outputs_of(run, record)
    lines = [f"# Run {run.name}", "", f"Root: {_link(record['root'], record['root'])}", ""]
    if failure:
        lines += [f"**It failed: {failure}**", ""]
    lines += ["| stage | state | seconds | what |", "| --- | --- | ---: | --- |"]
    for name, output in outputs.items():
        stage = record["stages"][name]
        what = ", ".join(figures(output.manifest["figures"])).replace("|", "\\|")
        lines.append(f"| {name} | {stage['state']} | {stage['seconds']:,.1f} | {what} |")
    for name, output in outputs.items():
        lines += ["", f"## {name}", "", output.page or "", "", _origin(output)]
    report = "\n".join(lines)
    run.store.write_text(report, "runs", f"{run.name}.md")
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
            text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if isinstance(value, float) else value
            yield f"{prefix}{name.replace('_', ' ')} {text}"


def _origin(output: Output) -> str:
    made = output.manifest["made"]
    return (
        f"Made by run `{made['run']}` on {made['host']} at {made['at']} in {made['seconds']:,.1f} s. "
        f"Files: {_link(f'{output.ref.stage}/{output.ref.key[:12]}…', output.url)}"
    )


def _link(text: str, place: str) -> str:
    return f"[{text}]({place if '://' in place else 'file://' + place})"


def _show(key: str, markdown: str, description: str) -> None:
    try:
        create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:  # what was made is made, shown or not
        log.warning("The page of %s could not be shown in Prefect: %s", key, error)
