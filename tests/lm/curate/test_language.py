"""Languages: by scripts that decide alone, without the extra, and as py3langid tells them."""

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.common.errors import UserError
from lm.curate import identify_language, pack_documents
from lm.curate.language import _load_model, identify_batch

BY_SCRIPT = {
    "ko": "안녕하세요. 오늘 날씨가 좋네요.",
    "ja": "今日はとても良い天気ですね。東京へ行きます。",
    "th": "สวัสดีครับ วันนี้อากาศดี",
    "el": "Καλημέρα, τι κάνεις σήμερα;",
    "he": "שלום, מה שלומך היום?",
    "ka": "გამარჯობა, როგორ ხარ?",
    "hy": "Բարեւ ձեզ, ինչպես եք:",
    "ta": "வணக்கம், எப்படி இருக்கிறீர்கள்?",
    "km": "សួស្តី តើអ្នកសុខសប្បាយទេ",
}


@pytest.fixture(scope="module")
def identifier() -> Any:
    """py3langid itself, the reference."""
    langid = pytest.importorskip("py3langid.langid", reason="py3langid is not installed")
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


@pytest.fixture
def without_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    _load_model.cache_clear()
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)


@pytest.mark.usefixtures("without_extra")
@pytest.mark.parametrize("code", BY_SCRIPT)
def test_a_script_of_one_language_decides_without_the_extra(code: str) -> None:
    assert identify_language(BY_SCRIPT[code]) == (code, 1.0)
    found, score = identify_language(BY_SCRIPT[code] + " ok")
    assert found == code and 0.8 < score < 1


@pytest.mark.usefixtures("without_extra")
@pytest.mark.parametrize(
    "text",
    [
        "Moby Dick is a whale.",
        "欢迎来到我们的网站",
        "中文里只有一个の字，别的都是中文。",
        "ἐν ἀρχῇ ἦν ὁ λόγος",
        "בְּרֵאשִׁית בָּרָא אֱלֹהִים",
        "Привет, мир",
    ],
)
def test_other_scripts_need_the_extra(text: str) -> None:
    with pytest.raises(UserError, match=r"pip install 'textmill\[languages\]'"):
        identify_language(text)


@pytest.mark.usefixtures("without_extra")
@pytest.mark.parametrize("text", ["", " ", "12 + 30 = 42", "🙂"])
def test_text_without_letters_has_no_language(text: str) -> None:
    assert identify_language(text) == ("und", 0.0)


@pytest.mark.usefixtures("identifier")
def test_languages_of_the_course() -> None:
    code, score = identify_language("Moby Dick; Or, The Whale. Call me Ishmael. Some years ago I went to sea.")
    assert code == "en" and 0.8 < score <= 1
    code, score = identify_language("欢迎来到我们的网站")
    assert code == "zh" and 0.9 < score <= 1


WORDS = [
    *("the whale", "la maison", "und dann", "está aquí", "привет", "мир", "नमस्ते", "مرحبا", "中文", "の", "E\u0301tait"),
    *("HELLO", "123", "...", "\n", "Ü", "x", "ğ", "dziękuję", "cảm ơn", "hvala", "хвала", "oʻzbek"),
]
texts = st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join)


@given(st.lists(texts, min_size=1, max_size=4))
def test_other_languages_are_those_of_the_library(identifier: Any, texts: list[str]) -> None:
    codes, scores = identify_batch(pack_documents(texts))
    expected = [identifier.classify(text) for text in texts]
    by_script = [place for place, code in enumerate(codes) if code in ("ja", "und")]
    for place in set(range(len(texts))) - set(by_script):
        ranks = [score for _, score in identifier.rank(texts[place])[:2]]
        assert np.isclose(scores[place], expected[place][1], rtol=1e-4)
        assert codes[place] == expected[place][0] or np.isclose(ranks[0], ranks[1], rtol=1e-4)
