"""The lines of a traceback that a user can do something about: those of code that is not ours."""

import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent)
_NOISE = (str(Path(traceback.__file__).parent / "asyncio"), _OURS)
MAX_CHARACTERS = 4000


def user_traceback(error: BaseException) -> str:
    """Lines of the user's and other libraries' code, innermost last.

    Notes come last, such as the traceback of a reward that was raised in another process. Empty if
    only our own code was involved.
    """
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not f.filename.startswith(_NOISE)]
    lines = traceback.format_list(theirs) + [
        f"{note}\n" for note in getattr(error, "__notes__", ())
    ]
    return "".join(lines).rstrip()[-MAX_CHARACTERS:]
