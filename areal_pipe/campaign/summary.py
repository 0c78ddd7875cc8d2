"""What a campaign came to, read from its manifests."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from areal_pipe.contract.trajectory import Status
from areal_pipe.storage.manifest import FailureRecord, Manifest, Tally, VersionRecord
from areal_pipe.storage.trial import StoredVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Figures of one scope and version."""

    record: VersionRecord
    episodes: dict[str, int]
    """Outcomes, open groups' failures included; `missing` for episodes without one."""
    accepted_groups: int
    rejected_groups: int
    open_groups: int
    mixed_groups: int
    """Accepted groups whose rewards differ."""
    mean_reward: float | None
    """Over accepted episodes."""
    pass_at: dict[int, float]
    """pass@k by k; a pass is a reward above 0."""
    prompt_tokens: int
    generated_tokens: int
    failures: tuple[FailureRecord, ...]
    given_up: tuple[int, ...]
    """task_ids of closed groups that lost members to failures."""

    @property
    def is_whole(self) -> bool:
        """Every group is closed."""
        return self.accepted_groups + self.rejected_groups == self.record.num_prompts


def summarize(version: StoredVersion) -> Summary:
    """Read the manifests of one version and add them up."""
    manifests = list(version.manifests())
    tally = Tally.total(m.tally for m in manifests)
    failures = tuple(f for m in manifests for f in m.failures)
    episodes = {s: n for s in Status if (n := tally.episodes.get(s, 0))}
    failed = episodes.get(Status.FAILED, 0) + len(failures)
    outcomes = {str(s): n for s, n in episodes.items()} | ({"failed": failed} if failed else {})
    missing = version.record.num_episodes - sum(outcomes.values())
    return Summary(
        record=version.record,
        episodes=outcomes | ({"missing": missing} if missing else {}),
        accepted_groups=sum(len(m.accepted) for m in manifests),
        rejected_groups=sum(len(m.rejected) for m in manifests),
        open_groups=version.record.num_prompts - sum(len(m.closed) for m in manifests),
        mixed_groups=tally.mixed_groups,
        mean_reward=tally.reward_sum / tally.reward_count if tally.reward_count else None,
        pass_at=pass_at_ks(tally.correct, version.record.group_size),
        prompt_tokens=tally.prompt_tokens,
        generated_tokens=tally.generated_tokens,
        failures=failures,
        given_up=tuple(t for m in manifests for t in m.given_up),
    )


def describe_open(manifest: Manifest, num_episodes: int) -> str:
    """One sentence for people about a shard that is not whole: what failed, and what to do."""
    failures = manifest.failures
    if not failures:
        return f"{len(manifest.open)} groups are open; running again completes them"
    classes = Counter(f.error_class for f in failures).most_common()
    counts = ", ".join(f"{n} {name}" for name, n in classes)
    return (
        f"{len(failures)} of {num_episodes} episodes failed: {counts}; "
        "running again runs only these"
    )


def pass_at_ks(correct: Sequence[tuple[int, int, int]], group_size: int) -> dict[int, float]:
    """pass@k for k = 1, 2, 4, ... up to the group size.

    Args:
        correct: (n, c, groups): how many groups have n scored samples, c of them correct.

    Groups with fewer than k scored samples do not enter pass@k.
    """
    ks = [2**i for i in range(group_size.bit_length()) if 2**i < group_size] + [group_size]
    return {k: value for k in ks if (value := _mean_pass_at(correct, k)) is not None}


def _mean_pass_at(correct: Sequence[tuple[int, int, int]], k: int) -> float | None:
    usable = [(n, c, groups) for n, c, groups in correct if n >= k]
    total = sum(groups for *_, groups in usable)
    if not total:
        return None
    return sum(pass_at_k(n, c, k) * groups for n, c, groups in usable) / total


def pass_at_k(n: int, c: int, k: int) -> float:
    """The unbiased estimate 1 - C(n-c, k) / C(n, k) (Chen et al. 2021, arXiv:2107.03374).

    Args:
        n: samples, c of them correct; k <= n are drawn.
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)
