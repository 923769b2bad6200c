"""`slotstream capture`: a file of prompts in, their samples out."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slotstream.cli.common import (
    CommandFailed,
    add_access_arguments,
    add_namespace_argument,
    note,
    progress_bar,
    shown,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from slotstream.capture.lines import Line
    from slotstream.capture.manifest import Manifest, Outcome
    from slotstream.capture.run import Run

_SHOWN_FAILURES = 10


def add_capture_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompts", metavar="FILE", type=Path, help="JSON lines, each with prompt, messages or token_ids")
    parser.add_argument(
        "--layers", metavar="LAYERS", required=True, help="layers to capture: 2,18,33,final, or eagle3, or draft:PATH"
    )
    parser.add_argument(
        "--to",
        metavar="DIR|ADDRESS",
        required=True,
        help="a folder, for which a server is started, or a server's address; of several with the same samples a:1,b:1",
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", metavar="MODEL", help="start vLLM with this model; its own flags stand behind --")
    source.add_argument("--url", metavar="URL[,URL]", help="engines that run, such as http://127.0.0.1:8000")
    parser.add_argument("--api-key-file", metavar="FILE", type=Path, help="file with the engines' API key (default: none)")
    add_namespace_argument(parser)
    parser.add_argument(
        "--max-tokens", metavar="N", type=int, default=1, help="of lines without their own (default: %(default)s)"
    )
    parser.add_argument("--output-rows", action="store_true", help="capture the output's rows too (default: the prompt's)")
    parser.add_argument(
        "--loss-mask",
        choices=("output", "assistant"),
        help="the tokens that count: the output's, or a chat's assistant turns (default: the line's own)",
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="for --loss-mask assistant: the tokenizer (default: that of the engine's model)"
    )
    parser.add_argument("--temperature", metavar="T", type=float, default=0.0, help="of the sampling (default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, help="of the sampling (default: the engine's)")
    parser.add_argument(
        "--shard", metavar="I/N", type=_shard, default=(1, 1), help="every Nth line, from the Ith (default: 1/1)"
    )
    parser.add_argument("-j", "--jobs", metavar="N", type=int, default=128, help="requests at a time (default: %(default)s)")
    parser.add_argument(
        "--manifest",
        metavar="FILE",
        type=Path,
        help="what became of each line (default: FILE.manifest.jsonl beside the prompts)",
    )
    add_access_arguments(parser)
    parser.epilog = """\
A second run sends only what is not stored. The exit code is 0 once every line is.

examples:
  slotstream capture prompts.jsonl --layers 2,18,33,final --to samples --model Qwen/Qwen3-8B -- --max-model-len 8192
  slotstream capture prompts.jsonl --layers eagle3 --to 127.0.0.1:50151 --url http://127.0.0.1:8000 --shard 1/4
"""


def run_capture(arguments: argparse.Namespace) -> int:
    # A plain SIGTERM would leave the server and the engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    from slotstream.capture.engine import EngineAway, EngineRefused
    from slotstream.capture.run import Misplaced
    from slotstream.demo.processes import ProcessFailed

    try:
        return _capture(arguments)
    except (Misplaced, EngineAway, EngineRefused, ProcessFailed) as error:
        raise CommandFailed(str(error)) from error


def _capture(arguments: argparse.Namespace) -> int:
    from slotstream.capture import processes
    from slotstream.capture.engine import Engine
    from slotstream.capture.lines import Job, read_lines, revision_of
    from slotstream.capture.manifest import Manifest
    from slotstream.capture.run import Run, Setting, layers_option
    from slotstream.client import connect
    from slotstream.wire.errors import ConfigError

    if arguments.jobs < 1 or arguments.max_tokens < 1:
        raise ConfigError("--jobs and --max-tokens are 1 or more")
    layers, option = layers_option(arguments.layers)
    address = _address(arguments.to)
    if arguments.url and (address is None or arguments.rest):
        raise ConfigError(
            "with --url, --to is the address of the server that the engines send to, and vLLM's flags are its own"
        )
    manifest = Manifest(arguments.manifest or _beside(arguments.prompts, arguments.shard))
    logs = manifest.path.parent
    with contextlib.ExitStack() as stack:
        if address is None:
            address = stack.enter_context(processes.server(Path(arguments.to), logs / f"{manifest.path.name}.server.log"))
        urls = arguments.url.split(",") if arguments.url else []
        if arguments.model:
            log = logs / f"{manifest.path.name}.vllm.log"
            note(f"starting vLLM; it writes to {log}")
            urls = [stack.enter_context(processes.engine(arguments.model, address, option, arguments.rest, log))]
        key = None if arguments.api_key_file is None else arguments.api_key_file.read_text().strip()
        engines = [Engine(url, key) for url in urls]
        roots = [engine.open() for engine in engines]
        model = arguments.model or roots[0]
        if len(set(roots)) > 1:
            raise ConfigError(f"the engines serve different models: {', '.join(sorted(set(roots)))}")
        job = Job(
            model,
            revision_of(model, _revision(arguments.rest)),
            layers,
            arguments.loss_mask,
            arguments.output_rows,
            arguments.max_tokens,
            arguments.temperature,
            arguments.seed,
        )
        client = stack.enter_context(
            connect(
                address,
                token_file=arguments.token_file,
                tls_ca=arguments.tls_ca,
                tls_cert=arguments.tls_cert,
                tls_key=arguments.tls_key,
            )
        )
        lines = list(read_lines(arguments.prompts, job, arguments.shard))
        setting = Setting(arguments.namespace, arguments.jobs, mask_of=_mask_of(arguments, model))
        return _carried_out(Run(client, engines, job, setting, manifest), lines, arguments.prompts, manifest)


def _carried_out(run: Run, lines: Sequence[Line], prompts: Path, manifest: Manifest) -> int:
    """The exit code. Where it ends too early to tell of every line, the manifest keeps what it had."""
    outcomes: dict[int, Outcome] = {}  # By line.
    try:
        try:
            with progress_bar() as bar:
                task = bar.add_task(str(prompts), total=len(lines))

                def told(outcome: Outcome) -> None:
                    outcomes[outcome.line] = outcome
                    bar.update(task, completed=len(outcomes))

                away = run.over(lines, told)
        finally:
            manifest.close(outcomes.values() if len(outcomes) == len(lines) else None)
    except (KeyboardInterrupt, SystemExit):
        _summary(prompts, manifest.path, outcomes.values(), InterruptedError("interrupted"))
        raise
    return _summary(prompts, manifest.path, outcomes.values(), away)


def _summary(prompts: Path, manifest: Path, outcomes: Collection[Outcome], away: Exception | None) -> int:
    states = Counter(outcome.state for outcome in outcomes)
    failures = [outcome for outcome in outcomes if outcome.state == "failed"]
    for outcome in failures[:_SHOWN_FAILURES]:
        note(f"slotstream capture: line {outcome.line}: {shown(outcome.message or '')} ({outcome.code})")
    if away is not None:
        note(f"slotstream capture: {shown(str(away))}; what is left is not stored: run the same command again")
    kinds = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"{prompts}: {kinds or 'no lines'}; {manifest}")
    return 0 if states.keys() <= {"stored"} else 1


def _address(to: str) -> str | None:
    """The server's address, or several with commas between; None where `to` is a folder."""
    from slotstream.wire.address import check_address, check_addresses
    from slotstream.wire.errors import ConfigError

    def is_address(text: str) -> bool:
        try:
            return bool(check_address(text.strip()))
        except ConfigError:
            return text.startswith("unix:")

    try:
        return ",".join(check_addresses(to))
    except ConfigError:
        # A folder's name may have commas too; beside an address it is a mistake in a list.
        if any(map(is_address, to.split(","))):
            raise
        return None


def _beside(prompts: Path, shard: tuple[int, int]) -> Path:
    part = "" if shard[1] == 1 else f".{shard[0]}-of-{shard[1]}"
    return prompts.with_name(f"{prompts.name}{part}.manifest.jsonl")


def _revision(options: list[str]) -> str | None:
    """What vLLM's own flags say of the model's revision."""
    for number, word in enumerate(options):
        if word == "--revision" and number + 1 < len(options):
            return options[number + 1]
        if word.startswith("--revision="):
            return word.partition("=")[2]
    return None


def _mask_of(arguments: argparse.Namespace, model: str) -> Any:
    if arguments.loss_mask != "assistant":
        return None
    from slotstream.capture.chats import mask_of

    return mask_of(arguments.tokenizer or model)


def _shard(text: str) -> tuple[int, int]:
    part, slash, parts = text.partition("/")
    if not slash or not part.isdecimal() or not parts.isdecimal() or not 1 <= int(part) <= int(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 1/4, 2/4, 3/4, 4/4")
    return int(part), int(parts)
