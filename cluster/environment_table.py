"""Every environment variable that the product reads, in one table, and how its text is read.

Names that begin with DEEPINFER_ are those of DeepSeek's engine, read by its rules: 0, false,
False and nothing at all are false, any other text is true; numbers are Python's; a choice lists
what it may be. Those that this version does not use stand here too, each with the reason.
Knows nothing of who asks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from cluster.errors import StartupError

OWN, ENGINE = "TANDEM_", "DEEPINFER_"
Kind = Literal["bool", "int", "float", "str", "choice"]


@dataclass(frozen=True)
class Variable:
    """`sets` says which settings a value stands for: by that value, or by "" for any other."""

    name: str
    meaning: str
    kind: Kind = "str"
    choices: tuple[str, ...] = ()
    sets: Mapping[str, Mapping[str, Any]] | None = None
    secret: bool = False  # its value is not shown
    unused: bool = False  # DeepInfer reads it, this version does not; `meaning` says why
    benchmark: bool = False  # examples/benchmark.py reads it, and nothing else

    def parse(self, text: str) -> Any:
        """StartupError, with the variable's name in front, for text that is no such value."""
        try:
            match self.kind:
                case "bool":
                    return text not in ("", "0", "false", "False")
                case "int":
                    return int(text)
                case "float":
                    return float(text)
                case "choice" if text not in self.choices:
                    raise ValueError(f"{text!r} is none of {', '.join(self.choices)}")
        except ValueError as error:
            raise StartupError(f"{self.name}: {error}") from error
        return text

    def settings(self, text: str) -> dict[str, Any]:
        """By name of the setting; a setting that is None stands for the text itself."""
        value = self.parse(text)
        chosen = (self.sets or {}).get(str(value), (self.sets or {}).get("", {}))
        return {key: value if given is None else given for key, given in chosen.items()}


def _unused(kind: Kind, names: str, why: str) -> list[Variable]:
    return [Variable(ENGINE + name, why, kind, unused=True) for name in names.split()]


# why a variable of DeepInfer's is not used
_SPECULATION = "the serving loop does not speculate yet"
_TRUNCATION = "a truncated prompt stores nothing more"
_GPU = "of DeepInfer's GPU engine"
_SCHEDULING = (
    "scheduling has its own settings: chunk_tokens, max_rows, num_slots of each pool's engine"
)
_GRAMMAR = "of DeepInfer's grammar compiler, which is not used"
_IMAGES = "images are not served yet"
_LOGS = "`log.level`, metrics and `tandem trace` take its place: docs/observability.md"
_SAMPLING = "sampling is asked for by each request: docs/sampling.md"

_GRAPHS = ("prefill.engine.graphs", "decode.engine.graphs")
_GRAPH_INTERVALS = ("prefill.engine.graph_interval", "decode.engine.graph_interval")
_RUN_AHEAD = ("prefill.engine.run_ahead", "decode.engine.run_ahead")
_ACCELERATORS = ("prefill.accelerator", "decode.accelerator")

TABLE: tuple[Variable, ...] = (
    Variable("TANDEM_URL", "server that `tandem bench`, `tandem trace` and the examples talk to"),
    Variable("TANDEM_API_KEY", "sent by them where the server asks for keys", secret=True),
    Variable("TANDEM_ORACLE", "folder of the model's reference implementation; tests, model.bench"),
    Variable("TANDEM_SETTINGS", "set by launch in replicas: a digest of what they were built on"),
    Variable("RAY_ADDRESS", "Ray cluster that every command means; else the one of `up --local`"),
    Variable("RAY_API_SERVER_ADDRESS", "URL of its dashboard, where applications are deployed"),
    Variable("RAY_AUTH_MODE", "token or disabled; decides how `up --local` starts its head"),
    Variable("RAY_AUTH_TOKEN_PATH", "file with the token that Ray's clients send"),
    Variable("XDG_STATE_HOME", "where `up --local` notes its head; else ~/.local/state"),
    Variable("OMP_NUM_THREADS", "set in ranks to engine.threads, before torch is imported"),
    Variable("MKL_NUM_THREADS", "the same"),
    Variable("MKL_CBWR", "set where torch is used on a CPU: the same bits whatever the batch"),
    Variable(
        "CUDA_VISIBLE_DEVICES",
        "set by Ray in ranks: the GPUs that are theirs; of examples: the cards of a machine",
    ),
    Variable("ASCEND_RT_VISIBLE_DEVICES", "the same for Ascend; both must be equal"),
    Variable("WORLD_SIZE", "machines of an example; ep_size = WORLD_SIZE x visible cards"),
    Variable("RANK", "number of this machine among them, from 0"),
    Variable("SWEEP_OUT", "folder of examples/sweep's results"),
    Variable("SWEEP_SCALE", "divides all its lengths, for small models", "int"),
    Variable("SWEEP_MODEL", "what it measures, as --model_name of examples/benchmark.py"),
    Variable("SWEEP_OPTIONS", "more options of it"),
    Variable("HF_HOME", "where examples look for models that Hugging Face has downloaded"),
    Variable("HF_HUB_CACHE", "the same, for its cache alone"),
    Variable("UCX_NET_DEVICES", "set to lo in ranks whose wire.host is loopback"),
    Variable(
        "GLOO_SOCKET_IFNAME",
        "set in ranks that share experts to the network interface of wire.host, unless it is set",
    ),
    Variable("NCCL_SOCKET_IFNAME", "the same"),
    Variable("UCX_TLS", "UCX's transports; a list must have tcp, see `tandem doctor`"),
    Variable("PYTORCH_CUDA_ALLOC_CONF", "torch's allocator; see `tandem doctor` for a trap"),
    Variable(
        "DEEPINFER_HF_MODEL_DIR",
        "folder of the checkpoint",
        sets={"": {"model.path": None, "model.weights": "checkpoint"}},
    ),
    Variable(
        "DEEPINFER_ACCELERATOR",
        "what ranks compute on; cpu: they hold no GPUs either",
        kind="choice",
        choices=("auto", "cpu", "nvidia", "ascend"),
        sets={
            "": dict.fromkeys(_ACCELERATORS),
            "cpu": dict.fromkeys(_ACCELERATORS) | {"prefill.gpus": 0.0, "decode.gpus": 0.0},
        },
    ),
    Variable(
        "DEEPINFER_EXPERT_REARRANGEMENT_STEP_INTERVAL",
        "steps of a group between two decisions about its experts; 0: none is made",
        kind="int",
        sets={"": {"experts.window_steps": None}, "0": {"experts.disable_eplb": True}},
    ),
    Variable(
        "DEEPINFER_SHOW_EPLB_DETAIL",
        "log a table of the layers at each such decision",
        kind="bool",
        sets={"": {"experts.show_detail": None}},
    ),
    Variable(
        "DEEPINFER_OVERRIDE_NUM_EXTRA_EXPERTS",
        "redundant experts a layer in groups that share experts, rounded up until all divide",
        kind="int",
        sets={"": dict.fromkeys(("prefill.extra_experts", "decode.extra_experts"))},
    ),
    *_unused(
        "int",
        "EXPERT_COUNT_WINDOW_SIZE REARRANGE_P2P_GROUPS MOE_LB_STAT_INTERVAL",
        "the [experts] section has its own: windows, report_s",
    ),
    *_unused(
        "bool", "REARRANGE_AFTER_PREFILL_IN_NORMAL_ENGINE", "each pool is balanced for its own load"
    ),
    Variable(
        "DEEPINFER_FORCE_LOAD_BALANCE",
        "experts get as many rows each; served routing is the model's own",
        kind="bool",
        benchmark=True,
    ),
    Variable(
        "DEEPINFER_FORCE_IMBALANCE_RATIO",
        "the first rank's experts get so many times the average; examples/expert_drift.py serves "
        "uneven load",
        kind="float",
        benchmark=True,
    ),
    Variable(
        "DEEPINFER_USE_NEXTN_DECODE",
        "draft tokens of a request and step; the serving loop does not speculate yet",
        kind="int",
        benchmark=True,
    ),
    *_unused(
        "int",
        "MAX_BACKTRACKING_TOKENS DECODE_PERF_CACHE_TTL_SEC DFLASH_CUDAGRAPH_BATCH_SIZE_INTERVAL",
        _SPECULATION,
    ),
    *_unused("bool", "ENABLE_MTP_VARLEN DFLASH_ENFORCE_EAGER", _SPECULATION),
    *_unused("str", "DECODE_PERF_CACHE_DIR DFLASH_CONFIDENCE_HEAD_TEMPERATURE", _SPECULATION),
    Variable(
        "DEEPINFER_YOCO_PREFILL_TRUNCATION_MODE",
        "what becomes of a prompt's rows before the last ones, behind the last KV source",
        kind="choice",
        choices=("off", "mask", "compact"),
        sets={"": {"model.truncation": None}},
    ),
    Variable(
        "DEEPINFER_YOCO_PREFILL_KEEP_TOKENS",
        "how many last ones go on; 0, DeepInfer's default: as set",
        kind="int",
        sets={"": {"model.keep_tokens": None}, "0": {}},
    ),
    *_unused("int", "PREFILL_STORE_EXTRA_SIZE", _TRUNCATION),
    *_unused("bool", "PREFILL_STORE_EXTRA_STATE", _TRUNCATION),
    Variable(
        "DEEPINFER_ENFORCE_EAGER",
        "no CUDA graphs: decode steps are launched one by one",
        kind="bool",
        sets={"True": dict.fromkeys(_GRAPHS, "off")},
    ),
    Variable(
        "DEEPINFER_CUDAGRAPH_BATCH_SIZE_INTERVAL",
        "rows of graphs: 1, 2, 4 ... below it, then its multiples, then max_rows",
        kind="int",
        sets={"": dict.fromkeys(_GRAPH_INTERVALS)},
    ),
    Variable(
        "DEEPINFER_ZERO_OVERHEAD_SCHEDULING",
        "the next decode step is begun before the tokens of this one are known",
        kind="bool",
        sets={"False": dict.fromkeys(_RUN_AHEAD, False), "": dict.fromkeys(_RUN_AHEAD, True)},
    ),
    *_unused(
        "bool",
        "ENGRAM_FORCE_GPU_STORAGE BATCH_INVARIANT DISABLE_SYNC_GUARD "
        "PROFILE_TORCH_CUDA_MEMORY ENABLE_MEMORY_TRACING",
        _GPU,
    ),
    *_unused(
        "int",
        "NCCL_NUM_SMS USERBUFFER_COMM_SMS "
        "INDEX_ATTN_MEMORY_LIMIT NCCL_MEMORY_SAMPLE_INTERVAL_STEPS",
        _GPU,
    ),
    *_unused("str", "JIT_CACHE_DIR", _GPU),
    *_unused(
        "int",
        "PREFILL_MAX_SUM_SEQLEN_K PREFILL_ATTEMPT_INTERVAL PREFILL_ANY_ATTEMPT_INTERVAL "
        "GC_INTERVAL_STEP",
        _SCHEDULING,
    ),
    *_unused("float", "NUM_STATE_SLOTS_RATIO", _SCHEDULING),
    *_unused("bool", "XGRAMMAR_DEBUG XGRAMMAR_DISABLE_CACHE", _GRAMMAR),
    *_unused("int", "XGRAMMAR_TIMEOUT XGRAMMAR_CACHE_LIMIT_BYTES SO_BUILDER_CPUS", _GRAMMAR),
    *_unused("bool", "USE_MULTIMODAL_POOL", _IMAGES),
    *_unused(
        "int",
        "MULTIMODAL_POOL_SIZE_GB MULTI_MODAL_BUFFER_SIZE MULTI_MODAL_WORKER_TIMEOUT",
        _IMAGES,
    ),
    *_unused(
        "int",
        "LOGGING_INTERVAL_STEP RINGBUFFER_WARNING_INTERVAL PROFILE_HTTP_PORT_BASE",
        _LOGS,
    ),
    *_unused("bool", "PROFILE_HTTP_ENABLE", _LOGS),
    *_unused("str", "CPP_LOG_LEVEL TORCH_PROFILER_DIR", _LOGS),
    *_unused(
        "bool",
        "COMPUTE_SUM_SMALLER_PROBS FUSED_SAMPLE_STRESS_TEST FUSED_SAMPLE_DETAIL_LOG",
        _SAMPLING,
    ),
    *_unused("int", "SAMPLER_FORCE_TOPK", _SAMPLING),
    *_unused("str", "DECODE_TOKEN_BLACKLIST", _SAMPLING),
    *_unused("int", "ENGRAM_PAD_TOKEN", "config.json says it"),
    *_unused("int", "GLOO_TIMEOUT", "calls between ranks are bounded by life.stuck_after_s"),
)

BY_NAME: Mapping[str, Variable] = {variable.name: variable for variable in TABLE}
