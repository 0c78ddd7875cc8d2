"""Rows of a dataloader, one after another, pass after pass."""

from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any, cast

from areal_pipe.contract.errors import WorkflowError

ENDLESS_PASS = 10_000
"""Rows taken for one pass over a dataloader that does not know its length."""


class RowStream:
    """Goes on where it stopped; at the end it begins anew."""

    def __init__(self, dataloader: Iterable[Any]) -> None:
        """
        Args:
            dataloader: yields rows or lists of rows, and can be iterated again.

        Raises:
            WorkflowError: it collates rows into columns.
        """
        _check_collate(dataloader)
        self.dataloader = dataloader
        self._rows = _endless_rows(dataloader)

    @property
    def batch_size(self) -> int | None:
        """The dataloader's own, where it has one."""
        size = getattr(self.dataloader, "batch_size", None)
        return int(size) if size else None

    @property
    def rows_per_pass(self) -> int:
        """How many rows one pass over the data has, about."""
        if not isinstance(self.dataloader, Sized):
            return ENDLESS_PASS
        return max(1, len(self.dataloader) * (self.batch_size or 1))

    def next_row(self) -> Mapping[str, Any]:
        """The next row.

        Raises:
            WorkflowError: the dataloader is empty.
        """
        return next(self._rows)


def _check_collate(dataloader: Iterable[Any]) -> None:
    """torch's own collate turns rows into columns of tensors, which cannot be undone for lists."""
    collate = getattr(getattr(dataloader, "collate_fn", None), "__name__", "")
    if collate == "default_collate" and getattr(dataloader, "batch_size", None) is not None:
        raise WorkflowError(
            "a dataloader must yield rows or lists of rows, this one collates them into columns "
            "(torch's default); pass collate_fn=list"
        )


def _endless_rows(dataloader: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    while True:
        empty = True
        for item in dataloader:
            for row in cast(list[Any], item) if isinstance(item, list) else [item]:
                empty = False
                yield row
        if empty:
            raise WorkflowError("a dataloader must yield rows or lists of rows, it yielded none")
