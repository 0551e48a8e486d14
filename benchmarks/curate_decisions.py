"""Compare the decisions of our rules with those of datatrove's filters, rule by rule.

``python -m benchmarks.curate_decisions PYTHON [--stories 5000] [--pages 1500]``. PYTHON is that of an environment with
datatrove, ``xxhash<4`` and spacy. Prints for each rule how many documents both remove, only ours and only datatrove's,
and the kinds of documents about which they differ. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np

from benchmarks.made_up_pages import make_pages
from benchmarks.texts import END, documents, stories
from lm.curate import RULES, RulesConfig, compute_figures, figure_of, pack_documents

_WORKER = Path(__file__).with_name("datatrove_filters.py")


def our_decisions(texts: list[str]) -> dict[str, set[int]]:
    """Return for each rule the places of the texts that it removes, whatever other rules do."""
    config = RulesConfig()
    figures = compute_figures(pack_documents(texts), config)
    removed = {}
    for rule in RULES:
        limit = asdict(config)[rule]
        if limit is not None:
            figure = figures[figure_of(rule)]
            removed[rule] = set(np.flatnonzero(figure < limit if "min_" in rule else figure > limit).tolist())
    # datatrove has one limit for both.
    removed["gopher_max_symbols"] = removed.pop("gopher_max_hashes") | removed.pop("gopher_max_ellipses")
    return removed


def their_decisions(python: str, texts: list[str]) -> dict[str, set[int]]:
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", encoding="utf-8") as file:
        file.writelines(json.dumps(text) + "\n" for text in texts)
        file.flush()
        command = [python, str(_WORKER), "decisions", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{python} cannot run datatrove's filters:\n{done.stderr[-2000:]}")
    return {rule: set(places) for rule, places in json.loads(done.stdout.splitlines()[-1]).items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python")
    parser.add_argument("--stories", type=int, default=5000)
    parser.add_argument("--pages", type=int, default=1500, help="made-up pages")
    parser.add_argument("--show", metavar="RULE", help="print the documents on which this rule differs")
    options = parser.parse_args()
    real = [part.removesuffix(END).decode().strip() for part in islice(documents(stories()), options.stories)]
    pages = [("story", text) for text in real] + [*make_pages(real[:1000], options.pages)]
    texts = [text for _, text in pages]
    ours, theirs = our_decisions(texts), their_decisions(options.python, texts)
    print(f"{len(texts):,} documents\n\n| rule | both remove | only ours | only datatrove's | differences |")
    print("| --- | ---: | ---: | ---: | --- |")
    rows = []
    for rule, mine in ours.items():
        other = theirs.get(rule, set())
        kinds = Counter(pages[place][0] for place in mine ^ other).most_common()
        numbers = [len(mine & other), len(mine - other), len(other - mine)]
        rows.append([rule, *numbers, kinds])
        differences = ", ".join(f"{kind} {count}" for kind, count in kinds)
        print(f"| `{rule}` |", *(f"{number} |" for number in numbers), f"{differences} |")
        if rule == options.show:
            for place in sorted(mine ^ other):
                print("ours" if place in mine else "datatrove's", pages[place])
    either, both = set[int]().union(*ours.values()), set[int]().union(*theirs.values())
    numbers = [len(either & both), len(either - both), len(both - either)]
    print("\nRemoved by any rule: {} by both, {} by ours only, {} by datatrove's only.".format(*numbers))
    print(json.dumps({"documents": len(texts), "rules": rows}))


if __name__ == "__main__":
    main()
