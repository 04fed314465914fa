"""Rows of a local data file: JSON lines, CSV or Parquet. Knows not what is in them."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class BadFile(ValueError):
    """Says which file, what is wrong with it, and what it should be."""


def read_rows(path: Path) -> list[Row]:
    """By the file's ending: .jsonl, .json (a list), .csv, .parquet. BadFile for anything else."""
    try:
        return list(_rows(path))
    except OSError as error:
        raise BadFile(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise BadFile(f"{path}: {error}") from error


def _rows(path: Path) -> Iterator[Row]:
    match path.suffix.lower():
        case ".jsonl":
            with path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield _object(json.loads(line), f"line {number}")
        case ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(rows, list):
                raise ValueError("must be a list of objects")
            for number, row in enumerate(rows):
                yield _object(row, f"element {number}")
        case ".csv":
            with path.open(encoding="utf-8-sig", newline="") as file:
                yield from csv.DictReader(file)
        case ".parquet":
            yield from _parquet(path)
        case other:
            raise ValueError(f"{other or 'no ending'}: must be .jsonl, .json, .csv or .parquet")


def _object(row: object, where: str) -> Row:
    if not isinstance(row, dict):
        raise ValueError(f"{where} is not an object")
    return row


def _parquet(path: Path) -> list[Row]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")  # for this alone: nothing else does
    except ImportError:
        raise ValueError("Parquet needs pyarrow: pip install pyarrow, or save as .jsonl") from None
    rows: list[Row] = parquet.read_table(path).to_pylist()
    return rows
