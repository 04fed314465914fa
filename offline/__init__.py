"""Batch inference in one program: an `LLM` over the same ranks that a cluster serves with.

from offline import LLM, SamplingParams

with LLM("tandem-mini") as llm:
    print(llm.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=16)))
"""

from offline.llm import LLM
from offline.request_output import RequestOutput
from offline.sampling_params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]
