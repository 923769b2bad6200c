"""What speculators asks of a backend for hidden states. Importing this registers it, under the name "slotstream"."""

from __future__ import annotations

import argparse
import os
from typing import Any

from hs_connectors import HiddenStatesBackend

from slotstream.client.client import SERVER_VARIABLE
from slotstream.integrations.speculators.transfer import SlotStreamTransfer
from slotstream.wire.errors import ConfigError
from slotstream.wire.names import DEFAULT_ADDRESS, DEFAULT_NAMESPACE, check_namespace

NAME = "slotstream"
_EAGLE3 = "eagle3"
_WAIT_S = 120.0  # Defaults stand in the help as numbers: speculators' parser takes them out of the arguments.


@HiddenStatesBackend.register(NAME)
class SlotStreamBackend(HiddenStatesBackend):  # type: ignore[misc]
    """Rows from a slotstream server, cached and online. The token and certificates come from the environment."""

    @staticmethod
    def add_train_args(parser: argparse.ArgumentParser) -> None:
        _add_server(parser)
        parser.add_argument(
            "--slotstream-layers",
            default=None,
            help="layers beside the last one, in the draft's order, such as 2,18,33 (default: all that a sample has)",
        )
        parser.add_argument(
            "--slotstream-wait-s", type=float, default=_WAIT_S, help=f"how long to wait for a sample (default: {_WAIT_S:g})"
        )

    @staticmethod
    def add_launch_args(parser: argparse.ArgumentParser) -> None:
        _add_server(parser)
        parser.add_argument(
            "--slotstream-layers",
            default=_EAGLE3,
            help="layers to capture: 2,18,33,36 with the model's last, or eagle3 (default: eagle3)",
        )

    @staticmethod
    def from_train_args(args: argparse.Namespace, data_path: str) -> SlotStreamTransfer:
        layers = None if args.slotstream_layers is None else _numbers(args.slotstream_layers)
        return SlotStreamTransfer(
            args.slotstream_server, data_path, check_namespace(args.slotstream_namespace), layers, args.slotstream_wait_s
        )

    @staticmethod
    def build_kv_transfer_config(args: argparse.Namespace) -> dict[str, Any]:
        layers = args.slotstream_layers
        return {
            "kv_connector": "SlotStreamConnector",
            "kv_connector_module_path": "slotstream.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "server": args.slotstream_server or os.environ.get(SERVER_VARIABLE) or DEFAULT_ADDRESS,
                "layers": layers if layers == _EAGLE3 else list(_numbers(layers)),
                "namespace": check_namespace(args.slotstream_namespace),
                "response_handle": True,
            },
        }


def _add_server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--slotstream-server", default=None, help=f"the server (default: $SLOTSTREAM_SERVER, else {DEFAULT_ADDRESS})"
    )
    parser.add_argument(
        "--slotstream-namespace",
        default=DEFAULT_NAMESPACE,
        help=f"of samples without a manifest, and of those that the engine captures (default: {DEFAULT_NAMESPACE})",
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in str(text).split(","))
    except ValueError:
        raise ConfigError(f"layers {text!r} are not like 2,18,33") from None
