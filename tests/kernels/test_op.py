"""Which form of an op runs."""

from __future__ import annotations

import sys

import torch

from kernels.op import Op

DOUBLED = Op[[torch.Tensor], torch.Tensor](
    "doubled", lambda x: x + x, cpu=lambda x: 2 * x, cuda="kernels.that_is_not_there:doubled"
)


def test_the_faster_form_runs_where_it_is_for() -> None:
    with torch.no_grad():
        assert DOUBLED.backend(torch.ones(2)) == "cpu"
        assert DOUBLED.backend(torch.ones(2, dtype=torch.float64)) == "torch"
        assert DOUBLED.backend("not a tensor") == "torch"
        assert DOUBLED(torch.ones(2)).tolist() == [2, 2]


def test_gradients_are_asked_of_the_reference() -> None:
    assert DOUBLED.backend(torch.ones(2)) == "torch"


def test_a_form_for_gpus_is_not_imported_elsewhere() -> None:
    with torch.no_grad():
        DOUBLED(torch.ones(2))
    assert "kernels.that_is_not_there" not in sys.modules
