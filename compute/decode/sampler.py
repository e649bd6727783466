"""Which token follows: drawn from the model's distribution, by temperature and top-p, on the device.

The draw behind a row is a function of the row's logits, the request's seed and the position of the token to come, and
of nothing else: not of the batch, nor of what was drawn before. So a sampled request gives the same tokens alone, in a
batch, and with drafts or without.

Drafts are tokens, not distributions: the MTP layer's most likely ones. The rejection rule of speculative sampling keeps
such a draft d with probability p(d), and otherwise draws from p without d. Drawing t from p, and keeping the draft if
it is t, is that rule: t is d with probability p(d), and where it is not, t is distributed as p without d. So drafts
are verified by comparing them with what is drawn (`compute.decode.mtp`), whether greedily or not.

Probabilities are summed as integers. A sum of floats depends on its order, and a scan's order on the number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.errors import InvalidValue

WEIGHT_BITS = 40
"""The most likely token's weight is 2 ** 40: what is 2 ** -40 times as likely is never drawn."""
MAX_TEMPERATURE = 2.0
SEED_BITS = 63


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. Temperature 0 takes the most likely one, whatever the others say."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `InvalidValue`; a seed of any size is taken modulo 2 ** 63."""
        if not 0.0 <= self.temperature <= MAX_TEMPERATURE:
            raise InvalidValue("temperature", self.temperature, f"0 to {MAX_TEMPERATURE:g}")
        if not 0.0 < self.top_p <= 1.0:
            raise InvalidValue("top_p", self.top_p, "above 0, at most 1")
        object.__setattr__(self, "seed", self.seed % (1 << SEED_BITS))


GREEDY = Sampling()


class Sampler:
    """The settings of a step's places, as device data: a recorded step reads them anew each time."""

    def __init__(self, places: int, device: torch.device) -> None:
        self._temperature = torch.zeros(places, dtype=torch.float32, device=device)
        self._top_p = torch.ones(places, dtype=torch.float64, device=device)
        self._seed = torch.zeros(places, dtype=torch.int64, device=device)

    def set(self, place: int, sampling: Sampling) -> None:
        """Sample in this way in ``place`` from the next step on."""
        self._temperature[place] = sampling.temperature
        self._top_p[place] = sampling.top_p
        self._seed[place] = sampling.seed

    def choose(self, logits: Tensor, positions: Tensor) -> Tensor:
        """int64 [batch, rows]: tokens for ``positions`` int64 [batch, rows], from ``logits`` [batch, rows, V]."""
        batch = len(logits)
        return choose(
            logits, positions, self._temperature[:batch, None], self._top_p[:batch, None], self._seed[:batch, None]
        )


def choose_one(logits: Tensor, position: int, sampling: Sampling) -> int:
    """The token for ``position``, from ``logits`` float32 [V], as a step chooses it. Waits for the device."""
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    sampler = Sampler(1, logits.device)
    sampler.set(0, sampling)
    return int(sampler.choose(logits[None, None], torch.tensor([[position]], device=logits.device)))


def choose(logits: Tensor, positions: Tensor, temperature: Tensor, top_p: Tensor, seed: Tensor) -> Tensor:
    """Tokens int64 [...] for ``positions`` int64 [...], from ``logits`` float32 [..., V]; the others broadcast.

    Of temperature 0 it is the most likely token. Top-p keeps the fewest likeliest tokens whose probabilities reach it.
    """
    likeliest = logits.argmax(-1)
    below = (logits - logits.max(-1, keepdim=True).values).double()
    heat = torch.where(temperature > 0, temperature, 1.0).unsqueeze(-1)
    weights = (torch.exp(below / heat) * 2.0**WEIGHT_BITS).long()
    ordered, tokens = weights.sort(dim=-1, descending=True, stable=True)
    through = ordered.cumsum(-1)
    wanted = (through[..., -1].double() * top_p).ceil().long()
    last_kept = ((through - ordered) < wanted.unsqueeze(-1)).sum(-1, keepdim=True) - 1
    mass = through.gather(-1, last_kept).squeeze(-1)
    drawn = (uniform(seed, positions) * mass.double()).long().minimum(mass - 1)
    place = (through <= drawn.unsqueeze(-1)).sum(-1, keepdim=True)
    return torch.where(temperature > 0, tokens.gather(-1, place).squeeze(-1), likeliest)


def uniform(seed: Tensor, position: Tensor) -> Tensor:
    """float64 in [0, 1) with 53 random bits, of ``seed`` and ``position``, both int64.

    The finaliser of SplitMix64 (Steele, Lea and Flood, 2014), of a counter that starts at the seed's own hash.
    """
    mixed = _mix(_mix(seed + _GAMMA) + position * _GAMMA)
    return _shifted(mixed, 11).double() * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shifted(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """``x`` shifted right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


_GAMMA = _signed(0x9E3779B97F4A7C15)
