"""Several attempts at one answer: wrong answers are told so, and later success counts less."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from areal_pipe.contract.engine import GenerationHyperparameters
from areal_pipe.contract.workflow import Draft
from areal_pipe.rewards.call import Isolation
from areal_pipe.workflows.rlvr import RewardFn, RLVRWorkflow

RETRY_MESSAGE = (
    "That answer is wrong, or its final result could not be read. Check your reasoning and your "
    "arithmetic, then solve the problem again and state the final answer."
)


class MultiTurnWorkflow(RLVRWorkflow):
    """Generate and score until the reward is not 0 or `max_turns` is reached.

    All turns form one trajectory: generated tokens are trained on, what is told in between is not.
    The final reward is multiplied by `turn_discount` for every failed turn before it.
    """

    def __init__(
        self,
        reward_fn: RewardFn | str,
        gconfig: GenerationHyperparameters,
        tokenizer: Any,
        max_turns: int,
        turn_discount: float,
        *,
        retry_message: str = RETRY_MESSAGE,
        reward_timeout_seconds: float = 15.0,
        reward_retries: int = 0,
        reward_isolation: Isolation = "worker",
    ) -> None:
        """
        Raises:
            ValueError: max_turns < 1, or turn_discount outside (0, 1].
        """
        if max_turns < 1:
            raise ValueError(f"max_turns must be positive, got {max_turns}")
        if not 0 < turn_discount <= 1:
            raise ValueError(f"turn_discount must be in (0, 1]. Got {turn_discount}")
        super().__init__(
            reward_fn,
            gconfig,
            tokenizer,
            reward_timeout_seconds=reward_timeout_seconds,
            reward_retries=reward_retries,
            reward_isolation=reward_isolation,
        )
        self.max_turns = max_turns
        self.turn_discount = turn_discount
        self._retry_ids = retry_prompt_ids(tokenizer, retry_message)

    async def reward(self, draft: Draft) -> Draft:
        score = await self.score(draft)
        if score != 0 or draft.turns >= self.max_turns:
            return replace(draft, reward=score * draft.discount, finished=True)
        told = replace(draft, discount=draft.discount * self.turn_discount)
        return told.with_context([*self._missing_eos(draft), *self._retry_ids])

    def _missing_eos(self, draft: Draft) -> Sequence[int]:
        """Close a turn that was cut off: the template expects an end of turn before the next."""
        ends = (self.tokenizer.eos_token_id, self.tokenizer.pad_token_id)
        return [] if draft.input_ids[-1] in ends else [self.tokenizer.eos_token_id]


def retry_prompt_ids(tokenizer: Any, message: str) -> list[int]:
    """Tokens between a finished assistant turn and the next one.

    Taken as a difference of two renderings, so that the template decides on separators and the
    tokens of earlier turns are never tokenized again.
    """
    turn = [{"role": "assistant", "content": "answer"}]
    asked = [*turn, {"role": "user", "content": message}]
    before = tokenizer.apply_chat_template(turn, tokenize=True, return_dict=False)
    after = tokenizer.apply_chat_template(
        asked, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return list(after)[len(before) :]
