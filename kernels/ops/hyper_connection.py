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


def mixing_logits(streams_TnD: Tensor, project_Em: Tensor, base_m: Tensor, eps: Tensor) -> Tensor:
    """[T, m] from the normed, flattened streams; `project` holds the scales already."""
    flat_TE = streams_TnD.view(streams_TnD.shape[0], -1)
    norm_T1 = torch.linalg.vector_norm(flat_TE, dim=-1, keepdim=True)
    mean_T1 = torch.addcmul(eps, norm_T1, norm_T1, value=1 / flat_TE.shape[1])
    return torch.addcmul(base_m, flat_TE @ project_Em, mean_T1.rsqrt())


def collapse(streams_TnD: Tensor, pre_Tn: Tensor) -> Tensor:
    """The weighted sum of the streams [T, D]."""
    return torch.bmm(pre_Tn.unsqueeze(1), streams_TnD).squeeze(1)


def spread(out_TD: Tensor, streams_TnD: Tensor, post_Tn: Tensor, mix_Tnn: Tensor) -> Tensor:
    """Add a sublayer's output to every stream and mix them: mix[t, source, destination]."""
    mixed_TnD = torch.bmm(mix_Tnn.transpose(1, 2), streams_TnD)
    return mixed_TnD.addcmul_(post_Tn.unsqueeze(2), out_TD.unsqueeze(1))


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
    logits_mT = logits_Tm.t().contiguous().numpy()
    rows, small = logits_mT.shape[1], np.float32(eps)
    gates = np.maximum(logits_mT[: 2 * n], np.float32(-80))
    np.negative(gates, gates)
    np.exp(gates, gates)
    gates += np.float32(1)
    np.reciprocal(gates, gates)
    mix_T = np.empty((rows, n * n), np.float32)
    for first in range(0, rows, _BLOCK):
        block = slice(first, first + _BLOCK)
        mix_T[block] = _sinkhorn(logits_mT[2 * n :, block], n, iterations, small).T
    return Mixes(
        torch.from_numpy(np.ascontiguousarray(gates[:n].T) + small),
        torch.from_numpy(gates[n:] * np.float32(2)).t(),
        torch.from_numpy(mix_T).view(rows, n, n),
    )


_BLOCK = 256  # rows at a time: products that OpenBLAS leaves to one thread


def _sinkhorn(logits: Floats, n: int, iterations: int, eps: np.float32) -> Floats:
    """[n * n, rows] logits of mixes, entry by entry, to the mixes."""
    size, rows = logits.shape
    by_source, by_destination = _summing_matrices(n)
    work = np.empty((size + 1, rows), np.float32)  # the last row is eps, for the sums
    mix = work[:size]
    largest = logits.reshape(n, n, rows).max(1)
    np.subtract(logits.reshape(n, n, rows), largest[:, None], mix.reshape(n, n, rows))
    np.exp(mix, mix)
    sums = np.dot(by_source[:, :size], mix)
    np.divide(mix, sums, mix)
    mix += eps
    work[size] = eps
    dot, divide = np.dot, np.divide
    dot(by_destination, work, sums)
    divide(mix, sums, mix)
    for _ in range(iterations - 1):
        dot(by_source, work, sums)
        divide(mix, sums, mix)
        dot(by_destination, work, sums)
        divide(mix, sums, mix)
    return mix


@lru_cache
def _summing_matrices(n: int) -> tuple[Floats, Floats]:
    """[n * n, n * n + 1] each: times the mix and eps, the sum that each entry is divided by."""
    same, everywhere = np.eye(n, dtype=np.float32), np.ones((n, n), np.float32)
    eps = np.ones((n * n, 1), np.float32)
    by_source = np.concatenate([np.kron(same, everywhere), eps], 1)
    by_destination = np.concatenate([np.kron(everywhere, same), eps], 1)
    return by_source, by_destination


mixes = Op("mixes", _mixes, cpu=_mixes_numpy if AVX512 else None)
