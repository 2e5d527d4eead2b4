"""Where do two fine-tunes of one model part? Identity stitching, layer by layer (as figure 2 of Brown et al. 2023).

python examples/stitch_fine_tunes.py

The demo model is tuned on the first and on the second half of the text that ships, some steps each. Then each one's lower
layers are put, as they are, under the other's upper layers: no adapter, nothing to train. Nothing is downloaded.
"""

from pathlib import Path

import torch

import tl_layersim as lsim

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

texts = lsim.demo_text()
half = len(texts) // 2
models = {"base": lsim.demo_model()}
for name, part in (("first", texts[: half - 4]), ("second", texts[half:-4])):
    torch.manual_seed(0)
    model = lsim.demo_model().train()
    ids = torch.cat([torch.tensor(model.tokenizer(text)["input_ids"]) for text in part])
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for _ in range(20):
        batch = rows[torch.randint(len(rows), (8,))]
        model(batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    models[name] = model.eval()

# Texts that neither saw.
unseen = texts[half - 4 : half] + texts[-4:]
grid = lsim.stitch_grid(models, lsim.Data(unseen, batch_size=2), adapter="identity")
table = grid.to_frame()
print(table[table.front != table.back].pivot(index="seam", columns=["front", "back"], values="penalty").round(3).to_string())
grid.plot().write_html(OUT / "stitch_fine_tunes.html")
grid.plot("accuracy_penalty").write_html(OUT / "stitch_fine_tunes_accuracy.html")

# One stitch, with an adapter in closed form; the stitched model runs, generates and can be measured.
found = lsim.stitch(models["first"], models["second"], lsim.Data(texts, batch_size=4), at=(3, 3), adapter="affine", fit="lstsq")
print(found)
print(found.model.generate("Once upon a time", max_new_tokens=20, do_sample=False))
print(lsim.analyze(found.model, unseen, ["logit_lens"])["logit_lens"].to_frame()[["layer", "cross_entropy", "agreement"]])
