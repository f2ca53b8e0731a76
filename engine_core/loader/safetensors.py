"""Hugging Face directories: safetensors, one file or several with an index."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine_core.errors import UserError
from engine_core.loader.hf_config import read_config, read_json
from engine_core.loader.weights import Weight

EXPERT_WEIGHT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class _OpenFile(Protocol):
    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> Any: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsCheckpoint:
    """Weights of a directory, read tensor by tensor from memory-mapped files."""

    quantized = False

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = read_config(directory)
        self._files = _file_of_each_weight(directory)
        self._open: dict[str, _OpenFile] = {}
        self._taken: set[str] = set()

    def take(self, name: str, shape: tuple[int, ...]) -> Weight:
        if name not in self._files:
            expert = EXPERT_WEIGHT.fullmatch(name)
            if expert is not None and f"{expert[1]}.down_proj" in self._files:
                return self._take_expert(expert[1], int(expert[2]), expert[3], shape)
            raise UserError(f"{self.directory}: weight {name} is missing; the download may be incomplete")
        file = self._files[name]
        self._taken.add(name)
        try:
            tensor = self._reader(file).get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.directory / file} cannot be read ({error}); download it again") from error
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"{self.directory / file}: weight {name} has shape {list(tensor.shape)}, but config.json asks for "
                f"{list(shape)}"
            )
        return self._checked(tensor, name)

    def _take_expert(self, prefix: str, index: int, part: str, shape: tuple[int, ...]) -> torch.Tensor:
        """One expert's matrix out of the stacks [experts, 2 * intermediate, hidden] of gate above up and [experts,
        hidden, intermediate] of down, as transformers keeps them in memory and may save them."""
        assert self.config.moe is not None
        name = f"{prefix}.down_proj" if part == "down" else f"{prefix}.gate_up_proj"
        rows = shape[0] if part == "down" else 2 * shape[0]
        first = shape[0] if part == "up" else 0
        if name not in self._files:
            raise UserError(f"{self.directory}: weight {name} is missing; the download may be incomplete")
        file = self._files[name]
        self._taken.add(name)
        try:
            stack = self._reader(file).get_slice(name)
            stored, expected = list(stack.get_shape()), [self.config.moe.num_experts, rows, *shape[1:]]
            if stored != expected:
                raise UserError(
                    f"{self.directory / file}: weight {name} has shape {stored}, but config.json asks for {expected}"
                )
            return self._checked(stack[index, first : first + shape[0]], name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{self.directory / file} cannot be read ({error}); download it again") from error

    def _checked(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            path = self.directory / self._files[name]
            raise UserError(f"{path}: weight {name} is of type {tensor.dtype}, which is not supported")
        return tensor

    def optional(self, name: str, shape: tuple[int, ...]) -> Weight | None:
        return self.take(name, shape) if name in self._files else None

    def unused(self) -> list[str]:
        # A tied head may be stored all the same; the frequencies of RoPE are computed.
        ignored = {"lm_head.weight"} if self.config.tie_embeddings else set()
        names = set(self._files) - self._taken - ignored
        return sorted(name for name in names if not name.endswith("rotary_emb.inv_freq"))

    def _reader(self, file: str) -> _OpenFile:
        if file not in self._open:
            self._open[file] = _open_file(self.directory / file)
        return self._open[file]


def _file_of_each_weight(directory: Path) -> dict[str, str]:
    index = directory / INDEX
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UserError(f'{index} has no "weight_map"; download it again')
        files = {str(name): str(file) for name, file in weight_map.items()}
        for file in sorted(set(files.values())):
            if Path(file).name != file:
                raise UserError(f"{index} names a file outside its directory: {file}")
            if not (directory / file).exists():
                raise UserError(f"{directory / file} is missing, though {INDEX} names it; download it again")
        return files
    if not (directory / SINGLE).exists():
        others = any(directory.glob("*.bin")) or any(directory.glob("*.pth"))
        hint = "; weights in pickle files (.bin, .pth) are not loaded, convert them to safetensors" if others else ""
        raise UserError(f"{directory} has neither {SINGLE} nor {INDEX}{hint}")
    return dict.fromkeys(_open_file(directory / SINGLE).keys(), SINGLE)


def _open_file(path: Path) -> _OpenFile:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path} is damaged or incomplete ({error}); download it again") from error
