"""Values by prompt: equal to those of each row alone, for any batches, and correlated over prompts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tl_layersim as lsim
from tl_layersim.analyzers._samples import COUNTED_ROWS, row_counts_kernel, sums_by_row

from ..inputs.views import residuals, view
from ..models.tiny_models import random_tokens, tiny_llama

LENGTHS = (7, 3, 12, 5, 9)
BOTH = (lsim.Trajectory(per_prompt=True), lsim.BlockCoupling(k=4, per_prompt=True))


def rows() -> list[torch.Tensor]:
    return [random_tokens(1, n, seed=n)[0] for n in LENGTHS]


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize("batch_size", [2, 5])
def test_values_are_those_of_each_row_alone(batch_size):
    model = tiny_llama()
    report = lsim.analyze(model, lsim.Data(rows(), batch_size=batch_size), BOTH)
    path = report["trajectory"]
    coupling = report["block_coupling"]

    assert path.prompt_rows == coupling.prompt_rows == (0, 1, 2, 3, 4)
    assert path.prompt_tokens.tolist() == coupling.prompt_tokens.tolist() == list(LENGTHS)
    for number, row in enumerate(rows()):
        alone = lsim.analyze(model, [row], [lsim.Trajectory(), lsim.BlockCoupling(k=4)])
        of = alone["trajectory"]
        for name in ("lss", "expodistance", "equidistance"):
            np.testing.assert_allclose(getattr(path, f"prompt_{name}")[number], getattr(of, f"{name}_mean"), rtol=1e-4)
        np.testing.assert_allclose(path.prompt_norm[number], of.norm, rtol=1e-5)
        np.testing.assert_allclose(coupling.prompt_coupling[number], alone["block_coupling"].mean(), rtol=1e-4, atol=1e-5)
    assert coupling.prompt_coupling.unique().numel() == 5


def test_prompts_can_be_correlated():
    report = lsim.analyze(tiny_llama(), rows(), BOTH)
    lss = report["trajectory"].by_prompt()
    coupling = report["block_coupling"].by_prompt()

    assert list(lss) == ["row 0", "row 1", "row 2", "row 3", "row 4"]

    fit = lsim.many.relate(coupling, lss)
    expected = np.corrcoef(list(coupling.values()), list(lss.values()))[0, 1] ** 2
    np.testing.assert_allclose(fit.r_squared, expected)

    table = report["trajectory"].to_frame("prompt_lss")
    assert list(table.columns) == ["prompt_row", "prompt_lss"]
    assert report["block_coupling"].plot("prompt_coupling").data

    path = report["trajectory"]
    assert list(path.by_prompt("equidistance").values()) == path.prompt_equidistance.tolist()
    assert path.to_frame("prompt_norm").shape == (5 * 4, 3)
    assert path.plot("prompt_norm").data


def test_rows_without_counted_tokens_are_left_out():
    result = lsim.analyze(tiny_llama(), lsim.Data(rows(), skip_first=4), lsim.Trajectory(per_prompt=True))["trajectory"]
    assert result.prompt_rows == (0, 2, 3, 4)
    assert result.prompt_tokens.tolist() == [3, 8, 1, 5]
    assert list(result.by_prompt()) == ["row 0", "row 2", "row 3", "row 4"]


def test_rows_without_a_value_are_not_a_number():
    model = tiny_llama()
    tokens = rows()
    tokens[1] = torch.full((3,), 5)
    with torch.no_grad():
        # Token 5 has an embedding of zero, which no block changes: its steps have no direction.
        model.model.embed_tokens.weight[5] = 0

    with pytest.warns(lsim.LayersimWarning, match=r"is zero.*: 3 of 36\b"):
        result = lsim.analyze(model, tokens, lsim.Trajectory(per_prompt=True))["trajectory"]

    assert result.prompt_lss.isnan().tolist() == [False, True, False, False, False]
    assert result.prompt_tokens[1] == 3
    assert list(result.by_prompt()) == ["row 0", "row 2", "row 3", "row 4"]


def test_tokens_of_one_prompt_are_averaged():
    model = tiny_llama()
    tokens = rows()[2:]

    result = lsim.analyze(model, tokens, lsim.BlockCoupling(k=4, tokens=(0, -1), per_prompt=True))["block_coupling"]
    prompts = [
        lsim.analyze(model, tokens, lsim.BlockCoupling(k=4, tokens=(p,), per_prompt=True))["block_coupling"] for p in (0, -1)
    ]
    mean = (prompts[0].prompt_coupling + prompts[1].prompt_coupling) / 2

    torch.testing.assert_close(result.prompt_coupling, mean, rtol=1e-4, atol=1e-5)
    assert result.prompt_tokens.tolist() == [12, 5, 9]


def test_other_fields_do_not_change():
    plain = lsim.analyze(tiny_llama(), rows(), [lsim.Trajectory(), lsim.BlockCoupling(k=4)])
    report = lsim.analyze(tiny_llama(), rows(), BOTH)
    for name, result in plain.items():
        assert result.prompt_rows == ()
        for field in result.tensor_fields():
            if not field.startswith("prompt_"):
                assert torch.equal(getattr(result, field).nan_to_num(-1), getattr(report[name], field).nan_to_num(-1)), field
        with pytest.raises(lsim.LayersimError, match="per_prompt=True"):
            result.by_prompt()


def test_packed_rows_are_refused():
    data = {"text": ["a b c", "d e"]}
    with pytest.raises(lsim.LayersimError, match="`pack`"):
        lsim.analyze(lsim.demo_model(), lsim.Data(data, pack=True), lsim.Trajectory(per_prompt=True))
    lsim.analyze(lsim.demo_model(), lsim.Data(lsim.demo_text()[:2], pack=True), lsim.Trajectory())


def test_attached_models_do_not_know_rows():
    with pytest.raises(lsim.LayersimError, match=r"^Trajectory "):
        lsim.attach(tiny_llama(), lsim.Trajectory(per_prompt=True)).__enter__()


def test_more_rows_than_can_be_counted_are_refused():
    last = view(residuals(0, tokens=2), row=torch.tensor([0, COUNTED_ROWS - 1]))
    assert row_counts_kernel(last)["rows"].nonzero().flatten().tolist() == [0, COUNTED_ROWS - 1]
    with pytest.raises(lsim.LayersimError, match="`per_prompt`"):
        row_counts_kernel(view(residuals(0, tokens=2), row=torch.tensor([0, COUNTED_ROWS])))


def test_sums_by_row_are_in_float64():
    sums = sums_by_row(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([9, 2, 9]), torch.tensor([2, 5, 9]))
    assert sums.dtype == torch.float64
    assert sums.tolist() == [2, 0, 5]
