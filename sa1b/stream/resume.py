"""Check that a saved state belongs to a stream."""

import reprlib
import warnings
from collections.abc import Mapping
from typing import Any

from sa1b.console import command
from sa1b.errors import Sa1bError

_SEQUENCE = ("order", "block_size", "ids_sha256", "masks_where", "seed")


class ResumeError(Sa1bError):
    """A saved state that does not belong to this stream; the message names the difference and the remedy.

    Attributes:
        argument: the stream's argument that differs, such as "seed" or "view"; None if the value is not the
            state of a stream.
    """

    def __init__(self, message: str, argument: str | None = None) -> None:
        super().__init__(message)
        self.argument = argument

    def __reduce__(self) -> tuple[type["ResumeError"], tuple[str, str | None]]:
        return ResumeError, (str(self), self.argument)


_PASS = "pass what state_dict() returned"


def check_state(own: Mapping[str, Any], state: object, view: str, root: str, *, grown: bool) -> None:
    """Check that a state has the same sequence as a stream, and warn about other differences.

    Args:
        own: state of the stream.
        state: the saved state.
        view: the stream's view, for messages.
        root: the stream's dataset directory, for messages.
        grown: whether the stream reads all images of the directory, which may have grown since the state was
            saved.

    Raises:
        ResumeError: the state has another sequence, or is not the state of a stream.
    """
    if not isinstance(state, Mapping):
        raise ResumeError(f"state {reprlib.repr(state)}: not the state of a stream; {_PASS}")
    if missing := own.keys() - state.keys():
        raise ResumeError(f"state {reprlib.repr(state)}: has no {', '.join(sorted(missing))}; {_PASS}")
    if not isinstance(state["options"], Mapping):
        raise ResumeError(f"state options {reprlib.repr(state['options'])}: not a mapping; {_PASS}")
    # With blocks, an endless order cuts the blocks of later epochs at other rows.
    for name in (*_SEQUENCE, "epochs") if own["block_size"] != 1 else _SEQUENCE:
        if state[name] != own[name]:
            raise _other_sequence(name, state[name], own[name], view, root, grown)
    if changed := [
        f"{name} {value}, now {own['options'].get(name)}"
        for name, value in {**own["options"], **state["options"]}.items()
        if own["options"].get(name) != value
    ]:
        warnings.warn(
            f"the state was saved by a stream with other options: {', '.join(changed)}. The sequence of "
            "images is the same, but the samples differ",
            stacklevel=3,
        )
    if state["bytes_sha256"] != own["bytes_sha256"]:
        warnings.warn(
            f"{root} has changed since the state was saved (sample table {_short(state['bytes_sha256'])}, "
            f"now {_short(own['bytes_sha256'])}): the images are the same, but their stored bytes may differ",
            stacklevel=3,
        )


def _other_sequence(name: str, saved: Any, own: Any, view: str, root: str, grown: bool) -> ResumeError:
    argument = "view" if name in ("ids_sha256", "masks_where") else name
    if name == "ids_sha256":
        differs = f"other images ({_short(saved)}) than {view} ({_short(own)})"
        remedy = (
            f"pass the view that the state was saved with; `{command('view')}` prints the digests of views"
        )
        if grown:
            remedy = (
                f"if sources were added to {root} since, make a view of the images that it was trained on "
                f"(`{command('view')} {root} --ids FILE --name NAME`) and pass it as view: a view keeps its "
                "images and its sequence when a directory grows"
            )
    elif name == "masks_where":
        differs = f"condition on masks {_condition(saved)}, {view} {_condition(own)}"
        remedy = "pass the view that the state was saved with, as view"
    else:
        differs = f"{name} {saved}, this stream {own}"
        remedy = f"pass {name}={saved!r}"
    return ResumeError(
        f"saved state with {differs}: its sequence differs, so samples would be repeated and left out; "
        f"{remedy}",
        argument,
    )


def _condition(text: Any) -> str:
    return "none" if text is None else repr(text)


def _short(digest: Any) -> str:
    return str(digest)[:12]
