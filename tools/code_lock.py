"""Accept the edits of the stages' code, or raise stages whose output changes.

``python -m tools.code_lock`` lists the edited modules and their stages. ``… accept`` writes their digests to the lock
file ``tasks/runtime/code_versions.json``: the output is the same, so nothing reruns. ``… raise STAGE …`` also makes the
digests of these stages their versions. So two branches that raise a stage for different edits never share a key.
"""

import argparse
import importlib
import json
import pkgutil
import sys
from typing import Any

from lm.common.errors import did_you_mean
from tasks.runtime import code_version
from tasks.runtime.stage import Stage


def current_lock() -> dict[str, dict[str, Any]]:
    """Return the lock for the present code: its digests, and the versions of the lock file. The version of a new stage
    is its digest."""
    locked = code_version.read_lock()["stages"]
    stages: dict[str, dict[str, Any]] = {}
    modules: dict[str, str] = {}
    for info in pkgutil.iter_modules([str(code_version.PROJECT / "tasks")]):
        module = importlib.import_module(f"tasks.{info.name}")
        for stage in vars(module).values():
            if isinstance(stage, Stage) and stage.body.__module__ == module.__name__:
                version = locked.get(stage.name, {"version": stage.code_digest})["version"]
                stages[stage.name] = {"version": version, "digest": stage.code_digest}
                modules |= code_version.module_digests(stage.modules)
    return {"stages": dict(sorted(stages.items())), "modules": dict(sorted(modules.items()))}


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if ``show`` finds edited code, and 2 for a mistake in the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.code_lock",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", nargs="?", choices=["show", "accept", "raise"], default="show")
    parser.add_argument("stages", nargs="*", help="with raise: the stages whose output changes")
    options = parser.parse_args(arguments)
    now, lock = current_lock(), code_version.read_lock()
    if (options.action == "raise") != bool(options.stages):
        print("raise needs the stages whose output changes; show and accept take none.", file=sys.stderr)
        return 2
    for name in options.stages:
        if name not in now["stages"]:
            print(f"There is no stage {name!r}{did_you_mean(name, now['stages'])}.", file=sys.stderr)
            return 2
    changed = {name for name, _ in now["modules"].items() ^ lock["modules"].items()}
    for name in sorted(changed):
        print(f"{name}: {'edited' if name in lock['modules'] and name in now['modules'] else 'new or gone'}")
    changed_stages = [name for name, stage in now["stages"].items() if stage != lock["stages"].get(name)]
    if changed_stages:
        print(f"Stages with edited code: {', '.join(changed_stages)}")
    if options.action == "show":
        is_edited = changed or changed_stages
        print("Accept these edits, or raise stages: see --help." if is_edited else "No module differs from the lock.")
        return 1 if is_edited else 0
    for name in options.stages:
        stage = now["stages"][name]
        if stage["version"] == stage["digest"]:
            print(f"{name} was last raised with this code. Its version stays.", file=sys.stderr)
        stage["version"] = stage["digest"]
        print(f"{name}: version {stage['version'][:12]}")
    code_version.LOCK.write_text(json.dumps(now, indent=1) + "\n", encoding="utf-8")
    print(f"{code_version.LOCK} is written.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
