"""The `dataset:` section."""

from pydantic import Field

from areal_pipe.contract.sections import Section


class DatasetConfig(Section):
    """Where prompts come from, and how a row becomes messages."""

    path: str = Field(description="File or fsspec URL (.jsonl .json .csv .parquet), or a hub name")
    format: str | None = Field(
        None, description="jsonl | json | csv | parquet | hf; by the name's ending if left out"
    )
    name: str | None = Field(None, description="Configuration of a hub dataset")
    split: str = Field("train", description="Split of a hub dataset")
    messages_column: str = Field("messages", description="Column of chat messages")
    prompt_column: str = Field(
        "prompt", description="Column of plain text, used when there are no messages"
    )
    template: str | None = Field(
        None, description="Python format string over the row's columns, e.g. 'Question: {question}'"
    )
    system: str | None = Field(None, description="System message put first")
    limit: int | None = Field(None, ge=1, description="Use the first rows only")
    shuffle_seed: int | None = Field(
        None, description="Shuffle the rows before `limit`; task ids stay the row numbers"
    )
