"""Reads rows as speculators does online, where it is installed: `FOLDER ENDPOINT MODEL SERVER NAMESPACE OUT`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from slotstream.integrations.speculators.backend import SlotStreamBackend

if __name__ == "__main__":
    folder, endpoint, model, server, namespace, out = sys.argv[1:]
    from speculators.train.data import ArrowDataset

    parser = argparse.ArgumentParser()
    SlotStreamBackend.add_train_args(parser)
    chosen = parser.parse_args(["--slotstream-server", server, "--slotstream-namespace", namespace])
    transfer = SlotStreamBackend.from_train_args(chosen, folder)
    dataset = ArrowDataset(4096, folder, transfer=transfer, vllm_endpoint=endpoint, on_missing="generate", model=model)
    torch.save([dict(dataset[number]) for number in range(len(dataset))], Path(out))
