"""The sliding window: which recent rows each row sees, and where they are found.

Recent rows of a request lie in the cache up to its chunk, and in the forward itself from there
on. They are read from the cache before the chunk's rows are written, because in a ring these may
take their place. Knows nothing of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from model.cache import Cache
from model.rows import Rows

# T = padded rows, R = requests, W = window size, h = W - 1 rows of history, d = head size


@dataclass(frozen=True)
class Window:
    """The last W positions of each row, oldest first, itself last.

    A position has the same place among the W whatever the chunk, so sums keep their order.
    `index` numbers a pool: h rows of history for each request, then the rows of the chunks.
    """

    history_requests_Rh: Tensor
    history_rows_Rh: Tensor  # -1 where the request has none
    index: Tensor  # [T * W]
    mask_T1W: Tensor  # 0 or -inf
    count: int  # rows of the chunks
    newest: Tensor  # those that can still be seen after this forward
    newest_requests: Tensor
    newest_positions: Tensor
    one_run: bool  # the rows that look are those of the chunks

    @classmethod
    def of(cls, rows: Rows, size: int, clipped: bool) -> Window:
        """What rows see of their chunks and before; if clipped, nothing below their clip."""
        history, requests, whole = size - 1, len(rows.starts_R), rows.whole
        floor_R = np.maximum(rows.floors_R, rows.clips_R) if clipped else rows.floors_R
        floor_R1 = floor_R[:, None]
        history_rows_Rh = rows.starts_R[:, None] + np.arange(-history, 0)
        history_rows_Rh[history_rows_Rh < floor_R1] = -1
        history_requests_Rh = np.repeat(np.arange(requests)[:, None], history, 1)

        request_T1 = rows.requests_T[:, None]
        seen_TW = rows.positions_T[:, None] + np.arange(-history, 1)
        since_TW = seen_TW - rows.starts_R[request_T1]  # negative: before the chunk
        index_TW = since_TW + np.where(
            since_TW < 0,
            request_T1 * history + history,
            requests * history + whole.first_R[request_T1],
        )
        hidden_TW = seen_TW < floor_R1[rows.requests_T]
        hidden_TW[rows.count :] = True
        index_TW[hidden_TW] = 0
        mask_TW = np.where(hidden_TW, -np.inf, 0.0)
        newest = whole.newest(size, clipped)
        return cls(
            rows.tensor(history_requests_Rh),
            rows.tensor(history_rows_Rh),
            rows.tensor(index_TW.ravel()),
            rows.tensor(mask_TW).to(torch.get_default_dtype()).unsqueeze(1),
            whole.count,
            rows.tensor(newest),
            rows.tensor(whole.requests_T[newest]),
            rows.tensor(whole.positions_T[newest]),
            rows is whole,
        )

    def exchange(
        self, cache: Cache, field: str, layer: int, unrounded_Td: Tensor, rounded_Td: Tensor
    ) -> Tensor:
        """Window keys [T, W, d] of each row; the chunks' own rows, which these are of all ranks,
        go into the cache.
        """
        history_Rhd = cache.read(field, layer, self.history_requests_Rh, self.history_rows_Rh)
        newest = self.newest
        if newest.shape[0] == self.count:
            written = unrounded_Td[: self.count]
        else:
            written = unrounded_Td.index_select(0, newest)
        cache.write(field, layer, self.newest_requests, self.newest_positions, written)
        size = rounded_Td.shape[1]
        pool = torch.cat([history_Rhd.view(-1, size), rounded_Td])
        shape = (self.mask_T1W.shape[0], self.mask_T1W.shape[2], size)
        if (
            len(history_Rhd) == 1 and shape[0] and self.one_run
        ):  # windows of neighbours overlap in memory: nothing is copied
            return pool.unfold(0, shape[1], 1).transpose(1, 2)
        return pool.index_select(0, self.index).view(shape)
