"""Opens what `model` names: a GGUF file, a Hugging Face directory, or the shape of either with random weights."""

from __future__ import annotations

from pathlib import Path

import torch

from engine_core.errors import UserError
from engine_core.loader.checkpoint import Checkpoint
from engine_core.loader.dummy import DummyCheckpoint


def open_checkpoint(
    model: str, load_format: str = "auto", seed: int = 0, device: torch.device | None = None
) -> Checkpoint:
    """The checkpoint at the path `model`. Weights are read when the model takes them; random ones are made on `device`.

    Raises:
        UserError: there is none, it is damaged, or it is not supported.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        from engine_core.loader.hf_config import read_config
        from engine_core.loader.safetensors import SafetensorsCheckpoint

        return (
            DummyCheckpoint(read_config(path), seed, device) if load_format == "dummy" else SafetensorsCheckpoint(path)
        )
    if path.is_file():
        from engine_core.loader.gguf import GGUFCheckpoint

        checkpoint = GGUFCheckpoint(path)
        return DummyCheckpoint(checkpoint.config, seed, device) if load_format == "dummy" else checkpoint
    raise UserError(f"{path} does not exist; a model is a .gguf file or a directory with config.json and safetensors")
