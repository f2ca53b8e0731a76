"""Flag over environment over file over default; unknown keys and bad values are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from frontend.cli.errors import SettingsError
from frontend.cli.settings import OPTIONS, Settings, default_config_path, load
from ipc.config import EngineConfig, EngineOptions, FrontendProcessConfig, ServerOptions, TextOptions


def toml(folder: Path, text: str) -> str:
    path = folder / "settings.toml"
    path.write_text(text)
    return str(path)


def test_precedence(tmp_path: Path) -> None:
    path = toml(tmp_path, 'port = 1\nmax_num_seqs = 1\nhost = "file"\nthreads = 3\n')
    environ = {"GAPLESS_PORT": "2", "GAPLESS_MAX_NUM_SEQS": "2", "GAPLESS_CONFIG": path}
    settings = load({"port": "3", "host": None}, environ)
    assert settings.server.port == 3  # flag
    assert settings.engine.max_num_seqs == 2  # environment
    assert settings.server.host == "file"
    assert settings.engine.threads == 3
    assert settings.engine.block_size == EngineOptions().block_size  # default


def test_config_flag_wins_over_config_variable(tmp_path: Path) -> None:
    path = toml(tmp_path, "port = 5")
    assert load({"config": path}, {"GAPLESS_CONFIG": str(tmp_path / "missing")}).server.port == 5


def test_default_file_is_read_if_there_and_nothing_happens_if_not(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path)}
    assert load({}, environ) == Settings()
    path = default_config_path(environ)
    path.parent.mkdir()
    path.write_text('model = "m"')
    assert load({}, environ).program.model == "m"


def test_every_setting_can_be_given_in_all_three_ways(tmp_path: Path) -> None:
    samples = {"N": 1024, "X": 0.5, "TEXT": "text", "SIZE": "1.5GiB", "": True}
    for key, opt in OPTIONS.items():
        if key == "config":
            continue
        value = opt.expected.removeprefix("one of ").split(", ")[-1] if opt.metavar == "NAME" else samples[opt.metavar]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        path = toml(tmp_path, f"{key} = {toml_value(value)}")
        for settings in (
            load({key: text}, {"HOME": str(tmp_path)}),
            load({}, {"HOME": str(tmp_path), opt.env: text}),
            load({"config": path}, {}),
        ):
            assert getattr(getattr(settings, opt.part), key) == value, key


def toml_value(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


def test_every_field_of_the_public_structs_is_a_setting_and_no_key_is_used_twice() -> None:
    fields = [name for part in (EngineOptions, ServerOptions, TextOptions) for name in part.__struct_fields__]
    assert len(fields) == len(set(fields))
    assert set(fields) <= OPTIONS.keys()
    owners = [len(type(getattr(Settings(), part)).__struct_fields__) for part in Settings.__struct_fields__]
    assert sum(owners) == len(OPTIONS)
    assert OPTIONS.keys() >= set(EngineConfig.__struct_fields__)
    assert set(ServerOptions.__struct_fields__) < set(FrontendProcessConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [("GAPLESS_PROT", "GAPLESS_PORT"), ("GAPLESS_MAX_SEQS", "GAPLESS_MAX_NUM_SEQS"), ("GAPLESS_X", None)],
)
def test_unknown_variable(variable: str, nearest: str | None) -> None:
    with pytest.raises(SettingsError) as raised:
        load({}, {variable: "1"})
    assert variable in str(raised.value)
    assert (f"did you mean {nearest}?" in str(raised.value)) == (nearest is not None)


def test_unknown_key_in_a_file(tmp_path: Path) -> None:
    path = toml(tmp_path, "max_num_sequences = 3")
    with pytest.raises(SettingsError, match=r"max_num_sequences.*settings.toml; did you mean max_num_seqs?"):
        load({"config": path}, {})


@pytest.mark.parametrize(
    ("key", "value", "bound"),
    [
        ("port", "65536", "an integer between 0 and 65535"),
        ("port", "eighty", "an integer between 0 and 65535"),
        ("max_num_seqs", "0", "an integer between 1 and 2147483647"),
        ("gpu_memory_utilization", "nan", "a number above 0 and at most 1"),
        ("gpu_memory_utilization", "0", "a number above 0 and at most 1"),
        ("temperature", "-1", "a number between 0 and 100"),
        ("dtype", "fp8", "one of auto, bfloat16, float16, float32"),
        ("enable_prefix_caching", "perhaps", "true or false"),
    ],
)
def test_a_bad_value_is_named_with_its_bound_and_source(tmp_path: Path, key: str, value: str, bound: str) -> None:
    opt = OPTIONS[key]
    path = toml(tmp_path, f'{key} = "{value}"')
    for flags, environ, source in (
        ({key: value}, {}, opt.flags[0]),
        ({}, {opt.env: value}, opt.env),
        ({"config": path}, {}, path),
    ):
        with pytest.raises(SettingsError) as raised:
            load(flags, {"HOME": str(tmp_path), **environ})
        assert str(raised.value) == f"{key} must be {bound}, got {value!r} (from {source})"


def test_a_file_keeps_types_apart(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="port must be an integer"):
        load({"config": toml(tmp_path, "port = true")}, {})
    with pytest.raises(SettingsError, match="port must be an integer"):
        load({"config": toml(tmp_path, 'port = "8000"')}, {})


def test_a_file_that_is_missing_or_no_toml(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"cannot read the settings file .*missing.toml"):
        load({"config": str(tmp_path / "missing.toml")}, {})
    with pytest.raises(SettingsError, match="not valid TOML"):
        load({"config": toml(tmp_path, "port 1")}, {})
    with pytest.raises(SettingsError, match="unknown setting 'config'"):
        load({"config": toml(tmp_path, 'config = "other.toml"')}, {})
