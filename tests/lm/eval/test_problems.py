"""Tasks from files and from procedures."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from lm.common.errors import UserError
from lm.eval import get_reward, load_task, make_addition_task, make_reasoning_gym_task, read_task
from lm.eval.problems import R1_ZERO_PROMPT, Problem, problem_libraries, reward_libraries
from lm.text.rows import DamagedRows


def read(tmp_path: Path, name: str, *rows: dict[str, Any]) -> tuple[list[Problem], list[str]]:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    damaged = DamagedRows()
    return read_task(name, str(path), damaged).problems, [row.split(": ", 1)[1] for row in damaged.names]


def test_gsm8k(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": "It is 2.\n#### 1,002"}
    wrong = [{"question": "x", "answer": "2"}, {"question": "x"}, {"question": "x", "answer": "#### abc"}]
    assert read(tmp_path, "gsm8k", row, *wrong) == (
        [Problem("1+1?", "1002", row["answer"])],
        [
            "the answer has no #### before its final answer",
            "no texts named question and answer",
            "the final answer 'abc' is no number",
        ],
    )


def test_math(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"problem": "a?", "solution": r"so \boxed{\frac{1}{2}}"},
        {"problem": "b?", "answer": "3", "solution": 5},
        {"problem": "c?", "solution": "none"},
        {"problem": 4, "answer": "3"},
        {"problem": "d?", "answer": " "},
        {"problem": "e?", "solution": r"\boxed{}"},
    ]
    problems, reasons = read(tmp_path, "math", *rows)
    assert problems == [Problem("a?", r"\frac{1}{2}", rows[0]["solution"]), Problem("b?", "3")]
    assert reasons == [
        r"the solution has no \boxed answer",
        "no text named problem with a text named answer or solution",
        "the answer is blank",
        "the answer is blank",
    ]


def test_mmlu(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"question": "Which?", "options": ["red", "blue"], "answer": "B", "subject": "art"},
        {"question": "Which?", "choices": [1, 2, 3], "answer": 2},
        {"question": "Which?", "options": ["red"], "answer": "B"},
        {"question": "Which?", "options": [], "answer": "A"},
    ]
    problems, reasons = read(tmp_path, "mmlu", *rows)
    assert problems == [
        Problem("Which?\nA. red\nB. blue\nAnswer:", {"options": ["red", "blue"], "answer": "B"}, "B"),
        Problem("Which?\nA. 1\nB. 2\nC. 3\nAnswer:", {"options": ["1", "2", "3"], "answer": "C"}, "C"),
    ]
    assert reasons == [
        "the answer 'B' is none of the 1 options",
        "no question, 1 to 26 options (or choices) and answer",
    ]


def test_words(tmp_path: Path) -> None:
    row = {"prompt": "Use a, b.", "words": ["a", "b"], "response": "a b"}
    wrong = [{"prompt": "x", "words": words} for words in ([], [""], ["a", " "])]
    problems, reasons = read(tmp_path, "words", row, *wrong)
    assert problems == [Problem("Use a, b.", ["a", "b"], "a b")]
    assert reasons == ["no prompt with a list of words"] * 3


@pytest.mark.parametrize(("name", "file", "count"), [("gsm8k", "gsm8k_test", 1319), ("words", "words_valid", 271)])
def test_real_files_and_their_own_solutions(shared_data: Path, name: str, file: str, count: int) -> None:
    damaged = DamagedRows()
    task = read_task(name, str(shared_data / f"{file}.jsonl.xz"), damaged)
    assert len(task.problems) == count and not damaged.count
    reward = get_reward(task.reward)
    scores = [reward(problem.solution or "", problem.ground_truth)["reward"] for problem in task.problems]
    assert sum(scores) / count == (1.0 if name == "gsm8k" else pytest.approx(1.0, abs=0.01))


def test_addition() -> None:
    task = make_addition_task(300, seed=0)
    assert task.problems == make_addition_task(300, seed=0).problems != make_addition_task(300, seed=1).problems
    assert task.problems[:100] == make_addition_task(100, seed=0).problems
    for problem in task.problems:
        a, plus, b, equals = problem.prompt.split()
        assert (plus, equals) == ("+", "=") and 10 <= int(a) <= 999 and 10 <= int(b) <= 999
        assert problem.ground_truth == problem.solution == str(int(a) + int(b))
    reward = get_reward(task.reward)
    assert all(reward(f" {problem.solution}", problem.ground_truth)["reward"] == 1 for problem in task.problems)


def test_the_splits_of_addition_share_no_pair() -> None:
    train, test = (
        {problem.prompt for problem in make_addition_task(3000, seed=0, digits=(1, 2), split=split).problems}
        for split in ("train", "test")
    )
    assert not train & test and len(test) > 500
    assert len(make_addition_task(50, seed=3, digits=(3, 3)).problems) == 50


def test_reasoning_gym() -> None:
    pytest.importorskip("reasoning_gym", reason="has the tasks")
    task = make_reasoning_gym_task("simple_equations", 5, seed=1, max_terms=2)
    assert task.problems == make_reasoning_gym_task("simple_equations", 5, seed=1, max_terms=2).problems
    reward = get_reward(task.reward)
    for problem in task.problems:
        assert json.loads(json.dumps(problem.ground_truth)) == problem.ground_truth
        assert reward(problem.solution or "", problem.ground_truth)["reward"] == 1.0
    with pytest.raises(UserError, match="cannot make the data set 'no_such_set'"):
        make_reasoning_gym_task("no_such_set", 5, seed=1)
    with pytest.raises(UserError, match="cannot make the data set 'simple_equations'"):
        make_reasoning_gym_task("simple_equations", 5, seed=1, no_such_option=2)


def test_answers(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": [{"type": "text", "text": "1+1?"}]}]
    rows: list[dict[str, Any]] = [
        {"prompt": asked, "reward_model": {"ground_truth": "2", "style": "rule"}, "data_source": "x"},
        {"question": "1+1?", "answer": 2},
        {"problem": "1+1?", "answer": "2", "solution": "It is 2."},
        {"instruction": "Add.", "input": "1+1", "output": "2"},
        {"prompt": "1+1?", "ground_truth": ["2", "two"], "answer": "3"},
        {"prompt": [{"role": "system", "content": "Add."}, *asked], "answer": "2"},
        {"prompt": "1+1?", "answer": " "},
        {"text": "1+1?", "answer": "2"},
        {"prompt": " ", "answer": "2"},
    ]
    problems, reasons = read(tmp_path, "answers", *rows)
    assert problems == [
        Problem("1+1?", "2", "2"),
        Problem("1+1?", "2", "2"),
        Problem("1+1?", "2", "It is 2."),
        Problem("Add.\n\n1+1", "2", "2"),
        Problem("1+1?", ["2", "two"], "2"),
    ]
    assert reasons == [
        "prompt must be a text or one message of the user, to be a problem",
        "no ground_truth, answer, solution, output or completion that is a text or a number",
        "no prompt, question, problem or instruction",
        "the prompt is blank",
    ]
    reward = get_reward("exact")
    assert [reward(problem.solution or "", problem.ground_truth)["reward"] for problem in problems] == [1, 1, 0, 1, 1]


@pytest.mark.parametrize("seed", [0, 1, (1 << 31) - 1, (1 << 63) - 1])
def test_the_splits_of_reasoning_gym_have_seeds_that_numpy_takes(seed: int) -> None:
    pytest.importorskip("reasoning_gym", reason="has the tasks")
    train, test = (load_task("reasoning-gym:pool_matrix", [], split, 3, seed).problems for split in ("train", "test"))
    assert len({problem.prompt for problem in (*train, *test)}) == 6


@pytest.mark.parametrize("dataset", ["arc_agi", "rearc"])
def test_the_solution_of_a_grid_is_right(dataset: str) -> None:
    """These data sets compare the answer with tuples, and a ground truth is JSON, which has lists."""
    pytest.importorskip("reasoning_gym", reason="has the tasks")
    [problem] = make_reasoning_gym_task(dataset, 1, seed=5).problems
    reward = get_reward("reasoning_gym")
    assert reward(problem.solution or "", problem.ground_truth)["reward"] == 1.0
    assert reward("1 2\n3 4", problem.ground_truth)["reward"] < 0.1


def test_mistakes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"no task 'gsmk8' \(did you mean 'gsm8k'\?\); choose one of gsm8k, math, mmlu"):
        read_task("gsmk8", "x.jsonl", DamagedRows())
    for name in ("addition", "addition:1-3", "reasoning-gym:simple_equations"):
        with pytest.raises(UserError, match=f"The task {name} is generated; leave out the file x.jsonl"):
            load_task(name, ["x.jsonl"])
    with pytest.raises(UserError, match="has no usable row"):
        read(tmp_path, "gsm8k", {"question": "x"})
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"install textmill\[reasoning-gym\]"):
        make_reasoning_gym_task("simple_equations", 5, seed=1)


def test_the_r1_zero_prompt_takes_any_question() -> None:
    prompt = R1_ZERO_PROMPT.format(question="What is {x}?")
    assert "What is {x}?" in prompt and prompt.endswith("<think>")


def test_versions_of_the_libraries_that_decide_problems_and_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lm.eval.problems.metadata.version", lambda library: f"version of {library}")
    math, gym = ({name: f"version of {name}"} for name in ("math_verify", "reasoning_gym"))
    assert problem_libraries("reasoning-gym:dice") == gym
    assert problem_libraries("math") == problem_libraries("") == {}
    assert reward_libraries("math", []) == reward_libraries("gsm8k", ["exact", "r1_zero"]) == math
    assert reward_libraries("reasoning-gym:dice", []) == gym
    for task, rewards in (("math", ["exact"]), ("gsm8k", []), ("addition:1-2", []), ("", [])):
        assert reward_libraries(task, rewards) == {}


def test_a_missing_library_is_named_before_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(library: str) -> str:
        raise PackageNotFoundError(library)

    monkeypatch.setattr("lm.eval.problems.metadata.version", find_nothing)
    with pytest.raises(UserError, match=r"pip install 'textmill\[math\]'"):
        reward_libraries("gsm8k", ["r1_zero"])
    with pytest.raises(UserError, match=r"pip install 'textmill\[reasoning-gym\]'"):
        problem_libraries("reasoning-gym:dice")
