"""A small CLIP of digits and their names: its two towers layer by layer, and zero-shot accuracy by vision layer.

Jiang, Zhou and Zhu 2024, appendix D. The data is scikit-learn's; training takes a minute on one core.

python examples/clip_digits.py
"""

from pathlib import Path

import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from transformers import CLIPConfig, CLIPModel

import tl_layersim as lsim
from tl_layersim.vision import tower_similarity, zero_shot

OUT = Path(__file__).parent / "out"
OUT.mkdir(exist_ok=True)

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ("a {} .", "the digit {} .", "a photo of the digit {} .", "someone wrote {} here .")
WORDS = ["<pad>", "<start>", *sorted({*NAMES, *" ".join(TEMPLATES).replace("{}", "").split()}), "<end>"]
END = len(WORDS) - 1


def tokens(text: str) -> torch.Tensor:
    return torch.tensor([1, *map(WORDS.index, text.split()), END])


def texts(labels: torch.Tensor, templates: torch.Tensor) -> dict[str, torch.Tensor]:
    rows = [tokens(TEMPLATES[t].format(NAMES[label])) for label, t in zip(labels.tolist(), templates.tolist(), strict=True)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def trained(images: torch.Tensor, labels: torch.Tensor, steps: int = 400) -> CLIPModel:
    torch.manual_seed(0)
    text = {"hidden_size": 48, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 4}
    text |= {"vocab_size": len(WORDS), "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": END, "pad_token_id": 0}
    vision = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 6}
    vision |= {"image_size": 8, "patch_size": 2, "num_channels": 1}
    clip = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=32))
    optimizer = torch.optim.AdamW(clip.parameters(), lr=1e-3, weight_decay=0.05)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        rows = torch.randint(len(labels), (128,))
        own = labels[rows]
        logits = clip(pixel_values=images[rows], **texts(own, torch.randint(4, (128,)))).logits_per_image
        # Every text of a digit matches every image of that digit.
        same = (own[:, None] == own).float()
        same = same / same.sum(1, keepdim=True)
        loss = (cross_entropy(logits, same) + cross_entropy(logits.T, same)) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rate.step()
    return clip.eval()


digits = load_digits()
images, labels = torch.tensor(digits.images).float()[:, None] / 8 - 1, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
held_out, seen = order[:360], order[360:]
clip = trained(images[seen], labels[seen])

pairs = {"pixel_values": images[held_out], **texts(labels[held_out], torch.full((360,), 2))}
towers = tower_similarity(clip, lsim.Data(pairs, batch_size=360))
prompts = {name: [tokens(template.format(name)) for template in TEMPLATES] for name in NAMES}
lens = zero_shot(clip, images[held_out], prompts=prompts, labels=labels[held_out])
lsim.Report({"towers": towers, "zero_shot": lens}).to_html(OUT / "clip_digits_report.html")

# The figure: both kinds of pairs, each layer with the last ones, and what each layer says.
titles = ("Image and its text", "Image and the text of another", "Cosine with the last text layer", "Zero-shot classes")
figure = make_subplots(rows=2, cols=2, subplot_titles=titles, horizontal_spacing=0.14, vertical_spacing=0.2)
ticks = ["embed", *range(6)]
for column, values in ((1, towers.values), (2, towers.mismatched)):
    figure.add_trace(go.Heatmap(z=values, zmin=-0.1, zmax=1, colorscale="Viridis", showscale=column == 2), row=1, col=column)
    figure.update_xaxes(title="After text block", tickvals=list(range(5)), ticktext=ticks[:5], row=1, col=column)
    figure.update_yaxes(
        title="After vision block", tickvals=list(range(7)), ticktext=ticks, autorange="reversed", row=1, col=column
    )
for number, name in ((1, "its text"), (2, "text of another")):
    figure.add_trace(go.Scatter(y=towers.vision_to_last[number], name=name), row=2, col=1)
figure.add_trace(go.Scatter(y=lens.accuracy, name="accuracy"), row=2, col=2)
figure.add_trace(go.Scatter(y=lens.agreement, name="agreement with the last layer"), row=2, col=2)
figure.update_xaxes(title="After vision block", tickvals=list(range(7)), ticktext=ticks, row=2, col=1)
figure.update_xaxes(title="After vision block", dtick=1, row=2, col=2)
figure.update_yaxes(title="Cosine similarity", row=2, col=1)
figure.update_yaxes(title="Fraction of images", range=[0, 1.02], row=2, col=2)
figure.update_layout(template="plotly_white", width=900, height=640, margin={"t": 40})
figure.update_layout(legend={"orientation": "h", "y": -0.14})
bar = {"len": 0.44, "y": 0.8, "title": {"text": "Cosine similarity", "side": "right"}}
figure.update_traces(colorbar=bar, selector={"type": "heatmap"})
figure.write_html(OUT / "clip_digits.html", config={"displayModeBar": False})

print(towers)
print(lens)
print(lens.to_frame("accuracy"))
