"""The model over request state on a device: what it says is what it says over host memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kv_transfer.blocks import BlockPool
from kv_transfer.device_cache import DeviceCache
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.layout import Layout
from kv_transfer.packed_cache import PackedCache
from kv_transfer.slab import Slab
from model.batch import Chunk, build_batch
from model.cache import Cache
from model.load import load_model
from model.state import state_fields
from model.transformer import Transformer
from tests.tiny import MODEL, make_prompt

CHUNKS = (40, 57, 1, 1, 1)  # of both requests, one after another
PROMPTS = [make_prompt(100, seed=1), make_prompt(100, seed=2)]


def logits(model: Transformer, cache: Cache) -> list[Tensor]:
    """After each chunk, [2, V] on the host."""
    spec, done, found = model.spec, 0, []
    for count in CHUNKS:
        chunks = [Chunk(prompt, done, count) for prompt in PROMPTS]
        batch = build_batch(
            chunks, image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size
        )
        with torch.no_grad():
            found.append(model.forward(batch, cache).cpu())
        done += count
    return found


def both(device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Over host memory on the CPU, and over a device's memory on that device."""
    on_host = load_model(MODEL, weights="random", seed=7)
    on_device = load_model(MODEL, weights="random", seed=7, device=device)
    layout = Layout(state_fields(on_host.spec), 16)
    pool = BlockPool(16, 2, 16)
    leases = [pool.lease(100) for _ in PROMPTS]
    return (
        logits(on_host, PackedCache(Slab(layout, 16, 2), leases)),
        logits(on_device, DeviceCache(DeviceSlab(layout, 16, 2, device), leases)),
    )


def test_moves_of_state_by_torch_change_no_bit() -> None:
    expected, found = both(torch.device("cpu"))
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
def test_a_gpu_says_what_the_cpu_says() -> None:
    """A cached value on the edge of a rounding step may fall on its other side, and what follows
    from it differs more: of at most one of the two requests here.
    """
    expected, found = both(torch.device("cuda"))
    scale = expected[0].abs().max()
    for one, other in zip(expected, found, strict=True):
        gaps = (one - other).abs().median(-1).values / scale
        assert float(gaps.min()) < 1e-5
        assert float(gaps.max()) < 1e-3
        assert torch.equal(one.argmax(-1), other.argmax(-1))
