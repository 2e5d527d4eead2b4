"""The command line in this process, as every test of this folder runs it."""

from __future__ import annotations

from typer.testing import CliRunner

from tl_layersim import cli

# A few rows of the demo text.
SHORT = ("--max-tokens", 512, "--seq-len", 64)


def run(*arguments: object):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def done(*arguments: object):
    """A command that ends without an error."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result
