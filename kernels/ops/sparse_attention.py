"""Attention of each row to its own short list of keys, which are also the values."""

from __future__ import annotations

import torch
from torch import Tensor


# T = rows, H = heads, d = head size, W = window keys, K = selected keys
def sparse_attention(
    q_THd: Tensor,
    window_TWd: Tensor,
    window_mask_T1W: Tensor,
    sink_1H1: Tensor,
    selected_TKd: Tensor | None = None,
    selected_mask_T1K: Tensor | None = None,
) -> Tensor:
    """One softmax over all keys of a row; a head's sink takes weight and adds nothing. [T, H, d].

    Masks are 0 where there is a key and -inf where there is none; a row may have none at all.
    W and K are the same in every batch, so that a row's sums always run over the same slots.
    """
    scale = q_THd.shape[-1] ** -0.5
    logits = [_logits(q_THd, window_TWd, window_mask_T1W, scale)]
    if selected_TKd is not None and selected_mask_T1K is not None:
        logits.append(_logits(q_THd, selected_TKd, selected_mask_T1K, scale))
    sink_TH1 = sink_1H1.expand(q_THd.shape[0], -1, -1)
    weights = torch.softmax(torch.cat([*logits, sink_TH1], -1), -1)
    width = window_TWd.shape[1]
    out_THd = torch.bmm(weights[..., :width], window_TWd)
    if selected_TKd is not None:
        out_THd.baddbmm_(weights[..., width:-1], selected_TKd)
    return out_THd


def _logits(q_THd: Tensor, keys_TKd: Tensor, mask_T1K: Tensor, scale: float) -> Tensor:
    return torch.baddbmm(mask_T1K, q_THd, keys_TKd.transpose(1, 2), alpha=scale)
