"""config.json and generation_config.json to a `ModelConfig`. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine_core.errors import UserError
from engine_core.models.config import ModelConfig, check_architecture, from_hf, token_ids


def read_config(directory: Path) -> ModelConfig:
    """The model's config with the EOS ids of config.json and generation_config.json together."""
    config = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    eos = token_ids(read_json(generation).get("eos_token_id")) if generation.exists() else frozenset[int]()
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1:
        check_architecture(str(names[0]))  # before anything else of an unknown model is looked at
    return from_hf(config, eos)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises `UserError`."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise UserError(f"{path} is missing") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} does not hold a JSON object")
    return value
