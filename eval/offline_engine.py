"""Answers of an engine in this process, without a server. Knows nothing of questions."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cluster.errors import BadRequest, StartupError
from eval.endpoint import Said
from model.spec import ModelSpec
from offline import LLM, SamplingParams
from offline.model_folder import model_folder

PROMPT_ROOM = 4096  # positions beside the answer's


class OfflineEngine:
    """One of endpoint.Speaker; each answer waits in a thread of its own, so they run together."""

    def __init__(self, llm: LLM, *, concurrency: int) -> None:
        self._llm = llm
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="answer")

    @classmethod
    def of(cls, model: str, *, concurrency: int, max_tokens: int) -> OfflineEngine:
        """`model`: a folder or a name. StartupError, in one line, if it cannot be.

        An answer gets fewer than `max_tokens` only where the model has no more positions.
        """
        try:
            folder = model_folder(model)
            length = min(max_tokens + PROMPT_ROOM, ModelSpec.load(folder).max_position_embeddings)
            llm = LLM(str(folder), max_model_len=length, max_num_seqs=concurrency)
        except ValueError as error:
            raise StartupError(f"{model}: {error}") from error
        return cls(llm, concurrency=concurrency)

    async def say(self, prompt: str, fields: dict[str, Any]) -> Said:
        """`fields` are those of a completion: max_tokens, temperature, top_p, seed."""
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._say, prompt, fields
        )

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        await asyncio.to_thread(self._llm.close)

    def _say(self, prompt: str, fields: dict[str, Any]) -> Said:
        try:
            params = SamplingParams(
                max_tokens=fields["max_tokens"],
                temperature=fields["temperature"],
                top_p=fields["top_p"],
                seq_seed=fields["seed"],
            )
            tokenizer = self._llm.get_tokenizer()
            (told,) = self._llm.outputs([tokenizer.encode(prompt)], params, use_tqdm=False)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        finish = told[-1].finish_reason
        if finish not in ("stop", "length"):
            raise BadRequest(finish)
        ids = [one.token_id for one in told if one.num_output_tokens]
        return Said(tokenizer.decode(ids), finish, len(ids))
