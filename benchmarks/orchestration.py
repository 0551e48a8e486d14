"""Measure the cost of orchestration: the stages called directly, and the same stages under Prefect with a server.

``python -m benchmarks.orchestration [--rounds 3] [--train FILE …] [--valid FILE …]``. The two take turns. Each run is a
process with an empty root, and all imports are done before its clock starts. The time of the flow is that of the call
in ``textmill run``, with all requests to the server, the artifacts and the report. ``idle`` is the part of it in which
no stage ran: it is less noisy than the difference of two times. The text is the children's stories in
``../shared/data``, or generated stories if that folder does not exist. The last line is JSON.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.texts import story_file
from flows.config import PipelineConfig
from flows.plan import Executor, UntilReached

_SERVER_START_SECONDS = 120


class DirectExecutor(Executor):
    """Call the stages from a thread pool, without orchestration."""

    def call(self, stage: Any, *arguments: Any, title: str = "") -> Any:
        return stage.materialize(self.run, stage.bind(*arguments))[0]

    def map(self, stage: Any, title: str, items: Any, *arguments: Any) -> list[Any]:
        with ThreadPoolExecutor(self.run.execution.workers) as pool:
            return list(pool.map(lambda item: self.call(stage, item, *arguments), items))


def measure(kind: str, preset: str, until: Any, data: dict[str, Any]) -> dict[str, float]:
    """Run once in this process; return the wall, idle and CPU seconds."""
    from flows.pipeline import pipeline, pipeline_stages
    from flows.prefect_support.server import server_for_flow
    from tasks.runtime.run_context import RunContext
    from tasks.runtime.stage import Stage

    intervals: list[tuple[float, float]] = []
    materialize = Stage.materialize

    def timed_materialize(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return materialize(*arguments)
        finally:
            intervals.append((started, time.perf_counter()))

    Stage.materialize = timed_materialize  # type: ignore[method-assign, assignment]
    config = PipelineConfig.load_preset(preset)
    config = replace(config, data=replace(config.data, **data))
    with tempfile.TemporaryDirectory() as root:
        started, cpu = time.perf_counter(), time.process_time()
        if kind == "prefect":
            with server_for_flow():
                pipeline(config, root, until)
        else:
            with suppress(UntilReached):
                run = RunContext(root, "direct", execution=config.execution)
                pipeline_stages(config, DirectExecutor(run, config, until))
        wall = time.perf_counter() - started
        return {"wall": wall, "idle": wall - _union(intervals), "cpu": time.process_time() - cpu}


def _union(intervals: list[tuple[float, float]]) -> float:
    """Return the total length of the union of the intervals."""
    total, last_end = 0.0, 0.0
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last_end))
        last_end = max(last_end, end)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="stories-cpu")
    parser.add_argument("--until", default="encode")
    parser.add_argument("--train", nargs="+", help="training text; default: stories, or the text of another --preset")
    parser.add_argument("--valid", nargs="+", help="validation text; default: as for --train")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", choices=["direct", "prefect"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    data = {name: value for name in ("train", "valid") if (value := getattr(options, name))}
    if options.kind:
        print(json.dumps(measure(options.kind, options.preset, options.until, data)))
        return
    with tempfile.TemporaryDirectory() as home:
        if not data and options.preset == parser.get_default("preset"):  # the text of this preset must be downloaded
            data = {split: [str(story_file(split, Path(home)))] for split in ("train", "valid")}
        text_options = [word for name, urls in data.items() for word in (f"--{name}", *urls)]
        environment = {**os.environ, "PREFECT_HOME": home, "PREFECT_LOGGING_LEVEL": "CRITICAL"}
        port = free_port()
        environment |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "DO_NOT_TRACK": "1"}
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for_server(port, server)
            seconds: dict[str, list[dict[str, float]]] = {"direct": [], "prefect": []}
            for _ in range(options.rounds):
                for kind, runs in seconds.items():
                    command = [
                        sys.executable,
                        "-m",
                        "benchmarks.orchestration",
                        *sys.argv[1:],
                        *text_options,
                        "--kind",
                        kind,
                    ]
                    result = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    runs.append(json.loads(result.stdout.splitlines()[-1]))
                    print(kind, "  ".join(f"{name} {value:.2f} s" for name, value in runs[-1].items()), flush=True)
        finally:
            server.terminate()
            server.wait()
    direct, prefect = (
        {name: statistics.median(run[name] for run in runs) for name in runs[0]} for runs in seconds.values()
    )
    ratios = {
        "wall": prefect["wall"] / direct["wall"] - 1,
        "idle": (prefect["idle"] - direct["idle"]) / direct["wall"],
        "cpu": prefect["cpu"] / direct["cpu"] - 1,
    }
    print("orchestration costs " + ", ".join(f"{100 * ratio:.2f} % by {name}" for name, ratio in ratios.items()))
    print(json.dumps({"seconds": seconds, "cost": ratios}))


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for_server(port: int, server: "subprocess.Popen[bytes]") -> None:
    """Wait until a Prefect server answers."""
    deadline = time.monotonic() + _SERVER_START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/api/health", timeout=5).close()
            return
        except OSError:
            if server.poll() is not None or time.monotonic() > deadline:
                raise
            time.sleep(0.3)


if __name__ == "__main__":
    main()
