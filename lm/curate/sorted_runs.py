"""Files of sorted records with checksums: the runs of an external sort, which many groups of documents write.

A record has a key, which is evenly distributed, and the number of its item (a document or a line) in the run. A file
holds blocks of records, then a footer in JSON with the checksum of each block and of itself, then the footer's length.
Ranges of keys of all runs are read together, so memory does not grow with the number of records. With keys of 128 bits,
equal keys count as equal items: only the first item of a run gets a record, and pairs (item, first) follow the records.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lm.common.errors import StorageError, UserError, translate_write_errors
from lm.files.checksum import dumps_with_checksum, loads_with_checksum
from lm.kernels.jit import Int64s, UInt32s, UInt64s

_FORMAT = 1
_BLOCK_RECORDS = 4096
_LENGTH_BYTES = 8  # of the footer's length
_MAX_FOOTER_BYTES = 64 << 20
_RECORD = np.dtype([("key", "<u8"), ("low", "<u8"), ("item", "<u4")])
_SHORT_RECORD = np.dtype([("key", "<u8"), ("item", "<u4")])
_MAX_RUN_RECORDS = 1 << 20  # each thread that signs holds some 75 bytes a record
_RANGE_RECORDS = 1 << 20  # of all runs that memory holds
_NUM_KEYS = 1 << 64


@dataclass(frozen=True)
class Records:
    """R records of several runs, sorted by key, low half and item."""

    keys: UInt64s
    """(R,)"""
    lows: UInt64s | None
    """(R,): second halves of the keys, if they have 128 bits."""
    items: Int64s
    """(R,): numbers of the items, counted through all runs."""

    def is_repeated(self) -> npt.NDArray[np.bool_]:
        """Return whether each record has the key of the record before it, bool (R,)."""
        equal = np.zeros(len(self.keys), np.bool_)
        np.equal(self.keys[1:], self.keys[:-1], out=equal[1:])
        if self.lows is not None:
            equal[1:] &= self.lows[1:] == self.lows[:-1]
        return equal


class Keys(NamedTuple):
    """Keys of some items of a group, R in all."""

    keys: UInt64s
    """(R,)"""
    lows: UInt64s | None
    """(R,): second halves of the keys, if they have 128 bits."""
    items: Int64s
    """(R,): numbers of the items, counted from the first one of this part, ascending."""
    num_items: int


def write_runs(parts: Iterable[Keys], folder: Path, kind: str, identity: dict[str, Any]) -> list[Path]:
    """Write the keys of a group of items to new files in ``folder``, a million records or so each; return their paths.

    Together and in order, the files are the group. ``identity`` is plain data that says how the keys were made: files
    of different identities are not read together.
    """
    paths: list[Path] = []
    pending: list[Keys] = []

    def flush() -> None:
        starts = accumulate((part.num_items for part in pending), initial=0)
        items = np.concatenate([part.items + start for start, part in zip(starts, pending, strict=False)])
        lows = [part.lows for part in pending if part.lows is not None]
        keys, num_items = np.concatenate([part.keys for part in pending]), sum(part.num_items for part in pending)
        paths.append(folder / f"{len(paths):05}.{kind}")
        _write_run(paths[-1], keys, np.concatenate(lows) if lows else None, items, num_items, identity)
        pending.clear()

    for part in parts:
        pending.append(part)
        if sum(len(keys) for keys, *_ in pending) >= _MAX_RUN_RECORDS:
            flush()
    if pending:
        flush()
    return paths


def _sorted_order(keys: UInt64s, lows: UInt64s | None) -> Int64s:
    """Return the stable order by key, then by low half, which decides between a few equal keys only."""
    order = np.argsort(keys, kind="stable")
    if lows is not None:
        ordered = keys[order]
        is_tied = np.zeros(len(keys) + 1, np.bool_)
        is_tied[1:-1] = ordered[1:] == ordered[:-1]
        tied = np.flatnonzero(is_tied[1:] | is_tied[:-1])
        members = order[tied]
        order[tied] = members[np.lexsort((lows[members], keys[members]))]
    return order


def _write_run(
    path: Path, keys: UInt64s, lows: UInt64s | None, items: Int64s, num_items: int, identity: dict[str, Any]
) -> None:
    order = _sorted_order(keys, lows)
    ordered = Records(keys[order], None if lows is None else lows[order], items[order])
    repeats: UInt32s = np.empty((0, 2), np.uint32)
    if lows is not None:
        is_repeated = ordered.is_repeated()
        firsts = np.maximum.accumulate(np.where(is_repeated, 0, np.arange(len(keys))))
        repeats = np.stack([ordered.items, ordered.items[firsts]], 1)[is_repeated].astype("<u4")
        order = order[~is_repeated]
    records = np.empty(len(order), _SHORT_RECORD if lows is None else _RECORD)
    records["key"], records["item"] = keys[order], items[order]
    if lows is not None:
        records["low"] = lows[order]
    blocks = [records[start : start + _BLOCK_RECORDS] for start in range(0, len(records), _BLOCK_RECORDS)]
    footer = dumps_with_checksum(
        {
            "format": _FORMAT,
            "identity": identity,
            "items": num_items,
            "records": len(records),
            "has_lows": lows is not None,
            "repeats": len(repeats),
            "repeats_checksum": _checksum(repeats.tobytes()),
            "first_keys": [int(block["key"][0]) for block in blocks],
            "checksums": [_checksum(block.tobytes()) for block in blocks],
        }
    ).encode()
    with translate_write_errors(path), path.open("wb") as file:
        for block in blocks:
            file.write(block.tobytes())
        file.write(repeats.tobytes())
        file.write(footer + len(footer).to_bytes(_LENGTH_BYTES, "little"))


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


class Run:
    """A file that :func:`write_runs` wrote.

    Raises UserError, here and in :meth:`read`, if the file is missing, or is damaged: then it names the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        footer = self._read_footer()
        self.identity: dict[str, Any] = footer["identity"]
        self.num_items: int = footer["items"]
        self.num_records: int = footer["records"]
        self._first_keys = np.array(footer["first_keys"], np.uint64)
        self._checksums: list[str] = footer["checksums"]
        self._dtype = _RECORD if footer["has_lows"] else _SHORT_RECORD
        self._num_repeats: int = footer["repeats"]
        self._repeats_checksum: str = footer["repeats_checksum"]

    def _read_footer(self) -> dict[str, Any]:
        try:
            with self.path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(max(0, size - _LENGTH_BYTES))
                length = int.from_bytes(file.read(), "little")
                start = size - _LENGTH_BYTES - length
                if start < 0 or length > _MAX_FOOTER_BYTES:
                    raise self._damaged("it has no footer")
                file.seek(start)
                footer = loads_with_checksum(file.read(length))
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}.") from None
        if footer is None:
            raise self._damaged("the checksum of its footer is wrong")
        if footer["format"] != _FORMAT:
            raise UserError(f"{self.path} has the format {footer['format']}, not {_FORMAT}; make it again.")
        return footer

    def _damaged(self, reason: str) -> StorageError:
        return StorageError(f"{self.path} is damaged: {reason}. Delete it, and sign its documents again.")

    def read(self, first: int, stop: int) -> npt.NDArray[np.void]:
        """Return the records with first <= key < stop, in order. Checks the blocks that have them."""
        begin = max(0, int(np.searchsorted(self._first_keys, np.uint64(first), "left")) - 1)
        end = len(self._first_keys)
        if stop < _NUM_KEYS:
            end = int(np.searchsorted(self._first_keys, np.uint64(stop), "left"))
        if begin >= end:
            return np.empty(0, self._dtype)
        block_bytes = _BLOCK_RECORDS * self._dtype.itemsize
        stop_byte = min(end * block_bytes, self.num_records * self._dtype.itemsize)
        data = self._read_bytes(begin * block_bytes, stop_byte)
        for number in range(begin, end):
            block = data[(number - begin) * block_bytes : (number - begin + 1) * block_bytes]
            if _checksum(block) != self._checksums[number]:
                raise self._damaged(f"the checksum of block {number + 1} of {len(self._checksums)} is wrong")
        records = np.frombuffer(data, self._dtype)
        keys = records["key"]
        low = int(np.searchsorted(keys, np.uint64(first), "left"))
        high = len(keys) if stop >= _NUM_KEYS else int(np.searchsorted(keys, np.uint64(stop), "left"))
        return records[low:high]

    def read_repeats(self) -> UInt32s:
        """Return (item, first item with the same key) for each item without a record, uint32 (n, 2)."""
        start = self.num_records * self._dtype.itemsize
        data = self._read_bytes(start, start + 8 * self._num_repeats)
        if _checksum(data) != self._repeats_checksum:
            raise self._damaged("the checksum of its repeated items is wrong")
        return np.frombuffer(data, "<u4").reshape(-1, 2)

    def _read_bytes(self, start: int, stop: int) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return file.read(stop - start)
        except OSError as error:
            raise StorageError(f"{self.path} cannot be read: {error.strerror or error}.") from None


def open_runs(paths: Sequence[Path], identity: dict[str, Any]) -> list[Run]:
    """Open runs in the order of their items. Raises UserError if one was made in another way, or is damaged."""
    runs = [Run(path) for path in paths]
    for run in runs:
        if run.identity != identity:
            raise UserError(f"{run.path} was made with {run.identity}, not with {identity}; make it again.")
    return runs


def merge_runs(runs: Sequence[Run]) -> Iterator[Records]:
    """Yield all records in the order of their keys, in parts between which keys differ.

    The parts depend on the runs, the order of the records does not.
    """
    starts = [*accumulate((run.num_items for run in runs), initial=0)]
    num_parts = -(-sum(run.num_records for run in runs) // _RANGE_RECORDS)
    bounds = [part * _NUM_KEYS // num_parts for part in range(num_parts + 1)] if num_parts else []
    for first, stop in zip(bounds, bounds[1:], strict=False):
        parts = [run.read(first, stop) for run in runs]
        keys = np.concatenate([part["key"] for part in parts])
        items = np.concatenate([part["item"] + np.int64(start) for start, part in zip(starts, parts, strict=False)])
        names = parts[0].dtype.names or ()
        lows = np.concatenate([part["low"] for part in parts]) if "low" in names else None
        order = _sorted_order(keys, lows)
        yield Records(keys[order], None if lows is None else lows[order], items[order])
