"""The `gapless` command. Importing this package costs nothing: the command's modules load when it runs."""


def main() -> None:
    """Entry point of the `gapless` command."""
    from frontend.cli.app import run

    run()
