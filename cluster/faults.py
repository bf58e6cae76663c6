"""What goes wrong in an actor, as it may reach a person: one line, and of a kind that the callers can tell apart.

Ray wraps whatever an actor raises so that its text is a remote traceback. Owns the way back from there; decides nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from kernelband.errors import RunFailed, UserError


class ActorLost(RunFailed):
    """The actor died, twice, while it worked on this call, or could not be started."""


class Unexpected(RunFailed):
    """Code in an actor raised what nobody provided for: a defect of ours, or a process in a bad state."""


def first_line(err: BaseException) -> str:
    """The first line of an exception's text that is not empty, else the name of its class."""
    return next((line.strip() for line in str(err).splitlines() if line.strip()), type(err).__name__)


def plain(err: Exception) -> UserError | RunFailed:
    """What an actor raised, without Ray's wrapping: its UserError or RunFailed as it was; all else a RunFailed of one line."""
    import ray  # late: a finished run is shown without it

    if isinstance(err, ray.exceptions.RayTaskError):
        cause = err.cause
        if isinstance(cause, (UserError, RunFailed)):
            return cause
        return Unexpected(f"a worker process failed: {type(cause).__name__}: {first_line(cause)}")
    if isinstance(err, (UserError, RunFailed)):
        return err
    if isinstance(err, ray.exceptions.RayActorError):
        return ActorLost(f"a worker process was lost: {_why_dead(err)}")
    return Unexpected(f"{type(err).__name__}: {first_line(err)}")


def _why_dead(err: Any) -> str:
    """The last line of the traceback when the constructor raised (it names the exception), else the first line."""
    if err.actor_init_failed:
        return next((line.strip() for line in reversed(str(err).splitlines()) if line.strip()), "its constructor raised")
    return first_line(err)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Whatever an actor or Ray raises leaves this `with` as a UserError or a RunFailed of one line, never as a traceback."""
    try:
        yield
    except (UserError, RunFailed) as err:
        raise plain(err) from None
    except Exception as err:
        raise plain(err) from err
