"""An engine for whole batches, as DeepInfer's users know it: prompts in, answers out, in order.

    with LLM("tandem-mini", expert_parallel_size=2) as llm:
        llm.generate(prompts, SamplingParams(temperature=0))

Its ranks are those of a cluster, in this process or as Ray actors, and its caller is a cluster's,
so its answers are those that a server gives. Blocking; for programs without an event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.api.text import Tokenizer, load_tokenizer
from cluster.client import build_request
from cluster.closing import Closing
from cluster.config import ClusterConfig
from cluster.errors import BadRequest, StartupError
from cluster.generation import Caller
from cluster.pictures import Picture, read_pictures
from cluster.progress_bar import ProgressBar
from kernels.accelerator import Accelerator, choose
from offline.answer import Answer, outputs_of
from offline.carriers import Carrier
from offline.engine_args import CPU_STATE_BYTES, EngineArgs, engine_config
from offline.loop_thread import LoopThread
from offline.model_folder import check_checkpoint, model_folder
from offline.prompts import image_files, params_of, prompt_ids
from offline.rank_actors import RankActors
from offline.rank_threads import RankThreads
from offline.request_output import RequestOutput
from offline.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

Images = Mapping[str, Any] | Sequence[Mapping[str, Any] | None] | None
"""Files of a prompt's images: {"image_bytes": [...]}, one such for each prompt."""


class LLM(Closing):
    """`model` is a folder or a name of offline/model_folder.py; further arguments are those of
    offline/engine_args.py. StartupError, ValueError or TypeError, in one line, if it cannot be.
    """

    def __init__(
        self,
        model: str | None = None,
        tokenizer: str | None = None,
        *,
        decode_sequence: bool = True,
        machines: int = 1,
        **arguments: Any,
    ) -> None:
        """`decode_sequence`: answers are texts; else lists of RequestOutput.

        `machines`: how many the Ray cluster must have, where ranks are Ray actors. Loading is
        done when this returns.
        """
        args = EngineArgs.of(arguments)
        folder = model_folder(model)
        if args.load_format == "auto":
            check_checkpoint(folder)
        self._decode_sequence = decode_sequence
        self._tokenizer = load_tokenizer(tokenizer or folder)
        accelerator = choose(args.accelerator)
        self.config = engine_config(
            folder, args, device=accelerator.kind, state_bytes=_state_bytes(accelerator, args)
        )
        self._carrier = _carrier(args, self.config, accelerator, machines)
        self._batches = itertools.count(1)  # threads may ask at the same time
        self._loop = LoopThread("offline engine")
        try:
            self._caller: Caller = self._loop.run(self._carrier.start())
        except BaseException:
            self.close()
            raise

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[Iterable[int]] | None = None,
        use_tqdm: bool = True,
        multi_modal_data: Images = None,
    ) -> list[str] | list[list[RequestOutput]]:
        """One answer for each prompt, in their order: a text, or one RequestOutput a token.

        A prompt that leaves no room for an answer, or a schema that cannot be followed, ends its
        own request only: with a finish_reason that says so, and a warning in the log. ValueError
        for prompts that cannot be, before anything runs; a ClusterError if the engine fails.
        """
        ids = prompt_ids(prompts, prompt_token_ids, self._tokenizer)
        params = params_of(sampling_params, len(ids))
        if not self._decode_sequence:
            return self.outputs(ids, params, multi_modal_data, use_tqdm=use_tqdm)
        images = image_files(multi_modal_data, len(ids))
        answers = self._answers(ids, params, images, use_tqdm, tell_logprobs=False)
        return [self._tokenizer.decode(answer.token_ids) for answer in answers]

    def outputs(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        multi_modal_data: Images = None,
        *,
        use_tqdm: bool = True,
    ) -> list[list[RequestOutput]]:
        """As generate() with `decode_sequence` off."""
        ids = prompt_ids(None, prompt_token_ids, self._tokenizer)
        params = params_of(sampling_params, len(ids))
        images = image_files(multi_modal_data, len(ids))
        answers = self._answers(ids, params, images, use_tqdm, tell_logprobs=True)
        return [outputs_of(answer) for answer in answers]

    def close(self) -> None:
        """Ends the ranks; closing again is harmless."""
        if self._loop.running:
            self._loop.run(self._carrier.stop())
            self._loop.stop()

    # ---------------------------------------------------------------- inside

    def _answers(
        self,
        ids: Sequence[list[int]],
        params: Sequence[SamplingParams],
        images: Sequence[list[bytes]],
        show: bool,
        *,
        tell_logprobs: bool,
    ) -> list[Answer]:
        batch = next(self._batches)
        asked = [
            _Asked(f"{batch}-{number}", *parts, tell_logprobs)
            for number, parts in enumerate(zip(ids, params, images, strict=True))
        ]
        bar = ProgressBar(len(asked), sys.stderr) if show and asked else None
        return self._loop.run(self._answer_all(asked, bar))

    async def _answer_all(self, asked: Sequence[_Asked], bar: ProgressBar | None) -> list[Answer]:
        """As many at a time as have a slot: those who wait are no load to the ranks."""
        pool = self.config.decode
        slots = asyncio.Semaphore(pool.groups * pool.ranks // pool.cp * pool.engine.num_slots)
        began, tokens = time.monotonic(), 0

        async def one(asking: _Asked) -> Answer:
            nonlocal tokens
            async with slots:
                answer = await self._answer(asking)
            tokens += len(answer.token_ids)
            if bar is not None:
                bar.step(f"{tokens / (time.monotonic() - began):.1f} output tokens/s")
            return answer

        tasks = [asyncio.create_task(one(asking)) for asking in asked]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if bar is not None:
                bar.end()

    async def _answer(self, asking: _Asked) -> Answer:
        answer = Answer(asking.request_id, len(asking.prompt))
        room = self.config.decode.engine.max_length - len(asking.prompt)
        if room < 1:
            answer.finish = "prompt_length_exceeded"
            logger.warning(
                "request %s: %d prompt tokens leave no room in max_model_len %d",
                asking.request_id,
                len(asking.prompt),
                self.config.decode.engine.max_length,
            )
            return answer
        fields = asking.params.fields(tell_logprobs=asking.tell_logprobs)
        fields["max_tokens"] = min(fields["max_tokens"], room)
        fields["min_tokens"] = min(fields["min_tokens"], room)
        try:
            request = build_request(
                asking.prompt,
                request_id=asking.request_id,
                images=await self._pictures(asking.images),
                **fields,
            )
            async for delta in self._caller.generate(request):
                answer.add(delta)
        except BadRequest as error:
            answer.finish = str(error)
            logger.warning("request %s: %s", asking.request_id, error)
        return answer

    async def _pictures(self, files: Sequence[bytes]) -> tuple[Picture, ...]:
        """BadRequest for what the model does not take."""
        if not files:
            return ()
        rules = await self._caller.image_rules()
        return await asyncio.to_thread(read_pictures, files, rules, self.config.images)


@dataclass(frozen=True)
class _Asked:
    request_id: str
    prompt: list[int]
    params: SamplingParams
    images: list[bytes]
    tell_logprobs: bool


def _carrier(
    args: EngineArgs, config: ClusterConfig, accelerator: Accelerator, machines: int
) -> Carrier:
    if args.ranks_as == "ray":
        return RankActors(config, machines=machines)
    if machines > 1:
        raise StartupError(f'{machines} machines need ranks as Ray actors: ranks_as="ray"')
    ranks = sum(pool.groups * pool.ranks for pool in (config.decode, config.prefill))
    if accelerator.kind != "cpu" and ranks > 1:
        raise StartupError(
            f'{ranks} ranks as threads would share one GPU; ranks_as="ray" gives each its own'
        )
    return RankThreads(config)


def _state_bytes(accelerator: Accelerator, args: EngineArgs) -> int:
    """Most that the blocks of one rank may take; on a GPU the other half is for the weights."""
    free = accelerator.free_bytes()
    return CPU_STATE_BYTES if free is None else int(free * args.gpu_memory_utilization / 2)
