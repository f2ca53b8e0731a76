"""`python -m frontend.cli` is the `gapless` command."""

from frontend.cli import main

if __name__ == "__main__":
    main()
