"""Records of WARC files: where they begin and end, what damage costs, and bounds for bombs."""

import gzip
import random
import zlib
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lm.text.warc_records import MAX_RECORD_BYTES, decompress_members, split_records
from tests.helpers.examples import examples
from tests.helpers.web import warc_record

RECORDS = [warc_record(f"<p>page {i} {'x' * i * 50}".encode(), url=f"http://a/{i}") for i in range(6)]


class Damage:
    """The places of damage, with the reasons."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def __call__(self, place: str, reason: str) -> None:
        self.reasons.append(f"{place}: {reason}")


def blocks(data: bytes, size: int = 100) -> Iterable[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


def split(data: bytes, size: int = 100) -> tuple[list[bytes], list[str]]:
    damage = Damage()
    return [record for _, record in split_records(blocks(data, size), damage)], damage.reasons


def decompress(data: bytes, size: int = 100) -> tuple[bytes, list[str]]:
    damage = Damage()
    return b"".join(decompress_members(blocks(data, size), damage)), damage.reasons


def bodies(records: Iterable[bytes]) -> list[bytes]:
    return [record.removesuffix(b"\r\n\r\n") for record in records]


@pytest.mark.parametrize("size", [1, 7, 100, 1 << 20])
def test_records_are_split_at_any_size_of_blocks(size: int) -> None:
    assert split(b"".join(RECORDS), size) == (bodies(RECORDS), [])
    compressed = b"".join(map(gzip.compress, RECORDS))
    assert decompress(compressed, size) == (b"".join(RECORDS), [])
    assert decompress(gzip.compress(b"".join(RECORDS)), size) == (b"".join(RECORDS), [])


@given(st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 2000)), min_size=1, max_size=5), st.integers(1, 9))
@examples(40)
def test_large_members_are_decompressed(members: list[tuple[int, int]], level: int) -> None:
    """Random text, repeated: members larger and smaller than what is read or written at a time."""
    texts = [(random.Random(size).randbytes(size // 3 % part + 1) * part)[:size] for size, part in members]
    data = b"".join(gzip.compress(text, level) for text in texts)
    for size in (1000, 1 << 20):
        assert decompress(data, size) == (b"".join(texts), [])


def test_a_record_may_hold_the_line_that_begins_one() -> None:
    record = warc_record(b"<p>a\r\n\r\nWARC/1.0\r\nContent-Length: 1\r\n\r\nb")
    assert split(record + RECORDS[0]) == (bodies([record, RECORDS[0]]), [])


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        (warc_record(b"a", length=3), "its length is wrong"),
        (warc_record(b"a" * 50, length=300), "its length is wrong"),
        (warc_record(b"a", length=MAX_RECORD_BYTES), "cut short"),
        (warc_record(b"a", length=MAX_RECORD_BYTES + 1), "longer than 16 MiB"),
        (warc_record(b"a", length=10**14), "longer than 16 MiB"),
        (warc_record(b"a", length=-1), "no end or no length"),
        (warc_record(b"a").replace(b"Content-Length", b"Content"), "no end or no length"),
        (b"garbage\r\n" * 20, "no WARC record begins here"),
        (b"\0" * 200 + b"\n", "no WARC record begins here"),
    ],
)
def test_damage_costs_the_record_that_it_lies_in(damaged: bytes, reason: str) -> None:
    records, reasons = split(RECORDS[0] + damaged + b"".join(RECORDS[1:]))
    assert records == bodies(RECORDS)
    assert len(reasons) == 1 and reason in reasons[0]
    assert reasons[0].startswith(f"record at byte {len(RECORDS[0]):,}:")


def test_a_truncated_file_keeps_its_whole_records() -> None:
    data = b"".join(RECORDS)
    records, reasons = split(data[:-30])
    assert records == bodies(RECORDS[:-1]) and "cut short" in reasons[0]


@given(st.data())
@examples(100)
def test_a_damaged_member_costs_itself(data: st.DataObject) -> None:
    members = [gzip.compress(record) for record in RECORDS]
    number = data.draw(st.integers(0, 5))
    member = bytearray(members[number])
    place = data.draw(st.integers(0, len(member) - 1))
    member[place] ^= data.draw(st.integers(1, 255))
    members[number] = bytes(member)
    text, reasons = decompress(b"".join(members), data.draw(st.sampled_from([50, 5000])))
    records, _ = split(text)
    others = bodies(record for i, record in enumerate(RECORDS) if i != number)
    assert [record for record in records if record in others] == others, "each whole member is read"
    if zlib_reads(bytes(member)) != RECORDS[number]:
        assert len(reasons) == 1 and "compressed byte" in reasons[0]


def zlib_reads(member: bytes) -> bytes:
    try:
        return zlib.decompress(member, 31)
    except zlib.error:
        return b""


@given(st.binary(max_size=400), st.booleans())
@examples(100)
def test_random_bytes_end_in_records_or_damage(data: bytes, is_prefixed: bool) -> None:
    data = b"WARC/1.0\r\nContent-Length: 9\r\n\r\n" + data if is_prefixed else data
    records, reasons = split(data, 37)
    assert bool(data) == bool(records or reasons)
    text, reasons = decompress(data, 37)
    assert bool(data) == bool(text or reasons)


def test_a_bomb_is_left_out_before_it_is_decompressed() -> None:
    bomb = gzip.compress(bytes(200 << 20), 9)
    members = [gzip.compress(record) for record in RECORDS]
    size, reasons, tail = 0, Damage(), b""
    for block in decompress_members(blocks(members[0] + bomb + b"".join(members[1:]), 1 << 16), reasons):
        size += len(block)
        tail = (tail + block)[-5000:]
    assert size < 100 << 20
    assert len(reasons.reasons) == 1 and "more than 200 times" in reasons.reasons[0]
    assert tail.endswith(b"".join(RECORDS[1:]))


def test_memory_does_not_grow_with_a_record_that_is_too_long() -> None:
    sizes = []

    def stream() -> Iterable[bytes]:
        yield warc_record(b"", length=1 << 40)
        for _ in range(40):
            yield random.Random(0).randbytes(1 << 20)
        yield b"\r\n\r\n" + RECORDS[1]

    for _, record in split_records(stream(), Damage()):
        sizes.append(len(record))
    assert sizes == [len(RECORDS[1]) - 4]
