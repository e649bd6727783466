"""What a worker does when its daemon goes away: wait for the next one, and go on with it.

Until it needs the daemon again, a worker notices nothing: it decodes to the end of the pages that it has.
"""

from __future__ import annotations

import time

from compute.attach import Attachment
from protocol.errors import DaemonUnavailable, KvdError

RETRY_S = 0.05


class Recovery:
    """Waits for at most ``timeout_s``. Made for an `Attachment`, whose ``on_loss`` it is."""

    def __init__(self, attachment: Attachment, timeout_s: float) -> None:
        self._attachment = attachment
        self._timeout_s = timeout_s

    def __call__(self, lost: DaemonUnavailable) -> None:
        """Return with another lease that holds every session and has all VRAM that the earlier one had.

        Raises ``lost`` if no daemon answers in time, and `DaemonUnavailable` with the reason where the one that answers
        does not take back what this process holds: a session that it could not verify, or VRAM whose place others have
        had meanwhile.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            try:
                self._reattach()
                return
            except DaemonUnavailable:
                if time.monotonic() > deadline:
                    raise lost from None
                time.sleep(RETRY_S)
            except KvdError as error:
                reason = f"the next daemon does not take back what this process holds: {error.message}"
                raise DaemonUnavailable(reason, **error.facts) from error

    def _reattach(self) -> None:
        attachment = self._attachment
        attachment.client.reconnect()
        extents: set[int] = set()
        for session in attachment.sessions:
            extents |= session.reattach()
        attachment.hand_over(extents)
