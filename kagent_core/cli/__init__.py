"""The command ``kagent``: what is installed, what it is told, and programs that run through it.

torch is imported by the commands that compute (``run``, ``demo``, ``bench``, ``tune``) or open a device (``kernels``),
and by no other.

Every `KagentError` that a command raises is printed as one message on stderr, and the exit code is 1.
``kagent --debug COMMAND`` shows its traceback instead.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kagent_core import __version__
from kagent_core.cli.bench import bench_app
from kagent_core.cli.check_kernel import check_kernel_command
from kagent_core.cli.config import show_config
from kagent_core.cli.conformance import conformance_command
from kagent_core.cli.demo import demo_command
from kagent_core.cli.devices import list_devices
from kagent_core.cli.kernels import list_kernels
from kagent_core.cli.new_plugin import new_plugin
from kagent_core.cli.output import print_error
from kagent_core.cli.plugins import list_plugins
from kagent_core.cli.run import run_command
from kagent_core.cli.tune import tune_command
from kagent_core.errors import KagentError

__all__ = ["app", "main"]

# Options after the script's name are the script's own.
_PASS_ON = {"allow_interspersed_args": False}


class _Group(TyperGroup):
    """Turns kagent's errors into messages."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KagentError as error:
            if ctx.params["debug"]:
                raise
            print_error(error)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="kagent",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # typer's panels show a flag as if it took a value: --debug <bool>
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"kagent {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run PyTorch programs on new devices, and with kernels of your own."""


app.command("devices")(list_devices)
app.command("plugins")(list_plugins)
app.command("kernels")(list_kernels)
app.command("check-kernel")(check_kernel_command)
app.command("config")(show_config)
app.command("conformance")(conformance_command)
app.command("run", context_settings=_PASS_ON)(run_command)
app.command("demo")(demo_command)
app.command("new-plugin")(new_plugin)
app.command("tune")(tune_command)
app.add_typer(bench_app, name="bench")


def main() -> None:
    """Run the command line; ends the process with the command's exit code."""
    # Not `app()`: that would put typer's hook into sys.excepthook, which belongs to the scripts that we run.
    typer.main.get_command(app).main(prog_name="kagent")
