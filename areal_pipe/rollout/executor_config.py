"""The executor's settings."""

from dataclasses import dataclass, field

from areal_pipe.episodes.episode import EpisodePolicy
from areal_pipe.storage.task_dump import DumpConfig

UNLIMITED_STALENESS = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorConfig:
    """How many prompts run at once, how stale they may be, and whether they are dumped."""

    max_concurrent_rollouts: int = 64
    """Prompts (groups) running at once."""
    consumer_batch_size: int = 1
    """Results a trainer takes per weight version."""
    max_head_offpolicyness: int = UNLIMITED_STALENESS
    """Versions a result may lag behind when it is consumed."""
    policy: EpisodePolicy = field(default_factory=EpisodePolicy)
    dump: DumpConfig | None = None
    """Write `{task_id}.jsonl` files; None: do not."""
