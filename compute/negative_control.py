"""One fetched row made wrong on purpose: an equality of outputs that cannot fail shows nothing."""

from __future__ import annotations

from compute.hot_cache import HotCaches
from compute.kernels.state import CURSOR, MISSES
from protocol.layout import PageFormat


class NegativeControl:
    """Corrupts the next row that is fetched into ``caches``, once, when it is `armed`."""

    def __init__(self, page_format: PageFormat, caches: HotCaches | None) -> None:
        groups = page_format.groups
        self._caches = caches
        # The group with the most layers: a wrong key that all heads of one layer pass over shows nothing.
        self._group = max(range(len(groups)), key=lambda group: groups[group].layers)
        self.armed = False

    def strike(self, group: int | None = None) -> None:
        """A round is done, of ``group`` or of all groups."""
        if not self.armed or self._caches is None or group not in (None, self._group):
            return
        cache = self._caches.groups[self._group]
        if cache.control[MISSES]:
            cache.rows[cache.control[CURSOR] - 1] = 0x40  # the slot before the cursor is the last one filled
            self.armed = False
