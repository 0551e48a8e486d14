"""The decisions of the rules: those of a plain reference, and one document for each rule that only this rule fails."""

from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import RULES, RulesConfig, compute_figures, first_failed_rule, gopher_quality_filter, pack_documents
from lm.kernels.curation.document_counts import LineLimits
from tests.helpers.document_counts import count_document
from tests.lm.curate.test_counts import documents

SENTENCES = (
    "The keeper of the light climbed up to the lamp and looked over the water.",
    "Nobody had seen a ship that autumn, but he counted waves with great care.",
    "A gull sat upon the railing and watched him work for most of the morning.",
    "Later it began to rain, so they went inside and drank a cup of hot tea.",
    "When night fell over the bay, everyone could see how bright it burned.",
    "In the village below, children pointed at it and asked for another story.",
)
GOOD = "\n".join(SENTENCES)
OFF = RulesConfig(**dict.fromkeys(RULES))  # type: ignore[arg-type]


def decide(text: str, config: RulesConfig) -> str | None:
    """Return the first rule that a text fails, in plain Python."""
    limits = LineLimits(
        config.fineweb_short_line_characters,
        config.c4_min_words_per_line,
        config.c4_max_word_characters,
        config.c4_end_marks,
    )
    counts = count_document(text, limits)

    def share(count: str, of: int) -> float:
        return counts[count] / of if of else 0.0

    figures: dict[str, float] = {
        "characters": counts["characters"],
        "gopher_words": counts["words"],
        "gopher_mean_word_length": share("word_characters", counts["words"]),
        "gopher_hashes": share("hashes", counts["tokens"]),
        "gopher_ellipses": share("ellipses", counts["tokens"]),
        "gopher_bullet_lines": share("bullet_lines", counts["lines"]),
        "gopher_ellipsis_lines": share("ellipsis_lines", counts["lines"]),
        "gopher_alphabetic_words": share("alphabetic_words", counts["tokens"]),
        "gopher_stop_words": counts["stop_words"],
        "gopher_duplicate_paragraphs": share("duplicate_paragraphs", counts["paragraphs"]),
        "gopher_duplicate_paragraph_characters": share("duplicate_paragraph_characters", len(text)),
        "gopher_duplicate_lines": share("duplicate_lines", counts["filled_lines"]),
        "gopher_duplicate_line_characters": share("duplicate_line_characters", len(text)),
        **{f"gopher_top_{n}_gram": share(f"top_{n}_gram_characters", len(text)) for n in (2, 3, 4)},
        **{f"gopher_duplicate_{n}_grams": share(f"duplicate_{n}_gram_characters", len(text)) for n in range(5, 11)},
        "c4_lorem_ipsum_lines": counts["c4_lorem_ipsum_lines"],
        "c4_curly_bracket_lines": counts["c4_curly_bracket_lines"],
        "c4_sentences": counts["c4_sentences"],
        "fineweb_punctuated_lines": share("punctuated_lines", counts["filled_lines"]),
        "fineweb_short_lines": share("short_lines", counts["filled_lines"]),
        "fineweb_duplicate_line_characters": share("duplicate_line_characters", len(text.replace("\n", ""))),
        "fineweb_line_feeds": share("line_feeds", counts["tokens"]),
    }
    for rule in RULES:
        limit = asdict(config)[rule]
        if limit is not None and "min_" in rule and figures[rule.replace("min_", "", 1)] < limit:
            return rule
        if limit is not None and "max_" in rule and figures[rule.replace("max_", "", 1)] > limit:
            return rule
    return None


def failed_rules(texts: list[str], config: RulesConfig) -> list[str | None]:
    places = first_failed_rule(compute_figures(pack_documents(texts), config), config)
    return [RULES[place] if place >= 0 else None for place in places]


@st.composite
def configs(draw: st.DrawFn) -> RulesConfig:
    """Rules of which some are off, with limits near to what short texts have."""
    config = asdict(RulesConfig())
    for rule in RULES:
        if draw(st.booleans()):
            config[rule] = None
        elif isinstance(config[rule], int):
            config[rule] = draw(st.integers(1, 8))
    return RulesConfig(**config)


@pytest.mark.slow
@given(st.lists(documents, max_size=4), configs())
def test_decisions_equal_the_reference(texts: list[str], config: RulesConfig) -> None:
    assert failed_rules(texts, config) == [decide(text, config) for text in texts]


def repeat_grams(n: int) -> str:
    """Return a text of which n words come again and again, each time after another word."""
    return " ".join(f"w{i} " + " ".join(f"and{k}" for k in range(n)) for i in range(50))


FAILING = {
    "gopher_min_words": "The cat and the dog.",
    "gopher_max_words": "the sea " * 50_001,
    "gopher_min_mean_word_length": "to be of " * 40,
    "gopher_max_mean_word_length": "incomprehensibilities of " * 40,
    "gopher_max_hashes": "# the word with it " * 40,
    "gopher_max_ellipses": "the word … and " * 40,
    "gopher_max_bullet_lines": "- the word\n• and\n" * 40,
    "gopher_max_ellipsis_lines": "the word...\nand\n" * 40,
    "gopher_min_alphabetic_words": "the word 12 and 3 ! 4 " * 40,
    "gopher_min_stop_words": "the " + "cats purr " * 40,
    "gopher_max_duplicate_paragraphs": f"{GOOD}\n\n" + "a.\n\n" * 4,
    "gopher_max_duplicate_paragraph_characters": f"{GOOD}\n\n{SENTENCES[0]}\n\n{SENTENCES[0]}\n\n" * 2,
    "gopher_max_duplicate_lines": f"{GOOD}\n" + "a.\n" * 5,
    "gopher_max_duplicate_line_characters": f"{GOOD}\n{GOOD}",
    "gopher_max_top_2_gram": "the cat " * 30,
    "gopher_max_top_3_gram": "the cat of " * 30,
    "gopher_max_top_4_gram": "the cat of it " * 30,
    **{f"gopher_max_duplicate_{n}_grams": repeat_grams(n) for n in range(5, 11)},
    "c4_max_lorem_ipsum_lines": f"{GOOD}\nThis is Lorem Ipsum again.",
    "c4_max_curly_bracket_lines": f"{GOOD}\nif (x) {{ return; }} is code.",
    "c4_min_sentences": GOOD.replace(".\n", "\n"),
    "fineweb_min_punctuated_lines": GOOD.replace(".", ""),
    "fineweb_max_short_lines": GOOD.replace(" ", "\n"),
    "fineweb_max_duplicate_line_characters": f"{GOOD}\n{SENTENCES[2]}",
    "fineweb_max_line_feeds": GOOD.replace(" ", "\n\n"),
}


@pytest.mark.parametrize("rule", FAILING)
def test_a_rule_alone_fails_a_document_and_keeps_a_good_one(rule: str) -> None:
    config = replace(OFF, **{rule: asdict(RulesConfig())[rule]})
    assert failed_rules([FAILING[rule], GOOD], config) == [rule, None]


def test_each_rule_that_is_on_by_default_has_a_failing_document() -> None:
    assert FAILING.keys() == {rule for rule in RULES if asdict(RulesConfig())[rule] is not None}


def test_good_text_passes_all_rules_and_the_first_failed_one_is_the_reason() -> None:
    assert failed_rules([GOOD, "{ }", ""], RulesConfig()) == [None, "gopher_min_words", "gopher_min_words"]
    assert failed_rules([GOOD], RulesConfig(min_characters=10**6)) == ["min_characters"]
    assert failed_rules([GOOD], RulesConfig(max_characters=10)) == ["max_characters"]


def test_no_documents_have_no_reasons() -> None:
    assert failed_rules([], RulesConfig()) == []


@pytest.mark.parametrize(
    ("option", "value"), [("gopher_min_words", -1), ("c4_end_marks", 3), ("gopher_max_hashes", "a")]
)
def test_a_bad_limit_is_named(option: str, value: object) -> None:
    with pytest.raises(UserError, match=rf"rules\.{option} is "):
        RulesConfig(**{option: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "is_good"),
    [
        (GOOD, True),
        ("Fifty words need more than this line.", False),
        ("Human " * 100_000, True),
        ("Human " * 100_001, False),
        ("The be " * 60, False),
        ("incomprehensible longitudinal " * 60, False),
        ("This line goes on\nThis line stops here\n" * 30 + "This line breaks off...\n" * 25, True),
        ("This line goes on\nThis line stops here\n" * 30 + "This line breaks off...\n" * 26, False),
        ("word " * 80 + "2026 " * 20, True),
        ("word " * 80 + "2026 " * 21, False),
    ],
)
def test_the_filter_of_the_course(text: str, is_good: bool) -> None:
    assert gopher_quality_filter(text) is is_good
