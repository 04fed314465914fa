"""Loads of experts over time, made up: what a balancer meets, with everything that decides its
worth as a parameter. Stands alone; used by tests and `python -m tests.bench_placement`.

Traffic is a mixture of kinds (code, chat, law, ...). Every kind likes its own experts, and images
have a taste of their own, alike in all kinds. From window to window the mixture drifts: the log
weight of each kind is pulled back to zero and pushed at random. In one window the rarest kind
becomes the commonest. A window is a finite number of requests, which do not average out.

    W windows   L layers   E experts   T tokens of a step   K experts a token
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Traffic:
    windows: int = 14
    layers: int = 40
    experts: int = 384
    experts_a_token: int = 6
    tokens: int = 524_288  # a window, all ranks together
    requests: int = 2048  # a window
    kinds: int = 6
    taste: float = 1.0  # sigma of the log liking of an expert by a kind; 0 likes all alike
    push: float = 0.35  # sigma of a log weight's change from window to window
    memory: float = 0.9  # what is left of a log weight a window later
    upset: int | None = 9  # the window in which the rarest kind becomes the commonest
    upset_lead: float = 1.5  # log weight of the new commonest kind above the old one
    images: float = 0.15  # share of image tokens
    request_taste: float = 0.5  # sigma of one request's own liking


class Trace:
    """Windows of loads, and steps of single tokens that follow the last window; all from `seed`."""

    def __init__(self, traffic: Traffic, seed: int) -> None:
        self.traffic = traffic
        self._draw = np.random.default_rng(seed)
        shape = (traffic.layers, traffic.experts)
        self._liking = self._draw.normal(0, traffic.taste, (traffic.kinds, *shape))
        self._image_liking = self._draw.normal(0, traffic.taste, shape)
        self._mixture = np.full(traffic.kinds, 1.0 / traffic.kinds)
        weights = self._log_weights()
        self.loads: Ints = np.stack([self._window(log_weights) for log_weights in weights])

    def step(self, tokens: int, tokens_a_request: int = 32) -> Ints:
        """Experts [L, T, K] of a step's tokens, neighbours from one request, in random order."""
        traffic = self.traffic
        owner = np.arange(tokens) // tokens_a_request
        kind = self._draw.choice(traffic.kinds, owner[-1] + 1, p=self._mixture)
        is_image = self._draw.random(tokens) < traffic.images
        experts = np.empty((traffic.layers, tokens, traffic.experts_a_token), dtype=np.int64)
        for layer in range(traffic.layers):
            own = self._draw.normal(0, traffic.request_taste, (len(kind), traffic.experts))
            liking = (self._liking[kind, layer] + own)[owner]
            liking[is_image] = (self._image_liking[layer] + own)[owner[is_image]]
            # The largest of likings with Gumbel noise: a draw without putting back.
            noisy = liking + self._draw.gumbel(size=liking.shape)
            most = np.argpartition(-noisy, traffic.experts_a_token, axis=-1)
            experts[layer] = most[:, : traffic.experts_a_token]
        return experts

    def _log_weights(self) -> Floats:
        """Of each window and kind [W, kinds], as after a long past."""
        traffic = self.traffic
        settled = traffic.push / np.sqrt(1 - traffic.memory**2) if traffic.memory < 1 else 1.0
        now = self._draw.normal(0, settled, traffic.kinds)
        weights = []
        for window in range(traffic.windows):
            now = traffic.memory * now + self._draw.normal(0, traffic.push, traffic.kinds)
            if window == traffic.upset:
                rarest, commonest = now.argmin(), now.argmax()
                low, high = now[rarest], now[commonest]
                now[rarest], now[commonest] = high + traffic.upset_lead, low
            weights.append(now)
        return np.stack(weights)

    def _window(self, log_weights: Floats) -> Ints:
        """Loads [L, E] of one window; each layer's sum is tokens times experts a token."""
        traffic = self.traffic
        weights = np.exp(log_weights)
        self._mixture = (
            self._draw.multinomial(traffic.requests, weights / weights.sum()) / traffic.requests
        )
        text = np.tensordot(self._mixture, _chances(self._liking, traffic.experts_a_token), 1)
        image = _chances(self._image_liking, traffic.experts_a_token)
        chance = (1 - traffic.images) * text + traffic.images * image
        # What is left of the requests' own likings once so many of them are averaged.
        left = np.sqrt(np.log1p(np.expm1(traffic.request_taste**2) / traffic.requests))
        chance = np.minimum(chance * self._draw.lognormal(0, left, chance.shape), 1.0)
        chance /= chance.sum(-1, keepdims=True)
        return np.stack(
            [
                self._draw.multinomial(traffic.tokens * traffic.experts_a_token, layer)
                for layer in chance
            ]
        )


def _chances(liking: Floats, experts_a_token: int) -> Floats:
    """Chance [..., E] that a token uses each expert: in proportion, at most 1, K in all."""
    weight = np.exp(liking)
    capped = np.zeros(weight.shape, dtype=bool)
    while True:  # capping one expert raises the others, which may meet the cap in turn
        free = np.where(capped, 0.0, weight)
        wanted = experts_a_token - capped.sum(-1, keepdims=True)
        chance = np.where(capped, 1.0, free * wanted / free.sum(-1, keepdims=True))
        if chance.max() <= 1:
            return chance
        capped |= chance >= 1
