"""Models with a vision and a text tower, and the towers alone, under `analyze` and `attach`."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

import tl_layersim as lsim
from tl_layersim.sources.tower import end_of_text

from ..models.clip_models import clip_of, pairs
from ..running.options import called

VISION = [f"vision_model.encoder.layers.{number}" for number in range(4)]
TEXT = [f"text_model.encoder.layers.{number}" for number in range(3)]
COSINE = lsim.Cosine(center="none")
DATA = pairs()


def attached(model, layers, **options):
    with torch.no_grad(), called(lsim.attach, model, COSINE, layers=layers, **options) as probe:
        model(**DATA)
    return probe.results()["cosine"]


def states(tower: str) -> torch.Tensor:
    """`layer row pos width`, as transformers returns them."""
    model = clip_of()
    with torch.no_grad():
        if tower == "vision":
            output = model.vision_model(DATA["pixel_values"], output_hidden_states=True)
        else:
            output = model.text_model(DATA["input_ids"], DATA["attention_mask"], output_hidden_states=True)
    return torch.stack(output.hidden_states)


def cosines(samples: torch.Tensor) -> torch.Tensor:
    unit = torch.nn.functional.normalize(samples, dim=-1)
    return torch.einsum("and,bnd->ab", unit, unit) / unit.shape[1]


@pytest.mark.parametrize(
    "run", [lambda m: lsim.analyze(m, DATA, COSINE), lambda m: attached(m, None)], ids=["analyze", "attach"]
)
def test_a_model_of_two_towers_is_not_read_as_one(run):
    with pytest.raises(lsim.LayersimError, match=r"CLIPModel(.|\n)*model\.vision_model"):
        run(clip_of())


def test_layers_of_both_towers_are_refused():
    with pytest.raises(lsim.LayersimError, match=r"`layers`.*CLIPModel"):
        attached(clip_of(), [*VISION, *TEXT])
    with pytest.raises(lsim.LayersimError, match=r"`layers`.*CLIPModel"):
        lsim.analyze(lsim.open_model(clip_of(), layers=[*TEXT, *VISION]), DATA, COSINE)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_one_tower_is_read_where_its_blocks_are_named():
    images = states("vision")
    names = ("vision.blocks.0.hook_resid_pre", *(f"vision.blocks.{number}.hook_resid_post" for number in range(4)))
    for result in (
        attached(clip_of(), VISION),
        lsim.analyze(lsim.open_model(clip_of(), layers=VISION), DATA, COSINE)["cosine"],
    ):
        assert result.layers == names
        torch.testing.assert_close(result.values, cosines(images.flatten(1, 2)))
    assert set(names) < set(lsim.sites(clip_of()).name)

    first = attached(clip_of(), VISION, positions="first")
    torch.testing.assert_close(first.values, cosines(images[:, :, 0]))

    texts = states("text")[:, DATA["attention_mask"].bool()]
    for result in (attached(clip_of(), TEXT), lsim.analyze(lsim.open_model(clip_of(), layers=TEXT), DATA, COSINE)["cosine"]):
        torch.testing.assert_close(result.values, cosines(texts))
        assert result.layers[-1] == "text.blocks.2.hook_resid_post"

    later = attached(clip_of(), VISION[1:3])
    assert later.layers[0] == "vision.blocks.1.hook_resid_pre"
    assert attached(clip_of(), [VISION[0], VISION[2]]).layers[-1] == "vision.blocks.2.hook_resid_post"
    assert attached(clip_of(), VISION, at="attn_out").layers[0] == "vision.blocks.0.hook_attn_out"


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_tower_with_its_projection_and_a_tower_alone_are_models(tower):
    whole = clip_of()
    cls = hf.CLIPVisionModelWithProjection if tower == "vision" else hf.CLIPTextModelWithProjection
    projecting = cls(getattr(whole.config, f"{tower}_config")).double().eval()
    tower_model = getattr(whole, f"{tower}_model")
    getattr(projecting, f"{tower}_model").load_state_dict(tower_model.state_dict())
    names = ("pixel_values",) if tower == "vision" else ("input_ids", "attention_mask")
    data = {name: DATA[name] for name in names}
    rows = states(tower)
    expected = cosines(rows.flatten(1, 2) if tower == "vision" else rows[:, DATA["attention_mask"].bool()])
    for model in (tower_model, projecting):
        torch.testing.assert_close(lsim.analyze(model, data, COSINE)["cosine"].values, expected)
        with torch.no_grad(), lsim.attach(model, COSINE) as probe:
            model(**data)
        torch.testing.assert_close(probe.results()["cosine"].values, expected)


def test_a_text_tower_reads_texts_with_their_end():
    from ..models.clip_processor import processor, small_clip

    clip_processor = processor()
    model = small_clip(clip_processor)
    model.text_model.tokenizer = clip_processor.tokenizer
    texts = ["a cat.", "a dog here."]
    inputs = clip_processor.tokenizer(texts, return_tensors="pt", padding=True)
    by_text = lsim.analyze(model.text_model, lsim.Data(texts, positions="last"), COSINE)["cosine"]
    by_ids = lsim.analyze(model.text_model, lsim.Data(dict(inputs), positions="last"), COSINE)["cosine"]
    torch.testing.assert_close(by_text.values, by_ids.values)
    ends = int(clip_processor.tokenizer.eos_token_id)
    counted = lsim.analyze(model.text_model, lsim.Data(texts, positions=lambda ids: ids == ends), COSINE)["cosine"]
    assert counted.provenance.tokens == 2


def test_the_end_of_a_text_is_its_first_end_token_or_its_highest_id():
    row = torch.tensor([1, 5, 9, 9, 12])
    assert int(end_of_text(row, eos=9)) == 2
    assert int(end_of_text(row, eos=None)) == 4
    with pytest.raises(lsim.LayersimError, match=r"`data` has .* 50"):
        end_of_text(row, eos=50)
