"""The parts of a layer over packed rows, differentiable: what model/ computes, for training.

Each function has its counterpart there; a test holds the whole network to the project's own
forward. `w` are prepared weights by name (examples/mini/parameters.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.mini.fused import fuse
from kernels.formats import fake_quant
from model.engram import EngramHash
from model.spec import ModelSpec

# T = positions of all rows, one after another, n = streams, D = hidden size, m = 2 n + n * n,
# E = experts, d = head size, P = rotated pairs, N = longest n-gram

Prepared = Mapping[str, Tensor]


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x.to(weight.dtype), weight)


@fuse
def norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return _norm(x.float(), weight, eps).to(dtype)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


# ------------------------------------------------------------------ rotation


class Turns(NamedTuple):
    """Cosine and sine [T, P] of each position's angles."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, positions: Tensor, frequencies_P: Tensor) -> Turns:
        angles = positions.double().unsqueeze(-1) * frequencies_P
        return cls(angles.cos().float(), angles.sin().float())

    def back(self) -> Turns:
        return Turns(self.cos, -self.sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The last 2 P of the last dimension, in neighbouring pairs."""
    size = 2 * cos.shape[-1]
    even, odd = x[..., -size::2], x[..., -size + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)
    return torch.cat([x[..., :-size], turned], -1)


@fuse
def rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """All heads [..., H, d] of each position."""
    return _rotated(x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2)).to(dtype)


@fuse
def rotate_rounded(
    x: Tensor, cos: Tensor, sin: Tensor, row_format: str, dtype: torch.dtype
) -> Tensor:
    return fake_quant(
        _rotated(x.float(), cos.unsqueeze(-2), sin.unsqueeze(-2)).contiguous(), row_format
    ).to(dtype)


@fuse
def stored_row(
    x: Tensor,
    weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    row_format: str,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """Normed, rotated and rounded as a cache keeps it."""
    row = _rotated(_norm(x.float(), weight, eps), cos, sin)
    return fake_quant(row.contiguous(), row_format).to(dtype)


# ------------------------------------------------------------------ hyper-connections


class Mixes(NamedTuple):
    pre_Tn: Tensor
    post_Tn: Tensor
    mix_Tnn: Tensor


class Residual(NamedTuple):
    streams_TnD: Tensor
    pre_Tn: Tensor

    @classmethod
    def of(cls, hidden_TD: Tensor, streams: int) -> Residual:
        pre_Tn = hidden_TD.new_zeros(len(hidden_TD), streams)
        pre_Tn[:, 0] = 1
        return cls(hidden_TD.unsqueeze(1).repeat(1, streams, 1), pre_Tn)


@fuse
def read(
    streams_TnD: Tensor, pre_Tn: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> Tensor:
    """What a sublayer sees: its streams collapsed, then normed."""
    return _norm((streams_TnD * pre_Tn.unsqueeze(-1)).sum(1), weight, eps).to(dtype)


def mixes(streams_TnD: Tensor, w: Prepared, name: str, spec: ModelSpec) -> Mixes:
    project = w[f"{name}_fn"]
    logits_Tm = _mixing_logits(
        streams_TnD, project, w[f"{name}_scale"], w[f"{name}_base"], spec.hc_mult,
        spec.rms_norm_eps,
    )  # fmt: skip
    return Mixes(*_mixes(logits_Tm, spec.hc_mult, spec.hc_sinkhorn_iters, spec.hc_eps))


@fuse
def _mixing_logits(
    streams_TnD: Tensor, project_mE: Tensor, scale_3: Tensor, base_m: Tensor, n: int, eps: float
) -> Tensor:
    flat = streams_TnD.flatten(1)
    inverse = (flat.square().mean(1, keepdim=True) + eps).rsqrt()
    pre, post, mix = scale_3.unbind()
    scale = torch.cat([pre.expand(n), post.expand(n), mix.expand(n * n)])
    return F.linear(flat.to(project_mE.dtype), project_mE).float() * inverse * scale + base_m


@fuse
def _mixes(logits_Tm: Tensor, n: int, iterations: int, eps: float) -> tuple[Tensor, ...]:
    mix = torch.softmax(logits_Tm[:, 2 * n :].unflatten(1, (n, n)), -1) + eps
    for step in range(2 * iterations - 1):
        mix = mix / (mix.sum(1 + step % 2, keepdim=True) + eps)
    pre, post = torch.sigmoid(logits_Tm[:, :n]), torch.sigmoid(logits_Tm[:, n : 2 * n])
    return pre + eps, 2 * post, mix


@fuse
def spread(out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, mix_Tnn: Tensor) -> Tensor:
    """mix[source, destination]: streams move, and all take in what the sublayer gave."""
    moved = (mix_Tnn.unsqueeze(-1) * streams_TnD.unsqueeze(2)).sum(1)
    return moved + post_Tn.unsqueeze(-1) * out_TD.float().unsqueeze(1)


# ------------------------------------------------------------------ experts


class Routing(NamedTuple):
    shares_TE: Tensor  # zero where an expert was not chosen
    chosen_TE: Tensor  # bool


def route(x_TD: Tensor, w: Prepared, prefix: str, chosen: int, scale: float) -> Routing:
    scores = _gate_scores(linear(x_TD, w[f"{prefix}gate.weight"]))
    best = (scores.detach() + w[f"{prefix}gate.bias"].detach()).topk(chosen, -1).indices
    mask = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True)
    return Routing(_shares(scores, mask, scale), mask)


@fuse
def _gate_scores(logits_TE: Tensor) -> Tensor:
    return F.softplus(logits_TE.float()).sqrt()


@fuse
def _shares(scores_TE: Tensor, mask_TE: Tensor, scale: float) -> Tensor:
    kept = scores_TE * mask_TE
    return kept / (kept.sum(-1, keepdim=True) + 1e-20) * scale


def experts(x_TD: Tensor, routing: Routing, w: Prepared, prefix: str, limit: float) -> Tensor:
    """All experts compute all positions, and shares of zero leave out what was not chosen: four
    times the arithmetic, and no position moves.
    """
    gate, up, down = (w[f"{prefix}experts.{name}"] for name in ("w1", "w3", "w2"))
    x = x_TD.to(gate.dtype)
    hidden = _gated_by(
        F.linear(x, gate.flatten(0, 1)), F.linear(x, up.flatten(0, 1)), routing.shares_TE, limit
    )
    out = F.linear(hidden, down.transpose(0, 1).flatten(1))
    gate, up, down = (w[f"{prefix}shared_experts.{name}"] for name in ("w1", "w3", "w2"))
    return out + F.linear(_gated(F.linear(x, gate), F.linear(x, up), limit), down)


@fuse
def _gated_by(gate: Tensor, up: Tensor, shares_TE: Tensor, limit: float) -> Tensor:
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    by_expert: Tensor = hidden.unflatten(-1, (shares_TE.shape[-1], -1)) * shares_TE.unsqueeze(-1)
    return by_expert.flatten(-2).to(gate.dtype)


@fuse
def _gated(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    hidden = F.silu(gate.float().clamp(max=limit)) * up.float().clamp(-limit, limit)
    return hidden.to(gate.dtype)


# ------------------------------------------------------------------ Engram


def ngram_ids(compressed_BS: Tensor, starts_BS: Tensor, length: int, pad: int) -> Tensor:
    """[T, N]: ids at t, t - 1, ...; `pad` before the document's start."""
    positions = torch.arange(compressed_BS.shape[1], device=compressed_BS.device)
    columns = [compressed_BS]
    for back in range(1, length):
        earlier = F.pad(compressed_BS, (back, 0), value=pad)[:, : compressed_BS.shape[1]]
        columns.append(torch.where(positions - back >= starts_BS, earlier, pad))
    return torch.stack(columns, -1).flatten(0, 1)


def engram(
    streams_TnD: Tensor,
    ids_TN: Tensor,
    hashing: EngramHash,
    w: Prepared,
    prefix: str,
    spec: ModelSpec,
) -> Tensor:
    memory = F.embedding(hashing.rows(ids_TN), w[f"{prefix}embed"]).flatten(1)
    joint = linear(memory, w[f"{prefix}wkv"])
    weight = w[f"{prefix}q_weight"] * w[f"{prefix}k_weight"]
    return _remember(streams_TnD, joint, weight, spec.rms_norm_eps)


@fuse
def _remember(streams_TnD: Tensor, joint: Tensor, weight_nD: Tensor, eps: float) -> Tensor:
    _, n, size = streams_TnD.shape
    joint = joint.float().unflatten(-1, (n + 1, size))
    keys, value = joint[:, :-1], joint[:, -1:]
    match = (keys * weight_nD * streams_TnD).sum(-1)
    for x in (streams_TnD, keys):
        match = match * (x.square().mean(-1) + eps).rsqrt()
    match = match * size**-0.5
    gates = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    return streams_TnD + gates.unsqueeze(-1) * value
