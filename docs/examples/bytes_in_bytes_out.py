"""Rows that an engine has encoded itself go into kvd byte for byte, and come out again under another lease."""

import sys

import torch

from compute.api import Node
from protocol.model import DEMO

NAME, WEIGHTS = "bytes", b"which weights they are of".ljust(32)
with Node(sys.argv[1], "cpu") as node:
    session = node.session(NAME, DEMO, WEIGHTS, max_tokens=1024, hot_rows=4096)
    positions, row_bytes = session.begin(200), session.format.encoding.rows.row_bytes
    rows = [torch.randint(256, (200, g.layers, row_bytes)).to(torch.uint8) for g in session.format.groups]
    for group, encoded in enumerate(rows):
        session.append_encoded(group, positions, encoded)
    session.finish(positions)
    print("rows committed:", session.commit())
with Node(sys.argv[1], "cpu") as node:
    session = node.session(NAME, DEMO, WEIGHTS, max_tokens=1024, hot_rows=4096)
    found = [session.read(group, session.addresses(group, torch.arange(200))) for group in range(len(rows))]
    print("the same bytes:", all(map(torch.equal, found, rows)))
    session.close(keep=False)
