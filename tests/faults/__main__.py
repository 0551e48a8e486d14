"""``python -m tests.faults``: play rounds, and show a table of them."""

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from tests.deployed import STAGES
from tests.faults.bench import Bench
from tests.faults.faults import FAULTS, pairs
from tests.faults.rounds import Round, drawn, play


def table(rounds: list[Round]) -> str:
    """Rounds by the fault and the stage that it really hit, in Markdown; where some failed, how many."""
    columns = [*STAGES, "after"]
    hits = Counter((one.fault, one.hit) for one in rounds)
    failed = Counter((one.fault, one.hit) for one in rounds if one.wrong)
    lines = ["| fault | " + " | ".join(columns) + " |", "| --- |" + " ---: |" * len(columns)]
    for name, fault in FAULTS.items():
        cells = []
        for stage in columns:
            bad = failed[name, stage]
            number = str(hits[name, stage] or ("–" if stage in fault.not_in or stage == "after" else 0))
            cells.append(f"{number} ({bad} failed)" if bad else number)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def senseless() -> str:
    """What is not run, and why."""
    return "\n".join(
        f"{name} in {stage}: not run, as {why}" for name, fault in FAULTS.items() for stage, why in fault.not_in.items()
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--rounds", type=int, default=len(pairs()), help="how many; default: each pair once")
    parser.add_argument("--seed", type=int, default=0, help="of the order and of the moments")
    parser.add_argument("--first", type=int, default=0, help="number of the first round")
    parser.add_argument("--round", type=int, help="play this one alone, and show all that its runs say")
    parser.add_argument("--list", action="store_true", help="name the pairs of stage and fault, and those not run")
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name} in {stage}" for stage, name in pairs()), senseless(), sep="\n")
        return 0
    for number in (signal.SIGINT, signal.SIGTERM):  # in a shell's background too, it ends with the table
        signal.signal(number, signal.default_int_handler)
    numbers = range(options.first, options.first + options.rounds) if options.round is None else [options.round]
    rounds: list[Round] = []
    with tempfile.TemporaryDirectory(prefix="faults-") as home:
        bench = Bench(Path(home))
        try:
            for number in numbers:
                started = time.monotonic()
                stage, name = drawn(options.seed, number)
                rounds.append(one := play(bench, options.seed, number, stage, name))
                fate = "; ".join(one.wrong) or "well"
                print(
                    f"{number}  {name} in {stage}, hit {one.hit}, {time.monotonic() - started:.0f} s: {fate}",
                    flush=True,
                )
                if one.wrong or options.round is not None:
                    print("    " + one.said.replace("\n", "\n    "), flush=True)
        except KeyboardInterrupt:
            print("stopped")
        finally:
            bench.close()
    failed = [one for one in rounds if one.wrong]
    print(f"\n{table(rounds)}\n\n{len(rounds)} rounds, {len(failed)} failed.")
    for one in failed:
        print(f"python -m tests.faults --seed {options.seed} --round {one.number}    {'; '.join(one.wrong)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
