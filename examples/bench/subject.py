"""What is measured: a model of any config, and requests whose state has the right size.

The state is random numbers, written through the cache as a forward would write them: how long a
step takes does not depend on what they are. Knows nothing of clocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.bench.routing import Routing, with_routing
from kernels.accelerator import Accelerator
from kv_transfer.blocks import BlockPool
from kv_transfer.layout import Layout
from kv_transfer.state_memory import cache_over, open_memory
from model.batch import Chunk, ForwardBatch, build_batch
from model.cache import Cache
from model.catalogue import is_vision
from model.device_weights import DeviceWeights
from model.load import token_map
from model.moe import LocalExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.state import PerToken, state_fields
from model.transformer import Transformer
from model.weight_source import WeightSource
from model.weights import load_weights, random_weights
from offline.model_folder import has_checkpoint

FILLED_AT_ONCE = 4096  # rows of one write


@dataclass(frozen=True)
class Subject:
    """A loaded model on a device."""

    name: str
    weights: str  # "checkpoint" or "random"
    model: Transformer
    accelerator: Accelerator

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @contextmanager
    def requests(self, count: int, length: int, *, written: int, slack: int) -> Iterator[Cache]:
        """State of `count` requests of up to `length` positions, the first `written` filled.

        `slack`: rows that a step writes beyond its window. ValueError if there is no room.
        """
        block_tokens = 16 if self.accelerator.kind == "cpu" else 128
        layout = Layout(state_fields(self.spec), block_tokens, ring_slack=slack)
        blocks = count * -(-length // block_tokens)
        needed = blocks * layout.block_bytes + count * layout.slot_bytes
        state = f"state of {count} requests of {length} tokens takes {needed / 1e9:.1f} GB"
        free = free_bytes(self.accelerator)
        if needed > free:
            raise ValueError(
                f"{state}, and {free / 1e9:.1f} GB are free: "
                f"{int(count * free / needed)} such requests would fit"
            )
        try:
            memory = open_memory(layout, blocks, count, self.accelerator.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise ValueError(f"{state}, which are not there: {error}") from error
        pool = BlockPool(blocks, count, block_tokens)
        leases = [pool.lease(length) for _ in range(count)]
        cache = cache_over(memory, leases)
        if written:
            self._fill(cache, len(leases), written)
        yield cache

    def batch(self, chunks: Sequence[Chunk]) -> ForwardBatch:
        spec = self.spec
        return build_batch(
            chunks, image_token_id=spec.image_token_id, ngram=spec.engram_max_ngram_size
        )

    def _fill(self, cache: Cache, count: int, length: int) -> None:
        """Rows that a continuation after `length` positions needs."""
        device = self.accelerator.device
        for field in state_fields(self.spec):
            growth = field.growth
            needed = growth.rows(length)
            rows = torch.arange(needed.start, needed.stop, device=device)
            if not isinstance(growth, PerToken) and not len(rows):
                continue
            for layer in field.layers:
                for request in range(count):
                    for part in torch.split(rows, FILLED_AT_ONCE):
                        values = torch.randn(len(part), field.dim, device=device)
                        owners = torch.full_like(part, request)
                        cache.write(field.name, layer, owners, part, values)


def free_bytes(accelerator: Accelerator) -> int:
    """Of the device, or, on a CPU, what programs can have without swapping."""
    on_device = accelerator.free_bytes()
    if on_device is not None:
        return on_device
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable:"))) << 10


def load_subject(
    folder: Path,
    accelerator: Accelerator,
    *,
    routing: Routing,
    truncated: bool = False,
    seed: int = 0,
) -> Subject:
    """The folder's checkpoint, or random weights where it has none. ValueError as load_model."""
    spec = ModelSpec.load(folder)
    kind = "checkpoint" if has_checkpoint(folder) else "random"
    found = (
        load_weights(folder, spec)
        if kind == "checkpoint"
        else random_weights(spec, seed, vision=spec.vision is not None)
    )
    stored: WeightSource = found
    if accelerator.kind != "cpu":
        stored = DeviceWeights(stored, accelerator.device)
    options = ModelOptions(truncation="compact" if truncated else "off")
    model = Transformer(
        spec,
        stored,
        options,
        token_map=_token_map(folder, spec),
        make_experts=with_routing(LocalExperts, routing),
        vision=any(map(is_vision, found.names())),
    )
    return Subject(folder.name, kind, model, accelerator)


def _token_map(folder: Path, spec: ModelSpec) -> Tensor | None:
    """A config without a tokenizer gets a map of the right size; what it maps is no matter."""
    if (folder / "tokenizer.json").is_file():
        return token_map(folder, spec)
    return torch.arange(spec.vocab_size) % spec.engram_compressed_vocab_size
