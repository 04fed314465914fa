"""The experts of a model over the ranks of a group: this rank's part of every layer, every step.

Each rank brings the rows of its own requests, with attention and cache of its own; rows go to the
ranks that hold their experts and come back. A row's outputs are added in the order of its choices,
whoever computed them, so the size of the group changes no bit where the product of an expert does
not depend on the other rows. Knows nothing of requests or of who runs when.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cluster.expert_placement import extra_experts, first_placement, rank_slots
from cluster.placement_file import GroupPlacement
from cluster.replica_dispatch import Ints
from engine.expert_exchange import Exchange, GroupLost
from engine.expert_routes import LayerTable
from engine.expert_slots import ExpertSlots
from engine.experts import ExpertForm, LayerSlots, ValueForm
from kernels.ops.route import Routed
from model.moe import Experts, LocalExperts
from model.options import ModelOptions
from model.spec import ModelSpec
from model.weight_source import WeightSource

if TYPE_CHECKING:
    from model.packed.weights import PackedWeights

# T = padded rows, K = choices of a row, N = rows under way, D = hidden size, E = experts


class ExpertGroup:
    """One rank's end. Only the engine's thread computes with it."""

    def __init__(self, exchange: Exchange, slots: ExpertSlots) -> None:
        self.exchange, self.slots = exchange, slots
        self._layers: list[LayerSlots] = []
        self._next = 0  # layers of the step that is under way, so far
        self.renew_tables()

    @classmethod
    def first(
        cls, exchange: Exchange, group: str, spec: ModelSpec, least_extra: int
    ) -> ExpertGroup:
        """As a group of that name begins: version 0, experts in order, then copies in order.

        There are at least `least_extra` copies a layer, and as many more as make them divide by
        the ranks.
        """
        layers, experts, ranks = spec.num_hidden_layers, spec.n_routed_experts, exchange.size
        extra = extra_experts(experts, least_extra, ranks)
        placement = first_placement(layers, experts, ranks, rank_slots(experts, extra, ranks))
        return cls(exchange, ExpertSlots(GroupPlacement(group, 0, placement), index=exchange.index))

    @property
    def index(self) -> int:
        return self.exchange.index

    def status(self) -> dict[str, object]:
        """For people and for tests."""
        placed, last = self.slots.placed, self.slots.last_switch
        return {
            "index": self.exchange.index,
            "ranks": self.exchange.size,
            "slots": placed.placement.shape[2],
            "version": placed.version,
            "preparing": self.slots.preparing(),
            "last_switch": None if last is None else asdict(last),
        }

    def close(self) -> None:
        self.exchange.close()

    def make_experts(
        self,
        weights: WeightSource,
        prefix: str,
        count: int,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> Experts:
        """Reads this rank's experts of the model's next layer.

        Draft stages have all their experts here: who drafts and how often is each rank's affair,
        and need not be agreed on.
        """
        if not prefix.startswith("layers."):
            return LocalExperts(weights, prefix, count, spec, options)
        return self._next_layer(ValueForm(weights, spec, options), prefix)

    def make_packed_experts(
        self,
        weights: PackedWeights,
        prefix: str,
        count: int,
        spec: ModelSpec,
        options: ModelOptions,
    ) -> Experts:
        """The same on weights as they are stored."""
        from engine.stored_experts import StoredForm  # it needs Triton

        return self._next_layer(StoredForm(weights, spec, options), prefix)

    def _next_layer(self, form: ExpertForm, prefix: str) -> Experts:
        number, placement = len(self._layers), self.slots.placed.placement
        held = placement.slots[number, self.exchange.index].tolist()
        layer = LayerSlots(form, prefix, held)
        self._layers.append(layer)
        self.slots.add_layer(layer)
        return partial(self._compute, number)

    def renew_tables(self) -> None:
        """After a switch of the slots."""
        placement = self.slots.placed.placement
        layers = placement.shape[0]
        self._tables = [LayerTable(placement, layer) for layer in range(layers)]
        self._counts_LE = np.zeros((layers, placement.experts), np.int64)  # of this step

    @contextmanager
    def step(self) -> Iterator[None]:
        """All ranks are in it at the same time. A forward inside goes through the layers in order;
        what is left of them, and all where there is no forward, is done for the other ranks' rows.
        """
        self._next = 0
        self._counts_LE[:] = 0
        try:
            yield
        except GroupLost:
            raise
        except Exception:
            self._finish()
            raise
        self._finish()

    def _finish(self) -> None:
        with torch.inference_mode():
            while self._next < len(self._layers):
                nothing = self._layers[self._next].no_rows()
                self._pass(self._next, np.empty((0, 1), np.int64), nothing, nothing[:, :1])
        self.slots.count(self._counts_LE)

    def _compute(self, number: int, x_TD: Tensor, routed: Routed, count: int) -> Tensor:
        """[T, D], as model.moe.Experts says."""
        assert number == self._next, "a forward outside of a step, or layers out of order"
        chosen_TK = routed.experts[:count].cpu().numpy()
        shares_TK = routed.shares[:count]
        out_TKD = self._pass(number, chosen_TK, x_TD[:count], shares_TK)
        total_TD, *rest = out_TKD.unbind(1)
        for out_TD in rest:
            total_TD = total_TD + out_TD
        return torch.cat([total_TD, torch.zeros_like(x_TD[count:])])

    def _pass(self, number: int, chosen_TK: Ints, x_TD: Tensor, shares_TK: Tensor) -> Tensor:
        """[T, K, D]: each choice's output. Once counts are shared, others wait for what follows."""
        counts_E = np.bincount(chosen_TK.ravel(), minlength=self._counts_LE.shape[1])
        counts_RE = self.exchange.share_counts(counts_E)
        try:
            out_TKD = self._send_and_take(number, chosen_TK, counts_RE, x_TD, shares_TK)
        except GroupLost:
            raise
        except Exception as error:
            raise GroupLost(f"layer {number} failed between ranks: {error!r}") from error
        self._counts_LE[number] = counts_E
        self._next = number + 1
        return out_TKD

    def _send_and_take(
        self, number: int, chosen_TK: Ints, counts_RE: Ints, x_TD: Tensor, shares_TK: Tensor
    ) -> Tensor:
        layer, choices = self._layers[number], chosen_TK.shape[1]
        order, sizes, slots = self._tables[number].routes(chosen_TK, counts_RE, self.exchange.index)
        order_N = torch.from_numpy(order).to(x_TD.device)
        share_N1 = shares_TK.reshape(-1, 1).index_select(0, order_N)
        sent_ND = torch.cat([x_TD.index_select(0, order_N // choices), share_N1], 1)
        came_ND = self.exchange.dispatch(sent_ND, sizes)
        done_ND = layer(came_ND[:, :-1], slots, came_ND[:, -1])
        back_ND = self.exchange.combine(done_ND, sizes)
        out_ND = torch.empty_like(back_ND).index_copy_(0, order_N, back_ND)
        return out_ND.view(*chosen_TK.shape, x_TD.shape[1])
