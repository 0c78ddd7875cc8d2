"""The recipe of a dataset: everything that determines its trajectories, as digests.

Paths, hosts, times and concurrency never enter it: the same recipe elsewhere is the same data.
"""

import hashlib
import inspect
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from areal_pipe.campaign.config import CampaignConfig
from areal_pipe.contract.errors import ConfigError
from areal_pipe.datasets.load import Prompt
from areal_pipe.episodes.import_string import import_from_string
from areal_pipe.storage.rows import to_json

_EDGE_BYTES = 1 << 20
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt")
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
)
_MODEL_FILES = ("config.json", "generation_config.json")


def recipe_of(config: CampaignConfig, prompts: Iterable[Prompt]) -> dict[str, Any]:
    """The recipe, as plain data whose every field can be shown to a person."""
    engine = config.engine
    return {
        "dataset": _digest(to_json([p.task_id, p.data]) for p in prompts),
        "workflow": config.workflow.path,
        "workflow_kwargs": config.workflow.kwargs,
        "group_size": config.rollout.group_size,
        "gconfig": config.gconfig.model_dump(mode="json", exclude_none=True),
        "engine": engine.kind,
        "dtype": engine.dtype,
        "model": _model_digest(engine.model) if engine.model else None,
        "script": _script_digest(engine.script) if engine.script else None,
        "tokenizer": _folder_digest(config.tokenizer_path, _TOKENIZER_FILES),
        "chat_template": _folder_digest(config.tokenizer_path, ("chat_template.jinja",)),
    }


def fingerprint_of(recipe: dict[str, Any]) -> str:
    """SHA-256 of the recipe's canonical JSON."""
    return _digest([json.dumps(recipe, sort_keys=True, separators=(",", ":"))])


def differing_fields(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """One line per field in which two recipes differ, nested ones by dotted name."""
    lines: list[str] = []
    for key in sorted({*ours, *theirs}):
        mine, other = ours.get(key), theirs.get(key)
        if isinstance(mine, dict) and isinstance(other, dict):
            lines += [f"{key}.{line}" for line in differing_fields(mine, other)]
        elif mine != other:
            lines.append(f"{key}: stored {_shown(other)}, now {_shown(mine)}")
    return lines


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _digest(texts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode())
        digest.update(b"\n")
    return digest.hexdigest()


def _folder_digest(path: str | None, names: Iterable[str]) -> str:
    """Contents of some files of a folder; for a hub name, the name."""
    if path is None or not Path(path).is_dir():
        return str(path)
    files = [Path(path) / name for name in names]
    return _digest(f"{f.name} {_content_digest(f)}" for f in files if f.is_file())


def _model_digest(path: str) -> str:
    """Configuration in full, weights by size and their first and last mebibyte."""
    if not Path(path).is_dir():
        return path
    configs = [Path(path) / name for name in _MODEL_FILES]
    weights = sorted(f for f in Path(path).iterdir() if f.suffix in _WEIGHTS)
    lines = [f"{f.name} {_content_digest(f)}" for f in configs if f.is_file()]
    lines += [f"{f.name} {f.stat().st_size} {_edges_digest(f)}" for f in weights]
    return _digest(lines)


def _content_digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _edges_digest(path: Path) -> str:
    with path.open("rb") as file:
        digest = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(max(0, path.stat().st_size - _EDGE_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def _script_digest(script: str | None) -> str:
    """A scripted engine is its source."""
    try:
        target = import_from_string(script)
    except (ValueError, ImportError, AttributeError) as error:
        raise ConfigError(f"engine.script {script!r}: {error}") from error
    try:
        return _digest([inspect.getsource(target)])
    except (OSError, TypeError):  # not written in a file, or a list of answers
        return _digest([repr(target)])
