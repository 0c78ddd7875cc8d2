"""What an episode is: `RolloutWorkflow`, and `StagedWorkflow` for those that can be watched.

A staged workflow is the same episode cut at its natural joints. `tokenize`, `generate`, `reward`
and `pack` each take a `Draft` and return the next one, so that the library (`arun_episode`) and the
Prefect flow can compose the very same functions.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from areal_pipe.contract.engine import InferenceEngine
from areal_pipe.contract.interaction import InteractionWithTokenLogpReward

if TYPE_CHECKING:
    from torch import Tensor

    EpisodeResult = dict[str, Tensor] | dict[str, InteractionWithTokenLogpReward] | None
    """A padded tensor dict, recorded interactions, or None for a rejected episode."""


class RolloutWorkflow(ABC):
    """One episode on one prompt. AReaL's interface."""

    @abstractmethod
    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "EpisodeResult":
        """Run the episode on one dataset row.

        Returns:
            A tensor dict (see `packing`), a dict of interactions by id, or None to reject.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """An episode under way: tokens so far, aligned with mask, logprobs and versions.

    Immutable: the members of a group share the draft of their tokenized prompt.
    """

    data: Mapping[str, Any]
    """The dataset row."""
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    """1 on tokens the policy generated, 0 elsewhere; same length as input_ids."""
    logprobs: tuple[float, ...]
    """0.0 on tokens the policy did not generate."""
    versions: tuple[int, ...]
    """-1 on tokens the policy did not generate."""
    turn_ids: tuple[int, ...] = ()
    """Index of the turn that generated the token, -1 elsewhere; empty for one-turn workflows."""
    prompt_len: int = 0
    """Tokens of the prompt of the current turn: everything before its generated tokens."""
    turns: int = 0
    """Turns generated so far."""
    stop_reason: str | None = None
    """Of the last generation."""
    seeds: tuple[int, ...] = ()
    """Sampling seed of each turn, where sampling was seeded."""
    reward: float | None = None
    discount: float = 1.0
    finished: bool = False
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Anything else a workflow carries from stage to stage; never mutated."""

    @classmethod
    def of_prompt(cls, data: Mapping[str, Any], input_ids: list[int]) -> Self:
        """The draft of a tokenized prompt."""
        n = len(input_ids)
        return cls(
            data=data,
            input_ids=tuple(input_ids),
            loss_mask=(0,) * n,
            logprobs=(0.0,) * n,
            versions=(-1,) * n,
            turn_ids=(-1,) * n,
            prompt_len=n,
        )

    def with_context(self, ids: list[int]) -> Self:
        """Append tokens that the policy is shown, not trained on."""
        n = len(ids)
        return replace(
            self,
            input_ids=(*self.input_ids, *ids),
            loss_mask=(*self.loss_mask, *(0,) * n),
            logprobs=(*self.logprobs, *(0.0,) * n),
            versions=(*self.versions, *(-1,) * n),
            turn_ids=(*self.turn_ids, *(-1,) * n),
            prompt_len=len(self.input_ids) + n,
        )

    def with_generated(
        self, tokens: list[int], logprobs: list[float], versions: list[int], stop_reason: str
    ) -> Self:
        """Append one turn's generated tokens."""
        n = len(tokens)
        return replace(
            self,
            input_ids=(*self.input_ids, *tokens),
            loss_mask=(*self.loss_mask, *(1,) * n),
            logprobs=(*self.logprobs, *logprobs),
            versions=(*self.versions, *versions),
            turn_ids=(*self.turn_ids, *(self.turns,) * n),
            prompt_len=len(self.input_ids),
            turns=self.turns + 1,
            stop_reason=stop_reason,
        )

    @property
    def completion_ids(self) -> list[int]:
        """Tokens of the last turn."""
        return list(self.input_ids[self.prompt_len :])


class StagedWorkflow(RolloutWorkflow):
    """An episode as tokenize, then generate and reward until finished, then pack."""

    @abstractmethod
    async def tokenize(self, data: dict[str, Any]) -> Draft:
        """Turn a dataset row into the first prompt; shared by all members of a group."""

    @abstractmethod
    async def generate(self, engine: InferenceEngine, draft: Draft) -> Draft:
        """Append one turn."""

    @abstractmethod
    async def reward(self, draft: Draft) -> Draft:
        """Score the last turn; sets `finished`, or appends the next turn's context."""

    @abstractmethod
    async def pack(self, draft: Draft) -> "EpisodeResult":
        """The tensor dict of a finished draft, or None to reject."""

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> "EpisodeResult":
        draft = await self.tokenize(data)
        while not draft.finished:
            draft = await self.generate(engine, draft)
            draft = await self.reward(draft)
        return await self.pack(draft)
