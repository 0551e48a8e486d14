"""What the commands do in a terminal: run, plan, sample, export, verify and gc, and what they say at the end."""

import logging
import sys
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, get_current_settings, temporary_settings
from tqdm import tqdm

from flows.config import PipelineConfig
from flows.pipeline import StageName, absolute, pipeline
from flows.plan import plan
from flows.report import figures, outputs_of
from flows.runs import is_unreachable
from flows.stop import stoppable
from lm.completion import complete
from lm.convert import save_hugging_face
from lm.errors import UserError
from lm.sampling import SampleConfig
from tasks.audit import delete, garbage, verify
from tasks.lock import in_use
from tasks.output import Output, Ref, read_output
from tasks.records import RunRecord, read
from tasks.sample import load, trained
from tasks.stage import Run, part_log
from tasks.store import Store

log = logging.getLogger(__name__)


class _Console(logging.Handler):
    """Prints the project's lines above a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == part_log.name and record.levelno <= logging.INFO:
            return  # a progress bar tells of the parts
        tqdm.write(self.format(record), file=sys.stderr)


_console = _Console()
_console.setFormatter(logging.Formatter("%(asctime)s  %(message)s", "%H:%M:%S"))


def _log_to_console() -> None:
    for name in ("lm", "tasks", "flows"):
        logger = logging.getLogger(name)
        logger.propagate = False  # the root logger has Prefect's console
        logger.setLevel(logging.INFO)
        logger.addHandler(_console)
    # It speaks for itself, whatever Prefect's level, of each of many events that a server which is gone was not sent.
    logging.getLogger("prefect._internal.concurrency").setLevel(logging.CRITICAL)


def run_command(config: PipelineConfig, root: str, until: StageName | None, refresh: tuple[StageName, ...]) -> None:
    """Run the pipeline and print what was made."""
    _log_to_console()
    with stoppable():
        record = run_pipeline(config, root, until, refresh)
    print(_summary(record))


def run_pipeline(
    config: PipelineConfig, root: str, until: StageName | None = None, refresh: tuple[StageName, ...] = ()
) -> dict[str, Any]:
    """Run the flow in this process and return the run's record."""
    # A flow that ends waits up to a second for the thread of its heartbeats. Whether this one lives, its lock tells.
    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):
        try:
            return pipeline(config, root, until, refresh)
        except Exception as error:
            if not is_unreachable(error):
                raise
            raise UserError(
                f"Prefect's server at {get_current_settings().api.url} cannot be reached: {error}. What is finished is "
                "kept; start the server and the same command again, or unset PREFECT_API_URL to run without one."
            ) from error


def plan_command(config: PipelineConfig, root: str, until: StageName | None, refresh: tuple[StageName, ...]) -> None:
    """Print what a run would do."""
    _log_to_console()
    rows = plan(config, root, until, refresh)
    width = max(len(name) for name, _ in rows)
    for name, fate in rows:
        print(f"{name:<{width}}  {fate}")


def latest_model(root: str) -> tuple[Output, Output]:
    """The model and the tokenizer of the latest run below ``root`` that has trained one; raises UserError without."""
    store = Run(absolute(root), "sample").store
    newest_first = reversed([name for name in store.names("runs") if name.endswith(".json") and name != "latest.json"])
    for name in newest_first:
        record = read(RunRecord, store, "runs", name)
        if record is None:
            log.warning("%s is damaged; the run that it tells of is passed over.", store.url("runs", name))
        elif {"train", "merge"} <= record["stages"].keys():
            made = (read_output(store, Ref(stage, record["stages"][stage]["key"])) for stage in ("train", "merge"))
            return next(made), next(made)
    raise UserError(f"{root} has no finished model; make one with: textmill run --root {root}")


def sample_command(root: str, config: SampleConfig, device: str) -> None:
    """Print completions by the model of the latest run below ``root``."""
    for sample in complete(*load(*latest_model(root), device), config):
        print(_quote(sample.prompt, sample.text))


def export_command(root: str, directory: str) -> None:
    """Write the model of the latest run below ``root`` as a Hugging Face directory."""
    save_hugging_face(*trained(*latest_model(root), "cpu"), Path(directory))
    print(f"Exported to {directory}, for transformers' from_pretrained and whatever else reads its Llama.")


def verify_command(root: str) -> int:
    """Print what is damaged, unfinished or orphaned below a root; returns 1 where something is damaged."""
    kinds: Counter[str] = Counter()
    for finding in verify(Store(absolute(root))):
        kinds[finding.kind] += 1
        print(f"{finding.kind:<10}  {finding.place}: {finding.what}")
    if not kinds:
        print(f"All that is below {root} is as it was made.")
        return 0
    print(", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items())) + f" below {root}.")
    if kinds["damaged"]:
        print("What is damaged is not used: the next run that needs it makes it anew.")
    if kinds.keys() - {"damaged"}:
        print("What is unfinished or orphaned is not used either, and does no harm; textmill gc tells what can go.")
    return 1 if kinds["damaged"] else 0


def gc_command(root: str, is_meant: bool) -> None:
    """Print what no run's record needs below a root, and delete it where that is meant."""
    store = Store(absolute(root))
    with in_use(store, alone=True) if is_meant else nullcontext():
        found = garbage(store)
        for finding in found:
            is_kept = is_meant and not delete(store, finding)
            what = "kept, somebody trains there" if is_kept else finding.what
            print(f"{finding.bytes / 1e6:>10,.1f} MB  {finding.place}: {what}")
    total = f"{len(found)} in all, {sum(finding.bytes for finding in found) / 1e6:,.1f} MB"
    if is_meant or not found:
        print(f"{total}.")
    else:
        print(f"{total}. Nothing is deleted yet: --delete does that, when no run uses {root}.")
        print("To give up what only some run needs, delete its record in runs/ first.")


def _quote(prompt: str, text: str) -> str:
    return f"\n> {prompt}|{text}"


def _summary(record: dict[str, Any]) -> str:
    """One screen: what was made, where, and what to try next."""
    run = Run(record["root"], record["name"])
    outputs = outputs_of(run, record)
    lines = ["", f"{'stage':<8} {'state':<7} {'seconds':>8}  what"]
    for name, output in outputs.items():
        what = "  ".join(figures(output.manifest["figures"])).replace("`", "")
        stage = record["stages"][name]
        lines.append(f"{name:<8} {stage['state']:<7} {stage['seconds']:>8.1f}  {what}")
    if "sample" in outputs:
        lines += [_quote(**sample) for sample in outputs["sample"].json("samples.json")]
    lines += ["", "Made:"]
    if "merge" in outputs:
        lines.append(f"  tokenizer  {outputs['merge'].url}/tokenizer")
    if "train" in outputs:
        model = outputs["train"]
        lines.append(f"  model      {model.url}/{model.json('training.json')['best']}")
        lines.append(f"  loss plot  {model.url}/loss.png")
    root = record["root"]
    lines += [f"  report     {run.store.url('runs', run.name)}.md", "", "Try next:"]
    if "train" in outputs:
        lines.append(f'  textmill sample --root {root} --prompt "Once upon a time"')
    lines += [
        f"  textmill run --root {root} --data.train \"['your/text/*.txt']\"    your own text",
        f"  textmill plan --root {root} --train.steps 2000    what a change would rerun, and why",
        "  textmill up    Prefect's server with its UI, the deployments and a worker (in a checkout)",
    ]
    return "\n".join(lines)
