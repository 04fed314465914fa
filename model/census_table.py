"""A census as a table for people."""

from __future__ import annotations

from model.census import Census, state_bytes
from model.spec import ModelSpec


def census_lines(spec: ModelSpec, census: Census, length: int) -> list[str]:
    """The table that `inspect` prints; `length` is that of an example request, in positions."""
    lines = ["part                         parameters      tensors                bytes"]
    columns = (census.parameters, census.tensors, census.part_bytes)
    for part in census.parameters:
        counts = [column[part] for column in columns]
        lines.append(_row(part.replace("_", " "), *counts))
    lines.append(_row("total", *(sum(column.values()) for column in columns)))
    lines += ["", "type                            bytes"]
    lines += [f"{name:<16}{size:>21,}" for name, size in census.type_bytes.items()]
    active, state = census.active, census.state
    return [
        *lines,
        "",
        f"active a token            prefill {active.prefill:,}; decode {active.decode:,};"
        f" draft {active.draft:,}",
        f"one routed expert         {census.expert_bytes:,} bytes",
        f"request state             {state.per_token:,g} bytes a token, {state.windows:,} of"
        f" windows, {state.tail:,} of open pairs",
        f"  after {length:>11,}       {state_bytes(spec, length):,} bytes",
    ]


def _row(name: str, parameters: int, tensors: int, size: int) -> str:
    return f"{name:<16}{parameters:>23,}{tensors:>13,}{size:>21,}"
