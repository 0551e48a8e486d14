"""A JSON Lines file of responses that is the state of an evaluation: an interrupted one goes on where it was."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from filelock import FileLock, Timeout

from lm.common.errors import UserError, translate_write_errors

Row = dict[str, Any]


class ResponseFile:
    """Responses, one JSON object a line, each with its ``index``; the first line has the settings.

    Use it in a ``with``: one process at a time has the file. Raises UserError if another process has it, if it cannot
    be written, if its settings other than the ``reward`` are not ``settings``, or if a line is damaged. A last line
    without an end, as a kill leaves it, is dropped.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.settings = json.loads(json.dumps(settings))  # as they are read
        self.rows: list[Row] = []
        self._lock = FileLock(f"{path}.lock")

    def __enter__(self) -> "ResponseFile":
        with translate_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._lock.acquire(timeout=0)
            except Timeout:  # an OSError too
                raise UserError(f"Another process writes {self.path}; wait for it, or use another directory.") from None
        try:
            self._read()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._lock.release()

    def append(self, row: Row) -> None:
        """Add a response."""
        self.rows.append(row)
        with translate_write_errors(self.path), self._open(self.path, "a") as file:
            file.write(_format(row))

    def sort(self) -> None:
        """Put the responses into the order of their indices. The last row of an index counts."""
        self.rows = sorted({row["index"]: row for row in self.rows}.values(), key=lambda row: row["index"])
        self._rewrite()

    def _read(self) -> None:
        lines = self.path.read_bytes().split(b"\n")[:-1] if self.path.exists() else []
        rows = [self._parse(line, number) for number, line in enumerate(lines, start=1)]
        if rows:
            self._check(rows[0].get("settings"))
        self.rows = rows[1:]
        if any(not isinstance(row.get("index"), int) for row in self.rows):
            raise UserError(f"{self.path} is no file of responses; use another directory.")
        self._rewrite()

    def _parse(self, line: bytes, number: int) -> Row:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"{self.path}, line {number:,}, is damaged: {error}. Delete the line or the file."
            ) from None
        if not isinstance(row, dict):
            raise UserError(f"{self.path}, line {number:,}, is not a JSON object. Delete the line or the file.")
        return row

    def _check(self, theirs: Any) -> None:
        """Raise UserError if the settings in the file are not these."""
        if not isinstance(theirs, dict):
            raise UserError(f"{self.path} is no file of responses; use another directory.")
        names = [name for name in {**theirs, **self.settings} if theirs.get(name) != self.settings.get(name)]
        names = [name for name in names if name != "reward"]  # computed again from the response
        if names:
            differences = "; ".join(
                f"{name} was {theirs.get(name)!r} and is now {self.settings.get(name)!r}" for name in names
            )
            raise UserError(
                f"{self.path} has responses under other settings: {differences}. Repeat the settings, use another "
                "directory, or delete the file."
            )

    def _rewrite(self) -> None:
        temporary = self.path.with_name(f"{self.path.name}.tmp")
        with translate_write_errors(self.path):
            with self._open(temporary, "w") as file:
                file.writelines(map(_format, ({"settings": self.settings}, *self.rows)))
            temporary.replace(self.path)

    @staticmethod
    def _open(path: Path, mode: str) -> IO[str]:
        return path.open(mode, encoding="utf-8", errors="backslashreplace")  # JSON's escape of a lone surrogate


def _format(row: Row) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"
