"""Objects by their dotted path, as configurations name them."""

import importlib
from typing import Any


def import_from_string(path: Any) -> Any:
    """The object at a dotted path `module.path.Name`.

    Raises:
        ValueError: not such a path.
        ImportError: the module cannot be imported.
        AttributeError: the module has no such name.
    """
    if not path or not isinstance(path, str):
        raise ValueError(
            f"Invalid module path: {path}. "
            "Expected a non-empty string like 'module.path.ObjectName'."
        )
    module_path, _, name = path.rpartition(".")
    if not module_path:
        raise ValueError(
            f"Invalid module path: {path!r}. Expected format 'module.path.ObjectName', "
            "got 1 part(s)."
        )
    try:
        module = importlib.import_module(module_path)
    except ImportError as error:
        raise ImportError(
            f"Failed to import module {module_path!r} from path {path!r}: {error}"
        ) from error
    try:
        return getattr(module, name)
    except AttributeError as error:
        raise AttributeError(f"Module {module_path!r} has no attribute {name!r}.") from error
