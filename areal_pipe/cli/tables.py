"""Tables and texts that several commands print."""

import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from areal_pipe.campaign.summary import Summary
from areal_pipe.storage.manifest import FailureRecord

MAX_CAUSES = 10
"""Causes of failed episodes that are listed."""
MAX_GIVEN_UP = 10
"""Groups named that were given up."""
MAX_EPISODES = 4
"""Episodes named for each of them."""


def print_summary(
    console: Console,
    url: str,
    summary: Summary,
    *,
    this_run: str | None = None,
    verbose: bool = False,
) -> None:
    """The figures of one version.

    Args:
        this_run: what the run that just ended measured of itself.
        verbose: show tracebacks and what was printed.
    """
    record = summary.record
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_lines(summary, this_run=this_run):
        table.add_row(name, Text(value))
    title = Text.assemble((url, "bold"), f"  {record.scope}, version {record.version}")
    console.print("\n", title, sep="")
    console.print(table)
    print_failures(console, summary, verbose=verbose)
    if summary.accepted_groups or summary.rejected_groups:
        files = f"{url}/{record.scope}/{record.version}/"
        console.print(f"  files       {files}", soft_wrap=True, markup=False)
        console.print(f"  look at one: areal-pipe show {url}", soft_wrap=True, markup=False)


def summary_lines(summary: Summary, *, this_run: str | None = None) -> list[tuple[str, str]]:
    """(name, value) of each figure."""
    outcomes = ", ".join(f"{n} {status}" for status, n in summary.episodes.items())
    groups = (
        f"{summary.accepted_groups} accepted ({summary.mixed_groups} mixed), "
        f"{summary.rejected_groups} rejected"
    )
    if summary.open_groups:
        groups += f", {summary.open_groups} open"
    lines = [("episodes", outcomes), ("groups", groups)]
    if summary.mean_reward is not None:
        lines.append(("mean reward", f"{summary.mean_reward:.4f}"))
    lines += [(f"pass@{k}", f"{value:.4f}") for k, value in summary.pass_at.items()]
    if summary.given_up:
        lines.append(("given up", _given_up(summary.given_up)))
    tokens = f"{summary.generated_tokens:,} generated, {summary.prompt_tokens:,} prompt"
    lines.append(("tokens", tokens))
    if this_run is not None:
        lines.append(("this run", this_run))
    return lines


def print_failures(console: Console, summary: Summary, *, verbose: bool = False) -> None:
    """Failed episodes of open groups: each cause once, with the episodes it struck.

    Args:
        verbose: show each cause's traceback and what was printed, too.
    """
    failures = summary.failures
    if not failures:
        return
    classes = Counter(f.error_class for f in failures).most_common()
    again = (
        "Run again to retry only these."
        if any(f.infrastructure for f in failures)
        else "Mend the cause, then run again: only these are retried."
    )
    counts = ", ".join(f"{n} {name}" for name, n in classes)
    console.print(f"\n[red]{len(failures)} episodes failed[/]: {escape(counts)}. {again}")
    causes: dict[tuple[str, str, str], list[FailureRecord]] = {}
    for f in failures:
        causes.setdefault((f.stage, f.error_class, f.message), []).append(f)
    table = Table("episodes", "stage", "class", "message")
    for (stage, error_class, message), struck in list(causes.items())[:MAX_CAUSES]:
        shown = textwrap.shorten(message, 400, placeholder=" ...")
        place = struck[0].traceback.strip().splitlines()
        raised = next((line.strip() for line in reversed(place) if "File " in line), "")
        text = Text("\n".join(filter(None, (shown, raised))))
        table.add_row(_places(struck), stage, Text(error_class), text)
    console.print(table)
    if verbose:
        for struck in list(causes.values())[:MAX_CAUSES]:
            _print_details(console, struck[0])
    if (more := len(causes) - MAX_CAUSES) > 0:
        console.print(f"... and {more} other messages")


def _print_details(console: Console, failure: FailureRecord) -> None:
    """Traceback and output of one failed episode, as plain text."""
    console.print(f"\n[bold]episode {failure.task_id}/{failure.sample_idx}[/]")
    for title, text in (("traceback", failure.traceback), ("printed", failure.output)):
        if text:
            console.print(f"[dim]{title}[/]")
            console.print(text, markup=False, highlight=False, soft_wrap=True)


def _given_up(task_ids: Sequence[int]) -> str:
    """Groups that lost members to failures, and which."""
    named = ", ".join(map(str, task_ids[:MAX_GIVEN_UP]))
    more = len(task_ids) - MAX_GIVEN_UP
    tail = f" and {more} more" if more > 0 else ""
    return f"{len(task_ids)} groups with failed members (on_failed_member): {named}{tail}"


def _places(failures: list[FailureRecord]) -> str:
    """The first few, as `task_id/sample_idx`, and how many more."""
    places = [f"{f.task_id}/{f.sample_idx}" for f in failures]
    if (more := len(places) - MAX_EPISODES) > 0:
        places = [*places[:MAX_EPISODES], f"and {more} more"]
    return ", ".join(places)
