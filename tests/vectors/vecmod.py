"""What the resolution vectors import by name: workflows, agents, and things that are neither."""

from typing import Any

from areal_pipe.contract.workflow import RolloutWorkflow

notcallable = 3


class MyW(RolloutWorkflow):
    def __init__(self, a: int = 1) -> None:
        self.a = a

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        return None


class Agent:
    async def run(self, data: dict[str, Any]) -> float:
        return 0.0


class SyncAgent:
    def run(self, data: dict[str, Any]) -> float:
        return 0.0


class NoRun:
    pass


a_workflow = MyW(a=5)
an_agent = Agent()
