"""`python -m frontend.cli.reference > docs/settings.md`: every setting, from the one place that defines them."""

from __future__ import annotations

from frontend.cli.params import GROUP_ORDER, shown_default
from frontend.cli.settings import OPTIONS, Option

HEAD = """# Settings

Written by `make docs` from the definitions in `ipc/config.py` and `frontend/cli/settings.py`; do not edit.

Each setting is a flag, an environment variable and a key of a TOML file. The flag wins over the environment, the
environment over the file, the file over the default. The file is `$XDG_CONFIG_HOME/gapless/config.toml`
(`~/.config/gapless/config.toml`), or the one that `--config` or `GAPLESS_CONFIG` names:

```toml
# ~/.config/gapless/config.toml
model = "smollm2"
port = 8080
max_num_seqs = 16
```

A key or a `GAPLESS_` variable that is not listed here is an error that names the nearest one; so is a value outside
its bounds. The settings under Answer are those of `gapless run` and `gapless chat`, those under Explain of `gapless
explain`.
"""


def render() -> str:
    """The page as Markdown."""
    parts = [HEAD]
    for group in GROUP_ORDER:
        parts.append(
            f"\n## {group}\n\n| flag | environment | TOML key | value | default | |\n|---|---|---|---|---|---|\n"
        )
        parts += [_row(opt) for opt in OPTIONS.values() if opt.group == group]
    return "".join(parts)


def _row(opt: Option) -> str:
    flags = "MODEL, an argument" if opt.key == "model" else ", ".join(f"`{flag}`" for flag in opt.flags)
    key = "" if opt.key == "config" else f"`{opt.key}`"
    cells = [flags, f"`{opt.env}`", key, opt.expected, shown_default(opt), opt.help]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


if __name__ == "__main__":
    print(render(), end="")
