"""Hyper-connections: how a sublayer reads from and writes to the parallel residual streams."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.op import AVX512, Op

# T = rows, n = streams, D = hidden size, E = n * D, m = 2 n + n * n mixing weights of a sublayer

Floats = npt.NDArray[np.float32]


def _mixing_logits(streams_TnD: Tensor, project_Em: Tensor, base_m: Tensor, eps: Tensor) -> Tensor:
    """[T, m] from the normed, flattened streams; `project` holds the scales already."""
    flat_TE = streams_TnD.flatten(1)
    norm_T1 = torch.linalg.vector_norm(flat_TE, dim=-1, keepdim=True)
    mean_T1 = torch.addcmul(eps, norm_T1, norm_T1, value=1 / flat_TE.shape[1])
    return torch.addcmul(base_m, flat_TE @ project_Em, mean_T1.rsqrt())


def _collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """The weighted sum of the streams [T, D]."""
    return torch.bmm(pre_Tn.unsqueeze(1), streams_TnD).squeeze(1)


def _spread(
    out_TD: Tensor,
    streams_TnD: Tensor,
    post_Tn: Tensor,
    mix_Tnn: Tensor,
    more_TD: Tensor | None = None,
) -> Tensor:
    """Add a sublayer's output to every stream and mix them: mix[t, source, destination].

    The output may come in two parts. Computed in the dtype of the weights, and rounded once to
    that of the streams.
    """
    exact = mix_Tnn.dtype
    mixed_TnD = torch.bmm(mix_Tnn.transpose(1, 2), streams_TnD.to(exact))
    whole_TD = out_TD.to(exact)
    if more_TD is not None:
        whole_TD = whole_TD + more_TD.to(exact)
    mixed_TnD.addcmul_(post_Tn.unsqueeze(2), whole_TD.unsqueeze(1))
    return mixed_TnD.to(streams_TnD.dtype)


_GPU = "kernels.hyper_connection_kernels"
mixing_logits = Op("mixing_logits", _mixing_logits, cuda=f"{_GPU}:mixing_logits")
collapse = Op("collapse", _collapse, cuda=f"{_GPU}:collapse")
spread = Op("spread", _spread, cuda=f"{_GPU}:spread")


class Mixes(NamedTuple):
    """A sublayer's weights, made from the streams before it."""

    pre_Tn: Tensor  # for reading the NEXT sublayer's input
    post_Tn: Tensor
    mix_Tnn: Tensor  # nearly doubly stochastic; source, destination


def _mixes(logits_Tm: Tensor, n: int, iterations: int, eps: float) -> Mixes:
    """`logits`: n of pre, n of post, then the mix row by row.

    The mix (Sinkhorn): softmax of each row, then columns and rows are divided by their sums in
    turn; `iterations` counts the column steps.
    """
    pre_Tn = torch.sigmoid(logits_Tm[:, :n]) + eps
    post_Tn = 2 * torch.sigmoid(logits_Tm[:, n : 2 * n])
    mix_Tnn = torch.softmax(logits_Tm[:, 2 * n :].view(-1, n, n), -1) + eps
    for step in range(2 * iterations - 1):
        mix_Tnn = mix_Tnn / (mix_Tnn.sum(1 + step % 2, keepdim=True) + eps)
    return Mixes(pre_Tn, post_Tn, mix_Tnn)


def _mixes_numpy(logits_Tm: Tensor, n: int, iterations: int, eps: float) -> Mixes:
    """The same in NumPy, with a product by a matrix of ones for each sum: ten times faster."""
    logits, small = logits_Tm.numpy(), np.float32(eps)
    rows = len(logits)
    pre_Tn, post_Tn = np.empty((2, rows, n), np.float32)
    mix_Tnn = np.empty((rows, n, n), np.float32)  # by destination: as spread multiplies it
    for first in range(0, rows, _BLOCK):
        block = slice(first, first + _BLOCK)
        gates, mix = _gates_and_mix(logits[block], n, iterations, small)
        np.add(gates[:n].T, small, pre_Tn[block])
        np.multiply(gates[n:].T, np.float32(2), post_Tn[block])
        mix_Tnn[block] = mix.reshape(n, n, -1).transpose(2, 1, 0)
    return Mixes(
        torch.from_numpy(pre_Tn),
        torch.from_numpy(post_Tn),
        torch.from_numpy(mix_Tnn).transpose(1, 2),
    )


_BLOCK = 256  # rows at a time: products that OpenBLAS leaves to one thread


def _gates_and_mix(
    logits: Floats, n: int, iterations: int, eps: np.float32
) -> tuple[Floats, Floats]:
    """Of logits [rows, m], entry by entry: sigmoids [2 n, rows] and the mix [n * n, rows]."""
    rows, entries = logits.shape
    by_source, by_destination = _summing_matrices(n)
    work = np.zeros((entries + 1, rows), np.float32)  # the last row is for eps, in the sums
    powers = work[:entries]
    powers[...] = logits.T
    gates, mix, mix_and_eps = powers[: 2 * n], powers[2 * n :], work[2 * n :]
    np.maximum(gates, np.float32(-80), out=gates)
    np.negative(gates, gates)
    by_row = mix.reshape(n, n, rows)
    by_row -= by_row.max(1, keepdims=True)
    np.exp(powers, powers)
    gates += np.float32(1)
    np.reciprocal(gates, gates)
    dot, divide = np.dot, np.divide
    sums = dot(by_source, mix_and_eps)  # without eps yet
    divide(mix, sums, mix)
    mix += eps
    work[entries] = eps
    dot(by_destination, mix_and_eps, sums)
    divide(mix, sums, mix)
    for _ in range(iterations - 1):
        dot(by_source, mix_and_eps, sums)
        divide(mix, sums, mix)
        dot(by_destination, mix_and_eps, sums)
        divide(mix, sums, mix)
    return gates, mix


@lru_cache
def _summing_matrices(n: int) -> tuple[Floats, Floats]:
    """[n * n, n * n + 1] each: times the mix and eps, the sum that each entry is divided by."""
    same, everywhere = np.eye(n, dtype=np.float32), np.ones((n, n), np.float32)
    eps = np.ones((n * n, 1), np.float32)
    by_source = np.concatenate([np.kron(same, everywhere), eps], 1)
    by_destination = np.concatenate([np.kron(everywhere, same), eps], 1)
    return by_source, by_destination


mixes = Op("mixes", _mixes, cpu=_mixes_numpy if AVX512 else None, cuda=f"{_GPU}:mixes")
