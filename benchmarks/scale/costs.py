"""Costs of the pipeline, as measured by real runs."""

from dataclasses import dataclass

MB = 1e6


@dataclass(frozen=True)
class StepCost:
    """Requests and CPU seconds of a step: for the step, and for each item (a source, a group, a file of counts)."""

    fixed_requests: float = 0.0
    requests: float = 0.0
    fixed_seconds: float = 0.0
    seconds: float = 0.0

    def total_requests(self, items: float) -> float:
        return self.fixed_requests + items * self.requests

    def total_seconds(self, items: float) -> float:
        return self.fixed_seconds + items * self.seconds


@dataclass(frozen=True)
class Costs:
    """What the pipeline costs on one core, and sizes of its files. ``seconds`` are CPU seconds, MB are 10^6 bytes."""

    steps: dict[str, StepCost]
    """By step, as :class:`benchmarks.scale.meter.Meter` names them."""
    hash_seconds_per_mb: float
    ingest_seconds_per_mb: float
    chunk_seconds_per_mb: float
    chunk_seconds_per_chunk: float
    count_seconds_per_mb: float
    encode_seconds_per_mb: float
    sum_seconds_per_mb: float
    """Per MB of the files of counts that are read."""
    merge_seconds_per_pretoken: float
    """Per different pretoken."""
    index_seconds_per_document: float
    pretokens_of_first_mb: float
    """Heaps' law: n MB of text have ``pretokens_of_first_mb * n ** heaps_exponent`` different pretokens."""
    heaps_exponent: float
    bytes_per_pretoken: float
    file_bytes_per_pretoken: float
    """In a file of counts."""
    shard_bytes_per_byte: float
    """Bytes of token shards for each byte of text."""
    bytes_per_document: float
    driver_base_mb: float
    driver_kb_per_group: float
    rows_per_run: float
    rows_per_task_run: float
    rows_per_group: float

    def pretokens(self, text_bytes: float) -> float:
        """Return the number of different pretokens of a text."""
        return self.pretokens_of_first_mb * (text_bytes / MB) ** self.heaps_exponent

    def counts_bytes(self, text_bytes: float) -> float:
        """Return the size of the file of counts of a text."""
        return self.pretokens(text_bytes) * self.file_bytes_per_pretoken
