"""What a run shows while it runs, and what it measured of itself."""

import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from areal_pipe.campaign.runtime import Campaign
from areal_pipe.contract.trajectory import Episode


class RunMeter:
    """Counts the outcomes of this run, from the start of its first episode to the last record."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self._generated_tokens = 0
        self._began = float("inf")
        self._ended = 0.0

    def add(self, episode: Episode) -> None:
        """Count one outcome, at the moment it was recorded."""
        self._ended = time.perf_counter()
        self._began = min(self._began, self._ended - episode.duration_seconds)
        self.outcomes[str(episode.status)] += 1
        self._generated_tokens += sum(t.num_generated for t in episode.trajectories)

    def describe(self) -> str | None:
        """Episodes, seconds and generated tokens per second; None if nothing ran."""
        if not self.outcomes:
            return None
        seconds = max(self._ended - self._began, 1e-9)
        rate = self._generated_tokens / seconds
        return f"{self.outcomes.total()} episodes in {seconds:.1f} s, {rate:,.0f} tokens per second"


@contextmanager
def progress_bar(
    console: Console, campaign: Campaign, episodes: int, meter: RunMeter
) -> Generator[None]:
    """Show outcomes as they are recorded, and let `meter` count them."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[outcomes]}"),
    )
    with Progress(*columns, console=console, refresh_per_second=5) as progress:
        bar = progress.add_task("episodes", total=episodes, outcomes="")

        def count(episode: Episode) -> None:
            meter.add(episode)
            shown = "  ".join(f"{n} {status}" for status, n in meter.outcomes.items())
            progress.update(bar, advance=1, outcomes=shown)

        campaign.on_episode = count
        yield
