"""Trains tandem-mini: python -m examples.mini.train --out FOLDER [--from FOLDER] ...

The whole training goes from place 0 to 1. A run covers a stretch of it in a given time, whatever
the machine manages in it, and leaves what the next run begins with; so training fits into leases
of a few minutes. The drafter is trained last, with --draft, over the frozen rest.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from examples.mini.batch import PackedBatch
from examples.mini.corpus import FOLDER
from examples.mini.drafting import DraftNetwork, anchors
from examples.mini.feed import Feed, FeedSettings, feed
from examples.mini.fused import switch_on
from examples.mini.network import Network, Settings
from examples.mini.optimizer import Adam, Muon
from examples.mini.parameters import Parameters, is_draft
from examples.mini.saved import load, save
from examples.mini.step import Kind, Stepper
from model.load import token_map
from model.spec import ModelSpec

QUANTISED_FROM = 0.3  # places: weights rounded as in the checkpoint from here on ...
SPARSE_FROM = 0.4  # ... every other step with the rows that the indexer picks ...
DECAY_FROM = 0.55  # ... and learning slows down
_BALANCE = 0.002  # what a gate's bias moves by in a step
_WARM_STEPS = 40
_STEPS_BEFORE = 2  # time counts from here on

_ADAM = (  # rates by the end of a name; the first that fits holds
    ("embed.weight", 4e-3),
    ("head.weight", 2e-3),
    ("engram.embed", 6e-3),
    ("gate.weight", 1e-3),
    ("_fn", 1e-3),
    ("attn_sink", 4e-3),
    ("", 2e-3),
)


@dataclass(frozen=True)
class Run:
    """Goes from place `begin` to `until`, and is over when the monotonic clock says `end`."""

    end: float
    begin: float
    until: float
    tokens: int
    out: Path

    def place(self, elapsed: float) -> float:
        """`elapsed`: share of this run."""
        return self.begin + (self.until - self.begin) * min(1.0, elapsed)


def main(arguments: list[str] | None = None) -> None:
    started = time.monotonic()
    options = _options(arguments)
    spec = ModelSpec.load(FOLDER)
    device = torch.device(options.device)
    if options.source:
        parameters, begin = load(spec, options.source)
        begin = begin if options.place is None else options.place
    else:
        parameters, begin = Parameters.drawn(spec, options.seed), 0.0
    begin, until = (0.0, 1.0) if options.draft else (begin, options.until)
    run = Run(started + options.seconds, begin, until, options.tokens, options.out)
    settings = FeedSettings(FOLDER, options.corpus, run.tokens, options.workers, options.seed)
    with feed(settings, 1.0 if options.draft else begin) as batches:
        torch.backends.cuda.matmul.allow_tf32 = True
        if options.fuse:
            switch_on()
        parameters.to(device)
        network = Network(spec, token_map(FOLDER, spec), device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        trainer = Trainer(
            run, network, parameters, dtype, is_draft=options.draft, capture=options.capture
        )
        try:
            trainer.train(batches)
        finally:  # what an error interrupts is not lost
            save(parameters, run.out, trainer.place)


class Trainer:
    def __init__(
        self,
        run: Run,
        network: Network,
        parameters: Parameters,
        dtype: torch.dtype,
        *,
        is_draft: bool,
        capture: bool = False,
    ) -> None:
        self.place = run.begin
        self._run, self._network, self._parameters = run, network, parameters
        self._dtype, self._draft = dtype, is_draft
        device = next(iter(parameters.values.values())).device
        self._device = device
        self._drafter = DraftNetwork(network.spec, device)
        keys = [key for key in parameters.stacks if is_draft == _is_draft(key)]
        self._keys = [key for key in keys if not key.endswith((".bias", ".bias_vl"))]
        for key in self._keys:
            parameters.values[key].requires_grad_(True)
        self._stepper = Stepper(network, parameters, self._keys, dtype, capture=capture)
        muon = [key for key in self._keys if _is_hidden(key, parameters)]
        adam = [key for key in self._keys if key not in muon]
        self._muon = Muon({key: parameters.values[key] for key in muon})
        self._adam = Adam(
            {key: parameters.values[key] for key in adam}, {key: _rate(key) for key in adam}
        )

    def train(self, batches: Feed) -> None:
        run, log = self._run, _Log(self._run.out)
        number, tokens, elapsed, start = 0, 0, 0.0, time.monotonic()
        teach: Callable[[PackedBatch, float, int], Mapping[str, Tensor]]
        teach = self._teach_draft if self._draft else self._teach
        while elapsed < 1:
            place = self.place = run.place(elapsed)
            batch = batches.next(1.0 if self._draft else place).to(self._device)
            told = teach(batch, place, number)
            tokens += batch.ids_BS.numel()
            number += 1
            if number <= _STEPS_BEFORE:  # they compile
                start = time.monotonic()
            elapsed = (time.monotonic() - start) / max(run.end - start, 1.0)
            if number <= 3 or number % 100 == 0:
                log.line(number, place, tokens, time.monotonic() - start, batches.waiting(), told)
        self.place = run.until

    def _teach(self, batch: PackedBatch, place: float, number: int) -> Mapping[str, Tensor]:
        sparse, length = place >= SPARSE_FROM and number % 2 == 1, batch.ids_BS.shape[1]
        kind = Kind(length, sparse, place >= QUANTISED_FROM, 0 if sparse else max(32, length // 64))
        at_BK = batch.drawn(kind.sampled) if kind.sampled else None
        learned = self._stepper(batch, kind, at_BK)
        for key, grad in zip(self._keys, learned.grads, strict=True):
            self._parameters.values[key].grad = grad
        self._update(_scale(place, number))
        self._balance(learned.loads_LE, _BALANCE * _scale(place, 999))
        return learned.told

    def _teach_draft(self, batch: PackedBatch, place: float, number: int) -> dict[str, Tensor]:
        with torch.no_grad():
            w = self._parameters.prepared(self._main_keys(), self._dtype, quantised=True)
            outcome = self._network(w, batch, Settings(self._dtype, True))
        biases = [key for key in self._parameters.stacks if _is_draft(key) and "bias" in key]
        w |= self._parameters.prepared([*self._keys, *biases], self._dtype, quantised=True)
        count = max(1, self._run.tokens // 16 // len(batch.ids_BS))
        drafted = self._drafter.loss(w, batch, outcome, anchors(batch, count))
        drafted.loss.backward()
        warm = min(1.0, (number + 1) / _WARM_STEPS)
        self._update(warm * min(1.0, max(0.02, 2 - 2 * place)))
        self._balance(torch.stack(list(drafted.loads.values())).float(), _BALANCE)
        share = drafted.accepted / drafted.drafted.clamp(min=1)
        whole = drafted.accepted.sum() / drafted.drafted.sum().clamp(min=1)
        return {"loss": drafted.loss, "first": share[0], "accepted": whole}

    def _main_keys(self) -> list[str]:
        return [key for key in self._parameters.stacks if not _is_draft(key)]

    def _update(self, scale: float) -> None:
        torch.nn.utils.clip_grad_norm_(list(self._adam.parameters.values()), 1.0, foreach=True)
        self._muon.step(scale)
        self._adam.step(scale)
        for key in self._keys:
            self._parameters.values[key].grad = None

    @torch.no_grad()
    def _balance(self, counts: Tensor, step: float) -> None:
        """Gates choose overworked experts less often; what they weigh stays."""
        key = "mtp.*.ffn.gate.bias" if self._draft else "layers.*.ffn.gate.bias"
        lack = (counts.mean(1, keepdim=True) - counts).sign()
        for name in (key, f"{key}_vl"):
            self._parameters.values[name].add_(lack, alpha=step)


_is_draft = is_draft


def _scale(place: float, number: int) -> float:
    warm = min(1.0, (number + 1) / _WARM_STEPS)
    return warm * min(1.0, max(0.02, (1 - place) / (1 - DECAY_FROM)))


def _is_hidden(key: str, parameters: Parameters) -> bool:
    stack = parameters.stacks[key]
    return (
        stack.kind in ("fp8", "fp4") or "compressor.w" in key or key.endswith("indexer.wk.weight")
    )


def _rate(key: str) -> float:
    return next(rate for end, rate in _ADAM if key.endswith(end))


class _Log:
    """A line now and then, on the screen and in log.jsonl."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / "log.jsonl").open("a", encoding="utf-8")

    def line(
        self,
        number: int,
        place: float,
        tokens: int,
        seconds: float,
        waiting: int,
        told: Mapping[str, Tensor],
    ) -> None:
        values = {name: round(value.item(), 4) for name, value in told.items()}
        entry = {"step": number, "place": round(place, 4), "tokens": tokens, **values}
        self._file.write(json.dumps({**entry, "seconds": round(seconds, 1)}) + "\n")
        self._file.flush()
        shown = " ".join(f"{name} {value:g}" for name, value in values.items())
        rate = tokens / seconds / 1e3
        print(
            f"{place:6.1%} step {number} {tokens / 1e6:.1f}M tokens {rate:.0f}K/s "
            f"ahead {waiting} {shown}",
            flush=True,
        )


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train tandem-mini, in one or several runs.")
    parser.add_argument("--out", type=Path, required=True, help="folder for what the run leaves")
    parser.add_argument("--from", dest="source", type=Path, help="what an earlier run left")
    parser.add_argument("--corpus", type=Path, required=True, help="from examples.mini.corpus")
    parser.add_argument("--seconds", type=float, default=300.0, help="of this run, all in all")
    parser.add_argument("--place", type=float, help="begin here, not where the earlier run ended")
    parser.add_argument("--until", type=float, default=1.0, help="place to reach, 0 to 1")
    parser.add_argument("--draft", action="store_true", help="train the drafter, nothing else")
    parser.add_argument("--tokens", type=int, default=65536, help="of a batch")
    parser.add_argument("--workers", type=int, default=14, help="processes that make batches")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--capture", action="store_true", help="replay steps as CUDA graphs")
    parser.add_argument("--fuse", action="store_true", help="compile what can be fused")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
