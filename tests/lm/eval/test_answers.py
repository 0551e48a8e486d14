"""Extraction of answers, also from long and hostile output."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.eval import parse_gsm8k_response, parse_mmlu_response
from lm.eval.answers import extract_boxed, extract_r1_zero
from tests.helpers.examples import examples
from tests.helpers.limits import TIMEOUT_SCALE

EXAMPLE = {
    "subject": "geography",
    "question": "How many rivers flow through the town?",
    "options": ["20", "2", "200", "nobody knows"],
    "answer": "B",
}


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is B. Two rivers meet there.", "B"),
        ("The correct answer is 20000 rivers.", None),
        ("Answer: (C)", "C"),
        ("The answer is **D**.", "D"),
        ("Is the answer A? No, the answer is C.", "C"),
        ("I choose option B because of the map", "B"),
        ("B", "B"),
        (" (b", None),
        ("B. 2", "B"),
        ("A river flows there.", None),
        ("Nobody knows.", "D"),
        ("200", "C"),
        ("It must be C.", "C"),
        ("It is B. or C.", None),
        ("The answer is Eel", None),
        ("The answer is Both", None),
        ("E.", None),
        ("", None),
        ("**B**", "B"),
        ("_B_", None),
        ("**B.** 2", "B"),
        ("I choose **B**", "B"),
        ("Is it A, or B?", None),
        (r"\boxed{B}", "B"),
        (r"A and C are wrong: $\boxed{\text{(B)}}$.", "B"),
        (r"The answer is A. Wait: \boxed{B}", "B"),
        (r"So \boxed{200}", "C"),
        (r"\boxed{x}, so the answer is D", "D"),
        (r"\boxed{A good river}", None),
        ("A good river flows there", None),
        ("**A good** river", None),
        ("A river fits each option. A town has few, so I pick C.", "C"),
        ("I do not know the answer. A guess would be C.", "C"),
        ("The answer is: A combination of both, that is D.", "D"),
        ("### Answer\n\nA combination of both, that is D.", "D"),
        ("### Answer\n\nA\nbecause of the map", "A"),
        ("Answer: A because of the map", "A"),
        ("Answer: B because of the map", "B"),
        ("Option A fits the map", "A"),
        ("The answer is C. Option A is wrong, and option B too.", "C"),
        ("The answer is option C, as option A is wrong.", "C"),
        ("I choose **Option (C)**, not choice D.", "D"),
        ("The answer is b", "B"),
        ("the answer is (c).", "C"),
        ("Option b fits the map", "B"),
        ("Answer: a", "A"),
        ("The answer is a.", "A"),
        ("The answer is a river", None),
        ("The answer is not b", None),
        ("I choose B because 20", "B"),
        ("I would go with D here", "D"),
        ("The answer is 20", "A"),
        ("The answer is 2.", "B"),
        ("Answer: Nobody knows", "D"),
        ("The answer is 20 because of the map", "A"),
        ("The answer is 20.5", None),
        ("The answer is 20,000 rivers", None),
        (r"The answer is $\text{B}$ because", "B"),
        (r"The answer is $\mathbf{(D)}$, since", "D"),
        ("The answer is A. Wait, no: it is B.", "B"),
        ("The answer is A. Actually, it should be C.", "C"),
        ("Answer: D. No, B.", "B"),
        ("The answer is A. Wait, B is right.", "B"),
        ("The answer is B. No, it is not A", "B"),
        ("The answer is A. No other option fits.", "A"),
        ("Answer: A or B?", None),
        ("The answer is C/D", None),
        ("The answer is A and C", None),
        ("Answer: A or option C", None),
        ("The answer is A, not B", "A"),
        ("The answer is A, B, or C?", None),
        ("Answer: A, B and D", None),
        ("A or B?", None),
        ("It is both B and C.", None),
        ("b", "B"),
        (" (c).", "C"),
        ("a", "A"),
        ("B is the correct answer", "B"),
        ("I think that D is right", "D"),
        ("B is the wrong answer", None),
        ("A. Wait, no: it is B.", "B"),
        ("Answer: A. Hmm, actually B", "B"),
        ("Answer: A. Hmm, actually I do", "A"),
        ("Is the answer A or B? I choose B.", "B"),
    ],
)
def test_multiple_choice(output: str, letter: str | None) -> None:
    assert parse_mmlu_response(EXAMPLE, output) == letter


def test_number_of_options() -> None:
    five = {"choices": ["a1", "b1", "c1", "d1", "e1"]}
    assert parse_mmlu_response(five, "The answer is E.") == "E"
    assert parse_mmlu_response({}, "The answer is D.") == "D"
    assert parse_mmlu_response({"options": ["x", "x"]}, "x") is None


def test_the_text_of_an_option_counts_with_and_without_its_period() -> None:
    for option in ("It rises.", "It rises", " it rises. "):
        for output in ("It rises.", "it rises", "\tIt rises.\r\n"):
            assert parse_mmlu_response({"options": ["It falls.", option]}, output) == "B"
    points = {"options": [".5", "5", "."]}
    assert [parse_mmlu_response(points, output) for output in (".5", "5.", ".", "")] == ["A", "B", "C", None]


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("She sold 48/2 = 24 clips in May, so 48+24 = 72 in all.", "72"),
        ("She sold seventy-two.", None),
        ("#### 1,234", "1234"),
        ("It costs $1,234.50.", "1234.50"),
        ("The sum is -7", "-7"),
        ("5-3", "3"),
        ("(2)-1", "1"),
        ("x = .5", ".5"),
        ("12,34", "34"),
        ("18 eggs, 3 left, ", "3"),
        ("", None),
        ("so \u22125", "-5"),
        ("7\u22125", "5"),
        ("It lost -$5.", "-5"),
        ("\u2212\\$1,250.50", "-1250.50"),
        ("$20-$5", "5"),
        ("$-5", "-5"),
        (r"\boxed{1{,}000}", "1000"),
        (r"1\,000\,000.5", "1000000.5"),
        ("1{,}00", "00"),
    ],
)
def test_gsm8k(output: str, number: str | None) -> None:
    assert parse_gsm8k_response(output) == number


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{42}.", "42"),
        (r"\boxed{1} or \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{}", ""),
        (r"\boxed{1", None),
        (r"\boxed 1", None),
        ("42", None),
    ],
)
def test_boxed(text: str, content: str | None) -> None:
    assert extract_boxed(text) == content


@examples(200)
@given(st.text("ab{}", max_size=12), st.text("ab{}", max_size=12))
def test_boxed_braces_are_balanced(before: str, content: str) -> None:
    depths = [content[:i].count("{") - content[:i].count("}") for i in range(len(content) + 1)]
    is_balanced = min(depths) == 0 == depths[-1]
    assert (extract_boxed(before + "\\boxed{" + content + "}") == content) is is_balanced


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("I add.</think> <answer>4</answer>", "4"),
        ("<think>I add.</think>\n<answer> 4 </answer>\n", "4"),
        ("</think><answer>4</answer>", "4"),
        ("</think> \t\r\n\n <answer>4</answer> bye", "4"),
        ("</think> <answer>3</answer> wait </think> <answer>4</answer>", "4"),
        ("</think> so <answer>4</answer>", None),
        ("<answer>4</answer>", None),
        ("</think> <answer>4", None),
        ("</think> <answer></answer>", ""),
        ("4", None),
    ],
)
def test_r1_zero(response: str, answer: str | None) -> None:
    assert extract_r1_zero(response) == answer


@pytest.mark.parametrize(
    "output",
    [
        *("{" * 100_000, "\\boxed{" * 15_000, "1," * 50_000, "-" * 100_000, "A" * 100_000, "(" * 100_000),
        *("</think>" + " " * 99_000, "</think> <answer>" * 5_000, "</think>   " * 9_000),
        *("answer 20" * 10_000, "wait, " * 10_000, "A or " * 10_000, "\\text{" * 10_000),
        *("answer is " * 10_000, "answer" + " " * 99_000, "A" + "*" * 99_000 + "b"),
    ],
    ids=lambda text: text[:12],
)
def test_hostile_output_takes_little_time(output: str) -> None:
    start = time.monotonic()
    parse_gsm8k_response(output), parse_mmlu_response(EXAMPLE, output), extract_boxed(output), extract_r1_zero(output)
    assert time.monotonic() - start < 2 * TIMEOUT_SCALE
