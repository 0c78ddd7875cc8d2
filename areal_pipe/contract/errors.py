"""Every error this library raises, by the boundary that was crossed.

ArealPipeError
├── InfrastructureError      an outage, worth a retry; user code may raise it, too
├── ConfigError              the campaign's configuration: a key, a value, an override
│   └── RecipeMismatch       this experiment/trial/version holds data of another recipe
├── DatasetError             the prompts: a file, a line, a missing column
├── WorkflowError            the user's workflow: it does not import, or breaks its contract
│   └── TrajectoryError      what it returned is no trajectory (also a ValueError)
├── EngineError              generation (also a RuntimeError)
│   ├── EngineUnavailable    the server or process is away (also an InfrastructureError)
│   └── RequestError         the request can never succeed: prompt too long, bad parameter
├── RewardError              the reward function: what it raised, or that it gave no number
│   ├── RewardTimeout        it did not return in time and was killed
│   └── RewardCrashed        its process died
├── StageTimeout             an episode or a stage took longer than its limit
└── StorageError             object storage: unreachable, refused, or damaged content
    ├── StorageUnavailable   it is away or overloaded (also an InfrastructureError)
    ├── ConcurrentWrite      another run is writing the same shard
    │   └── ShardBusy        another run is working on it and says so
    └── SchemaError          a file was written by a newer major schema
"""


class ArealPipeError(Exception):
    """Base of all errors of this library. The message states the rule, what came, the way out."""


class InfrastructureError(ArealPipeError):
    """An outage: waiting and trying again can help. Raise it where your code knows of one."""


class ConfigError(ArealPipeError):
    """The configuration does not say what can be run."""


class RecipeMismatch(ConfigError):
    """The target already holds trajectories made by a different recipe."""


class DatasetError(ArealPipeError):
    """The prompts cannot be read or lack what an episode needs."""


class WorkflowError(ArealPipeError):
    """The workflow cannot be imported or broke the RolloutWorkflow contract."""


class TrajectoryError(WorkflowError, ValueError):
    """A value returned by a workflow violates the trajectory contract."""


class EngineError(ArealPipeError, RuntimeError):
    """Generation failed."""


class EngineUnavailable(EngineError, InfrastructureError):
    """The engine cannot be reached or is restarting."""


class RequestError(EngineError):
    """The request itself is invalid: sending it again cannot help."""


class RewardError(ArealPipeError):
    """The reward function gave no usable number.

    What it raised in its process comes as text: no object of user code crosses the boundary.
    """

    raised: str | None = None
    """Name of the class that the function raised; None if it raised nothing."""
    raised_message: str = ""
    raised_traceback: str = ""
    infrastructure: bool = False
    """Whether what it raised was an outage, such as a judge's server being away."""
    output: str = ""
    """The end of what the function printed."""


class RewardTimeout(RewardError):
    """The reward function did not return within its limit; its process was killed."""


class RewardCrashed(RewardError):
    """The process that ran the reward function died."""


class StageTimeout(ArealPipeError):
    """A stage or an episode exceeded its time limit."""


class StorageError(ArealPipeError):
    """Object storage refused, or holds something unreadable."""


class StorageUnavailable(StorageError, InfrastructureError):
    """Object storage is away or overloaded."""


class ConcurrentWrite(StorageError):
    """Another run changed the same shard while this one was writing it."""


class ShardBusy(ConcurrentWrite):
    """Another run is working on this shard right now."""


class SchemaError(StorageError):
    """A stored file follows a schema this version does not know."""
