"""Each op against hand results, published vectors, or the definition written out."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.ops.compress import compress
from kernels.ops.engram import engram_gates
from kernels.ops.expert_mlp import _Places, expert_mlp, gated_mlp
from kernels.ops.hyper_connection import _mixes_numpy, collapse, mixes, spread
from kernels.ops.index_score import index_score
from kernels.ops.rms_norm import rms_norm
from kernels.ops.rope import rope, rotations
from kernels.ops.route import route
from kernels.ops.sparse_attention import sparse_attention
from kernels.ops.top_rows import _top_rows, _top_rows_numpy

EPS = torch.tensor(1e-20)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


def close(found: Tensor, wanted: object, tolerance: float = 1e-6) -> bool:
    return bool((found.double() - torch.as_tensor(wanted).double()).abs().max() <= tolerance)


def test_rms_norm_divides_by_the_root_of_the_mean_square() -> None:
    x, weight = torch.randn(3, 5, 64), torch.randn(64)
    wanted = x / x.square().mean(-1, keepdim=True).sqrt() * weight
    assert close(rms_norm(x, weight, EPS), wanted, 2e-6)
    assert not rms_norm(torch.zeros(1, 64), weight, EPS).any()


def test_rope_turns_adjacent_pairs_of_the_last_dims_and_back() -> None:
    x = torch.arange(12.0).view(1, 2, 6)
    quarter, half = torch.pi / 2, torch.pi
    turns = rotations(torch.tensor([1]), torch.tensor([quarter, half], dtype=torch.float64))
    turned = rope(x.clone(), turns)
    assert close(turned[0, 0], [0, 1, -3, 2, -4, -5])
    assert close(rope(turned, turns.conj()), x, 1e-5)


def test_angles_are_exact_at_a_million_positions() -> None:
    positions = torch.tensor([1_048_575])
    found = rotations(positions, torch.tensor([1.0], dtype=torch.float64))
    assert complex(found[0, 0, 0]) == pytest.approx(
        complex(np.cos(1_048_575.0), np.sin(1_048_575.0)), abs=1e-7
    )


def test_the_mix_of_known_logits() -> None:
    mix: list[list[float]] = [[1, 0, -1, 0.5], [0, 2, 0, 0], [0.5, 0.5, 0.5, 0.5], [-1, 0, 1, 3]]
    logits = torch.tensor([[0.0] * 8 + [value for row in mix for value in row]] * 8)
    found = mixes(logits, 4, 20, 1e-6)
    by_numpy = _mixes_numpy(logits, 4, 20, 1e-6)
    for pre, post, mix_nn in zip(*found, strict=True):
        assert close(pre, [0.5 + 1e-6] * 4)
        assert close(post, [1.0] * 4)
        assert close(mix_nn[0], [0.575466, 0.142876, 0.117384, 0.164273], 1e-6)
        assert close(mix_nn[3], [0.025211, 0.046248, 0.280753, 0.647786], 1e-6)
        assert close(mix_nn.sum(0), [0.999999] * 4, 1e-6)
    for one, other in zip(found, by_numpy, strict=True):
        assert close(one, other)


@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
@pytest.mark.parametrize("n", [2, 4])
def test_both_forms_of_the_mixes_agree(n: int, iterations: int) -> None:
    logits = 4 * torch.randn(600, 2 * n + n * n)
    logits[0] = 90.0
    logits[1] = -90.0
    reference = mixes(logits, n, iterations, 1e-6)
    by_numpy = _mixes_numpy(logits, n, iterations, 1e-6)
    for one, other in zip(reference, by_numpy, strict=True):
        assert close(one, other, 2e-6)


def test_spread_mixes_from_source_to_destination() -> None:
    streams, out = torch.randn(5, 4, 16), torch.randn(5, 16)
    post, mix = torch.rand(5, 4), torch.rand(5, 4, 4)
    wanted = post[:, :, None] * out[:, None] + torch.einsum("tij,tid->tjd", mix, streams)
    assert close(spread(out, streams, post, mix), wanted, 1e-5)
    assert close(collapse(streams, post), torch.einsum("tn,tnd->td", post, streams), 1e-5)


def test_router_weights_of_known_logits() -> None:
    logits = torch.tensor([[2, 1, 0, -1, 0.5, -0.5, -9]])
    experts, shares = route(logits, torch.zeros(7), 6, 1.5)
    assert experts.tolist() == [[0, 1, 4, 2, 5, 3]]
    wanted = [0.3856761, 0.3030554, 0.2610015, 0.2201705, 0.1820836, 0.1480130]
    assert close(shares[0], wanted, 1e-6)


def test_the_bias_only_chooses_and_ties_take_the_lower_expert() -> None:
    experts, shares = route(torch.ones(1, 3), torch.tensor([0.0, 0.0, 5.0]), 2, 1.0)
    assert experts.tolist() == [[2, 0]]
    assert shares.tolist() == [[0.5, 0.5]]


def test_the_activation_clamps_before_silu() -> None:
    one = torch.tensor([[1.0]])
    gate_up = torch.tensor([[12.0, -15.0]])
    share = torch.tensor([[0.25]])
    found = expert_mlp(
        one,
        torch.zeros(1, 1, dtype=torch.int64),
        share,
        gate_up[None],
        one[None],
        count=1,
        limit=10.0,
        fp8=False,
    )
    assert close(found, [[-24.9988651]], 1e-5)


def test_experts_are_summed_row_by_row() -> None:
    x, experts = torch.randn(40, 32), torch.randint(0, 5, (40, 3))
    shares, gate_up, down = torch.rand(40, 3), torch.randn(5, 32, 64), torch.randn(5, 32, 32)
    found = expert_mlp(x, experts, shares, gate_up, down, count=37, limit=10.0, fp8=False)
    for row in range(37):
        wanted = sum(
            share * gated_mlp(x[row : row + 1], gate_up[e], down[e], limit=10.0, fp8=False)
            for e, share in zip(experts[row].tolist(), shares[row], strict=True)
        )
        assert close(found[row : row + 1], wanted, 1e-3)


def test_on_a_device_each_expert_has_as_many_places_and_each_row_its_own() -> None:
    experts = torch.randint(0, 5, (40, 3))
    places = _Places._even(experts, 5, 37)
    room = int(experts[:37].flatten().bincount().max())
    assert places.sizes == [room] * 5
    found = places.place.view(40, 3)[:37]
    assert torch.equal(found // room, experts[:37])
    assert torch.equal(places.row_S[found], torch.arange(37).unsqueeze(1).expand(37, 3))
    assert torch.equal(places.assignment_S[found].flatten(), torch.arange(37 * 3))
    assert len(set(found.flatten().tolist())) == found.numel()


def test_rounded_inputs_make_the_place_of_the_share_matter() -> None:
    x, down = torch.randn(8, 32), torch.randn(1, 32, 32)
    gate_up, expert = torch.randn(1, 32, 64), torch.zeros(8, 1, dtype=torch.int64)
    share = torch.full((8, 1), 0.3)
    before = expert_mlp(x, expert, share, gate_up, down, count=8, limit=10.0, fp8=True)
    after = 0.3 * gated_mlp(x, gate_up[0], down[0], limit=10.0, fp8=True)
    assert not close(before, after, 1e-4)


def test_attention_is_one_softmax_with_a_sink_in_the_denominator() -> None:
    q, window, selected = torch.randn(6, 2, 32), torch.randn(6, 5, 32), torch.randn(6, 3, 32)
    hidden, absent = torch.rand(6, 1, 5) > 0.6, torch.rand(6, 1, 3) > 0.6
    hidden[0], absent[0] = True, True  # no key at all
    sink = torch.randn(1, 2, 1)
    masks = [torch.zeros(m.shape).masked_fill(m, -torch.inf) for m in (hidden, absent)]
    found = sparse_attention(q, window, masks[0], sink, selected, masks[1])
    keys = torch.cat([window, selected], 1)
    seen = ~torch.cat([hidden, absent], 2)
    weights = torch.einsum("thd,tkd->thk", q, keys).mul(32**-0.5).exp() * seen
    total = weights.sum(-1, keepdim=True) + sink.exp()
    assert close(found, weights / total @ keys, 1e-5)
    assert not found[0].any()


def test_index_scores_sum_weighted_relus_and_hide_what_is_not_visible() -> None:
    q, weights, keys = torch.randn(2, 8, 3, 32), torch.randn(2, 8, 3), torch.randn(2, 16, 32)
    hidden = torch.arange(16) >= torch.randint(0, 17, (2, 8, 1))
    found = index_score(q, weights, keys, hidden)
    products = torch.einsum("rqhd,rjd->rqhj", q, keys).relu()
    wanted = torch.einsum("rqhj,rqh->rqj", products, weights)
    assert close(found[~hidden], wanted[~hidden], 1e-4)
    assert (found[hidden] == -torch.inf).all()


TopRows = Callable[[Tensor, int], Tensor]


@pytest.mark.parametrize("top_rows", [_top_rows, _top_rows_numpy])
def test_top_rows_are_ascending_and_ties_take_the_lower_row(top_rows: TopRows) -> None:
    inf = torch.inf
    scores = torch.tensor(
        [
            [3.0, 5.0, -inf, 3.0, 0.0],
            [0.0, -0.0, 0.0, -1.0, -0.0],
            [-inf, -inf, -inf, -2.0, -inf],
            [inf, 1.0, 2.0, 3.0, 4.0],
        ]
    )
    assert top_rows(scores, 2).tolist() == [[0, 1], [0, 1], [3, -1], [0, 4]]
    assert top_rows(scores[:1], 7).tolist() == [[0, 1, 3, 4, -1, -1, -1]]


@pytest.mark.parametrize("top_rows", [_top_rows, _top_rows_numpy])
def test_top_rows_equal_a_stable_sort(top_rows: TopRows) -> None:
    scores = torch.randn(2, 50, 300).round(decimals=1)
    for count in (1, 40, 300, 310):
        order = np.argsort(-scores.numpy(), axis=-1, kind="stable")[..., :count]
        wanted = torch.from_numpy(np.sort(order, axis=-1))
        found = top_rows(scores, count)
        assert torch.equal(found[..., : wanted.shape[-1]], wanted)
        assert (found[..., wanted.shape[-1] :] == -1).all()


def test_compression_weighs_two_positions_by_the_softmax_of_their_gates() -> None:
    kv, gate = torch.randn(2, 7, 16), 3 * torch.randn(2, 7, 16)
    wanted = (kv * torch.softmax(gate, 0)).sum(0)
    assert close(compress(kv[0], gate[0], kv[1], gate[1]), wanted)


def test_engram_gates_follow_the_cosine_of_stream_and_key() -> None:
    streams, keys, weight = torch.randn(6, 4, 64), torch.randn(6, 4, 64), torch.randn(4, 64)
    norms = streams.square().mean(-1).sqrt() * keys.square().mean(-1).sqrt()
    match = (streams * keys * weight).sum(-1) / norms / 8
    wanted = torch.sigmoid(match.sign() * match.abs().clamp(min=1e-6).sqrt())
    assert close(engram_gates(streams, keys, weight, EPS), wanted, 1e-5)
    assert close(engram_gates(0 * streams, keys, weight, EPS), 0.5)
