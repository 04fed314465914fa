"""The least time each op of a forward can take: its bytes at the memory's rate, its operations at
the matrix units' rate, whichever is more.

Bytes are those that have to be read and written once: weights as checkpoints store them, rows of
request state as they are packed, activations in bf16. What an implementation reads twice, or keeps
in a wider form, shows as a gap. Pure: from a config and the shape of a step alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from model.spec import ModelSpec
from model.state import WINDOW, compressed, index_keys, state_fields

BF16, F32 = 2, 4


@dataclass(frozen=True)
class Rates:
    """Of the machine, measured in the run whose times are compared with them."""

    bytes_per_s: float  # of the device's memory, read and written
    operations_per_s: float  # bf16 products
    link_bytes_per_s: float  # from the host's memory


@dataclass(frozen=True)
class Cost:
    """What a part of an op has to move and to compute; layer None: outside of all layers.

    `op` is the name that the packed forward gives to what it runs (model/packed/ranges.py).
    """

    layer: int | None
    op: str
    part: str
    nbytes: float
    operations: float = 0.0
    linked: float = 0.0  # bytes that have to come from the host

    def seconds(self, rates: Rates) -> float:
        return max(
            self.nbytes / rates.bytes_per_s,
            self.operations / rates.operations_per_s,
            self.linked / rates.link_bytes_per_s,
        )


@dataclass(frozen=True)
class StepShape:
    """Rows of a forward: positions start .. start + count - 1 of each request.

    `kept` rows of each go on after the cut; None: all. `touched`: how many experts the rows of a
    layer go to, where it was counted; else as many as even routing would choose.
    """

    starts: Sequence[int]
    counts: Sequence[int]
    kept: int | None = None
    touched: Mapping[int, int] = field(default_factory=dict)

    @classmethod
    def decode(cls, requests: int, context: int, touched: Mapping[int, int]) -> StepShape:
        """One row a request, after `context` positions."""
        return cls([context] * requests, [1] * requests, touched=touched)

    def rows(self) -> int:
        return sum(self.counts)

    def after_cut(self) -> StepShape:
        if self.kept is None:
            return self
        counts = [min(self.kept, count) for count in self.counts]
        ends = [start + count for start, count in zip(self.starts, self.counts, strict=True)]
        starts = [end - count for end, count in zip(ends, counts, strict=True)]
        return StepShape(starts, counts, None, self.touched)

    def visible(self, ratio: int, most: int | None = None) -> int:
        """Compressed rows that the rows see, `most` each, in all."""
        total = 0
        for start, count in zip(self.starts, self.counts, strict=True):
            total += sum(
                min((position + 1) // ratio, most or position + 1)
                for position in range(start, start + count)
            )
        return total

    def known(self, ratio: int) -> int:
        """Compressed rows that are there at the end, each once."""
        ends = zip(self.starts, self.counts, strict=True)
        return sum((start + count) // ratio for start, count in ends)


def costs(spec: ModelSpec, step: StepShape) -> list[Cost]:
    """Every op of a forward with one row of logits a request."""
    rows, width, streams = step.rows(), spec.hidden_size, spec.hc_mult
    answers, vocabulary = len(step.counts), spec.vocab_size
    found = [Cost(None, "embed", "rows", rows * width * BF16 * (1 + streams))]
    for layer in range(spec.num_hidden_layers):
        found += _Layer(spec, layer, step).costs()
    moved = vocabulary * width * BF16 + answers * (width * BF16 + vocabulary * F32)
    return [
        *found,
        *_observing(spec, step.after_cut().rows()),
        Cost(None, "logits", "norm", answers * width * BF16 * (streams + 1)),
        Cost(None, "logits", "product", moved, 2.0 * answers * vocabulary * width),
    ]


def _observing(spec: ModelSpec, rows: int) -> list[Cost]:
    """What the drafter remembers of each row, and the streams' means that it is made of."""
    taps, stages = len(spec.dspark_target_layer_ids), len(spec.draft_stages)
    width, wide = spec.hidden_size, stages * spec.head_dim
    read = taps * width
    moved = _fp8(width, read) + _fp8(wide, width) + rows * (read + 2 * width + wide) * BF16
    return [
        Cost(None, "tap", "streams", taps * rows * width * BF16 * (spec.hc_mult + 1)),
        Cost(None, "observe", "products", moved, 2.0 * rows * width * (read + wide)),
    ]


@dataclass(frozen=True)
class _Layer:
    spec: ModelSpec
    layer: int
    step: StepShape

    def costs(self) -> list[Cost]:
        """The cut layer's compressor sees all rows, what is behind it those that go on."""
        spec, layer, step = self.spec, self.layer, self.step
        kept = step.after_cut()
        if layer > spec.cut_layer:
            step = kept
        found = self._engram(step.rows()) if layer in spec.engram_layer_ids else []
        found.append(self._reading(step.rows()))
        if layer in spec.kv_source_layer_ids:
            found += self._compressor(step)
        if layer == spec.cut_layer:
            step = kept
        rows = step.rows()
        return [
            *found,
            *self._attention(step),
            self._writing(rows),
            self._reading(rows),
            *self._experts(step),
            self._writing(rows),
        ]

    def _cost(
        self, op: str, part: str, nbytes: float, operations: float = 0.0, linked: float = 0.0
    ) -> Cost:
        return Cost(self.layer, op, part, nbytes, operations, linked)

    def _product(
        self, op: str, part: str, rows: int, inner: int, out: int, stored: float | None = None
    ) -> Cost:
        """Of rows by a matrix [out, inner], FP8 unless its bytes are told."""
        weights = _fp8(out, inner) if stored is None else stored
        moved = weights + rows * (inner + out) * BF16
        return self._cost(op, part, moved, 2.0 * rows * inner * out)

    def _row_bytes(self, name: str) -> int:
        return next(one for one in state_fields(self.spec) if one.name == name).row_bytes

    # ------------------------------------------------------------------ hyper-connections

    def _reading(self, rows: int) -> Cost:
        """The mixing weights of a sublayer, and its input, normed: the streams are read once."""
        streams, width = self.spec.hc_mult, self.spec.hidden_size
        flat, weights = streams * width, streams * (streams + 2)
        moved = rows * ((flat + width) * BF16 + weights * F32) + weights * flat * F32
        return self._cost("begin", "streams", moved, 2.0 * rows * flat * weights)

    def _writing(self, rows: int) -> Cost:
        moved = rows * self.spec.hidden_size * BF16 * (2 * self.spec.hc_mult + 1)
        return self._cost("spread", "streams", moved)

    # ------------------------------------------------------------------ attention

    def _attention(self, step: StepShape) -> list[Cost]:
        spec, rows = self.spec, step.rows()
        width, rank, size = spec.hidden_size, spec.q_lora_rank, spec.head_dim
        wide = spec.num_attention_heads * size
        chooses = self.layer in spec.index_source_layer_ids
        index = spec.index_n_heads * spec.index_head_dim if chooses else 0
        grouped, each = spec.o_groups * spec.o_lora_rank, wide // spec.o_groups
        turned = 2.0 * rows * wide * BF16
        return [
            self._product("project", "wq_a, wkv", rows, width, rank + size),
            self._cost("project", "norms", 2.0 * rows * (rank + size) * BF16),
            self._cost("window", "rows", rows * (size * BF16 + self._row_bytes(WINDOW))),
            self._product("queries", "wq_b", rows, rank, wide + index),
            self._cost("queries", "rotation", turned),
            *(self._index(step) if chooses else []),
            self._attend(step),
            self._cost("output", "rotation", turned),
            self._cost(
                "output",
                "wo_a",
                _fp8(grouped, each) + rows * (wide + grouped) * BF16,
                2.0 * rows * grouped * each,
            ),
            self._product("output", "wo_b", rows, grouped, width),
        ]

    def _attend(self, step: StepShape) -> Cost:
        spec, rows, ratio = self.spec, step.rows(), self.spec.compress_ratios[self.layer]
        wide, window = spec.num_attention_heads * spec.head_dim, spec.sliding_window
        spans = zip(step.starts, step.counts, strict=True)
        near = sum(count + min(window - 1, start) for start, count in spans)
        pairs = step.visible(1, window)
        moved = near * self._row_bytes(WINDOW) + 2.0 * rows * wide * BF16
        if ratio:
            chosen = step.visible(ratio, spec.index_topk)
            pairs += chosen
            moved += min(chosen, step.known(ratio)) * self._row_bytes(compressed(ratio))
        return self._cost("attention", "rows", moved, 4.0 * pairs * wide)

    def _index(self, step: StepShape) -> list[Cost]:
        spec, rows, ratio = self.spec, step.rows(), self.spec.compress_ratios[self.layer]
        heads, width = spec.index_n_heads, spec.hidden_size
        wide, pairs = heads * spec.index_head_dim, step.visible(ratio)
        keys = step.known(ratio) * self._row_bytes(index_keys(ratio))
        weights = heads * width * BF16 + rows * (width * BF16 + heads * F32)
        return [
            self._cost("index", "queries", weights + 2.0 * rows * wide * BF16),
            self._cost("index", "scores", keys + rows * wide * BF16, 2.0 * pairs * wide),
            self._cost("index", "choice", (pairs + rows * spec.index_topk) * F32),
        ]

    def _compressor(self, step: StepShape) -> list[Cost]:
        spec, rows, ratio = self.spec, step.rows(), self.spec.compress_ratios[self.layer]
        width, size, key = spec.hidden_size, spec.head_dim, spec.index_head_dim
        out, made = size * (2 if ratio == 2 else 1), rows / ratio
        written = self._row_bytes(compressed(ratio)) + self._row_bytes(index_keys(ratio))
        moved = rows * out * BF16 + made * written + size * key * BF16
        return [
            self._product("compress", "products", rows, width, out, out * width * BF16),
            self._cost("compress", "rows", moved, 2.0 * made * size * key),
        ]

    # ------------------------------------------------------------------ experts and Engram

    def _experts(self, step: StepShape) -> list[Cost]:
        spec, rows = self.spec, step.rows()
        width, inner, count = spec.hidden_size, spec.moe_intermediate_size, spec.n_routed_experts
        slots = spec.num_experts_per_tok
        even = count * (1 - (1 - slots / count) ** rows)
        weights = step.touched.get(self.layer, even) * 3 * inner * width * (0.5 + 1 / 32)
        shared = 3 * _fp8(inner, width) + rows * 2 * (width + inner) * BF16
        return [
            self._product("route", "gate", rows, width, count, count * width * BF16),
            self._cost(
                "experts",
                "weights",
                weights + 2.0 * rows * width * BF16,
                6.0 * rows * slots * inner * width,
            ),
            self._cost("shared expert", "weights", shared, 6.0 * rows * inner * width),
        ]

    def _engram(self, rows: int) -> list[Cost]:
        """It stands before the layer, not in it."""
        spec = self.spec
        width, streams, dim = spec.hidden_size, spec.hc_mult, spec.engram_head_dim
        read = (spec.engram_max_ngram_size - 1) * spec.engram_n_heads
        out = (streams + 1) * width
        stored = float(rows * read * (dim + dim // 32))
        return [
            Cost(None, "engram", "table", rows * read * dim * BF16, linked=stored),
            replace(self._product("engram", "wkv", rows, read * dim, out), layer=None),
            Cost(None, "engram", "gates", rows * BF16 * (out + 2.0 * streams * width)),
        ]


def _fp8(out: int, inner: int) -> float:
    """Bytes of a matrix with a scale for each block of 32 x 32."""
    return out * inner * (1 + 1 / 1024)
