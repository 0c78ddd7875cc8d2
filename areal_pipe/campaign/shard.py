"""One shard under way: what is missing, what finished, and committing it.

The order of writes is the whole protocol. Finished episodes go to the ledger at once. A commit
writes the closed groups as a part, then swaps the manifest, then writes their dumps, then drops
ledger objects that it made superfluous. A crash between any two leaves a state from which the next
run goes on; readers see only what the manifest names.
"""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass, field

from areal_pipe.campaign.runtime import Campaign
from areal_pipe.contract.trajectory import Episode, Status
from areal_pipe.contract.workflow import Draft
from areal_pipe.episodes.episode import EpisodeRun, GroupRun, failed_to_store
from areal_pipe.episodes.grouping import GroupState, GroupVerdict, close_group
from areal_pipe.storage.drafts import draft_of
from areal_pipe.storage.dump import to_jsonl
from areal_pipe.storage.ledger import LedgerWriter, read_ledger
from areal_pipe.storage.manifest import FailureRecord, Manifest, PartRecord, Tally, tally_of
from areal_pipe.storage.parts import to_ipc, to_parquet
from areal_pipe.storage.rows import Row, rows_of, table_of, trajectory_of

Place = tuple[int, int]
"""(task_id, sample_idx)"""


@dataclass(slots=True, eq=False)
class _State:
    """What is known of a shard's groups that are not closed yet."""

    manifest: Manifest
    tag: str | None
    """Identifies the stored state of the manifest; None: there is none yet."""
    ledger_keys: list[str] = field(default_factory=list[str])
    rows: dict[Place, list[Row]] = field(default_factory=dict[Place, list[Row]])
    """Rows of every episode that has an outcome."""


class ShardRun:
    """One run of one shard. Use from one event loop; open with `ShardRun.open`."""

    def __init__(self, campaign: Campaign, shard: int, state: _State) -> None:
        self.campaign = campaign
        self.shard = shard
        self._state = state
        self._prompts = {p.task_id: p for p in campaign.prompts_of(shard)}
        self._started = time.time()
        self._ledger = LedgerWriter(
            campaign.store, campaign.keys, shard, run_blocking=campaign.run_blocking
        )

    @classmethod
    async def open(cls, campaign: Campaign, shard: int) -> "ShardRun":
        """Read what earlier runs committed or left in the ledger."""
        return cls(campaign, shard, await campaign.run_blocking(_read_state, campaign, shard))

    @property
    def num_episodes(self) -> int:
        """Episodes of the shard, whatever their state."""
        return len(self._prompts) * self._state.manifest.group_size

    @property
    def num_missing(self) -> int:
        """Episodes to run."""
        return sum(len(samples) for samples in self._missing().values())

    @property
    def is_closed(self) -> bool:
        """No group is open."""
        return len(self._state.manifest.closed) == len(self._prompts)

    @property
    def is_whole(self) -> bool:
        """Everything is closed, dumped, and cleaned up after."""
        pending = self._state.manifest.undumped or self._state.ledger_keys
        return self.is_closed and not pending

    def groups(self) -> list[GroupRun]:
        """The groups with missing episodes, and which of their members to run."""
        campaign = self.campaign
        return [
            GroupRun(
                campaign.workflow,
                campaign.engine,
                self._prompts[task_id].data,
                task_id=task_id,
                samples=samples,
                is_eval=campaign.config.rollout.is_eval,
                policy=campaign.config.rollout.episode_policy(),
                drafts=self._drafts(task_id, samples),
            )
            for task_id, samples in self._missing().items()
        ]

    def _drafts(self, task_id: int, samples: Iterable[int]) -> dict[int, Draft]:
        """Generations of an earlier run that could not be scored."""
        found: dict[int, Draft] = {}
        for sample in samples:
            rows = self._state.rows.get((task_id, sample))
            if rows and rows[0]["draft"] is not None and (t := trajectory_of(rows[0])):
                found[sample] = draft_of(rows[0], t, self._prompts[task_id].data)
        return found

    async def record(self, episode: Episode) -> Episode:
        """Keep an outcome: durable once this returns; what failed is run again by a later run.

        Of a failed episode only a finished generation is durable, to be scored then.

        Returns:
            The outcome that was kept: `failed` if the result could not be stored.

        Raises:
            StorageError: it could not be stored.
        """
        episode, rows = self._rows_of(episode)
        if episode.status is not Status.FAILED or rows[0]["draft"] is not None:
            await self._ledger.append(rows)
        self._state.rows[episode.task_id, episode.sample_idx] = rows
        self.campaign.on_episode(episode)
        return episode

    def _rows_of(self, episode: Episode) -> tuple[Episode, list[Row]]:
        """An episode's rows; if its result cannot be stored, those of a failed episode."""
        data = self._prompts[episode.task_id].data
        try:
            return episode, rows_of(episode, data=data, decoder=self.campaign.tokenizer)
        # The boundary once more: what a workflow returned is as foreign as what it raised.
        except Exception as error:  # noqa: BLE001
            failed = failed_to_store(episode, error)
            return failed, rows_of(failed, data=data, decoder=None)

    async def record_group(self, group: GroupRun) -> list[Episode]:
        """Run a group's missing members and keep each outcome as it comes; what was kept."""
        if failed := await group.tokenized(group.tokenize()):
            return await self.record_all(failed)
        async with asyncio.TaskGroup() as running:
            tasks = [running.create_task(self._record_member(m)) for m in group.members()]
        return [task.result() for task in tasks]

    async def record_all(self, episodes: Iterable[Episode]) -> list[Episode]:
        """Keep several outcomes."""
        return [await self.record(episode) for episode in episodes]

    async def _record_member(self, member: EpisodeRun) -> Episode:
        return await self.record(await member.run())

    @contextlib.asynccontextmanager
    async def group_tasks(self) -> AsyncGenerator[asyncio.TaskGroup]:
        """A task group for the shard's groups; if it is interrupted, writes under way end first.

        Raises the first error as it is, not wrapped into groups.
        """
        try:
            async with asyncio.TaskGroup() as groups:
                yield groups
        except BaseExceptionGroup as errors:
            raise root_cause(errors) from errors
        finally:
            await self._ledger.drain()

    async def commit(self) -> Manifest:
        """Close what can be closed and make it visible to readers.

        Raises:
            ConcurrentWrite: another run committed this shard in between.
            StorageError: nothing was committed; finished episodes are in the ledger.
        """
        if self.is_whole:
            return self._state.manifest
        await self._ledger.drain()
        self._state.ledger_keys += self._ledger.written
        self._state = await self.campaign.run_blocking(self._commit)
        return self._state.manifest

    def _missing(self) -> dict[int, tuple[int, ...]]:
        size = self.campaign.config.rollout.group_size
        closed = self._state.manifest.closed
        missing = {
            task_id: tuple(s for s in range(size) if not self._is_finished((task_id, s)))
            for task_id in self._prompts
            if task_id not in closed
        }
        return {task_id: samples for task_id, samples in missing.items() if samples}

    def _is_finished(self, place: Place) -> bool:
        rows = self._state.rows.get(place)
        return rows is not None and rows[0]["status"] != Status.FAILED

    # -- committing (in the store's thread) --

    def _commit(self) -> _State:
        verdicts = self._verdicts()
        closed = {t: v for t, v in verdicts.items() if v.state is not GroupState.OPEN}
        rows = self._closed_rows(closed)
        manifest = self._manifest_after(verdicts, rows)
        if rows:
            manifest.parts.append(self._write_part(rows, n=len(manifest.parts)))
        kept = self._carry_over(set(closed))
        tag = self._swap(manifest, self._state.tag)
        # From here on the commit stands. Dumps and cleaning up are finished by the next run if need
        # be: it finds `undumped` tasks in the manifest, or ledger objects of closed groups.
        if manifest.undumped:
            self._write_dumps(manifest, rows)
            manifest = manifest.model_copy(update={"undumped": []})
            tag = self._swap(manifest, tag)
        self.campaign.store.delete(k for k in self._state.ledger_keys if k not in kept.ledger_keys)
        return _State(manifest, tag, kept.ledger_keys, kept.rows)

    def _swap(self, manifest: Manifest, tag: str | None) -> str:
        key = self.campaign.keys.manifest(self.shard)
        return self.campaign.store.swap(key, manifest.to_bytes(), tag=tag)

    def _verdicts(self) -> dict[int, GroupVerdict]:
        """Verdict on every group that was not closed before."""
        statuses: dict[int, dict[int, Status]] = {
            t: {} for t in self._prompts if t not in self._state.manifest.closed
        }
        outages: dict[int, list[int]] = {t: [] for t in statuses}
        for (task_id, sample), rows in self._state.rows.items():
            statuses[task_id][sample] = Status(rows[0]["status"])
            if rows[0]["infrastructure"]:
                outages[task_id].append(sample)
        policy = self.campaign.config.rollout.group_policy()
        return {
            t: close_group(members, policy, outages=outages[t]) for t, members in statuses.items()
        }

    def _closed_rows(self, closed: dict[int, GroupVerdict]) -> list[Row]:
        """Rows of closed groups; a rejected group leaves no accepted rows to train on."""
        return [
            _closed(row, closed[task_id])
            for (task_id, _), rows in sorted(self._state.rows.items())
            if task_id in closed
            for row in rows
        ]

    def _manifest_after(self, verdicts: dict[int, GroupVerdict], rows: list[Row]) -> Manifest:
        def tasks(state: GroupState) -> list[int]:
            return [t for t, v in verdicts.items() if v.state is state]

        before, accepted = self._state.manifest, tasks(GroupState.ACCEPTED)
        open_tasks = tasks(GroupState.OPEN)
        return Manifest(
            shard=self.shard,
            group_size=before.group_size,
            parts=list(before.parts),
            accepted=sorted([*before.accepted, *accepted]),
            rejected=sorted([*before.rejected, *tasks(GroupState.REJECTED)]),
            open=open_tasks,
            failures=self._failures(open_tasks),
            given_up=sorted({*before.given_up, *_given_up(rows)}),
            undumped=self._undumped(verdicts),
            tally=Tally.total([before.tally, tally_of(rows, set(accepted))]),
            busy_seconds=before.busy_seconds + time.time() - self._started,
            updated_at=time.time(),
        )

    def _failures(self, open_tasks: Iterable[int]) -> list[FailureRecord]:
        still_open = set(open_tasks)
        return [
            FailureRecord(
                task_id=task_id,
                sample_idx=sample,
                stage=rows[0]["error_stage"],
                error_class=rows[0]["error_class"],
                message=rows[0]["error_message"],
                attempts=rows[0]["attempts"],
                infrastructure=rows[0]["infrastructure"],
                traceback=rows[0]["error_traceback"] or "",
                output=rows[0]["error_output"] or "",
            )
            for (task_id, sample), rows in sorted(self._state.rows.items())
            if task_id in still_open and rows[0]["status"] == Status.FAILED
        ]

    def _write_part(self, rows: list[Row], *, n: int) -> PartRecord:
        """Write the next part. A name taken by a run that died before its manifest is skipped."""
        data = to_parquet(table_of(rows))
        store, keys = self.campaign.store, self.campaign.keys
        while not store.create(keys.part(self.shard, n), data):
            n += 1
        return PartRecord(
            key=keys.part(self.shard, n),
            rows=len(rows),
            episodes=len({(r["task_id"], r["sample_idx"]) for r in rows}),
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
        )

    def _undumped(self, verdicts: dict[int, GroupVerdict]) -> list[int]:
        if not self.campaign.config.rollout.dump_to_file:
            return []
        closed = [t for t, v in verdicts.items() if v.state is not GroupState.OPEN]
        return sorted([*self._state.manifest.undumped, *closed])

    def _write_dumps(self, manifest: Manifest, rows: list[Row]) -> None:
        """One object per prompt; what an earlier run committed is read back from its parts."""
        by_task: dict[int, list[Row]] = {task_id: [] for task_id in manifest.undumped}
        for row in rows:
            by_task[row["task_id"]].append(row)
        if not all(by_task.values()):
            stored = self.campaign.stored
            late = (r for part in self._state.manifest.parts for r in stored.part_rows(part))
            for row in late:
                if row["task_id"] in by_task:
                    by_task[row["task_id"]].append(row)
        self.campaign.store.put_many(
            {self.campaign.keys.dump(t): to_jsonl(group) for t, group in by_task.items()}
        )

    def _carry_over(self, closed: set[int]) -> _State:
        """What outlives the commit: finished members of open groups, gathered in one object."""
        rows = {place: r for place, r in self._state.rows.items() if place[0] not in closed}
        kept = [
            r
            for place, rs in rows.items()
            if self._is_finished(place) or rs[0]["draft"] is not None
            for r in rs
        ]
        if not kept:
            return _State(self._state.manifest, None, [], rows)
        if not closed and len(self._state.ledger_keys) == 1:
            return _State(self._state.manifest, None, self._state.ledger_keys, rows)
        data = to_ipc(table_of(kept))
        name = f"open-{hashlib.sha256(data).hexdigest()[:16]}"
        key = self.campaign.keys.ledger_entry(self.shard, name)
        self.campaign.store.put(key, data)
        return _State(self._state.manifest, None, [key], rows)


def _given_up(rows: Iterable[Row]) -> set[int]:
    """Groups among the closed ones that lost members to failures."""
    return {row["task_id"] for row in rows if row["status"] == Status.FAILED}


def _closed(row: Row, verdict: GroupVerdict) -> Row:
    row = row | {"group_state": str(verdict.state)}
    if verdict.state is GroupState.REJECTED and row["status"] == Status.ACCEPTED:
        row |= {"status": str(Status.FILTERED), "reason": f"group rejected: {verdict.reason}"}
    return row


def root_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first single exception inside nested groups."""
    first = errors.exceptions[0]
    return root_cause(first) if isinstance(first, BaseExceptionGroup) else first


def _read_state(campaign: Campaign, shard: int) -> _State:
    key = campaign.keys.manifest(shard)
    stored = campaign.store.get_tagged(key)
    if stored is None:
        manifest = Manifest(shard=shard, group_size=campaign.record.group_size)
    else:
        manifest = Manifest.from_bytes(stored.data, where=campaign.store.where(key))
    state = _State(manifest, stored.tag if stored else None)
    for ledger_key, rows in read_ledger(campaign.store, campaign.keys, shard):
        state.ledger_keys.append(ledger_key)
        found: dict[Place, list[Row]] = {}
        for row in rows:
            found.setdefault((row["task_id"], row["sample_idx"]), []).append(row)
        for place, episode_rows in found.items():
            if place[0] not in manifest.closed and _is_better(episode_rows, state.rows.get(place)):
                state.rows[place] = episode_rows
    return state


def _is_better(rows: list[Row], known: list[Row] | None) -> bool:
    """Of the same episode found twice the first one counts, unless it had failed."""
    return known is None or (known[0]["status"] == Status.FAILED != rows[0]["status"])
