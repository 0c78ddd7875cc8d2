"""A campaign in this process: its plan, its store, and (once something is missing) its engine."""

import asyncio
import functools
import importlib.metadata
import inspect
import logging
import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.campaign.fingerprint import differing_fields, fingerprint_of, recipe_of
from areal_pipe.contract.errors import ConcurrentWrite, RecipeMismatch, WorkflowError
from areal_pipe.contract.trajectory import Episode
from areal_pipe.contract.workflow import RolloutWorkflow
from areal_pipe.datasets.load import Prompt, load_prompts
from areal_pipe.episodes.import_string import import_from_string
from areal_pipe.episodes.resolution import resolve_workflow
from areal_pipe.rewards.pool import close_default_pool
from areal_pipe.storage.keys import TrialKeys
from areal_pipe.storage.lease import is_held
from areal_pipe.storage.manifest import CampaignRecord, VersionRecord
from areal_pipe.storage.objects import open_store
from areal_pipe.storage.trial import StoredVersion

logger = logging.getLogger(__name__)

T = TypeVar("T")
_RECORD_ATTEMPTS = 5
_RELEASES = ("areal-pipe", "torch", "transformers", "math-verify", "pyarrow")


class Campaign:
    """Config, prompts, store and engine of one campaign. Build with `Campaign.open`."""

    def __init__(self, config: CampaignConfig, prompts: list[Prompt]) -> None:
        self.config = config
        self.prompts = prompts
        self.store = open_store(config.trial_url, config.cluster.options_for(config.trial_url))
        self._record_key = TrialKeys("").campaign
        self.keys = TrialKeys("").version(config.rollout.scope, config.rollout.version)
        self.record = self._planned_record()
        self.on_episode: Callable[[Episode], None] = lambda _: None
        """Called with every outcome as it is recorded."""
        self.on_notice: Callable[[str], None] = logger.info
        """Called with what a person who waits should know."""
        self.group_slots = asyncio.Semaphore(config.rollout.max_concurrent_rollouts)
        """Bounds the prompts that are rolled out at once, over all shards in this process."""
        self.shard_slots = asyncio.Semaphore(config.orchestration.max_concurrent_shards)
        # One thread owns the store: fsspec's blocking calls must not run inside a running loop.
        self._store_thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    @classmethod
    def open(cls, config: CampaignConfig, *, register: bool = True) -> "Campaign":
        """Read the prompts, and enter the plan into `campaign.json`.

        Args:
            register: False: write nothing, only compare with what is stored.

        Raises:
            DatasetError: the prompts are not usable.
            RecipeMismatch: this version holds trajectories of another recipe.
            StorageError: the store cannot be reached or written.
        """
        prompts = load_prompts(
            config.dataset, storage_options=config.cluster.options_for(config.dataset.path)
        )
        campaign = cls(config, prompts)
        campaign._enter(write=register)
        return campaign

    def register(self) -> None:
        """Enter the plan into `campaign.json`, if `open` did not."""
        self._enter(write=True)

    def check_recipe(self) -> None:
        """That the version is still planned the way it was when this campaign was opened.

        Raises:
            RecipeMismatch: it is not.
        """
        _, trial = self._stored_record()
        known = trial.versions.get(self._version_name)
        if known is None or known.fingerprint != self.record.fingerprint:
            raise self._mismatch(known)

    @property
    def url(self) -> str:
        """Address of the trial."""
        return self.config.trial_url

    @property
    def stored(self) -> StoredVersion:
        """What readers see of it."""
        return StoredVersion(store=self.store, keys=self.keys, record=self.record)

    def prompts_of(self, shard: int) -> list[Prompt]:
        size = self.record.prompts_per_shard
        return self.prompts[shard * size : (shard + 1) * size]

    async def run_blocking(self, fn: Callable[..., T], *args: Any) -> T:
        """Run a store call in the thread that owns the store."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._store_thread, functools.partial(fn, *args))

    @functools.cached_property
    def built_engine(self) -> Any:
        """The engine, not yet initialized: no weights are loaded, no server is asked.

        Raises:
            ConfigError: there is no such model or device.
        """
        from areal_pipe.campaign.engines import build_engine  # torch only when something runs

        return build_engine(self.config)

    @functools.cached_property
    def engine(self) -> Any:
        """The engine, initialized on first use."""
        engine = self.built_engine
        engine.initialize()
        engine.set_version(self.config.rollout.version)
        return engine

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the workflow, and of the stored texts; None if none is configured."""
        from areal_pipe.engines.transformers_local import load_tokenizer

        path = self.config.tokenizer_path
        return None if path is None else load_tokenizer(path)

    @functools.cached_property
    def workflow(self) -> RolloutWorkflow:
        """The workflow, built with the arguments its constructor takes.

        Raises:
            WorkflowError: it does not import or its arguments do not fit.
        """
        section = self.config.workflow
        try:
            return resolve_workflow(section.path, self._workflow_kwargs())
        except (ValueError, TypeError, ImportError, AttributeError) as error:
            raise WorkflowError(f"workflow {section.path!r}: {error}") from error

    def _workflow_kwargs(self) -> dict[str, Any]:
        kwargs = dict(self.config.workflow.kwargs)
        target = import_from_string(self.config.workflow.path)
        parameters = inspect.signature(target).parameters if callable(target) else {}
        offered: dict[str, Callable[[], Any]] = {
            "gconfig": self.config.gconfig.build,
            "tokenizer": lambda: self.tokenizer,
            "reward_timeout_seconds": lambda: self.config.rollout.reward_timeout,
            "reward_isolation": lambda: self.config.rollout.reward_isolation,
        }
        for name, make in offered.items():
            if name in parameters and name not in kwargs:
                kwargs[name] = make()
        return kwargs

    def close(self) -> None:
        """Free the engine and the store's thread."""
        if "engine" in self.__dict__:
            self.engine.destroy()
            close_default_pool()
        self._store_thread.shutdown(wait=True)

    def _planned_record(self) -> VersionRecord:
        rollout = self.config.rollout
        recipe = recipe_of(self.config, self.prompts)
        return VersionRecord(
            scope=rollout.scope,
            version=rollout.version,
            num_prompts=len(self.prompts),
            group_size=rollout.group_size,
            num_shards=math.ceil(len(self.prompts) / rollout.prompts_per_shard),
            prompts_per_shard=rollout.prompts_per_shard,
            recipe=recipe,
            fingerprint=fingerprint_of(recipe),
            config=self.config.storable(),
            lineage={"python": platform.python_version(), "releases": _releases()},
            created_at=time.time(),
        )

    @property
    def _version_name(self) -> str:
        return f"{self.record.scope}/{self.record.version}"

    def _enter(self, *, write: bool) -> None:
        """Enter this version into campaign.json, or take over how it was planned before."""
        for attempt in range(1, _RECORD_ATTEMPTS + 1):
            try:
                self._enter_once(write=write)
                return
            except ConcurrentWrite:  # another version of the trial registered itself just now
                if attempt == _RECORD_ATTEMPTS:
                    raise

    def _enter_once(self, *, write: bool) -> None:
        tag, trial = self._stored_record()
        known = trial.versions.get(self._version_name)
        if known is not None and self._binds(known):
            self.record = known
        elif write:
            if known is not None:  # manifests of the old plan, of failed episodes only
                self.store.delete(self.store.list(self.keys.manifests))
            trial.versions[self._version_name] = self.record
            self.store.swap(self._record_key, trial.to_bytes(), tag=tag)

    def _stored_record(self) -> tuple[str | None, CampaignRecord]:
        """(tag, content) of campaign.json."""
        stored = self.store.get_tagged(self._record_key)
        if stored is None:
            return None, CampaignRecord(
                experiment_name=self.config.experiment_name, trial_name=self.config.trial_name
            )
        where = self.store.where(self._record_key)
        return stored.tag, CampaignRecord.from_bytes(stored.data, where=where)

    def _binds(self, known: VersionRecord) -> bool:
        """Whether the stored plan holds. One under which no episode was finished may be replaced.

        Raises:
            RecipeMismatch: there are trajectories of another recipe, or a run is making some.
        """
        if known.fingerprint == self.record.fingerprint:
            return True
        stored = StoredVersion(store=self.store, keys=self.keys, record=known)
        if not self._is_in_use(stored):
            return False
        raise self._mismatch(known)

    def _is_in_use(self, stored: StoredVersion) -> bool:
        shards = range(stored.record.num_shards)
        return (
            bool(self.store.list(self.keys.ledgers))
            or any(manifest.closed for manifest in stored.manifests())
            or any(is_held(self.store, self.keys.lease(shard)) for shard in shards)
        )

    def _mismatch(self, known: VersionRecord | None) -> RecipeMismatch:
        theirs = known.recipe if known else {}
        differing = "\n  ".join(differing_fields(self.record.recipe, theirs))
        return RecipeMismatch(
            f"{self.url}/{self._version_name} holds trajectories of another recipe:\n"
            f"  {differing}\n"
            "Choose another trial_name or rollout.version, or put these settings back."
        )


def _releases() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _RELEASES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
