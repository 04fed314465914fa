"""Answers a few prompts without a server.

    python examples/offline_inference.py
    python examples/offline_inference.py --ep 2 --dp 8
    python examples/offline_inference.py --disaggregated --check_structured_output

Sizes, variables and what differs from DeepInfer's example of this name: docs/guide.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":  # a script's own folder is first on the path; the root belongs there
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from cluster import environment
from cluster.config import load_config, setting_names
from cluster.errors import ClusterError
from examples.counts import positive
from examples.structured_output_checks import check_structured_output
from kernels.accelerator import choose
from model.spec import ModelSpec
from offline import LLM, SamplingParams
from offline.machines import Machines, machines
from offline.model_folder import model_folder
from offline.parallel_sizes import ParallelSizes, parallel_sizes

LONG_PROMPT, LONG_OUTPUT = 16_389, 4_096  # tokens a sample of --long_context
LEAST_LENGTH = 512  # positions of a request, so that structured output has room
PROMPTS = (
    "def add(a, b):",
    "The capital of Japan is",
    "def is_even(n):",
    "A list of three colours: red,",
)


@dataclass(frozen=True)
class Batch:
    """What is asked; `about` is shown in place of a prompt that is long or no text."""

    about: Sequence[str]
    prompt_token_ids: Sequence[Sequence[int]]
    params: SamplingParams
    longest: int  # positions that a sample takes


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 1 if a check of structured output fails, 2 for what cannot be, in one line, 130
    if interrupted."""
    options = _parser().parse_args(arguments)
    for remark in environment.remarks(os.environ, setting_names()):
        print(f"note: {remark}", file=sys.stderr)
    try:
        return _run(options)
    except (ClusterError, ValueError, TypeError) as error:
        print(f"offline_inference.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("offline_inference.py: interrupted", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    accelerator = choose(load_config(None).decode.accelerator)
    cards = accelerator.module.device_count() if accelerator.kind != "cpu" else 0
    here = machines(os.environ, cards_there=cards)
    ep = here.ep_size if options.ep is None else options.ep
    sizes = parallel_sizes(ep=ep, dp=options.dp, cp=options.cp)
    if here.rank:
        print(
            f"machine {here.rank} of {here.count}: its ranks are started, through Ray, by the "
            "program of RANK 0; nothing to do here but to be in the Ray cluster"
        )
        return 0
    folder = model_folder(options.model_name)
    print(f"{folder.name} on {accelerator.kind}: {_describe(sizes)}")
    for note in _notes(sizes):
        print(f"note: {note}", file=sys.stderr)
    batch = _batch(options, folder)
    with LLM(
        str(folder),
        machines=here.count,
        load_format=options.load_format,
        expert_parallel_size=sizes.ep,
        data_parallel_size=sizes.dp,
        context_parallel_size=sizes.cp,
        disable_eplb=options.disable_eplb,
        disaggregated=options.disaggregated,
        ranks_as=options.ranks or _ranks_as(here, sizes, accelerator.kind),
        accelerator=accelerator.kind,
        max_model_len=max(batch.longest, LEAST_LENGTH),
        max_num_seqs=options.max_num_seqs,
    ) as llm:
        _answer(llm, batch, show_texts=not options.long_context)
        if options.check_structured_output:
            return 0 if check_structured_output(llm, temperature=options.temperature) else 1
    return 0


def _answer(llm: LLM, batch: Batch, *, show_texts: bool) -> None:
    began = time.perf_counter()
    answers = llm.outputs(batch.prompt_token_ids, batch.params)
    took_s = time.perf_counter() - began
    tokenizer, made = llm.get_tokenizer(), 0
    for about, outputs in zip(batch.about, answers, strict=True):
        ids = [one.token_id for one in outputs if one.num_output_tokens]
        made += len(ids)
        print(f"--- {about}: {len(ids)} tokens, {outputs[-1].finish_reason}")
        if show_texts:
            print(tokenizer.decode(ids))
    prompts = sum(map(len, batch.prompt_token_ids))
    print(
        f"{len(answers)} samples, {prompts} prompt and {made} output tokens in {took_s:.1f} s: "
        f"{made / took_s:.1f} output tokens/s"
    )


def _batch(options: argparse.Namespace, folder: Path) -> Batch:
    spec = ModelSpec.load(folder)
    if options.long_context:
        return _long(options, spec, folder.name)
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    about, ids = _prompts(folder)
    count = options.num_samples or len(ids)
    about = [about[number % len(ids)] for number in range(count)]
    ids = [ids[number % len(ids)] for number in range(count)]
    return Batch(about, ids, params, max(map(len, ids)) + params.max_tokens)


def _long(options: argparse.Namespace, spec: ModelSpec, name: str) -> Batch:
    """Random ids: what is measured is length, not sense."""
    prompt, output = (-(-length // options.scale) for length in (LONG_PROMPT, LONG_OUTPUT))
    if prompt + output > spec.max_position_embeddings:
        least = -(-(LONG_PROMPT + LONG_OUTPUT) // (spec.max_position_embeddings - 2))
        raise ValueError(
            f"--long_context takes {prompt + output} positions a sample where {name} has "
            f"{spec.max_position_embeddings}; --scale {least} divides its lengths so that it fits"
        )
    if options.scale > 1:
        print(f"--scale {options.scale}: {prompt} in, {output} out, not the full lengths")
    pick = random.Random(0)
    count = options.num_samples or 2
    ids = [[pick.randrange(3, spec.image_token_id) for _ in range(prompt)] for _ in range(count)]
    params = SamplingParams(
        temperature=options.temperature, max_tokens=output, ignore_eos=True, seq_seed=0
    )
    about = [f"{prompt} random tokens"] * count
    return Batch(about, ids, params, prompt + output)


def _prompts(folder: Path) -> tuple[list[str], list[list[int]]]:
    """Those that lie beside a model, in its chat form, else some plain texts."""
    beside = folder / "demo.json"
    if beside.is_file():
        told = json.loads(beside.read_text(encoding="utf-8"))
        return [one["about"] for one in told], [one["prompt"] for one in told]
    from cluster.api.text import load_tokenizer

    tokenizer = load_tokenizer(folder)
    return [repr(text) for text in PROMPTS], [tokenizer.encode(text) for text in PROMPTS]


def _ranks_as(here: Machines, sizes: ParallelSizes, kind: str) -> str:
    """Threads share one device, so several GPUs or machines need actors."""
    return "ray" if here.count > 1 or (kind != "cpu" and sizes.world > 1) else "threads"


def _describe(sizes: ParallelSizes) -> str:
    return (
        f"dp {sizes.dp} x cp {sizes.cp} = {sizes.world} ranks, experts in "
        f"{sizes.expert_replicas} group(s) of {sizes.ep}"
    )


def _notes(sizes: ParallelSizes) -> list[str]:
    """What the sizes ask for that is done in another way here."""
    if sizes.group_ranks == sizes.ep:
        return []
    return [
        f"ranks that run prompts together share their experts, too: {sizes.groups} group(s) of "
        f"{sizes.group_ranks} ranks each, not of {sizes.ep}; the tokens are the same"
    ]


def _parser() -> argparse.ArgumentParser:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="offline_inference.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--ep", type=int, help="expert-parallel size (default: WORLD_SIZE x visible cards)")
    add("--dp", type=int, default=0, help="data-parallel size (default: ep // cp)")
    add("--cp", type=int, default=1, help="context-parallel size (default: 1)")
    add("--model_name", help="folder or name (default: DEEPINFER_HF_MODEL_DIR, else tandem-mini)")
    add("--load_format", choices=("auto", "dummy"), default="auto", help="dummy: random weights")
    add("--disable_eplb", action="store_true", help="experts stay where they are")
    add("--disaggregated", action="store_true", help="prompts on a rank of their own")
    add("--ranks", choices=("threads", "ray"), help="threads of this process, or Ray actors")
    add("--long_context", action="store_true", help=f"{LONG_PROMPT} in, {LONG_OUTPUT} out a sample")
    add("--scale", type=positive, default=1, help="divide these lengths, for small models")
    add("--check_structured_output", action="store_true", help="then a regex, a schema, EBNF")
    add("--num_samples", type=positive, help="prompts, repeated if there are fewer")
    add("--max_tokens", type=positive, default=64, help="of an answer (default: 64)")
    add("--max_num_seqs", type=positive, default=32, help="of a rank at a time (default: 32)")
    add("--temperature", type=float, default=0.0, help="0: greedy (default)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
