"""The one error tree.

    ClusterError
      BadRequest            400  the request itself is wrong; never retried
        PromptTooLong       400
      Unauthorized          401
      NoRoom                429  pools are full; retry after a while
      Unavailable           503  no live worker to serve it
        Draining            503  this worker takes no new work
      RequestCancelled      499  the caller went away
      WorkerLost            502  a process died or stopped answering; retried
      TransferError         502  request state did not arrive; retried
      Rejected              502  arrived state did not match its digest; retried
      Preempted             503  its memory was needed for an older one; retried, free of charge
      ProtocolError         500  a peer said something that cannot be
      StartupError          500  a process or launch cannot start as configured

Messages say who, what and what next. Knows nothing of HTTP bodies: dialects shape those.
"""

from __future__ import annotations


class ClusterError(Exception):
    """Anything that can happen to a request or a process; `status` is its HTTP status."""

    status = 500
    retryable = False

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    @property
    def kind(self) -> str:
        return type(self).__name__


class BadRequest(ClusterError):
    status = 400


class PromptTooLong(BadRequest):
    """Prompt and max_tokens do not fit the longest sequence that the cluster serves."""


class Unauthorized(ClusterError):
    status = 401


class NoRoom(ClusterError):
    status = 429


class Unavailable(ClusterError):
    status = 503


class Draining(Unavailable):
    pass


class RequestCancelled(ClusterError):
    status = 499


class WorkerLost(ClusterError):
    status = 502
    retryable = True


class TransferError(ClusterError):
    status = 502
    retryable = True


class Rejected(ClusterError):
    status = 502
    retryable = True


class Preempted(ClusterError):
    status = 503
    retryable = True


class ProtocolError(ClusterError):
    pass


class StartupError(ClusterError):
    pass


def _tree(root: type[ClusterError]) -> dict[str, type[ClusterError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


ERRORS: dict[str, type[ClusterError]] = _tree(ClusterError)
"""By kind: how an error that travelled as a message becomes one again."""


def revive(kind: str, message: str, retry_after_s: float | None = None) -> ClusterError:
    """The error that a peer described; an unknown kind is a plain ClusterError."""
    return ERRORS.get(kind, ClusterError)(message, retry_after_s=retry_after_s)
