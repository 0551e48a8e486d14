"""``python -m tests.faults``: run rounds of fault injection and print a table of the results."""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.faults.bench import Bench
from tests.faults.faults import FAULTS, list_cases
from tests.faults.flows import CURATE, PIPELINE, POSTTRAIN, TestedFlow
from tests.faults.rounds import Round, choose_case, run_round


def table(flow: TestedFlow, rounds: list[Round]) -> str:
    """Return a Markdown table with the number of rounds and of failures, by fault and by the stage that it hit."""
    columns = [*flow.stages, "after"]
    hits = Counter((round_.fault, round_.hit) for round_ in rounds)
    failed = Counter((round_.fault, round_.hit) for round_ in rounds if round_.problems)
    lines = ["| fault | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, fault in FAULTS.items():
        cells = []
        for stage in columns:
            failures = failed[name, stage]
            number = str(hits[name, stage] or ("–" if stage in fault.excluded or stage == "after" else 0))
            cells.append(f"{number} ({failures} failed)" if failures else number)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def list_excluded(flow: TestedFlow) -> str:
    """Return the excluded cases of a flow with their reasons."""
    return "\n".join(
        f"{name} in {stage}: excluded, {reason}"
        for name, fault in FAULTS.items()
        for stage, reason in fault.excluded.items()
        if stage in flow.stages
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    flows = parser.add_mutually_exclusive_group()
    flows.add_argument("--posttrain", action="store_true", help="the flow posttrain; default: the flow pipeline")
    flows.add_argument("--curate", action="store_true", help="the flow curate")
    parser.add_argument("--dask", action="store_true", help="runs on a Dask cluster, with their roots on S3")
    parser.add_argument("--rounds", type=int, help="default: each case once")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order and of the times")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--round", type=int, help="run only this round and print the output of its runs")
    parser.add_argument("--list", action="store_true", help="list the cases, and the excluded ones")
    options = parser.parse_args()
    if options.dask and options.posttrain:
        parser.error("--dask runs pipeline or curate; leave out --posttrain")
    flow = POSTTRAIN if options.posttrain else CURATE if options.curate else PIPELINE
    cases = list_cases(flow, options.dask)
    if options.list:
        print("\n".join(f"{name} in {stage}" for stage, name in cases), list_excluded(flow), sep="\n")
        return 0
    for stop in (signal.SIGINT, signal.SIGTERM):  # print the table also if a background job is stopped
        signal.signal(stop, signal.default_int_handler)
    count = len(cases) if options.rounds is None else options.rounds
    numbers = range(options.first, options.first + count) if options.round is None else [options.round]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as home:
        bench = Bench(Path(home), flow, options.dask)
        try:
            for number in numbers:
                started = time.monotonic()
                stage, name = choose_case(flow, options.seed, number, options.dask)
                rounds.append(result := run_round(bench, options.seed, number, stage, name))
                outcome = "; ".join(result.problems) or "passed"
                seconds = time.monotonic() - started
                print(f"{number}  {name} in {stage}, hit {result.hit}, {seconds:.0f} s: {outcome}", flush=True)
                if result.problems or options.round is not None:
                    print("    " + result.output.replace("\n", "\n    "), flush=True)
        except KeyboardInterrupt:
            print("stopped")
        finally:
            bench.close()
    failed = [result for result in rounds if result.problems]
    print(f"\n{table(flow, rounds)}\n\n{len(rounds)} rounds, {len(failed)} failed.")
    chosen = [name for name in ("dask", "posttrain", "curate") if getattr(options, name)]
    command = " ".join(["python -m tests.faults", *(f"--{name}" for name in chosen)])
    for result in failed:
        print(f"{command} --seed {options.seed} --round {result.number}    {'; '.join(result.problems)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
