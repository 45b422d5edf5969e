"""Where the program starts. Imports nothing heavy by itself: Ctrl-C while the rest is being imported is one line too."""

from __future__ import annotations

import sys


def main() -> None:
    """The console script, and `python -m benchctl`."""
    try:
        from benchctl.cli import main as command_line

        command_line()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
