"""`difference`: how two runs differ, with an interval and a p-value for every field of every result."""

from __future__ import annotations

from typing import Any, TypeVar, overload

from ..core.argument_checks import typed
from ..core.errors import LayersimError, warn
from ..core.intervals import refuse_no_blocks
from ..core.result_differences import same_blocks
from ..core.results import Report, Result
from ..core.wording import with_article
from .difference_results import Difference, ReportDifference, shown_labels
from .relative_depth import sites_along

R = TypeVar("R", bound=Result)

# Options in which the runs of two models differ without a choice of the user.
OF_MODEL_OR_DATA = (
    "tokenizer",
    "processor",
    "main_input",
    "layers",
    "unembed",
    "remote",
    "verify",
    "own_bos",
    "masked_by_pad_id",
    "cut_texts",
)


@overload
def difference(first: Report, second: Report, *, relative_depth: bool = False) -> ReportDifference: ...
@overload
def difference(first: R, second: R, *, relative_depth: bool = False) -> Difference: ...
@typed
def difference(
    first: Report | Result, second: Report | Result, *, relative_depth: bool = False
) -> Difference | ReportDifference:
    """How two runs differ: second minus first, with an interval and a p-value for every field.

    Runs on the same data in the same blocks are paired, which the digest of the data and the tokens of each block tell: the
    difference is computed again without each block (delete-one-block jackknife, Student's t with one degree of freedom fewer
    than blocks). Other runs are taken for independent: their squared errors add up, with the degrees of freedom of Welch and
    Satterthwaite.

    Args:
        first: a report or a result of a run with `intervals=True`.
        second: the same of another run. Analyzers of only one of two reports are left out, with a warning.
        relative_depth: compare models with other layers at relative depths, where the first site has depth 0 and the last one
            depth 1. Sites count as evenly spaced. The model with more sites is interpolated linearly at the depths of the other
            one. Without it, results of other sites are refused. On the diagonal of a similarity matrix, interpolated values
            are below 1 between two sites, so that differences there mean nothing.

    Returns:
        `Difference` of two results; `ReportDifference`, a mapping from analyzers to differences, of two reports.

    Raises:
        LayersimError: the results are of different classes or sites, or a run kept no blocks.

    Source:
        Wolter 2007, Introduction to Variance Estimation, chapter 4; Welch 1947.

    Examples:
        >>> import tl_layersim as lsim
        >>> model, texts = lsim.demo_model(), lsim.demo_text()[:16]
        >>> read = [lsim.Data(texts, batch_size=1, skip_first=n) for n in (0, 8)]
        >>> runs = [lsim.analyze(model, data, [lsim.LogitLens()], intervals=True) for data in read]
        >>> import warnings; warnings.simplefilter("ignore")  # says that the runs differ in skip_first
        >>> found = lsim.difference(*runs)
        >>> found["logit_lens"].paired, list(found["logit_lens"].to_frame("accuracy").columns[-3:])
        (False, ['high', 'p_value', 'p_adjusted'])
    """
    if isinstance(first, Report) and isinstance(second, Report):
        return _of_reports(first, second, relative_depth)
    found = _of_results(first, second, relative_depth)
    _warn_of_options([_other_options(found.first, found.second)])
    return found


def _of_reports(first: Report, second: Report, relative_depth: bool) -> ReportDifference:
    alone = [name for report, other in ((first, second), (second, first)) for name in report if name not in other]
    names = [name for name in first if name in second]
    if not names:
        raise LayersimError(
            f"`first` and `second` have no analyzer in common: {', '.join(first) or 'none'}; {', '.join(second) or 'none'}."
        )
    if alone:
        warn(f"Only one of the two reports has {', '.join(map(repr, alone))}, left out of the difference.")
    # An analyzer that is not defined without one of the blocks has no intervals, which its run said.
    known = [name for name in names if first[name].has_intervals and second[name].has_intervals]
    if known and len(known) < len(names):
        without = ", ".join(repr(name) for name in names if name not in known)
        warn(f"Results without intervals are left out of the difference: {without}.")
    _warn_of_options([_other_options(first[name], second[name]) for name in known])
    return ReportDifference({name: _of_results(first[name], second[name], relative_depth) for name in known or names})


def _of_results(first: Report | Result, second: Report | Result, relative_depth: bool) -> Difference:
    if isinstance(first, Report) or isinstance(second, Report) or type(first) is not type(second):
        raise LayersimError(
            f"`first` is {with_article(type(first).__name__)}, and `second` {with_article(type(second).__name__)}; they must "
            "be two reports, or two results of one class."
        )
    for result in (first, second):
        refuse_no_blocks(result)
    if not relative_depth:
        _refuse_other_sites(first, second)
    paired = same_blocks(first, second)
    records = first.provenance, second.provenance
    if not paired and len({(record.data, record.tokens) for record in records}) == 1:
        warn(
            "Both runs used the same data, but in other blocks, so the difference is not paired and its interval wider than it "
            f"needs to be. Blocks: {len(first.block_tokens)} and {len(second.block_tokens)}. Pass the same batch_size= to both."
        )
    return Difference(first, second, paired, relative_depth)


def _refuse_other_sites(first: Result, second: Result) -> None:
    for axis in ("row", "column"):
        one, other = sites_along(first, axis), sites_along(second, axis)
        if one != other:
            raise LayersimError(
                f"`first` and `second` were measured at different sites ({first.provenance.model}: {shown_labels(one)}; "
                f"{second.provenance.model}: {shown_labels(other)}). Pass relative_depth=True, or `at` in both runs."
            )


def _other_options(first: Result, second: Result) -> dict[str, tuple[Any, Any]]:
    """The options in which two runs differ, except those that follow from the model or the data."""
    one, other = first.provenance.options, second.provenance.options
    names = [name for name in {**one, **other} if name not in OF_MODEL_OR_DATA]
    return {name: (one.get(name), other.get(name)) for name in names if one.get(name) != other.get(name)}


def _warn_of_options(each: list[dict[str, tuple[Any, Any]]]) -> None:
    other = {name: values for own in each for name, values in own.items()}
    if other:
        words = ", ".join(f"{name} ({a!r} and {b!r})" for name, (a, b) in other.items())
        warn(f"The two runs differ in their options, which is part of the difference: {words}.")
