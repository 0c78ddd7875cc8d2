"""`show`, `stats` and `check`: commands that read a stored trial."""

import contextlib
import importlib
import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from areal_pipe.campaign.summary import summarize
from areal_pipe.cli.tables import print_summary
from areal_pipe.contract.errors import StorageError
from areal_pipe.contract.trajectory import run_lengths
from areal_pipe.storage.check import Finding, check_trial
from areal_pipe.storage.rows import Row, trajectory_of
from areal_pipe.storage.statistics import COLUMNS, Distributions, distributions_of
from areal_pipe.storage.trial import StoredTrial, StoredVersion, open_trial

console = Console()

UNLIKELY_LOGPROB = math.log(0.1)
"""Tokens sampled with less than a tenth of probability are shown in colour."""
Decode = Callable[[list[int]], str]

_ROLE_STYLES = {"prompt": "cyan", "context": "cyan", "gen": "green"}


def _open(url: str, endpoint_url: str | None) -> StoredTrial:
    options = {"client_kwargs": {"endpoint_url": endpoint_url}} if endpoint_url else None
    return open_trial(url, options)


def check_command(url: str, *, endpoint_url: str | None) -> list[Finding]:
    """Print what is wrong, or that nothing is."""
    trial = _open(url, endpoint_url)
    findings = list(check_trial(trial))
    for finding in findings:
        console.print(
            f"[red]✗[/] {escape(finding.where)}: {escape(finding.problem)}", soft_wrap=True
        )
    for version in trial.versions:
        _print_incomplete(version)
    parts = [p for v in trial.versions for m in v.manifests() for p in m.parts]
    sound = f"{len(parts)} parts, {sum(p.rows for p in parts)} trajectories"
    verdict = f"[red]{len(findings)} problems[/] in" if findings else "[green]sound[/]:"
    console.print(f"{escape(trial.url)}: {verdict} {sound}", soft_wrap=True)
    return findings


def _print_incomplete(version: StoredVersion) -> None:
    """What is not there yet: no damage, but good to know."""
    with contextlib.suppress(StorageError):  # a damaged manifest is among the findings
        summary = summarize(version)
        if not summary.is_whole:
            committed = sum(1 for _ in version.manifests())
            console.print(
                f"[yellow]incomplete[/]: {version.name} has {summary.open_groups} open groups; "
                f"{committed} of {version.record.num_shards} shards were committed"
            )


def stats_command(url: str, *, endpoint_url: str | None) -> None:
    trial = _open(url, endpoint_url)
    for version in trial.versions:
        print_summary(console, trial.url, summarize(version))
        _print_distributions(distributions_of(version.rows(COLUMNS)))


def _print_distributions(found: Distributions) -> None:
    table = Table("", "count", "mean", "min", "median", "p95", "max")
    for name, q in found.quantiles.items():
        values = (q.mean, q.minimum, q.median, q.p95, q.maximum)
        table.add_row(name, str(q.count), *(f"{v:.4g}" for v in values))
    console.print(table)
    highest = max((n for _, n in found.rewards), default=0)
    for label, n in found.rewards:
        console.print(f"  reward {label:>12}  {'█' * round(40 * n / highest)} {n}")
    counted = {
        "stop reasons": found.stop_reasons,
        "versions": found.versions,
        "errors": found.errors,
    }
    for name, counts in counted.items():
        if counts:
            shown = ", ".join(f"{key}: {n}" for key, n in counts.items())
            console.print(f"  {name}: {shown}", markup=False)


def show_command(
    url: str,
    *,
    task_id: int | None,
    sample: int,
    endpoint_url: str | None,
    verbose: bool = False,
) -> None:
    """Print one episode's trajectories."""
    trial = _open(url, endpoint_url)
    found = False
    for version in trial.versions:
        decode = _decoder_of(version)
        for row in _episode(version, task_id, sample):
            found = True
            _print_row(row, decode, verbose=verbose)
    if not found:
        raise StorageError(
            f"{url} has no committed episode {'' if task_id is None else task_id}/{sample}; "
            "areal-pipe stats shows what it has"
        )


def _episode(version: StoredVersion, task_id: int | None, sample: int) -> Iterator[Row]:
    for manifest in version.manifests():
        closed = sorted(manifest.closed)
        wanted = closed[0] if task_id is None and closed else task_id
        if wanted not in manifest.closed:
            continue
        for part in manifest.parts:
            for row in version.part_rows(part):
                if row["task_id"] == wanted and row["sample_idx"] == sample:
                    yield row
        return


def _decoder_of(version: StoredVersion) -> Decode | None:
    """Turns token ids into text, if the campaign's tokenizer is at hand."""
    config = version.record.config
    folder = config.get("rollout", {}).get("tokenizer_path") or config["engine"].get("model")
    path = Path(str(folder)) / "tokenizer.json"
    if not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    tokenizer: Any = importlib.import_module("tokenizers").Tokenizer.from_file(str(path))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


def _print_row(row: Row, decode: Decode | None, *, verbose: bool) -> None:
    console.rule(f"episode {row['task_id']}/{row['sample_idx']}  {row['status']}")
    for text in _texts(row):
        console.print(text)
    facts = {
        "reward": row["reward"],
        "tokens": f"{row['seqlen']} ({row['prompt_len']} prompt)" if row["seqlen"] else None,
        "versions": _versions(row),
        "stop reason": row["stop_reason"],
        "group": row["group_state"],
        "reason": row["reason"],
        "seeds": row["seeds"],
        "error": _error(row),
        "traceback": row["error_traceback"] if verbose else None,
        "printed": row["error_output"] if verbose else None,
        "data": row["data"],
    }
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        if value not in (None, "", []):
            table.add_row(Text(name, style="dim"), Text(str(value)))
    console.print(table)
    if row["logprobs"] is not None and row["loss_mask"] is not None:
        console.print(_unlikely_tokens(row, decode))


def _texts(row: Row) -> Iterator[Text]:
    if row["segments"]:
        for segment in json.loads(row["segments"]):
            yield Text(segment["text"], style=_ROLE_STYLES[segment["role"]])
    elif row["prompt"] is not None:
        yield Text(row["prompt"], style=_ROLE_STYLES["prompt"])
        yield Text(row["completion"], style=_ROLE_STYLES["gen"])


def _versions(row: Row) -> str | None:
    t = trajectory_of(row)
    if t is None or t.versions is None:
        return None
    runs = run_lengths(t.generated_versions)
    return ", ".join(f"{value} for {length} tokens" for value, length in runs)


def _error(row: Row) -> str | None:
    if not row["error_class"]:
        return None
    return f"{row['error_class']} in {row['error_stage']}: {row['error_message']}"


def _unlikely_tokens(row: Row, decode: Decode | None) -> Text:
    """The tokens that were sampled against the odds, with their place and probability."""
    ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
    places = [
        (i, logprob)
        for i, logprob in enumerate(row["logprobs"].tolist())
        if mask[i] and logprob < UNLIKELY_LOGPROB
    ]
    if not places:
        return Text("every token was sampled with a probability of at least 0.1", style="dim")
    text = Text("sampled with a probability below 0.1: ", style="dim")
    for i, logprob in places:
        shown = repr(decode([ids[i]])) if decode else f"id {ids[i]}"
        text.append(f"{shown} at token {i} ({math.exp(logprob):.3f})  ", "yellow")
    return text
