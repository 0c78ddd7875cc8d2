"""From the `engine:` section to an engine."""

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.engines.scripted import ScriptedEngine
from areal_pipe.episodes.import_string import import_from_string
from areal_pipe.rollout.rollout_engine import RolloutEngine


def build_engine(config: CampaignConfig) -> RolloutEngine:
    """The engine of a campaign, not yet initialized."""
    section = config.engine
    if section.kind == "scripted":
        script = import_from_string(section.script)
        return ScriptedEngine(script, latency_seconds=section.latency_seconds, keep_requests=False)
    from areal_pipe.engines.transformers_local import TransformersEngine  # slow to import

    return TransformersEngine(
        section.model or "",
        dtype=section.dtype,
        device=section.device,
        max_batch_size=section.max_batch_size,
        num_threads=section.num_threads,
    )
