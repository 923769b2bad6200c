"""One certification: the truth model in an engine with the user's flags, a load that is hard to survive, and every row."""

from __future__ import annotations

import contextlib
import math
import os
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotstream.capture import processes
from slotstream.certify import answers, load, sizes
from slotstream.certify.files import write_prompts
from slotstream.certify.flags import Flags
from slotstream.certify.kinds import Stood, kind_of
from slotstream.certify.load import Answer, EngineLost
from slotstream.certify.report import Gap, Report, Steps, gpu_names
from slotstream.certify.sizes import Sizes
from slotstream.client import Client, connect
from slotstream.demo.processes import ProcessFailed, Running, free_port, vllm_command
from slotstream.truth import model as truth_model
from slotstream.truth.compare import Truth
from slotstream.wire.errors import ConfigError
from slotstream.wire.layers import resolve_layers
from slotstream.wire.names import FINAL

_STARTS_MAX = 4  # Each with twice the blocks of the one before.
_SAY_EVERY_S = 30.0
_REFUSED = "slotstream cannot start: "
# What a user's environment says of the user's own servers.
_NOT_OURS = (
    *("SLOTSTREAM_TOKEN", "SLOTSTREAM_TOKEN_FILE", "VLLM_API_KEY"),
    *("SLOTSTREAM_TLS_CA", "SLOTSTREAM_TLS_CERT", "SLOTSTREAM_TLS_KEY"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How to run. `work`: a folder for all that is made. `say`: told in words what goes on."""

    work: Path
    requests: int
    seed: int
    up_s: float
    say: Callable[[str], None]
    steps: Steps


def certify(flags: Flags, config: Mapping[str, Any], setting: Setting) -> Report:
    """`config`: the user's model's. Raises ConfigError, ProcessFailed, EngineLost, and what the client raises."""
    for name in _NOT_OURS:
        os.environ.pop(name, None)
    stood, gpu = kind_of(config), bool(gpu_names())
    truth = Truth(stood.kind, stood.layers)
    layer_ids = layers_of(flags, truth)
    report = Report(flags.model, stood.kind, stood.layers, [truth.name_of(layer_id) for layer_id in layer_ids])
    report.gaps = gaps_of(flags, config, stood)
    planned = prepare(flags, stood, gpu=gpu)
    report.gaps += backend_gaps(flags)
    asked = flags.connector().get("transport")
    setting.say(f"making a {stood.kind} model of {stood.layers} layers whose rows spell their token")
    model = _make(setting.work / "model", flags, stood, planned)
    with processes.server(setting.work / "data", setting.work / "server.log") as address:
        flags.connect_to(address, str(setting.work / "spool"))
        with _engine(flags, model, setting) as (port, running, report.command), connect(address) as client:
            sent = _send(port, running, planned, report, setting)
            write_prompts(setting.work, truth, {a.request.name: a.request.prompt for a in sent if a.request.capture})
            # While the engine runs: it may send the last rows after the text has ended.
            with setting.steps("comparing rows", len(sent)) as told:
                answers.check(client, sent, layer_ids, truth, report.findings, told)
            report.gaps.append(_transport(client, port, asked))
    report.overrides = flags.overrides
    if not report.findings.output_rows:
        report.gaps.append(Gap("output rows", "none was captured", needed=True))
    return report


def layers_of(flags: Flags, truth: Truth) -> list[int]:
    """The ids of the layers that the flags ask for, as they are stored. Raises ConfigError."""
    asked = flags.connector().get("layers")
    if asked is None:
        extracted = flags.extracted()
        if extracted is None:
            raise ConfigError('name the layers to capture: add "layers" to kv_connector_extra_config')
        return sorted(set(extracted))
    names = resolve_layers(asked, truth.layers)
    return [truth.final_id if name == FINAL else int(name) for name in names]


def gaps_of(flags: Flags, config: Mapping[str, Any], stood: Stood) -> list[Gap]:
    """What of the user's engine no truth model can exercise."""
    found = [Gap("the model's own code", "the truth model is of the same kind, and not the same model")]
    if stood.close:
        found.append(Gap("its attention", stood.close))
    if stood.kind in ("mla", "gdn"):
        found.append(Gap("which layer a row is of", f"rows of the {stood.kind} truth model spell their token alone"))
    drafter = flags.drafter()
    if drafter is not None and not drafter[1]:
        found.append(Gap("speculative decoding", f"{drafter[0]} needs a drafter of the real model"))
    if flags.has("--quantization") or "quantization_config" in config:
        found.append(Gap("quantised weights", "the truth model's are bfloat16"))
    if flags.has("--enable-lora"):
        found.append(Gap("LoRA", "no adapter is loaded"))
    if flags.has("--enable-expert-parallel"):
        found.append(Gap("expert parallelism", "the truth model has no experts"))
    if any(key in config for key in ("vision_config", "audio_config")):
        found.append(Gap("images, video and audio", "the truth model takes text alone"))
    return found


def backend_gaps(flags: Flags) -> list[Gap]:
    """Which of the user's backends did not run, once the flags are prepared."""
    why = "ran with {}, for other kernels take no model of the truth model's sizes"
    of = ("--attention-config", "--additional-config")
    return [Gap("attention backend", why.format(one.ours)) for one in flags.overrides if one.flag in of and one.ours]


def transport_gap(asked: str | None, used: Collection[str], fallbacks: float) -> Gap:
    """`asked`: the connector's option. `used`: how the workers' last chunks came. `fallbacks`: of NIXL, to gRPC."""
    over = " and ".join(sorted(name for name in used if name)) or "an unknown transport"
    why = f"rows came over {over}, by a socket of this host: no network, TLS or token of yours"
    fell = asked == "nixl" and (set(used) != {"nixl"} or fallbacks > 0)
    return Gap("transport", f"nixl was asked for, and did not always work; {why}" if fell else why, needed=fell)


def _transport(client: Client, port: int, asked: str | None) -> Gap:
    server = client.status().server
    used = {one.transport for one in server.engines} if server is not None else set()
    try:
        fallbacks = load.counted(load.metrics(port), "slotstream_connector_nixl_fallbacks_total")
    except EngineLost:  # After its load, and with all rows compared: only this is not known.
        fallbacks = math.inf
    return transport_gap(asked, used, fallbacks)


def prepare(flags: Flags, stood: Stood, *, gpu: bool) -> Sizes:
    """Give the flags what the truth model needs."""
    flags.drop_what_is_of_the_real_model()
    planned = sizes.sizes_of(flags, stood.kind, gpu=gpu)
    sizes.apply(flags, planned, stood.kind, gpu=gpu)
    return planned


def _make(out: Path, flags: Flags, stood: Stood, planned: Sizes) -> Path:
    ranks = flags.number("--tensor-parallel-size") or 1
    positions = max(32768, planned.tokens_max)
    return truth_model.make(out, stood.kind, layers=stood.layers, heads=max(4, 2 * ranks), positions=positions)


@contextlib.contextmanager
def _engine(flags: Flags, model: Path, setting: Setting) -> Iterator[tuple[int, Running, list[str]]]:
    """The engine, up, with the blocks that it needs at least, and its command. Raises ProcessFailed."""
    for turn in range(_STARTS_MAX):
        log = setting.work / f"vllm{turn}.log"
        port = free_port()
        setting.say(f"starting vLLM, which writes to {log}")
        began = said = time.monotonic()

        def waiting(began: float = began) -> None:
            nonlocal said
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                setting.say(f"vLLM is still starting, for {said - began:.0f} s")

        command = [*vllm_command(model, port), *flags.words()]
        with contextlib.ExitStack() as stack:
            try:
                running = stack.enter_context(processes.vllm(command, port, log, setting.up_s, waiting))
            except ProcessFailed as error:
                written = log.read_text("utf-8", "replace")
                blocks = flags.number("--num-gpu-blocks-override")
                ours = any(one.flag == "--num-gpu-blocks-override" for one in flags.overrides)
                if blocks is None or not ours or turn + 1 == _STARTS_MAX or not sizes.without_room(written):
                    raise ProcessFailed(refused(written) or str(error)) from error
                setting.say(f"{blocks} blocks hold no longest request: again, with {2 * blocks}")
                flags.set("--num-gpu-blocks-override", str(2 * blocks), "the smallest cache that holds a longest request")
                continue
            yield port, running, command
            return


def refused(log: str) -> str:
    """The connector's own sentence on why vLLM does not start with it; "" where it wrote none. vLLM's own lines bury it."""
    lines = [line for line in log.splitlines() if _REFUSED in line]
    return _REFUSED + lines[0].partition(_REFUSED)[2] if lines else ""


def _send(port: int, running: Running, planned: Sizes, report: Report, setting: Setting) -> list[Answer]:
    """The load, and what happened while it ran. Raises ProcessFailed where the engine ends."""
    rng = random.Random(setting.seed)
    try:
        return _load(port, rng, planned, report, setting)
    except EngineLost as error:
        raise ProcessFailed(f"{error}; its log ends:\n{running.tail()}") from error


def _load(port: int, rng: random.Random, planned: Sizes, report: Report, setting: Setting) -> list[Answer]:
    sent: list[Answer] = []

    def send(what: str, requests: Sequence[load.Request], at_once: int) -> None:
        with setting.steps(what, len(requests)) as told:
            sent.extend(load.send(port, requests, at_once, told))

    before = load.metrics(port)
    mixed = load.mixed(rng, setting.requests, planned)
    setting.say(f"sending {len(mixed)} prompts of 1 to {planned.tokens_max} tokens")
    send("prompts of all lengths", mixed, load.AT_ONCE)
    setting.say("sending prompts that begin alike")
    for turn in load.alike(rng, planned):
        send("prompts that begin alike", turn, load.AT_ONCE)
    cache_tokens = _cache_tokens(before, planned)
    for number in range(load.ROUNDS):
        long = load.long_texts(rng, number, cache_tokens, planned)
        setting.say(f"sending {len(long)} requests of {long[0].max_tokens} tokens each, for a cache of {cache_tokens}")
        send("long texts", long, len(long))
        if _preempted(load.metrics(port)) > _preempted(before):
            break
    after = load.metrics(port)
    cut = sum(
        1
        for answer in sent
        if answer.request.capture and planned.step_tokens is not None and len(answer.request.prompt) > planned.step_tokens
    )
    hits = load.counted(after, "vllm:prefix_cache_hits_total") - load.counted(before, "vllm:prefix_cache_hits_total")
    preemptions = _preempted(after) - _preempted(before)
    report.load = {
        "requests": len(sent),
        "preemptions": round(preemptions),
        "prompts longer than a step": cut,
        "tokens of prefix hits": round(hits),
    }
    report.gaps += load_gaps(
        planned, preemptions, cut, hits, load.label(before, "vllm:cache_config_info", "enable_prefix_caching")
    )
    return sent


def load_gaps(planned: Sizes, preemptions: float, cut: int, hits: float, caching: str | None) -> list[Gap]:
    """What the load was to make happen, and did not."""
    found = []
    if not preemptions:
        why = "vLLM preempted nothing" + (": one request runs at a time" if planned.sequences == 1 else "")
        found.append(Gap("preemption", why, needed=True))
    if planned.step_tokens is None:
        found.append(Gap("chunked prompts", "with these flags a step holds the longest prompt"))
    elif not cut:
        found.append(Gap("chunked prompts", "no prompt was longer than a step", needed=True))
    if (caching or "").lower() == "false":
        found.append(Gap("shared prefixes", "prefix caching is off in this engine"))
    elif not hits:
        found.append(Gap("shared prefixes", "vLLM found none in its cache", needed=True))
    return found


def _preempted(page: str) -> float:
    return load.counted(page, "vllm:num_preemptions_total")


def _cache_tokens(page: str, planned: Sizes) -> int:
    """How many tokens the cache holds, at most, by vLLM's own facts."""
    try:
        blocks = int(load.label(page, "vllm:cache_config_info", "num_gpu_blocks") or "")
        block_size = int(load.label(page, "vllm:cache_config_info", "block_size") or "")
    except ValueError:
        return planned.tokens_max * 3
    return blocks * block_size
