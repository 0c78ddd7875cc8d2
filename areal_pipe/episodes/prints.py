"""What user code prints while an episode runs: its end is kept, for the case that it fails.

`sys.stdout` and `sys.stderr` become routers. Text printed within an episode is kept with it and
shown only if somebody wants to see it; all other text passes through.
"""

import sys
import threading
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TextIO, cast

MAX_CHARACTERS = 8000


class Kept:
    """The end of what was printed."""

    def __init__(self) -> None:
        self._text = ""

    def add(self, text: str) -> None:
        self._text = (self._text + text)[-MAX_CHARACTERS:]

    @property
    def text(self) -> str:
        return self._text


_current: ContextVar[Kept | None] = ContextVar("areal_pipe_prints", default=None)


class Router:
    """A text stream that sends what an episode prints to the episode."""

    hides = False
    """Whether text of episodes is kept only, instead of passing through, too."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str, /) -> int:
        kept = _current.get()
        if kept is not None:
            kept.add(text)
            if Router.hides:
                return len(text)
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def kept() -> Generator[Kept]:
    """Keep what this asyncio task (and what it starts) prints inside the block."""
    record = Kept()
    _route()
    token = _current.set(record)
    try:
        yield record
    finally:
        _current.reset(token)
        _unroute()


@contextmanager
def hidden() -> Generator[None]:
    """Do not show what episodes print: a progress bar has the terminal."""
    before, Router.hides = Router.hides, True
    try:
        yield
    finally:
        Router.hides = before


_lock = threading.Lock()
_blocks = Counter[str]()


def _route() -> None:
    with _lock:
        _blocks["open"] += 1
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream is not None and not isinstance(stream, Router):
                setattr(sys, name, Router(cast(TextIO, stream)))


def _unroute() -> None:
    """Put the streams back after the last block, unless somebody else has replaced them."""
    with _lock:
        _blocks["open"] -= 1
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if not _blocks["open"] and isinstance(stream, Router):
                setattr(sys, name, stream.stream)
