"""The sliding window: which recent rows each row sees, and where they are found.

Recent rows of a request lie in the cache up to its chunk, and in the forward itself from there
on. They are read from the cache before the chunk's rows are written, because in a ring these may
take their place. Knows nothing of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    newest: Tensor  # rows of the chunks that can still be seen after this forward
    newest_requests: Tensor
    newest_positions: Tensor

    @classmethod
    def of(cls, rows: Rows, size: int, clipped: bool) -> Window:
        """What rows see of their chunks and before; if clipped, nothing below their clip."""
        clips_R = rows.clips_R if clipped else torch.zeros_like(rows.clips_R)
        history = size - 1
        ages_h = torch.arange(-history, 0)
        history_rows_Rh = rows.starts_R.unsqueeze(1) + ages_h
        floor_R1 = clips_R.unsqueeze(1)
        history_rows_Rh = history_rows_Rh.masked_fill(history_rows_Rh < floor_R1, -1)
        numbers_R = torch.arange(len(rows.starts_R))

        request_T1 = rows.requests_T.unsqueeze(1)
        seen_TW = rows.positions_T.unsqueeze(1) + torch.arange(-history, 1)
        since_TW = seen_TW - rows.starts_R[request_T1]  # negative: before the chunk
        index_TW = torch.where(
            since_TW < 0,
            request_T1 * history + history + since_TW,
            len(numbers_R) * history + rows.first_R[request_T1] + since_TW,
        )
        hidden_TW = seen_TW < floor_R1[request_T1].squeeze(2)
        hidden_TW[rows.count :] = True
        newest = rows.newest(size, clips_R)
        return cls(
            numbers_R.unsqueeze(1).expand_as(history_rows_Rh),
            history_rows_Rh,
            index_TW.masked_fill(hidden_TW, 0).flatten(),
            torch.zeros(index_TW.shape).masked_fill_(hidden_TW, -torch.inf).unsqueeze(1),
            rows.count,
            newest,
            rows.requests_T[newest],
            rows.positions_T[newest],
        )

    def exchange(
        self, cache: Cache, field: str, layer: int, unrounded_Td: Tensor, rounded_Td: Tensor
    ) -> Tensor:
        """Window keys [T, W, d] of each row; the chunks' own rows go into the cache."""
        history_Rhd = cache.read(field, layer, self.history_requests_Rh, self.history_rows_Rh)
        newest = unrounded_Td[: len(self.newest)]
        if len(self.newest) < self.count:
            newest = unrounded_Td.index_select(0, self.newest)
        cache.write(field, layer, self.newest_requests, self.newest_positions, newest)
        pool = torch.cat([history_Rhd.view(-1, rounded_Td.shape[1]), rounded_Td])
        shape = (self.mask_T1W.shape[0], self.mask_T1W.shape[2], pool.shape[1])
        if history_Rhd.shape[0] == 1:  # windows of neighbours overlap in memory: nothing is copied
            return pool.as_strided(shape, (shape[2], shape[2], 1))
        return pool.index_select(0, self.index).view(shape)
