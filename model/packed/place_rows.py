"""From a batch on the host, and where its requests' state lies, to the rows of a packed forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from model.batch import ForwardBatch
from model.leaving import going_on
from model.options import ModelOptions
from model.packed.rows import (
    Embedded,
    Extras,
    Leaving,
    PackedRows,
    Shape,
    buffer_size,
    rows_in,
)
from model.rows import Ints, Rows
from model.spec import ModelSpec

# T = rows, R = requests, P = blocks of the widest table, N = longest n-gram


class Placed(Protocol):
    """Where one request's state lies; kv_transfer/blocks.py has leases."""

    @property
    def block_table(self) -> npt.NDArray[np.int64]: ...

    @property
    def slot(self) -> int: ...


@dataclass(frozen=True)
class Chunks:
    """A forward of any rows: what PackedTransformer.forward takes."""

    rows: PackedRows
    shape: Shape
    extras: Extras


def decode_rows(
    batch: ForwardBatch, leases: Sequence[Placed], shape: Shape, device: torch.device
) -> PackedRows:
    """Rows padded to `shape`, by one copy that nobody waits for.

    Raises ValueError for a batch that does not fit the shape.
    """
    buffer = fill(host_buffer(shape, batch.ngrams_Tn.shape[1], device), batch, leases, shape)
    return rows_in(buffer.to(device, non_blocking=True), shape, batch.ngrams_Tn.shape[1])


def host_buffer(shape: Shape, ngram: int, device: torch.device) -> Tensor:
    """int64 [buffer_size] that a copy to `device` need not wait for."""
    size = buffer_size(shape, ngram)
    return torch.empty(size, dtype=torch.int64, pin_memory=device.type == "cuda")


def fill(buffer: Tensor, batch: ForwardBatch, leases: Sequence[Placed], shape: Shape) -> Tensor:
    """Write a batch and its padding into a host buffer; returns it.

    Raises ValueError for a batch that does not fit the shape.
    """
    starts_R = batch.starts_R.numpy()
    floors_R = np.zeros_like(starts_R)
    _fill(buffer, batch, leases, shape, starts_R, floors_R)
    return buffer


def chunk_rows(
    batch: ForwardBatch,
    leases: Sequence[Placed],
    spec: ModelSpec,
    options: ModelOptions,
    device: torch.device,
) -> Chunks:
    """Rows of any chunks, unpadded, and which of them leave at the cut layer."""
    whole = Rows.of(batch, {}, spec.dspark_block_size, torch.device("cpu"))
    logit_rows = batch.logit_rows.numpy()
    rows, shape = _on(device, batch, leases, whole)
    stay = going_on(whole, logit_rows, spec, options)
    leaving = None
    if len(stay) < whole.count:
        kept, _ = whole.keep(stay)
        left = replace(batch, embeddings_TD=None, embedded_T=None).take(stay)
        leaving = Leaving(_to(device, stay), *_on(device, left, leases, kept))
        logit_rows = stay.searchsorted(logit_rows)
    extras = Extras(
        ends_R=_to(device, whole.starts_R + whole.counts_R),
        logit_rows=_to(device, logit_rows),
        images_T=_to(device, batch.images_T.numpy()),
        embedded=_embedded(batch, device),
        leaving=leaving,
    )
    return Chunks(rows, shape, extras)


def _on(
    device: torch.device, batch: ForwardBatch, leases: Sequence[Placed], rows: Rows
) -> tuple[PackedRows, Shape]:
    widest = max((len(lease.block_table) for lease in leases), default=0)
    shape = Shape(batch.num_rows, batch.num_requests, max(widest, 1), in_place=False)
    ngram = batch.ngrams_Tn.shape[1]
    buffer = host_buffer(shape, ngram, device)
    _fill(buffer, batch, leases, shape, rows.starts_R, rows.floors_R)
    return rows_in(buffer.to(device, non_blocking=True), shape, ngram), shape


def _fill(
    buffer: Tensor,
    batch: ForwardBatch,
    leases: Sequence[Placed],
    shape: Shape,
    starts_R: Ints,
    floors_R: Ints,
) -> None:
    """`starts` and `floors` as in model/rows.py; `batch` may have lost rows."""
    count, requests = batch.num_rows, batch.num_requests
    widest = max((len(lease.block_table) for lease in leases), default=0)
    if count > shape.rows or requests > shape.requests or widest > shape.blocks:
        raise ValueError(f"{count} rows of {requests} requests, {widest} blocks wide: not {shape}")
    buffer.zero_()
    rows = rows_in(buffer, shape, batch.ngrams_Tn.shape[1])
    rows.positions_T[count:] = -1
    rows.ngrams_TN[count:] = -1
    rows.token_ids_T[:count] = batch.token_ids_T
    rows.positions_T[:count] = batch.positions_T
    rows.requests_T[:count] = batch.requests_T
    rows.ngrams_TN[:count] = batch.ngrams_Tn
    slots_R, tables_RP = rows.slots_R.numpy(), rows.tables_RP.numpy()
    for number, lease in enumerate(leases):
        slots_R[number] = lease.slot
        tables_RP[number, : len(lease.block_table)] = lease.block_table
    rows.starts_R.numpy()[:requests] = starts_R
    counts_R = np.bincount(batch.requests_T.numpy(), minlength=requests)
    rows.first_R.numpy()[:requests] = counts_R.cumsum() - counts_R
    rows.floors_R.numpy()[:requests] = floors_R
    rows.clips_R.numpy()[:requests] = np.maximum(floors_R, batch.window_starts_R.numpy())


def _embedded(batch: ForwardBatch, device: torch.device) -> Embedded | None:
    if batch.embeddings_TD is None:
        return None
    given_T = batch.images_T
    if batch.embedded_T is not None:
        given_T = given_T & batch.embedded_T
    rows_N = given_T.nonzero()[:, 0]
    values_ND = batch.embeddings_TD.index_select(0, rows_N.to(batch.embeddings_TD.device))
    return Embedded(rows_N.to(device), values_ND.to(device))


def _to(device: torch.device, values: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
