"""A packed forward held to references on its own inputs: op by op, and layer by layer.

Every op is a function that runs its reference when it is given tensors of a CPU. So what a forward
computes is computed a second time: from the same inputs on the host, or in a whole second forward
in float32 whose every layer begins with what the first one's layer began with.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import isfunction, signature
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kernels.op import Op
from kernels.ops import index_topk, packed_attention, packed_experts
from kernels.ops.expert_mlp import expert_mlp
from model.packed.layer import Layer

Call = Callable[..., Any]

CHOICES = ("route_top", "index_topk", "select")
"""Ops whose results are numbers of experts or rows: a rounding can change them wholly."""

WRITERS = ("rope_pack", "norm_rope_pack", "pack_index_keys", "put_rows")
"""Ops that write into memory that they are given."""

_WIDE = ("spread",)  # whose reference takes tensors of one dtype only
_WHERE_IT_IS: dict[str, Call] = {  # references that would take long on a host
    "packed_attention": packed_attention.reference,
    "packed_experts": packed_experts.reference,
    "index_scores": index_topk.scores_reference,
    "index_topk": index_topk.reference,
    "expert_mlp": expert_mlp,
}


@dataclass(frozen=True)
class Compared:
    """One op of a forward beside its reference; `error` is of the norms, or of bytes or numbers
    the share that differs.
    """

    op: str
    error: float


@contextmanager
def replaced(change: Callable[[str, Call], Call]) -> Iterator[None]:
    """Inside, the packed forward calls change(name, op) in place of each op."""
    with ExitStack() as undo:
        for name, module in list(sys.modules.items()):
            if not name.startswith("model.packed."):
                continue
            for attribute, op in list(vars(module).items()):
                if isinstance(op, Op) or (
                    isfunction(op) and op.__module__.startswith("kernels.ops.")
                ):
                    called = op.name if isinstance(op, Op) else op.__name__
                    undo.enter_context(patch.object(module, attribute, change(called, op)))
        yield


# ------------------------------------------------------------------ op by op


@contextmanager
def compared() -> Iterator[list[Compared]]:
    """Inside, every op is run twice; what was found fills the list."""
    found: list[Compared] = []

    def change(name: str, op: Call) -> Call:
        def twice(*args: Any, **kwargs: Any) -> Any:
            reference = _reference(name, op)
            device = torch.device("cpu") if reference is op else _device((args, kwargs))
            copies = _moved((args, kwargs), device, wide=name in _WIDE)
            before = [memory.clone() for memory in _written(name, copies[0])]
            out = op(*args, **kwargs)
            expected = reference(*copies[0], **copies[1])
            errors = [_error(*pair) for pair in _pairs(out, expected)]
            for old, new, ours in zip(
                before, _written(name, copies[0]), _written(name, args), strict=True
            ):
                ours = ours.to(old.device)
                there = (new != old) | (ours != old)  # what either of them has changed
                errors.append(_error(ours[there], new[there]))
            if errors:
                found.append(Compared(name, max(errors)))
            return out

        return twice

    with replaced(change):
        yield found


def _reference(name: str, op: Call) -> Call:
    """A form that is the reference on any device, or the op itself, which is so on a host."""
    if name not in _WHERE_IT_IS:
        return op.reference if isinstance(op, Op) else op
    reference = _WHERE_IT_IS[name]
    known = signature(reference).parameters

    def without_settings(*args: Any, **kwargs: Any) -> Any:
        """How a kernel cuts its work is nothing to a reference."""
        return reference(*args, **{key: one for key, one in kwargs.items() if key in known})

    return without_settings


def _device(value: Any) -> torch.device:
    """Where an op with these arguments computes: some of them may be on the host all the same."""
    devices = {one.device for one in _tensors(value)}
    return next((one for one in devices if one.type != "cpu"), torch.device("cpu"))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return _tensors(tuple(value.values()))
    return [one for part in value for one in _tensors(part)] if isinstance(value, tuple) else []


def _moved(value: Any, device: torch.device, *, wide: bool = False) -> Any:
    """Copies there; if `wide`, in float32 what is narrower."""
    if isinstance(value, Tensor):
        widened = wide and value.dtype == torch.bfloat16
        return value.detach().to(device, torch.float32 if widened else value.dtype, copy=True)
    if isinstance(value, tuple):
        parts = [_moved(one, device, wide=wide) for one in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, dict):
        return {key: _moved(one, device, wide=wide) for key, one in value.items()}
    return value


def _written(name: str, args: tuple[Any, ...]) -> list[Tensor]:
    """Memory among the arguments: the first that holds bytes."""
    if name not in WRITERS:
        return []
    return [one for one in args if isinstance(one, Tensor) and one.dtype == torch.uint8][:1]


def _pairs(found: Any, expected: Any) -> list[tuple[Tensor, Tensor]]:
    if isinstance(found, Tensor):
        return [(found, expected)]
    if isinstance(found, tuple | list):
        return [pair for one in zip(found, expected, strict=True) for pair in _pairs(*one)]
    return []


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.cpu(), expected.cpu()
    if not found.numel():
        return 0.0
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if not found.dtype.is_floating_point:
        return float((found != expected).double().mean())
    seen = expected.isfinite()  # of scores, what no row sees is not written
    gap = (found.double() - expected.double())[seen]
    return float(gap.norm() / expected.double()[seen].norm().clamp(min=1e-30))


# ------------------------------------------------------------------ layer by layer


@dataclass
class Passed:
    """What went into and came out of each layer, and every choice in its order."""

    residuals: list[tuple[Any, Any]] = field(default_factory=list)
    choices: list[Any] = field(default_factory=list)


@contextmanager
def kept() -> Iterator[Passed]:
    """Inside, a forward is watched."""
    passed, run = Passed(), Layer.__call__

    def layer(self: Layer, residual: Any, step: Any) -> Any:
        out = run(self, residual, step)
        passed.residuals.append((residual, out))
        return out

    def change(name: str, op: Call) -> Call:
        if name not in CHOICES:
            return op

        def choose(*args: Any, **kwargs: Any) -> Any:
            passed.choices.append(op(*args, **kwargs))
            return passed.choices[-1]

        return choose

    with replaced(change), patch.object(Layer, "__call__", layer):
        yield passed


@contextmanager
def followed(passed: Passed, dtype: torch.dtype) -> Iterator[Passed]:
    """Inside, a forward by references takes its layers' inputs and choices from another one's."""
    own, run = Passed(), Layer.__call__
    given, choices = iter(passed.residuals), iter(passed.choices)

    def layer(self: Layer, residual: Any, step: Any) -> Any:
        before = next(given)[0]
        before = type(before)(*(part.to(dtype) for part in before))
        out = run(self, before, step)
        own.residuals.append((before, out))
        return out

    def change(name: str, op: Call) -> Call:
        def refer(*args: Any, **kwargs: Any) -> Any:
            found = _referred(name, op, args, kwargs)
            if name not in CHOICES:
                return found
            own.choices.append(found)
            return _chosen(next(choices), found)

        return refer

    with replaced(change), patch.object(Layer, "__call__", layer):
        yield own


def _referred(name: str, op: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The reference of an op on its own device, by way of the host; memory is written as well."""
    reference = _reference(name, op)
    if reference is not op:
        return reference(*args, **kwargs)
    there = _moved((args, kwargs), torch.device("cpu"))
    out = op(*there[0], **there[1])
    for own, copy in zip(_written(name, args), _written(name, there[0]), strict=True):
        own.copy_(copy)
    return _moved(out, _device((args, kwargs)))


def _chosen(theirs: Any, own: Any) -> Any:
    """Their numbers with our shares, which go with numbers."""
    return theirs if isinstance(theirs, Tensor) else type(theirs)(*theirs)
