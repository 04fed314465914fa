"""What runs a rank's steps, by what its model is and where: together, apart, by graph, or ahead."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import EngineSection
from engine.context_team import ContextTeam
from engine.decode_shapes import DecodeShapes
from engine.decode_steps import DecodeSteps
from engine.executor import Executor
from engine.grammar import Compiler
from engine.images import Encode
from engine.packed_runner import AnyModel, PackedModel, PackedRunner
from engine.runner import DenseRunner
from kv_transfer.device_slab import DeviceSlab
from kv_transfer.slab import Slab

logger = logging.getLogger(__name__)

_COMMON_LENGTH = 8192  # positions for which graphs are there from the start


@dataclass(frozen=True)
class StepRunners:
    """`execute` makes a step; `follow` is this rank's part of one that another rank leads."""

    execute: Executor
    follow: Callable[[], None]
    steps: DecodeSteps | None = None  # of answers' rows apart from others
    common_blocks: int = 1

    def prepare(self) -> None:
        """What can be made before the first request comes; takes up to minutes on a GPU."""
        if self.steps is not None:
            self.steps.prepare(self.common_blocks)

    def status(self) -> dict[str, object]:
        """Counts since the start; seconds in steps, and of that waiting for the device."""
        used, unused = self.execute.rows_ahead
        player = None if self.steps is None else self.steps.player
        return {
            "graphs": 0 if player is None else player.captured,
            "graph_bytes": 0 if player is None else player.nbytes,
            "replayed": 0 if player is None else player.replayed,
            "launched": 0 if player is None else player.launched,
            "rows_ahead_used": used,
            "rows_ahead_unused": unused,
            "steps_s": round(self.execute.steps_s, 3),
            "waited_s": round(self.execute.waited_s, 3),
        }


def step_runners(
    name: str,
    model: AnyModel,
    slab: Slab | DeviceSlab,
    sizes: EngineSection,
    *,
    answers: bool,
    alone: bool,
    spelled_ids: int | None,
    grammars: Compiler,
    keep: int,
    encode: Encode | None,
    team: ContextTeam | None,
) -> StepRunners:
    """`answers`: this rank makes them, not only prompts. `alone`: no other rank takes part in its
    forwards. The others as in Executor and DenseRunner."""
    if not isinstance(model, PackedModel):
        dense = DenseRunner(model, slab, keep=keep, encode=encode, team=team)
        return StepRunners(Executor(dense, spelled_ids, grammars), dense.follow)
    runner = PackedRunner(model, slab, keep=keep, encode=encode)
    if not answers or not alone:
        if answers:
            logger.warning(
                "%s: no graphs and no steps ahead: its experts are with other ranks, which must "
                "make every step together",
                name,
            )
        return StepRunners(Executor(runner, spelled_ids, grammars), _nobody_leads)
    block_tokens = slab.layout.block_tokens
    rows = min(sizes.max_rows, sizes.num_slots)
    shapes = DecodeShapes(rows, -(-sizes.max_length // block_tokens), sizes.graph_interval)
    graphs = sizes.graphs == "auto"
    if not graphs or model.device.type != "cuda":
        why = "engine.graphs is off" if not graphs else f"{model.device.type} has none"
        logger.warning("%s: steps are launched, not replayed as graphs: %s", name, why)
    steps = DecodeSteps(
        model,
        slab,
        shapes,
        name=name,
        spelled_ids=spelled_ids,
        keep=keep,
        graphs=graphs,
        run_ahead=sizes.run_ahead,
    )
    if sizes.run_ahead and not steps.may_run_ahead:
        logger.warning("%s: no steps ahead: Engram's tables are out of the GPU's reach", name)
    executor = Executor(runner, spelled_ids, grammars, steps)
    return StepRunners(executor, _nobody_leads, steps, -(-_COMMON_LENGTH // block_tokens))


def _nobody_leads() -> None:
    raise AssertionError("a model that works in place has no forwards that ranks share")
