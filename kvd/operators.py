"""Who may decide about the daemon itself and about what is other users'."""

from __future__ import annotations

import grp
import os
import pwd

from kvd.config import KEYS, Config
from kvd.peers import Peer
from protocol.errors import ConfigError, PermissionRefused


class Operators:
    """Root, the daemon's own uid, and members of the group that ``socket.admin_group`` names, if it names one.

    Raises `ConfigError` if there is no such group.
    """

    def __init__(self, config: Config) -> None:
        self._group = config.socket.admin_group
        if self._group:
            group_named(config, "socket.admin_group")

    def require(self, peer: Peer) -> None:
        """Raise `PermissionRefused` unless ``peer``, as the kernel gave it, is one of them."""
        if peer.uid in (0, os.geteuid()) or (self._group and self._is_member(peer)):
            return
        group = f", nor of group {self._group}" if self._group else ""
        raise PermissionRefused(f"{peer} is neither root nor of the daemon's uid, {os.geteuid()}{group}", uid=peer.uid)

    def _is_member(self, peer: Peer) -> bool:
        """By the gid of its process, or by what the group lists for its uid. Looked up anew: both lists change."""
        try:
            group = grp.getgrnam(self._group)
            return peer.gid == group.gr_gid or pwd.getpwuid(peer.uid).pw_name in group.gr_mem
        except KeyError:  # the group is gone, or the uid has no name that it could list
            return False


def group_named(config: Config, dotted: str) -> grp.struct_group:
    """The group that a setting names; raises `ConfigError` if this system has none of that name."""
    name = KEYS[dotted].value_in(config)
    try:
        return grp.getgrnam(name)
    except KeyError:
        raise ConfigError(
            f"{config.origins[dotted]}: {dotted} is {name!r}, which is not a group of this system",
            key=dotted,
            value=name,
        ) from None
