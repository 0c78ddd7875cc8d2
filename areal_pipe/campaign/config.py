"""The campaign file: AReaL's sections and names, validated, with command-line overrides."""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import AfterValidator, Field, SecretStr, ValidationError, model_validator

from areal_pipe.contract.engine import GenerationHyperparameters
from areal_pipe.contract.errors import ConfigError
from areal_pipe.contract.sections import Section, describe_errors
from areal_pipe.datasets.config import DatasetConfig
from areal_pipe.episodes.episode import EpisodePolicy
from areal_pipe.episodes.grouping import GroupPolicy
from areal_pipe.storage import keys
from areal_pipe.storage.objects import is_s3

Granularity = Literal["stage", "episode", "group"]


def _storable_name(value: str) -> str:
    try:
        keys.encode(value)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    return value


Name = Annotated[str, AfterValidator(_storable_name)]


class S3Config(Section):
    """Access to S3; what is left out comes from the standard AWS variables and files."""

    endpoint_url: str | None = None
    region: str | None = None
    access_key_id: SecretStr | None = None
    secret_access_key: SecretStr | None = None
    session_token: SecretStr | None = None

    def storage_options(self) -> dict[str, Any]:
        """fsspec options for s3fs. They hold secrets: never log or store them."""
        client = {"endpoint_url": self.endpoint_url, "region_name": self.region}
        options: dict[str, Any] = {
            "key": _revealed(self.access_key_id),
            "secret": _revealed(self.secret_access_key),
            "token": _revealed(self.session_token),
            "client_kwargs": {k: v for k, v in client.items() if v is not None} or None,
        }
        return {k: v for k, v in options.items() if v is not None}


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None


class ClusterConfig(Section):
    """Where trajectories go."""

    fileroot: str = Field(
        description="A folder or any fsspec URL: s3://bucket/prefix, file:///data"
    )
    s3: S3Config = Field(default_factory=S3Config)

    def options_for(self, url: str) -> dict[str, Any]:
        """fsspec options for an address of this campaign; only S3 needs any."""
        return self.s3.storage_options() if is_s3(url) else {}


class EngineConfig(Section):
    """What generates."""

    kind: Literal["transformers", "scripted"] = "transformers"
    model: str | None = Field(None, description="Model folder or hub name")
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    max_batch_size: int = Field(64, ge=1)
    num_threads: int | None = Field(
        None, ge=1, description="torch threads; 1 is fastest for tiny models"
    )
    script: str | None = Field(None, description="Import string of a ScriptedEngine script")
    latency_seconds: float = Field(0.0, ge=0, description="Delay of each scripted answer")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.kind == "transformers" and not self.model:
            raise ValueError("engine.model is required for the transformers engine")
        if self.kind == "scripted" and not self.script:
            raise ValueError("engine.script is required for the scripted engine")
        return self


class WorkflowConfig(Section):
    """Which episode to run."""

    path: str = Field("areal_pipe.workflows.rlvr.RLVRWorkflow", description="Import string")
    kwargs: dict[str, Any] = Field(
        default_factory=dict[str, Any],
        description="Constructor arguments; gconfig and tokenizer are filled in if it takes them",
    )


class GconfigConfig(Section):
    """How to sample; see GenerationHyperparameters."""

    max_new_tokens: int = Field(16384, ge=1)
    min_new_tokens: int = Field(0, ge=0)
    max_tokens: int = Field(32768, ge=1, description="Limit on prompt plus generated tokens")
    greedy: bool = False
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(100_000_000, ge=1)
    stop_token_ids: list[int] = Field(default_factory=list[int])
    stop: list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    frequency_penalty: float = 0.0
    seed: int | None = Field(None, ge=0, description="Base seed: each sample derives its own")

    def build(self) -> GenerationHyperparameters:
        return GenerationHyperparameters(**self.model_dump())


class RolloutConfig(Section):
    """How episodes run, and what is written."""

    group_size: int = Field(1, ge=1, description="Episodes per prompt")
    min_group_size: int = Field(1, ge=1)
    on_failed_member: Literal["retry", "keep", "drop_group"] = "retry"
    max_concurrent_rollouts: int = Field(16, ge=1, description="Prompts rolled out at once")
    version: int = Field(0, ge=0, description="Weight version of the model")
    is_eval: bool = False
    tokenizer_path: str | None = Field(None, description="The engine's model if left out")
    dump_to_file: bool = Field(True, description="Write {task_id}.jsonl beside the Parquet parts")
    fileroot: str | None = Field(None, description="AReaL's place for cluster.fileroot")
    shard_episodes: int = Field(256, ge=1, description="Episodes per shard, about")
    infrastructure_retries: int = Field(5, ge=0)
    data_retries: int = Field(0, ge=0)
    backoff_seconds: float = Field(0.5, gt=0)
    episode_timeout: float | None = Field(None, gt=0, description="Seconds")
    reward_timeout: float = Field(
        15.0, gt=0, description="Seconds; for workflows that take reward_timeout_seconds"
    )
    reward_isolation: Literal["worker", "call"] = Field(
        "worker",
        description="`call`: a process for every reward; for workflows that take reward_isolation",
    )
    request_timeout: float = Field(3600.0, gt=0, description="Seconds for one generation")

    @model_validator(mode="after")
    def _group_sizes_fit(self) -> Self:
        self.group_policy()
        return self

    @property
    def scope(self) -> str:
        return "eval-rollout" if self.is_eval else "rollout"

    @property
    def prompts_per_shard(self) -> int:
        return max(1, self.shard_episodes // self.group_size)

    def group_policy(self) -> GroupPolicy:
        return GroupPolicy(
            group_size=self.group_size,
            on_failed_member=self.on_failed_member,
            min_group_size=self.min_group_size,
        )

    def episode_policy(self) -> EpisodePolicy:
        return EpisodePolicy(
            infrastructure_retries=self.infrastructure_retries,
            data_retries=self.data_retries,
            backoff_seconds=self.backoff_seconds,
            episode_timeout_seconds=self.episode_timeout,
            request_timeout_seconds=self.request_timeout,
        )


class OrchestrationConfig(Section):
    """How the campaign shows in Prefect. It never changes what is stored."""

    granularity: Granularity = Field(
        "stage", description="A task run per stage, per episode, or per group"
    )
    max_concurrent_shards: int = Field(2, ge=1, description="Shards run at once in one process")


class CampaignConfig(Section):
    """A rollout campaign."""

    experiment_name: Name
    trial_name: Name
    cluster: ClusterConfig
    dataset: DatasetConfig
    engine: EngineConfig
    workflow: WorkflowConfig = WorkflowConfig.model_validate({})
    gconfig: GconfigConfig = GconfigConfig.model_validate({})
    rollout: RolloutConfig = RolloutConfig.model_validate({})
    orchestration: OrchestrationConfig = OrchestrationConfig.model_validate({})

    @model_validator(mode="before")
    @classmethod
    def _fileroot_from_rollout(cls, value: Any) -> Any:
        """AReaL also allows `rollout.fileroot`; here it means `cluster.fileroot`."""
        if isinstance(value, dict) and isinstance(rollout := value.get("rollout"), dict):
            fileroot = rollout.get("fileroot")
            cluster = value.get("cluster") or {}
            if fileroot is not None and isinstance(cluster, dict):
                if cluster.get("fileroot", fileroot) != fileroot:
                    raise ValueError(
                        f"rollout.fileroot={fileroot!r} and cluster.fileroot="
                        f"{cluster['fileroot']!r} differ; give one of them"
                    )
                return value | {"cluster": cluster | {"fileroot": fileroot}}
        return value

    @property
    def tokenizer_path(self) -> str | None:
        return self.rollout.tokenizer_path or self.engine.model

    @property
    def trial_url(self) -> str:
        """Where the trial lies, for people and for the reading commands."""
        prefix = keys.TrialKeys.of(self.experiment_name, self.trial_name).prefix
        return f"{self.cluster.fileroot.rstrip('/')}/{prefix}"

    def without_secrets(self) -> "CampaignConfig":
        """The configuration as it may be shown: credentials come from the environment instead."""
        hidden = {"access_key_id": None, "secret_access_key": None, "session_token": None}
        s3 = self.cluster.s3.model_copy(update=hidden)
        return self.model_copy(update={"cluster": self.cluster.model_copy(update={"s3": s3})})

    def storable(self) -> dict[str, Any]:
        """The configuration as plain data, without access settings."""
        return self.model_dump(mode="json", exclude={"cluster": {"s3"}}, exclude_none=True)


def load_config(path: str | Path, overrides: list[str] | None = None) -> CampaignConfig:
    """Read a campaign file.

    Args:
        path: YAML. Relative paths in it are relative to the working directory.
        overrides: `section.key=value`, the value in YAML.

    Raises:
        ConfigError: what is wrong, where, and the nearest key for an unknown one.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        data = yaml.safe_load(text)
    except FileNotFoundError as error:
        raise ConfigError(f"the configuration {str(path)!r} does not exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {str(path)!r} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is no valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a YAML mapping, got {type(data).__name__}")
    for override in overrides or []:
        _apply(data, override)
    try:
        return CampaignConfig.model_validate(data)
    except ValidationError as error:
        raise describe_errors(error, source=str(path)) from error


def _apply(data: dict[str, Any], override: str) -> None:
    found = re.fullmatch(r"([\w.-]+)=(.*)", override, re.DOTALL)
    if found is None:
        raise ConfigError(
            f"an override must read section.key=value, got {override!r}, "
            "for example rollout.group_size=8"
        )
    *sections, key = found[1].split(".")
    target: Any = data
    for section in sections:
        if target.get(section) is None:
            target[section] = {}
        target = target[section]
        if not isinstance(target, dict):
            raise ConfigError(f"{override!r}: {section!r} is no section")
    try:
        target[key] = yaml.safe_load(found[2])
    except yaml.YAMLError as error:
        raise ConfigError(f"{override!r}: the value is no valid YAML: {error}") from error
