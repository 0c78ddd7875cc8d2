"""One recorded model call of an agent, with what a trainer needs of it.

Named and shaped as AReaL's `InteractionWithTokenLogpReward`. A call that continues an earlier one
(its prompt starts with the parent's exact tokens) carries the parent's generated tokens as trained
tokens too; one that does not starts a trajectory of its own.
"""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from areal_pipe.contract.engine import ModelResponse
from areal_pipe.contract.errors import TrajectoryError
from areal_pipe.contract.trajectory import Trajectory

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class InteractionWithTokenLogpReward:
    """A model call: messages in, tokens with logprobs out, and the reward it earned."""

    model_response: ModelResponse | None = None
    """None while the call is under way, or when it failed."""
    reward: float | None = None
    """None: nobody scored it."""
    parent: "InteractionWithTokenLogpReward | None" = None
    """The call that this one continues."""
    chat_template_type: str = "hf"
    """How prompts were rendered, for AReaL's constructor; here the tokens themselves decide."""
    messages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    output_message_list: list[dict[str, Any]] | None = None
    interaction_id: str | None = None

    def to_trajectory(self) -> Trajectory:
        """Token columns of this call and of the calls whose tokens its prompt extends.

        Raises:
            TrajectoryError: the call has no response.
        """
        response = self.model_response
        if response is None:
            raise TrajectoryError(
                "an interaction without a model response is no trajectory: its generation failed "
                f"or has not ended (interaction {self.interaction_id})"
            )
        mask, logprobs, versions = self._prompt_columns(response.input_tokens)
        n = response.output_len
        return Trajectory(
            input_ids=np.asarray([*response.input_tokens, *response.output_tokens], np.int32),
            loss_mask=np.asarray([*mask, *[1] * n], np.int32),
            logprobs=np.asarray([*logprobs, *response.output_logprobs], np.float32),
            versions=np.asarray([*versions, *response.output_versions], np.int32),
            reward=self.reward,
        )

    def to_tensor_dict(self) -> "dict[str, Tensor]":
        """The same columns as a batch of one; `rewards` is missing when nobody scored the call."""
        from areal_pipe.contract.tensors import (
            tensor_dict_of,  # torch only where tensors are asked for
        )

        return tensor_dict_of(self.to_trajectory())

    def _prompt_columns(self, prompt: list[int]) -> tuple[list[int], list[float], list[int]]:
        """loss_mask, logprobs and versions of the prompt: the parent's own, then masked context."""
        columns = self._parent_columns(prompt)
        rest = len(prompt) - len(columns[0])
        mask, logprobs, versions = columns
        return [*mask, *[0] * rest], [*logprobs, *[0.0] * rest], [*versions, *[-1] * rest]

    def _parent_columns(self, prompt: list[int]) -> tuple[list[int], list[float], list[int]]:
        parent = self.parent
        if parent is None or parent.model_response is None:
            return [], [], []
        told = [*parent.model_response.input_tokens, *parent.model_response.output_tokens]
        if len(prompt) <= len(told) or prompt[: len(told)] != told:
            logger.warning(
                "interaction %s does not extend its parent's tokens: it starts a new trajectory",
                self.interaction_id,
            )
            return [], [], []
        t = parent.to_trajectory()
        assert t.loss_mask is not None and t.logprobs is not None and t.versions is not None
        return t.loss_mask.tolist(), t.logprobs.tolist(), t.versions.tolist()
