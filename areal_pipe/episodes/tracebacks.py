"""The lines of a traceback that a user can do something about: those of code that is not ours."""

import traceback
from pathlib import Path

_OURS = str(Path(__file__).parent.parent)
_NOISE = (str(Path(traceback.__file__).parent / "asyncio"), _OURS)
MAX_CHARACTERS = 4000


def user_traceback(error: BaseException | None) -> str:
    """Lines of the user's and other libraries' code, innermost last; empty if there are none.

    Those of the exception that it was raised from come first.
    """
    if error is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = traceback.format_list([f for f in frames if not f.filename.startswith(_NOISE)])
    causes = [user_traceback(error.__cause__), "".join(theirs).rstrip()]
    return "\n".join(filter(None, causes))[-MAX_CHARACTERS:]
