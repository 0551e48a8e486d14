"""The report of ``benchmarks.tokenizer``: a table, and a line of JSON."""

import importlib.util
import json
import os
import platform
import re
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

MODULES = {
    "gigatoken": "gigatoken",
    "tiktoken": "tiktoken",
    "huggingface": "tokenizers",
    "rustbpe": "rustbpe",
    "quicktok": "quicktok",
    "fastokens": "fastokens",
    "tokie": "tokie",
    "kitoken": "kitoken",
}
PACKAGES = {"quicktok": "quicktok-v1"}  # names that differ from those of the modules


@dataclass
class Results:
    """What the sections have measured."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    ratios: dict[str, float] = field(default_factory=dict)
    checks: dict[str, bool] = field(default_factory=dict)
    """Whether a peer has the result of ours."""
    extra: dict[str, Any] = field(default_factory=lambda: {"memory_mb": {}, "adversarial": {}, "merges": {}})
    notes: list[str] = field(default_factory=list)


def print_report(results: Results, with_table: bool) -> None:
    """Print the table and the JSON line."""
    machine = describe_machine()
    ratios = {name: round(value, 3) for name, value in results.ratios.items()}
    notes = list(dict.fromkeys(results.notes))
    if with_table:
        columns = {"mb_per_s": "8.1f", "wall": "8.3f", "cpu": "8.3f", "memory_mb": "9.0f", "runs": "4"}
        print(f"{'job':6} {'text':26} {'library':15} threads     MB/s   wall s    CPU s peak MB runs")
        for row in results.rows:
            cells = (format(row[name], form) for name, form in columns.items())
            print(f"{row['job']:6} {row['text']:26} {row['library']:15} {row['threads']:7}", *cells)
        checks = {name: "equal" if equal else "NOT EQUAL" for name, equal in results.checks.items()}
        figures = checks | ratios
        for group, values in results.extra.items():
            figures |= {f"{group} {name}": value for name, value in values.items()}
        for name, value in (figures | machine).items():
            print(f"{name:45} {value}")
        print(*notes, sep="\n")
    result = {
        "ratios": ratios,
        "equal": bool(results.checks) and all(results.checks.values()),
        "checks": results.checks,
    }
    print(json.dumps(result | results.extra | {"rows": results.rows, "notes": notes, "machine": machine}))


def describe_machine() -> dict[str, Any]:
    """Return the processor and the versions of the libraries."""
    cpu_info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.+)", cpu_info)
    modules = filter(importlib.util.find_spec, ("numpy", "numba", "pyarrow", *MODULES.values()))
    versions = {name: metadata.version(PACKAGES.get(name, name)) for name in modules}
    cpu = model[1] if model else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "python": platform.python_version(), **versions}
