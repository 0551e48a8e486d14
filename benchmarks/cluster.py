"""Compare count and encode in two Dask workers, in two threads and in one: ``python -m benchmarks.cluster``.

All run on this machine, with a directory as root, and report to a Prefect server. The workers have one thread each and
are warm: they have run a small text before. The text is stories and Python sources, repeated. In each round, the three
run one after the other; the figures are medians of the rounds.

Prints the seconds of ``count`` and ``encode`` and the wall time of the whole run, then the two ratios as JSON:
``speed_up_ratio``, the speed-up of the workers over one thread divided by that of two threads, and ``wall_ratio``, the
wall time with Dask divided by that with two threads.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

from benchmarks.chunks import PROJECT, new_home, server
from benchmarks.orchestration import free_port
from benchmarks.texts import mixed, take_bytes

_TEXTMILL = [sys.executable, "-c", "from textmill.cli.main import main; raise SystemExit(main())"]
_CASES = {"one thread": ("threads", 1), "two threads": ("threads", 2), "dask": ("dask", 2)}


@contextmanager
def workers(environment: dict[str, str], folder: Path) -> Iterator[str]:
    """Start a Dask scheduler and two workers with one thread each. Yield the address of the scheduler."""
    from distributed import Client

    address = f"tcp://127.0.0.1:{free_port()}"
    scheduler = ["dask_scheduler", "--host", "127.0.0.1", "--port", address.rpartition(":")[2], "--no-dashboard"]
    worker = ["dask_worker", address, "--nthreads", "1", "--no-nanny", "--no-dashboard"]
    processes = []
    with (folder / "dask.log").open("wb") as log:
        for module, *options in (scheduler, worker, worker):
            command = [sys.executable, "-m", f"distributed.cli.{module}", *options]
            processes.append(subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=log, stderr=log))
    try:
        with Client(address, timeout=60, set_as_default=False) as client:
            client.wait_for_workers(2, timeout=60)
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run(
    environment: dict[str, str], root: Path, corpus: Path, runner: str, threads: int, address: str
) -> dict[str, float]:
    """Run the pipeline up to ``encode``. Return the seconds of count and encode, and of the whole run."""
    command = [*_TEXTMILL, "run", "--root", str(root), "--until", "encode"]
    command += ["--data.train", json.dumps([str(corpus)]), "--tokenizer.vocab_size", "10000"]
    command += ["--execution.runner", runner, "--execution.threads", str(threads), "--execution.shared_root", "true"]
    command += ["--execution.address", address] if runner == "dask" else []
    started = time.perf_counter()
    process = subprocess.run(command, cwd=PROJECT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr)
    wall = time.perf_counter() - started
    stages = json.loads((root / "runs" / "latest.json").read_text())["stages"]
    return {"wall": wall, **{stage: stages[stage]["seconds"] for stage in ("count", "encode")}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in _CASES}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        small, large = folder / "small.txt", folder / "large.txt"
        small.write_bytes(b"".join(take_bytes(mixed(), 1_000_000)))
        block = b"".join(take_bytes(mixed(), 200_000_000))
        with large.open("wb") as file:
            file.writelines(take_bytes(cycle([block]), options.megabytes * 1_000_000))
        environment = new_home(folder / "home")
        with server(environment) as reporting, workers(reporting, folder) as address:
            run(reporting, folder / "warm", small, "dask", 2, address)
            for number in range(options.rounds):
                for case, (runner, threads) in _CASES.items():
                    root = folder / f"root-{number}-{runner}-{threads}"
                    results[case].append(run(reporting, root, large, runner, threads, address))
                    print(f"{case}: {json.dumps(results[case][-1])}", flush=True)
                    shutil.rmtree(root)
    median = {
        case: {
            "wall": statistics.median(result["wall"] for result in runs),
            "work": statistics.median(result["count"] + result["encode"] for result in runs),
        }
        for case, runs in results.items()
    }
    one, two, dask = (median[case] for case in _CASES)
    ratios = {"speed_up_ratio": two["work"] / dask["work"], "wall_ratio": dask["wall"] / two["wall"]}
    print(json.dumps({**median, "threads_speed_up": one["work"] / two["work"], **ratios}))


if __name__ == "__main__":
    main()
