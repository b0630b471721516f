"""What all commands say on standard error, and how: results alone go to standard output."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

console = Console(stderr=True)


@contextmanager
def clear_errors() -> Iterator[None]:
    """One line for what the user can mend; a traceback only for what is our fault."""
    try:
        yield
    except ValueError as error:
        # Escaped: rollout-spec[tasks] in a mend is no markup.
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
        raise typer.Exit(2) from None
