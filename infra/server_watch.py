"""A Prefect server that goes away in mid-run: said once, waited for, and given up in the end.

Episodes need no server while they run, only the flow runs' states do, and Prefect's client tries
those again for about a minute. So a server that is restarted is no reason to stop.
"""

import asyncio
import time
from collections.abc import Coroutine
from typing import Any

from rich.console import Console

from areal_pipe.cli.outcome import Unstoppable
from infra.prefect_server import PrefectServer, ServerError

LOOK_SECONDS = 2.0
NOTICE_SECONDS = 6.0
"""A busy server misses a look or two; after so long, the user is told."""
PATIENCE_SECONDS = 60.0
"""How long a server may be away."""
CANCEL_SECONDS = 5.0
"""For the ledger's writes under way, once the server is given up."""


class ServerGone(ServerError, Unstoppable):
    """It has not answered for too long. Prefect's threads go on trying to reach it."""


async def while_answering(
    server: PrefectServer,
    body: Coroutine[Any, Any, None],
    console: Console,
    *,
    patience_seconds: float = PATIENCE_SECONDS,
) -> None:
    """Await `body` as long as the server answers.

    Raises:
        ServerGone: it has not answered for `patience_seconds`; `body` was cancelled.
        Exception: what `body` raised.
    """
    running = asyncio.ensure_future(body)
    gone = asyncio.ensure_future(_gone(server, console, patience_seconds))
    try:
        await asyncio.wait({running, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            raise ServerGone(
                f"the Prefect server at {server.url} has not answered for {patience_seconds:g} s; "
                "finished episodes are stored. Start it and run again, or go on with --no-prefect"
            )
        await running
    finally:
        gone.cancel()
        running.cancel()
        # Not for ever: Prefect tries, shielded, to report the cancellation to the server.
        await asyncio.wait({running}, timeout=CANCEL_SECONDS)


async def _gone(server: PrefectServer, console: Console, patience_seconds: float) -> None:
    """Returns once the server has been away for too long."""
    answered, told = time.monotonic(), False
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        if await asyncio.to_thread(server.is_healthy):
            if told:
                console.print("The Prefect server answers again.")
            answered, told = time.monotonic(), False
            continue
        server.revive()
        silent = time.monotonic() - answered
        if silent > patience_seconds:
            return
        if silent > NOTICE_SECONDS and not told:
            told = True
            console.print(
                f"[yellow]The Prefect server at {server.url} does not answer[/]; episodes go on "
                f"and are stored. Waiting {patience_seconds:g} s for it.",
                soft_wrap=True,
            )
