"""What orchestration costs: the stages called one after the other, against the same under Prefect with a server.

``python -m benchmarks.orchestration [--rounds 3] [--train FILE …] [--valid FILE …]``. Both run in turn, in processes of
their own that have imported everything before the clock starts, each over an empty root. The flow's time is that of the
call that ``textmill run`` makes: with all requests to the server, artifacts and report. ``idle`` is the part of it in
which no stage was at work: less noisy than the difference of two times. The last line is JSON.
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
from dataclasses import dataclass, replace
from typing import Any

_SERVER_SECONDS = 120


@dataclass(frozen=True)
class DirectCaller:
    """Calls the stages with no orchestration but a pool of threads."""

    run: Any

    def call(self, stage: Any, *arguments: Any) -> Any:
        return stage.make(self.run, stage.named(arguments))

    def map(self, stage: Any, texts: Any, chunks: Any, split: str, *arguments: Any) -> list[Any]:
        from tasks.texts import read_chunks

        items = read_chunks(self.run.store, texts, chunks, split)
        with ThreadPoolExecutor(self.run.execution.workers) as pool:
            return list(pool.map(lambda item: self.call(stage, item, *arguments), items))


def measure(kind: str, preset: str, until: Any, data: dict[str, Any]) -> dict[str, float]:
    """Seconds that one run takes in this process: in all, idle, and of the processor."""
    from flows.config import load_preset
    from flows.console import run_pipeline
    from flows.pipeline import chain
    from tasks.ingest import find_sources
    from tasks.stage import Run, Stage

    work: list[tuple[float, float]] = []
    make = Stage.make

    def timed(*arguments: Any) -> Any:
        started = time.perf_counter()
        try:
            return make(*arguments)
        finally:
            work.append((started, time.perf_counter()))

    Stage.make = timed  # type: ignore[method-assign, assignment]
    config = load_preset(preset)
    config = replace(config, data=replace(config.data, **data))
    with tempfile.TemporaryDirectory() as root:
        started, processor = time.perf_counter(), time.process_time()
        if kind == "prefect":
            run_pipeline(config, root, until)
        else:
            caller = DirectCaller(Run(root, "direct", execution=config.execution))
            sources = find_sources.fn(config.data, caller.run.store)
            for name, _ in chain(config, sources, caller.call, caller.map):
                if name == until:
                    break
        wall = time.perf_counter() - started
        return {"wall": wall, "idle": wall - _union(work), "cpu": time.process_time() - processor}


def _union(intervals: list[tuple[float, float]]) -> float:
    """Length of the time that is in any of the intervals."""
    total, reached = 0.0, 0.0
    for started, ended in sorted(intervals):
        total += max(0.0, ended - max(started, reached))
        reached = max(reached, ended)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="stories-cpu")
    parser.add_argument("--until", default="encode")
    parser.add_argument("--train", nargs="+", help="training text, where it is not the preset's")
    parser.add_argument("--valid", nargs="+", help="validation text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kind", choices=["direct", "prefect"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    data = {name: value for name in ("train", "valid") if (value := getattr(options, name))}
    if options.kind:
        print(json.dumps(measure(options.kind, options.preset, options.until, data)))
        return
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "PREFECT_HOME": home, "PREFECT_LOGGING_LEVEL": "CRITICAL"}
        port = _free_port()
        environment |= {"PREFECT_API_URL": f"http://127.0.0.1:{port}/api", "DO_NOT_TRACK": "1"}
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
        server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait_for_server(port, server)
            seconds: dict[str, list[dict[str, float]]] = {"direct": [], "prefect": []}
            for _ in range(options.rounds):
                for kind, found in seconds.items():
                    again = [sys.executable, "-m", "benchmarks.orchestration", *sys.argv[1:], "--kind", kind]
                    done = subprocess.run(again, env=environment, stdout=subprocess.PIPE, text=True, check=True)
                    found.append(json.loads(done.stdout.splitlines()[-1]))
                    print(kind, "  ".join(f"{name} {value:.2f} s" for name, value in found[-1].items()), flush=True)
        finally:
            server.terminate()
            server.wait()
    direct, prefect = (
        {name: statistics.median(run[name] for run in found) for name in found[0]} for found in seconds.values()
    )
    ratios = {
        "wall": prefect["wall"] / direct["wall"] - 1,
        "idle": (prefect["idle"] - direct["idle"]) / direct["wall"],
        "cpu": prefect["cpu"] / direct["cpu"] - 1,
    }
    print("orchestration costs " + ", ".join(f"{100 * ratio:.2f} % by {name}" for name, ratio in ratios.items()))
    print(json.dumps({"seconds": seconds, "cost": ratios}))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _wait_for_server(port: int, server: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + _SERVER_SECONDS
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
