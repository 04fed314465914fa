"""Where there is no Triton, as on most machines without an NVIDIA GPU, ranks run all the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import torch
import decode_worker.worker, kv_transfer.open_transport, offline, prefill_worker.worker
from kv_transfer.layout import Layout
from kv_transfer.blocks import BlockPool
from kv_transfer.slab import Slab
from kv_transfer.state_memory import cache_over
from model.batch import Chunk, build_batch
from model.load import load_model
from model.state import state_fields

model = load_model("deploy/models/tiny", weights="random")
pool = BlockPool(4, 1, 16)
memory = Slab(Layout(state_fields(model.spec), 16), 4, 1)
spec = model.spec
chunks = [Chunk([5, 6, 7], 0, 3, 0, logits="last")]
ngram = spec.engram_max_ngram_size
batch = build_batch(chunks, image_token_id=spec.image_token_id, ngram=ngram)
with torch.inference_mode():
    print(model.forward(batch, cache_over(memory, [pool.lease(3)])).shape[0])
"""


def test_workers_are_imported_and_a_prompt_is_computed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1"]
