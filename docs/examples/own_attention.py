"""An engine with its own attention: kvd resolves its selections, it reads the rows by address. CPU or GPU.

The "model" is one projection, but the loop is that of any sparse-attention decoder: append, select, resolve, attend,
layer after layer. It is run with the history in VRAM and in host RAM, and must give the same bits.
"""

import hashlib
import sys

import torch
from torch import Tensor

from compute.api import Node, Session
from protocol.model import DEMO

HEADS, STEPS, PROMPT = 4, 40, 700
LATENT, ROPE, GROUP = 512, 64, 64  # of a q8g64 row: values, rope values, and values that share a scale


def decode(rows: Tensor) -> Tensor:
    """q8g64 rows uint8 [..., 656] to float32 [..., 576]: int8 values, 8 bfloat16 scales, 64 bfloat16 of rope."""
    values = rows[..., :512].view(torch.int8).float().unflatten(-1, (8, GROUP))
    scales = rows[..., 512:528].view(torch.bfloat16).float()
    return torch.cat(((values * scales[..., None]).flatten(-2), rows[..., 528:].view(torch.bfloat16).float()), dim=-1)


def attend(session: Session, group: int, layer: int, addresses: Tensor, query: Tensor) -> Tensor:
    """float32 [n, heads, 512] of queries [n, heads, 576], over the rows at ``addresses`` int64 [n, k]."""
    in_group = layer - session.format.groups[group].first_layer
    keys = decode(session.read(group, addresses)[..., in_group, :].contiguous())  # [n, k, 576]
    scores = torch.einsum("nhd,nkd->nhk", query, keys) * query.shape[-1] ** -0.5
    weights = scores.masked_fill((addresses == 0)[:, None], -torch.inf).softmax(dim=-1)
    return torch.einsum("nhk,nkd->nhd", weights, keys[..., :LATENT])


def step(session: Session, x: Tensor, *, cached: bool) -> Tensor:
    """Append the rows of x [n, 576], and attend from each: [n, 576]."""
    positions = session.begin(len(x), cached=cached)
    for group, index in enumerate(session.format.groups):
        for layer in range(index.first_layer, index.end):
            row = torch.tanh(x * (1 + 0.1 * layer)).to(positions.device)
            session.append(layer, positions, row[:, :LATENT], row[:, LATENT:])
            if layer == index.first_layer:
                selection = select(row, positions, session.length)
                addresses = session.resolve(group, selection)
            query = row[:, None, :].repeat(1, HEADS, 1).roll(layer, dims=-1)
            attended = attend(session, group, layer, addresses, query).mean(dim=1).cpu()
            x = x + torch.nn.functional.pad(attended, (0, ROPE))
    session.finish(positions)
    return x


def select(row: Tensor, positions: Tensor, length: int, k: int = 48) -> Tensor:
    """An engine's own choice: the newest 16 positions, and 32 that the row's values point to. Ascending, -1 last."""
    newest = positions[:, None] - torch.arange(16, device=positions.device)
    pointed = (row[:, :32].abs() * 1e4).long() % length
    chosen = torch.cat((newest, pointed), dim=1).clamp_min(-1)
    chosen = torch.where(chosen <= positions[:, None], chosen, -1).sort(dim=1, descending=True).values
    repeated = torch.nn.functional.pad(chosen[:, 1:] == chosen[:, :-1], (1, 0))
    found = torch.where(repeated | (chosen < 0), length, chosen).sort(dim=1).values[:, :k]
    return torch.where(found < length, found, -1).int()


def main(run_dir: str, device: str = "cpu") -> None:
    digests = []
    for mode in ("resident", "offloaded"):
        with Node(run_dir, device) as node:
            session = node.session(f"own-{mode}", DEMO, bytes(32), max_tokens=1024, mode=mode, hot_rows=256)
            x = torch.randn(PROMPT, LATENT + ROPE, generator=torch.Generator().manual_seed(1))
            for part in x.split(256):
                last = step(session, part, cached=False)[-1:]
            digest = hashlib.sha256()
            for _ in range(STEPS):
                last = step(session, torch.tanh(last), cached=True)
                digest.update(last.numpy().tobytes())
            print(mode, session.stats(), digest.hexdigest()[:16])
            digests.append(digest.digest())
            session.close(keep=False)
    print("outputs equal:", digests[0] == digests[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
