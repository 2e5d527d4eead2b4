"""A training of adapters that is cut goes on with the same bits."""

from __future__ import annotations

import pytest

from tl_layersim.core.errors import LayersimError
from tl_layersim.core.resumable_file import ResumableFile
from tl_layersim.remote.adapter_training import RemoteDescent

from .helpers import Stop, cut_after, equal, traced, train

# Random tokens have nothing in common.
pytestmark = pytest.mark.filterwarnings("ignore:On held-out data the aligned loss rose")


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("killed", [False, True])
def test_a_cut_training_goes_on_with_the_same_bits(count, killed, tmp_path, monkeypatch):
    path, calm = tmp_path / "run.ckpt", train(traced())
    with monkeypatch.context() as patch:
        if killed:
            # As it stands on disk when the power goes: what is saved on the way out is not there.
            patch.setattr(ResumableFile, "due", True)
            plain, dead = ResumableFile.write, []
            patch.setattr(ResumableFile, "write", lambda self, *a: bool(dead) or plain(self, *a))
            cut_after(count, patch, lambda: dead.append(1))
        else:
            cut_after(count, patch)
        with pytest.raises(Stop) as caught:
            train(traced(), checkpoint=path)
    assert path.exists() == (count > 0)
    assert bool(getattr(caught.value, "__notes__", [])) == (count > 0)
    made, plain = [], RemoteDescent.item
    monkeypatch.setattr(RemoteDescent, "item", lambda self, *a: made.append(a[-2]) or plain(self, *a))
    resumed = train(traced(), checkpoint=path)
    assert equal(resumed, calm)
    assert set(made) - {0} == set(range(count + 1, 5))
    assert equal(train(traced(), checkpoint=path), calm)
    with pytest.raises(LayersimError, match="another"):
        train(traced(), checkpoint=path, lr=0.1)
