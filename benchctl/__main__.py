"""`python -m benchctl`: the command line where the console script is not installed."""

from benchctl.cli import main

main()
