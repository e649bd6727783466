"""How large a bench's own daemon is."""

from __future__ import annotations

import torch

from kvd.planning.footprint import Footprint
from protocol.layout import round_up


def room_for(device: str, plan: Footprint, sessions: int) -> dict[str, int]:
    """Sizes of a daemon on ``device`` that ``sessions`` sessions of ``plan`` fit twice, as `EmbeddedDaemon` takes them.

    On a GPU it has all VRAM.
    """
    on_gpu = device != "cpu"
    extent = 1 << 30 if on_gpu else round_up(4 * plan.page_format.stride, 4 << 20)
    host = round_up(2 * plan.host_bytes(sessions), extent)
    if on_gpu:
        vram = torch.cuda.get_device_properties(torch.device(device)).total_memory
    else:
        vram = 2 * plan.vram_bytes(sessions) + (256 << 20)
    return {"host_bytes": host, "extent_bytes": extent, "vram_bytes": vram // (2 << 20) * (2 << 20)}
