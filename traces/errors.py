"""The one error type for a user's mistake: what, where, how to mend. Printed on a few lines, never as a traceback."""

from __future__ import annotations


class BenchctlError(Exception):
    """A fault that the user can mend.

    `what` is one line with the numbers that decided it, `where` the file, line and key, `fix` what to do.
    `exit_code`: 2 for usage and bad input (the default), 1 for a run that broke.
    """

    def __init__(self, what: str, *, where: str | None = None, fix: str | None = None, exit_code: int = 2) -> None:
        super().__init__(what)
        # Both may quote a file: an id may hold line ends, or escapes that steer the terminal.
        self.what = printable(what)
        self.where = None if where is None else printable(where)
        self.fix = fix
        self.exit_code = exit_code

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines.append(f"  in {self.where}")
        if self.fix:
            lines.append(f"  try: {self.fix}")
        return "\n".join(lines)


def printable(text: str) -> str:
    """One line that a terminal only prints: line ends, escapes and other characters that steer it are spelled out."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
