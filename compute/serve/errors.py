"""Why a request is refused by the server itself; what the daemon refuses is in ``protocol.errors``."""

from __future__ import annotations

from protocol.errors import KvdError


class RequestRefused(KvdError):
    """A request that is not served."""

    code = "refused"


class BadBody(RequestRefused):
    """A request's body that is not of the documented form. ``what`` is where: a field's path, or the body."""

    code = "invalid_body"

    def __init__(self, what: str, reason: str) -> None:
        super().__init__(f"{what}: {reason}", what=what)


class QueueFull(RequestRefused):
    """As many requests wait as may."""

    code = "queue_full"

    def __init__(self, waiting: int, limit: int) -> None:
        super().__init__(f"{waiting} requests wait; the limit is {limit}", waiting=waiting, limit=limit)


class QueueTimeout(RequestRefused):
    """A request that has waited as long as it may."""

    code = "queue_timeout"

    def __init__(self, waited_s: float, limit_s: float, place: int, reason: str) -> None:
        super().__init__(
            f"waited {waited_s:.1f} s in the queue, at place {place}; the limit is {limit_s:g} s; {reason}",
            waited_s=waited_s,
            limit_s=limit_s,
            place=place,
        )


class ContextExceeded(RequestRefused):
    """More tokens than a session may hold."""

    code = "context_length_exceeded"

    def __init__(self, history: int, prompt: int, output: int, limit: int) -> None:
        super().__init__(
            f"{history} tokens of history, {prompt} of prompt and {output} to come are {history + prompt + output}; "
            f"the limit is {limit}",
            history=history,
            prompt=prompt,
            output=output,
            limit=limit,
        )


class ShuttingDown(RequestRefused):
    """The server ends, and takes no new work."""

    code = "shutting_down"

    def __init__(self) -> None:
        super().__init__("the server is shutting down")
