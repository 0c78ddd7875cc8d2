"""Tables and texts that several commands print."""

import textwrap
from collections import Counter

from rich.console import Console
from rich.table import Table

from areal_pipe.campaign.summary import Summary

MAX_FAILURES = 10
"""Failed episodes listed one by one."""


def print_summary(
    console: Console, url: str, summary: Summary, *, this_run: str | None = None
) -> None:
    """The figures of one version.

    Args:
        this_run: what the run that just ended measured of itself.
    """
    record = summary.record
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in summary_lines(summary, this_run=this_run):
        table.add_row(name, value)
    console.print(f"\n[bold]{url}[/]  {record.scope}, version {record.version}")
    console.print(table)
    print_failures(console, summary)
    if summary.accepted_groups or summary.rejected_groups:
        console.print(f"  files       {url}/{record.scope}/{record.version}/", soft_wrap=True)
        console.print(f"  look at one: areal-pipe show {url}", soft_wrap=True)


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
    tokens = f"{summary.generated_tokens:,} generated, {summary.prompt_tokens:,} prompt"
    lines.append(("tokens", tokens))
    if this_run is not None:
        lines.append(("this run", this_run))
    return lines


def print_failures(console: Console, summary: Summary) -> None:
    """Failed episodes of open groups, by class and one by one."""
    if not summary.failures:
        return
    classes = Counter(f.error_class for f in summary.failures).most_common()
    console.print(
        f"\n[red]{len(summary.failures)} episodes failed[/]: "
        + ", ".join(f"{n} {name}" for name, n in classes)
        + ". Run again to retry only these."
    )
    table = Table("episode", "stage", "class", "message", "attempts")
    for f in summary.failures[:MAX_FAILURES]:
        message = textwrap.shorten(f.message, 400, placeholder=" ...")
        table.add_row(
            f"{f.task_id}/{f.sample_idx}", f.stage, f.error_class, message, str(f.attempts)
        )
    console.print(table)
    if (more := len(summary.failures) - MAX_FAILURES) > 0:
        console.print(f"... and {more} more")
