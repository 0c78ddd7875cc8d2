"""Reading prompts, and finding every bad row before the first episode starts."""

import csv
import importlib
import io
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.core import url_to_fs

from areal_pipe.contract.errors import DatasetError
from areal_pipe.datasets.config import DatasetConfig

FORMATS = ("jsonl", "json", "csv", "parquet", "hf")
Row = dict[str, Any]
MAX_REPORTED = 10
"""Row problems shown in one message."""
_ROLES = ("system", "user", "assistant", "tool", "developer")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One dataset row, ready to roll out."""

    task_id: int
    """Its row number in the dataset, from 0."""
    data: Mapping[str, Any]
    """All columns, with `messages` filled in."""


def load_prompts(
    config: DatasetConfig, *, storage_options: Mapping[str, Any] | None = None
) -> list[Prompt]:
    """All prompts of a dataset, checked.

    Raises:
        DatasetError: it cannot be read, is empty, or has rows without a usable prompt (each named
            with file and line).
    """
    prompts: list[Prompt] = []
    problems: list[str] = []
    for task_id, (where, row) in enumerate(_rows(config, storage_options or {})):
        try:
            if isinstance(row, DatasetError):
                raise row
            prompts.append(Prompt(task_id=task_id, data=_with_messages(row, config)))
        except DatasetError as error:
            problems.append(f"{where}: {error}")
    if problems:
        raise DatasetError(_report(config.path, problems))
    if not prompts:
        raise DatasetError(f"{config.path} holds no rows; a campaign needs at least one prompt")
    if config.shuffle_seed is not None:
        random.Random(config.shuffle_seed).shuffle(prompts)
    return prompts[: config.limit]


def _report(path: str, problems: list[str]) -> str:
    shown = problems[:MAX_REPORTED]
    more = len(problems) - len(shown)
    tail = [f"... and {more} more"] if more else []
    return "\n  ".join([f"{path} has {len(problems)} rows without a usable prompt:", *shown, *tail])


def _rows(
    config: DatasetConfig, storage_options: Mapping[str, Any]
) -> Iterator[tuple[str, Row | DatasetError]]:
    """(where it stands, columns) of every row, or what is wrong with it."""
    kind = config.format or _format_of(config.path)
    if kind == "hf":
        yield from _hub_rows(config)
        return
    content = _read(config.path, storage_options)
    readers = {"jsonl": _jsonl_rows, "json": _json_rows, "csv": _csv_rows, "parquet": _parquet_rows}
    if kind not in readers:
        raise DatasetError(f"dataset.format must be one of {', '.join(FORMATS)}, got {kind!r}")
    yield from readers[kind](content, config.path)


def _format_of(path: str) -> str:
    ending = path.rsplit("/", 1)[-1].rpartition(".")
    if ending[0] and ending[2] in ("jsonl", "ndjson"):
        return "jsonl"
    if ending[0] and ending[2] in FORMATS:
        return ending[2]
    return "hf"


def _read(path: str, storage_options: Mapping[str, Any]) -> bytes:
    try:
        fs, name = url_to_fs(path, **storage_options)
        return cast(bytes, fs.cat_file(name))
    except FileNotFoundError as error:
        raise DatasetError(f"the dataset {path!r} does not exist") from error
    except (OSError, ValueError, ImportError) as error:
        raise DatasetError(f"the dataset {path!r} cannot be read: {error}") from error


def _text(content: bytes, path: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise DatasetError(
            f"{path}:{line}: must be UTF-8, got byte 0x{content[error.start]:02x}; convert the file"
        ) from error


def _jsonl_rows(content: bytes, path: str) -> Iterator[tuple[str, Row | DatasetError]]:
    for number, line in enumerate(_text(content, path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            yield f"{path}:{number}", _object(json.loads(line))
        except json.JSONDecodeError as error:
            yield (
                f"{path}:{number}",
                DatasetError(
                    f"every line must be one JSON object: {error.msg} at column {error.colno} "
                    f"of {line[:60]!r}"
                ),
            )


def _json_rows(content: bytes, path: str) -> Iterator[tuple[str, Row | DatasetError]]:
    try:
        rows = json.loads(_text(content, path))
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}:{error.lineno}: invalid JSON: {error.msg}") from error
    if not isinstance(rows, list):
        raise DatasetError(f"{path} must hold a JSON list of objects, got {type(rows).__name__}")
    for number, row in enumerate(cast(list[Any], rows)):
        yield f"{path}[{number}]", _object(row)


def _object(value: Any) -> Row | DatasetError:
    if not isinstance(value, dict):
        return DatasetError(f"a row must be a JSON object, got {type(value).__name__}")
    return cast(Row, value)


def _csv_rows(content: bytes, path: str) -> Iterator[tuple[str, Row | DatasetError]]:
    reader = csv.DictReader(io.StringIO(_text(content, path), newline=""))
    for row in reader:
        where = f"{path}:{reader.line_num}"
        if None in row or None in row.values():
            yield where, DatasetError("has not as many fields as the header")
        else:
            yield where, dict(row)


def _parquet_rows(content: bytes, path: str) -> Iterator[tuple[str, Row | DatasetError]]:
    try:
        table = pq.read_table(pa.BufferReader(content))
    except (pa.ArrowInvalid, OSError) as error:
        raise DatasetError(f"{path} is not a readable Parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist()):
        yield f"{path} row {number}", row


def _hub_rows(config: DatasetConfig) -> Iterator[tuple[str, Row | DatasetError]]:
    try:
        hub: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise DatasetError(
            f"{config.path!r} has no ending of a data file ({', '.join(FORMATS[:-1])}), so it is "
            "taken for a hub dataset, which needs the package 'datasets': "
            "pip install 'areal-pipe[hf]'"
        ) from error
    try:
        rows = hub.load_dataset(config.path, config.name, split=config.split)
    # The hub client raises whatever its transport and the dataset's code raise.
    except Exception as error:
        raise DatasetError(f"the hub dataset {config.path!r} cannot be loaded: {error}") from error
    for number, row in enumerate(rows):
        yield f"{config.path} row {number}", dict(row)


def _with_messages(row: dict[str, Any], config: DatasetConfig) -> dict[str, Any]:
    """The row with `messages`: its own, or made from the template or the prompt column."""
    if config.template is not None:
        messages = [{"role": "user", "content": _rendered(config.template, row)}]
    elif row.get(config.messages_column) is not None:
        messages = _checked_messages(row[config.messages_column])
    elif row.get(config.prompt_column) is not None:
        messages = [{"role": "user", "content": _plain_prompt(row, config.prompt_column)}]
    else:
        raise DatasetError(
            f"needs a column {config.messages_column!r} or {config.prompt_column!r} (or set "
            f"dataset.template), has {', '.join(map(repr, row)) or 'no columns'}"
        )
    if config.system is not None:
        messages = [{"role": "system", "content": config.system}, *messages]
    _check_storable(row)
    return row | {"messages": messages}


def _rendered(template: str, row: dict[str, Any]) -> str:
    try:
        return template.format_map(row)
    except (KeyError, IndexError, ValueError, AttributeError, TypeError) as error:
        raise DatasetError(
            f"dataset.template {template!r} does not fit: {error!r}; the row has "
            f"{', '.join(map(repr, row))}"
        ) from error


def _plain_prompt(row: dict[str, Any], column: str) -> str:
    value = row[column]
    if not isinstance(value, str) or not value:
        raise DatasetError(f"the column {column!r} must be non-empty text, got {value!r}")
    return value


def _checked_messages(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):  # a CSV cell
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise DatasetError(f"messages must be a JSON list, got {value[:60]!r}") from error
    if not isinstance(value, list) or not value:
        raise DatasetError(f"messages must be a non-empty list, got {value!r}")
    for message in cast(list[Any], value):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise DatasetError(
                f"a message must have a role of {', '.join(_ROLES)}, got {str(message)[:80]}"
            )
        if "content" not in message:
            raise DatasetError(f"a message must have content, got {str(message)[:80]}")
    return cast(list[dict[str, Any]], value)


def _check_storable(row: dict[str, Any]) -> None:
    for key, value in row.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise DatasetError(f"the column {key!r} must be finite, got {value}")
