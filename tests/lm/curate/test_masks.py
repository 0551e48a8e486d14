"""The masks of the kernel equal those of the regular expressions, and those of the course."""

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lm.curate import mask_emails, mask_ips, mask_phone_numbers, pack_documents
from lm.curate.config import PersonalData
from lm.curate.masks import MASKS, PATTERNS, mask_batch

PIECES = {
    "email": [
        *(
            "ann",
            "b.c",
            "x_y",
            "%+",
            "-",
            "@",
            "@@",
            ".",
            "..",
            "com",
            "co.uk",
            "example",
            "d-e",
            "1",
            "a1",
            "é",
            "日本",
            " ",
        ),
        *("'", ",", "\n", "ann@example.com", "bob.smith+tag@mail.example.co.uk", "a@b.c1", "a@b-.com", "a@1.2.3.4"),
    ],
    "phone": [
        *("283", "182", "3829", "83", "1", "+1", "+", "(283)", "(", ")", "-", " ", ".", ",", "/", "_", "a", "é", "０"),
        *("2831823829", "(283)-182-3829", "283-182-3829", "(283) 182 3829", "+1 283.182.3829", "12831823829", "\n"),
    ],
    "ip": [
        *(
            "0",
            "1",
            "01",
            "25",
            "255",
            "256",
            "999",
            ".",
            "..",
            "192.0.2.146",
            "10.0.0",
            "v",
            "_",
            "é",
            "٣",
            ":80",
            " ",
        ),
        *("-", ",", "/", "\n", "1.2.3.4.5"),
    ],
}


EDGES = ["", " ", ".", "-", "_", "a", "7", ".7", "-7", "7.", "7-", "é", "+", "(", "@", ",", "/", "'"]
SHAPED = {  # what is nearly right, which lists of pieces seldom are
    "email": [
        ["a", "a.b", "a..b", ".a", "a.", "%_+-", "é", ""],
        ["@"],
        ["b", "b-c", "b-", "-b", "1"],
        [".", "..", ""],
        ["c", "co", "c1", "co-", "co-c", "c-d.co", "co.c", "co.uk", "co.1"],
    ],
    "phone": [
        ["", "+", "1", "+1", "11"],
        ["", "-", " ", ".", "--"],
        ["283", "(283)", "183", "(283", "28", "(083)"],
        ["", "-", " ", ".", ") "],
        ["182", "18"],
        ["", "-", " ", ".", "/"],
        ["3829", "382", "38299"],
    ],
    "ip": [[octet + dot for octet in ["0", "7", "25", "255", "256", "007", "0007"] for dot in [".", ".", ".."]]] * 3
    + [["1", "255", "256", "0255"]],
}


def shaped(kind: str) -> st.SearchStrategy[str]:
    return st.tuples(st.sampled_from(EDGES), *map(st.sampled_from, SHAPED[kind]), st.sampled_from(EDGES)).map("".join)


def replace_by_pattern(text: str, kind: PersonalData) -> tuple[str, int]:
    return re.subn(PATTERNS[kind], MASKS[kind], text)


@pytest.mark.parametrize("kind", ["email", "phone", "ip"])
def test_masks_equal_those_of_the_pattern(kind: PersonalData) -> None:
    pieces = st.lists(st.sampled_from(PIECES[kind]), max_size=40).map("".join)
    texts = st.lists(shaped(kind), max_size=4).map("".join) | shaped(kind) | pieces | st.text(max_size=60)

    @settings(max_examples=200)  # some milliseconds each
    @given(st.lists(texts | texts.map(lambda text: "x" * 60 + text), max_size=4))
    @example([])
    @example(["2831823829", "2831823829 a@b.de 1.2.3.4", "a@b.de"])
    def check(texts: list[str]) -> None:
        texts = [text.encode("utf-8", "replace").decode() for text in texts]
        (data, offsets), counts = mask_batch(pack_documents(texts), kind)
        masked = [data[begin:end].tobytes().decode() for begin, end in zip(offsets[:-1], offsets[1:], strict=True)]
        assert [*zip(masked, counts, strict=True)] == [replace_by_pattern(text, kind) for text in texts]
        assert not data[offsets[-1] :].any() and len(data) == offsets[-1] + 64

    check()


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("Write to test@gmail.com if you have any questions.", 1),
        ("Write to test@gmail.com, or to ann.b+x@mail.example.co.uk.", 2),
        ("The mask |||EMAIL_ADDRESS||| stays, and so does @user or a@b.", 0),
    ],
)
def test_emails(text: str, count: int) -> None:
    masked, found = mask_emails(text)
    assert found == count and masked.count("|||EMAIL_ADDRESS|||") == count + text.count("|||") // 2
    assert "gmail" not in masked and "example" not in masked


@pytest.mark.parametrize("prefix", ["", "+1 ", "+1-", "1-", "+1"])
@pytest.mark.parametrize("number", ["2831823829", "(283)-182-3829", "(283) 182 3829", "283-182-3829", "283.182.3829"])
def test_phone_numbers(number: str, prefix: str) -> None:
    text = "Call {} today, or {}."
    mask = "|||PHONE_NUMBER|||"
    assert mask_phone_numbers(text.format(prefix + number, number)) == (text.format(mask, mask), 2)


@pytest.mark.parametrize(
    "text",
    ["1609459200", "28318238291", "3.2831823829", "283-182-38291", "a2831823829", "283--182-3829", "283-182-382"],
)
def test_other_numbers_are_no_phone_numbers(text: str) -> None:
    assert mask_phone_numbers(text) == (text, 0)


def test_ip_addresses() -> None:
    text = "From 192.0.2.146 to 10.0.0.255:80. Not 256.1.1.1, 1.2.3.4.5, v1.2.3.4 or 1.2.3."
    masked = "From |||IP_ADDRESS||| to |||IP_ADDRESS|||:80. Not 256.1.1.1, 1.2.3.4.5, v1.2.3.4 or 1.2.3."
    assert mask_ips(text) == (masked, 2)


def test_a_text_without_personal_data_is_not_copied() -> None:
    batch = pack_documents(["No address."])
    assert mask_batch(batch, "email")[0] is batch
