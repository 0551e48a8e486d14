"""What a plan says of groups of which some are cached and some depend on outputs that do not exist yet."""

from pathlib import Path

from flows.plan import DryRunExecutor
from tasks.runtime.output import Ref
from tests.helpers.roots import letters, materialize, run_context


def test_a_group_that_may_not_run_has_no_share_in_the_forecast(tmp_path: Path) -> None:
    """Of a pending output the content may stay the same, and then the group is cached."""
    run = run_context(tmp_path)
    cached = materialize(letters, run, "a", 3)
    executor = DryRunExecutor(run, None)
    outputs = executor.map(letters, "letters", ["a", "b", Ref("merge", "pending"), Ref("merge", "pending")], 3)
    assert outputs == [cached, *[Ref("letters", "pending")] * 3]
    assert executor.missing == {"letters": 0.25}
    assert executor.rows == [("letters", 'runs, 3 of 4 groups: text "a" → "b"')]
    executor.map(letters, "letters", ["a", "b"], Ref("merge", "pending"))
    assert executor.missing == {"letters": 1.0}, "an argument of all groups"
