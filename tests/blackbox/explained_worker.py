"""A worker on a GPU that has memory of every kind, and takes more when it is told to.

Run as ``python -m tests.blackbox.explained_worker RUN_DIR``; it does what the lines on its standard input say, and
answers each with ``ok``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from compute import memory_report
from compute.attach import Attachment
from compute.client import Client
from compute.device import open_device
from compute.session import HostSession
from protocol.layout import Q8G64
from protocol.model import DEMO

MIB = 1 << 20


class Taken:
    """What the lines take, until they give it back."""

    def __init__(self, attachment: Attachment) -> None:
        self._attachment = attachment
        self._held: dict[str, Any] = {}

    def torch(self, mib: int) -> None:
        """From torch's allocator."""
        self._held["torch"] = torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")

    def kvd(self, mib: int) -> None:
        """From the daemon."""
        self._held["kvd"] = self._attachment.allocate(mib * MIB, "tables")

    def driver(self, mib: int) -> None:
        """From neither."""
        status, self._held["driver"] = driver.cuMemAlloc(mib * MIB)
        assert status == driver.CUresult.CUDA_SUCCESS, status

    def back(self, what: str) -> None:
        held = self._held.pop(what)
        if what == "driver":
            driver.cuMemFree(held)
        elif what == "kvd":
            held.free()
        else:
            del held
            torch.cuda.empty_cache()

    def warm(self, _: str) -> None:
        """Run kernels that have not run yet, and say so."""
        x = torch.randn(512, 512, device="cuda")
        ((x @ x).softmax(-1).sort()[0].topk(8)[0].sum() + (x.bfloat16() @ x.bfloat16()).float().sum()).item()
        del x
        self._attachment.warmed_up()


def main() -> None:
    memory_report.INTERVAL_S = 0.1
    device = open_device("cuda")
    page_format = DEMO.page_format(Q8G64)
    with Client(Path(sys.argv[1]), name="explained") as client, Attachment(client, device) as attachment:
        session = HostSession.create(
            attachment, "explained", page_format, fingerprint=bytes(32), token_capacity=64 * 64, commit_bytes=0
        )
        session.extend(16)
        taken = Taken(attachment)
        for line in sys.stdin:
            what, argument = line.split()
            getattr(taken, what)(int(argument) if argument.isdecimal() else argument)
            torch.cuda.synchronize()
            time.sleep(3 * memory_report.INTERVAL_S)  # until it has been reported
            sys.stdout.write("ok\n")
            sys.stdout.flush()
        session.close()


if __name__ == "__main__":
    main()
