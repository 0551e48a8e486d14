"""Measure the start of the command line: the help, a plan, and a run that finds everything cached.

``python -m benchmarks.start [--rounds 5] [--commit COMMIT]``. The time of a command is that of the whole process, over
the finished root of a small configuration. With ``--commit``, a checkout of that commit takes turns with this one, each
with its own root. Prints medians of wall and CPU seconds; the CPU seconds include child processes. The last line is
JSON.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from pathlib import Path

PROJECT = Path(__file__).parents[1]
_SMALL_CONFIG = [
    *("--model.context_length=16", "--model.d_model=16", "--model.num_layers=1", "--model.num_heads=2"),
    *("--model.d_ff=32", "--train.steps=4", "--train.warmup_steps=1", "--train.batch_size=2"),
    *("--train.sample_tokens=2", "--sample.max_new_tokens=3", "--execution.compile=false"),
]


def time_command(project: Path, root: Path, home: Path, *arguments: str) -> tuple[float, float]:
    """Run ``textmill`` of a checkout and return its (wall, CPU) seconds."""
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "XDG_"))},
        "HOME": str(home),
        "PYTHONPATH": str(project),
    }
    # The entry point is another module in other commits.
    scripts = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, function = scripts["textmill"].split(":")
    options = ["--root", str(root), *_SMALL_CONFIG] if arguments[0] in ("run", "plan") else []
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; from {module} import {function}; sys.exit({function}())",
            *arguments,
            *options,
        ],
        cwd=project,
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="commit to compare with this checkout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        projects = {"this": PROJECT}
        if options.commit:
            projects["before"] = Path(folder, "before")
            git = ["git", "-C", str(PROJECT), "worktree"]
            subprocess.run([*git, "add", "--detach", str(projects["before"]), options.commit], check=True)
        try:
            seconds: dict[str, list[tuple[float, float]]] = defaultdict(list)
            for name, project in projects.items():
                time_command(project, Path(folder, name, "root"), Path(folder), "run")
            for _ in range(options.rounds):
                for words in (["--help"], ["plan"], ["run"]):
                    for name, project in projects.items():
                        pair = time_command(project, Path(folder, name, "root"), Path(folder), *words)
                        seconds[f"{words[0]} {name}"].append(pair)
        finally:
            if options.commit:
                subprocess.run([*git, "remove", "--force", str(projects["before"])], check=True)
    medians = {
        name: {"wall": statistics.median(wall for wall, _ in pairs), "cpu": statistics.median(cpu for _, cpu in pairs)}
        for name, pairs in seconds.items()
    }
    for name, median in medians.items():
        print(f"{name:<14} {median['wall']:6.2f} s  CPU {median['cpu']:6.2f} s")
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
