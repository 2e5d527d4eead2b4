"""The command line in this process, as every test of this folder runs it."""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

from tl_layersim import cli

# No page: drawing its figures takes longer than most runs.
NUMBERS = ("--format", "")
# A few rows of the demo text.
FEW = ("--max-tokens", 512, "--seq-len", 64)
SHORT = (*FEW, *NUMBERS)


@dataclass
class Ended:
    """A command that ended."""

    exit_code: int
    stdout: str
    stderr: str
    exception: BaseException | None

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def run(*arguments: object) -> Ended:
    code, error, out, err = 0, None, io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            cli.main([str(argument) for argument in arguments])
        except SystemExit as ended:
            code, error = int(ended.code or 0), ended.__context__
        except Exception as bug:
            code, error = 1, bug
    return Ended(code, out.getvalue(), err.getvalue(), error)


def done(*arguments: object) -> Ended:
    """A command that ends without an error."""
    result = run(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result
