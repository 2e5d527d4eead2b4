"""Early exit the naive way: all of the text through the model each time."""

from __future__ import annotations

import torch

from ..models.tiny_models import VOCABULARY, random_tokens, tiny_llama

HEAD = 6.0
# Thresholds at which tokens of the models below leave at several depths; a test asserts that they do.
RULES = {
    "max-prob": {"threshold": 0.5},
    "margin": {"threshold": 0.3},
    "patience": {"threshold": 2},
    "cosine": {"threshold": 0.8},
}


def deep(seed: int = 0):
    """A Llama of six blocks whose layers are sure of some tokens and not of others."""
    model = tiny_llama(6, seed=seed)
    with torch.no_grad():
        model.lm_head.weight.mul_(HEAD)
    return model


def layers_of(model):
    """Per layer what enters and what leaves each block, by hooks of the test's own, and the lens."""
    llama = hasattr(model, "model")
    blocks = model.model.layers if llama else model.transformer.h
    norm = model.model.norm if llama else model.transformer.ln_f

    def stream_of(**inputs):
        stream = []
        handles = [b.register_forward_pre_hook(lambda _m, a: stream.append(a[0])) for b in blocks]
        handles += [blocks[-1].register_forward_hook(lambda _m, _a, o: stream.append(o))]
        with torch.no_grad():
            model(**inputs, use_cache=False)
        for handle in handles:
            handle.remove()
        return stream

    return stream_of, lambda h: model.lm_head(norm(h)).detach()


def naive_exit(states, lens, at, rule, threshold, shortlist=None, heads=()):
    """(logits, exit) of one position, from its residuals at all layers; `heads` are functions of the residual, by layer.

    Checks are made after the blocks `at`, numbers from 0; the exit is a number of blocks that have run.
    """
    streak = 0
    last = None
    for layer in (block + 1 for block in at):
        logits = heads[layer - 1](states[layer]) if heads else lens(states[layer])
        asked = logits if shortlist is None else logits[shortlist]
        p = asked.double().softmax(-1).sort(descending=True).values
        if rule == "patience":
            best = int(asked.argmax())
            streak = streak + 1 if best == last else 1
            last = best
            sure = streak >= threshold
        elif rule == "max-prob":
            sure = p[0] > threshold
        elif rule == "margin":
            sure = p[0] - p[1] > threshold
        else:
            a = states[layer].double()
            b = states[layer - 1].double()
            sure = a @ b / (a.norm() * b.norm()) > threshold
        if sure:
            return logits, layer
    return lens(states[-1]), len(states) - 1


def naive_generate(model, row, new, at, rule, threshold, shortlist=None, eos=None, heads=()):
    stream_of, lens = layers_of(model)
    row = row.tolist()
    tokens = []
    exits = []
    for _ in range(new):
        states = [h[0, -1] for h in stream_of(input_ids=torch.tensor([row]))]
        logits, layer = naive_exit(states, lens, at, rule, threshold, shortlist, heads)
        tokens.append(int(logits.argmax()))
        exits.append(layer)
        row.append(tokens[-1])
        if tokens[-1] == eos:
            break
    return tokens, exits


def ragged(lengths, side="left", seed=0):
    """Rows of these lengths in one tensor, with a mask."""
    width = max(lengths)
    tokens = torch.zeros(len(lengths), width, dtype=torch.int64)
    mask = torch.zeros(len(lengths), width, dtype=torch.int64)
    for i, length in enumerate(lengths):
        place = slice(width - length, width) if side == "left" else slice(0, length)
        tokens[i, place] = random_tokens(1, length, seed + i)[0]
        mask[i, place] = 1
    return tokens, mask


def classifier(name):
    """(model, what it reads, mask)."""
    import transformers

    torch.manual_seed(0)
    small = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    text, mask = ragged([9, 5, 7, 9, 3, 8, 9, 4], "right")
    if name == "vit":
        config = transformers.ViTConfig(**small, image_size=16, patch_size=8, num_labels=3)
        model = transformers.ViTForImageClassification(config)
        inputs = torch.randn(8, 3, 16, 16)
        mask = None
    elif name == "llama":
        config = transformers.LlamaConfig(**small, vocab_size=VOCABULARY, num_labels=3, pad_token_id=0)
        model = transformers.LlamaForSequenceClassification(config)
        inputs = text
    else:
        config = transformers.BertConfig(**small, vocab_size=VOCABULARY, num_labels=3)
        cls = transformers.BertForMaskedLM if name == "masked" else transformers.BertForSequenceClassification
        model = cls(config)
        inputs = text
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model.eval(), inputs, mask
