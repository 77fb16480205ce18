"""The table of verbs, in the order and groups that `fuel --help` shows."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from fuel_core.cli.bench import bench
from fuel_core.cli.chat import chat
from fuel_core.cli.check import check
from fuel_core.cli.compile import compile_model
from fuel_core.cli.doctor import doctor
from fuel_core.cli.families import families
from fuel_core.cli.generate import generate
from fuel_core.cli.inspect import inspect
from fuel_core.cli.new_family import new_family

__all__ = ["app", "command"]

app = typer.Typer(
    name="fuel",
    help="Decode language models with held plans.",
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

RUN, LOOK, EXTEND = "Run", "Look", "Extend"

app.command(rich_help_panel=RUN)(generate)
app.command(rich_help_panel=RUN)(chat)
app.command(rich_help_panel=LOOK)(inspect)
app.command(rich_help_panel=LOOK)(bench)
app.command(name="compile", rich_help_panel=EXTEND)(compile_model)
app.command(rich_help_panel=LOOK)(doctor)
app.command(rich_help_panel=EXTEND)(families)
app.command(rich_help_panel=EXTEND)(check)
app.command(name="new-family", rich_help_panel=EXTEND)(new_family)


@app.callback(invoke_without_command=True)
def _fuel(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        import importlib_metadata

        print(f"fuel-core {importlib_metadata.version('fuel-core')}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        # Asked for nothing: the help is the answer, not an error.
        typer.echo(context.get_help())


def command() -> Any:
    """The parsed command tree."""
    return typer.main.get_command(app)
