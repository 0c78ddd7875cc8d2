"""Parts: immutable Parquet files of closed groups. And ledger entries, the same rows in Arrow IPC.

Encodings were chosen by measuring: zstd level 1 with BYTE_STREAM_SPLIT on ids and logprobs; row
groups bounded by bytes, because a nested row group above 2 GiB can be written but not read.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from areal_pipe.contract.errors import SchemaError, StorageError
from areal_pipe.storage.rows import SCHEMA, SCHEMA_MAJOR, SCHEMA_VERSION_KEY

ROW_GROUP_BYTES = 64 << 20
MAX_ROWS_PER_GROUP = 2000
_SPLIT: Any = [  # the published type says bool
    "input_ids.list.element",
    "logprobs.list.element",
]
_DICTIONARY: Any = [
    "status",
    "reason",
    "group_state",
    "stop_reason",
    "loss_mask.list.element",
    "prompt",
    "data",
    "error_stage",
    "error_class",
]


def to_parquet(table: pa.Table) -> bytes:
    """A table as the bytes of one Parquet file."""
    sink = pa.BufferOutputStream()
    rows = max(1, min(MAX_ROWS_PER_GROUP, _rows_within(table, ROW_GROUP_BYTES)))
    pq.write_table(
        table,
        sink,
        row_group_size=rows,
        compression="zstd",
        compression_level=1,
        use_dictionary=_DICTIONARY,
        use_byte_stream_split=_SPLIT,
        write_page_checksum=True,
    )
    return sink.getvalue().to_pybytes()


def _rows_within(table: pa.Table, limit: int) -> int:
    if table.nbytes <= limit:
        return max(1, table.num_rows)
    return int(table.num_rows * limit / table.nbytes)


def open_part(file: Any, *, where: str) -> pq.ParquetFile:
    """A part to read.

    Raises:
        SchemaError: a newer major schema, or no part of ours.
        StorageError: not a readable Parquet file.
    """
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(f"{where} is not a readable Parquet file: {error}") from error
    check_schema_version(parquet.schema_arrow.metadata or {}, where=where)
    return parquet


def check_schema_version(metadata: dict[bytes, bytes], *, where: str) -> None:
    """Refuse what a newer major version wrote."""
    version = metadata.get(SCHEMA_VERSION_KEY)
    if version is None:
        raise SchemaError(f"{where} carries no areal_pipe schema version: it is no part of a store")
    if int(version.split(b".")[0]) > SCHEMA_MAJOR:
        raise SchemaError(
            f"{where} has schema version {version.decode()}, this release reads up to "
            f"{SCHEMA_MAJOR}.x; upgrade areal-pipe"
        )


def iterate_rows(
    parquet: pq.ParquetFile, columns: list[str] | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of a part, one row group in memory at a time; token columns as numpy arrays."""
    for group in range(parquet.num_row_groups):
        yield from table_rows(parquet.read_row_group(group, columns=columns))


def table_rows(table: pa.Table) -> Iterator[dict[str, Any]]:
    """Rows of a table; token columns as numpy arrays, everything else as Python values."""
    for batch in table.to_batches():
        columns = [_values(batch.column(i)) for i in range(batch.num_columns)]
        for values in zip(*columns, strict=True):
            yield dict(zip(batch.schema.names, values, strict=True))


def _values(column: pa.Array) -> list[Any]:
    if not pa.types.is_large_list(column.type) or pa.types.is_struct(column.type.value_type):
        return column.to_pylist()
    flat = column.values.to_numpy(zero_copy_only=False)
    offsets = column.offsets.to_numpy()
    valid = column.is_valid().to_pylist()
    return [flat[offsets[i] : offsets[i + 1]] if ok else None for i, ok in enumerate(valid)]


def to_ipc(table: pa.Table) -> bytes:
    """A table as the bytes of one Arrow IPC file."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def from_ipc(data: bytes, *, where: str) -> pa.Table:
    """The inverse of `to_ipc`.

    Raises:
        StorageError: damaged content.
    """
    try:
        table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise StorageError(f"{where} is not a readable ledger entry: {error}") from error
    check_schema_version(table.schema.metadata or {}, where=where)
    return table.cast(SCHEMA) if table.schema != SCHEMA else table
