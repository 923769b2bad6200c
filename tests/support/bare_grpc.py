"""Nothing but grpc.aio, which reads a message of each call: `python bare_grpc.py HOST:PORT`. It takes what gRPC takes."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
import grpc.aio

MESSAGE_BYTES_MAX = 17 << 20
METHOD = "/bare.Bare/Call"


async def _call(_: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.read()


async def main(address: str) -> None:
    """Serves until it is killed; says so on stdout once it does."""
    server = grpc.aio.server(options=(("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),))
    behaviour: Any = _call
    methods = {"Call": grpc.stream_stream_rpc_method_handler(behaviour)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bare.Bare", methods),))
    server.add_insecure_port(address)
    await server.start()
    print("serving", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
