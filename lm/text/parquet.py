"""Opening of Parquet files."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lm.common.errors import UserError
from lm.text.sources import detect_format, is_transient_error, open_raw


@contextmanager
def open_parquet(url: str) -> Iterator[Any]:
    """Open a source as a ``pyarrow.parquet.ParquetFile``.

    Raises UserError if it is not a readable Parquet file, also inside the ``with``, and TransientError if the
    connection breaks.
    """
    import pyarrow as pa  # slow to import
    import pyarrow.parquet as pq

    if detect_format(url)[1]:
        raise UserError(f"{url}: Parquet is compressed inside; decompress the file itself.")
    with open_raw(url, is_ranged=True) as raw:
        try:
            yield pq.ParquetFile(raw)
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            if is_transient_error(error):
                raise
            raise UserError(f"{url} is not a readable Parquet file: {error}") from None
        except ValueError as error:  # of fsspec
            if isinstance(error, UserError) or not url.startswith(("http://", "https://")):
                raise
            raise UserError(f"{url}: the web server serves no byte ranges. Download the file, and name that.") from None
