"""Where everything lies. The only module that spells a path.

    {experiment}/{trial}/campaign.json
    {experiment}/{trial}/{rollout|eval-rollout}/{version}/
        {task_id}.jsonl
        part-{shard:05d}[.n].parquet
        _ledger/{shard:05d}/{name}.arrow
        _manifest/{shard:05d}.json
        _lease/{shard:05d}.json

Names are percent-encoded where they hold anything but letters, digits and `-_.~`, so that distinct
names give distinct keys.
"""

from dataclasses import dataclass
from urllib.parse import quote, unquote

from areal_pipe.contract.errors import ConfigError

MAX_SEGMENT_BYTES = 255
SCOPES = ("rollout", "eval-rollout")
CAMPAIGN_FILE = "campaign.json"


def encode(name: str) -> str:
    """A name as one path segment.

    Raises:
        ConfigError: empty, holding `/` or NUL, or longer than 255 bytes once encoded.
    """
    if not name or "/" in name or "\0" in name:
        raise ConfigError(f"a name must be non-empty, without '/' and NUL, got {name!r}")
    try:
        segment = quote(name, safe="")
    except UnicodeEncodeError as error:
        raise ConfigError(f"a name must be valid Unicode text, got {name!r}") from error
    if set(segment) == {"."}:
        segment = segment.replace(".", "%2E")
    if len(segment) > MAX_SEGMENT_BYTES:
        raise ConfigError(
            f"a name must fit into {MAX_SEGMENT_BYTES} bytes once percent-encoded, "
            f"got {len(segment)}: {name[:40]!r}..."
        )
    return segment


def decode(segment: str) -> str:
    """The inverse of `encode`."""
    return unquote(segment)


@dataclass(frozen=True, slots=True)
class VersionKeys:
    """Keys of one experiment, trial, scope and weight version."""

    prefix: str

    def dump(self, task_id: int, n: int = 0) -> str:
        """A prompt's dump; those of an executor that was started anew count up `n`."""
        suffix = f".{n}" if n else ""
        return f"{self.prefix}/{task_id}{suffix}.jsonl"

    def part(self, shard: int, n: int = 0) -> str:
        """Part `n` of a shard: 0 is its first, later ones were added by retries."""
        suffix = f".{n}" if n else ""
        return f"{self.prefix}/part-{shard:05d}{suffix}.parquet"

    def ledger(self, shard: int) -> str:
        """Prefix of a shard's ledger objects."""
        return f"{self.ledgers}/{shard:05d}"

    def ledger_entry(self, shard: int, name: str) -> str:
        return f"{self.ledger(shard)}/{name}.arrow"

    @property
    def ledgers(self) -> str:
        """Prefix of all ledger objects."""
        return f"{self.prefix}/_ledger"

    @property
    def manifests(self) -> str:
        """Prefix of all manifests."""
        return f"{self.prefix}/_manifest"

    def manifest(self, shard: int) -> str:
        return f"{self.manifests}/{shard:05d}.json"

    def lease(self, shard: int) -> str:
        return f"{self.prefix}/_lease/{shard:05d}.json"


@dataclass(frozen=True, slots=True)
class TrialKeys:
    """Keys of one trial, relative to the fileroot; with an empty prefix, to the trial itself."""

    prefix: str

    @classmethod
    def of(cls, experiment_name: str, trial_name: str) -> "TrialKeys":
        return cls(f"{encode(experiment_name)}/{encode(trial_name)}")

    @property
    def campaign(self) -> str:
        return f"{self.prefix}/{CAMPAIGN_FILE}" if self.prefix else CAMPAIGN_FILE

    def version(self, scope: str, version: int) -> VersionKeys:
        if scope not in SCOPES:
            raise ValueError(f"scope must be one of {SCOPES}, got {scope!r}")
        inner = f"{scope}/{version}"
        return VersionKeys(f"{self.prefix}/{inner}" if self.prefix else inner)
