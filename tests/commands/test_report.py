"""The command line, and the page that it writes, in a real browser where there is one."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import tl_layersim as lsim
from tl_layersim.commands.models_and_data import load_data

from ..models.tiny_models import tiny_llama, tiny_tokenizer
from ..reporting import html_pages
from .helpers import NUMBERS, run


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    done = subprocess.run(
        [sys.executable, "-c", "from tl_layersim.cli import main; main()", "report", "--out", str(out), "--max-tokens", "2048"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return out, done


@pytest.mark.heavy("a process of its own")
def test_with_no_argument_it_runs_on_the_demo(page):
    out, done = page
    assert "Report:" in done.stdout
    assert "2048 tokens in 8 rows (packed)" in done.stdout
    assert str(out / "report.html") in done.stdout
    # Quiet where no one watches: no progress bar, no warning.
    assert "\r" not in done.stderr
    report = lsim.load(out / "report.safetensors")
    assert list(report) == ["cosine", "cka"]
    assert report["cka"].provenance.model == "tl_layersim demo"
    assert report["cka"].provenance.tokens == 2048


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_merged_shards_are_the_report_of_one_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = ["--max-tokens", 1200, "--seq-len", 32, "--option", "cka.minibatch=64", "--option", "cosine.center=none"]
    for number in range(2):
        done = run("report", *options, "--shard", f"{number}/2")
        assert done.exit_code == 0, done.output
        assert f"part-{number}-of-2.safetensors" in done.output
    assert run("report", *options, *NUMBERS, "--out", "alone").exit_code == 0
    # As a shell expands a pattern: with the files of the options.
    done = run("merge", *sorted((tmp_path / "parts").glob("*")), "--out", "merged")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "merged" / "report.html").exists()
    assert run("report", "--config", "merged/run.yaml", *NUMBERS, "--out", "again").exit_code == 0
    merged, alone, again = (lsim.load(tmp_path / name / "report.safetensors") for name in ("merged", "alone", "again"))
    for other in (alone, again):
        assert torch.equal(merged["cka"].values, other["cka"].values)
        assert torch.equal(merged["cosine"].values, other["cosine"].values)
    assert "1 of 2" in str(run("merge", "parts/part-0*", "--out", "merged").exception)


@pytest.mark.light("3", "-1/4")
@pytest.mark.parametrize("shard", ["3", "a/4", "3/", "-1/4"])
def test_a_shard_is_two_numbers(shard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run("report", f"--shard={shard}")
    assert str(done.exception).startswith(f"`--shard` is {shard!r}")
    assert list(tmp_path.iterdir()) == []
    assert "`--save-to` is 'part'" in str(run("report", "--save-to", "part").exception)


@pytest.mark.heavy("seconds, where faster tests reach the same")
@pytest.mark.parametrize(("text", "count"), [("2:5", 24)])
def test_positions_reach_the_result_and_the_page(tmp_path, text, count):
    done = run("report", "--seq-len", 16, "--positions", text, "--out", tmp_path, "--max-tokens", count)
    assert done.exit_code == 0, done.output
    assert f"positions {text}" in done.output
    known = lsim.load(tmp_path / "report.safetensors")["cka"].provenance
    assert (known.tokens, known.options["positions"]) == (count, text)
    page = " ".join((tmp_path / "report.html").read_text().split())
    assert f"<code>{text}</code></td>" in page


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_intervals_reach_the_result_and_the_page(tmp_path):
    reading = ["--seq-len", 16, "--batch-size", 2, "--max-tokens", 512]
    done = run("report", "--intervals", "--analyzers", "cosine", *reading, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    assert " ± " in done.output
    found = lsim.load(tmp_path / "report.safetensors")["cosine"]
    assert len(found.block_tokens) == 16
    assert sum(found.block_tokens) == 512
    page = (tmp_path / "report.html").read_text()
    assert "from 16 contiguous blocks of the data" in page
    traces = [trace for figure in html_pages.figures(page) for trace in figure["data"]]
    # Whiskers at the median of each figure of quantiles, bands around curves.
    assert {trace["name"] for trace in traces if "array" in trace.get("error_y", {})} == {"median"}
    assert [trace for trace in traces if trace.get("fill") == "toself"]


def test_a_folder_of_weights_and_a_text_file(tmp_path):
    model = tiny_llama()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("w3 w4 w5 w6 w7\nw8 w9\n\n" * 30)
    out = tmp_path / "out"
    done = run(
        "report",
        "--model",
        tmp_path / "model",
        "--data",
        tmp_path / "text.txt",
        "--analyzers",
        "cka",
        "--out",
        out,
        "--seq-len",
        32,
        "--skip-first",
        1,
        "--dtype",
        "bfloat16",
        *NUMBERS,
    )
    assert done.exit_code == 0, done.output
    result = lsim.load(out / "report.safetensors")["cka"]
    assert result.provenance.options["pack"]
    assert result.provenance.dtype == "torch.bfloat16"
    assert result.values.shape == (4, 4)


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_prompts_are_not_packed(tmp_path):
    text = tmp_path / "t.txt"
    text.write_text("Once upon a time there was a dog.\n\nThe sun was red and the sky was blue.\n")
    done = run("report", "--data", text, "--analyzers", "block_coupling", *NUMBERS, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output
    assert "one text a row" in done.output
    done = run("report", "--data", text, "--analyzers", "block_coupling", "--pack", "--out", tmp_path / "out")
    assert "`--pack` is True" in str(done.exception)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "parquet"])
def test_a_table(kind, tmp_path):
    import pandas

    table = pandas.DataFrame({"story": lsim.demo_text()[:6], "label": range(6)})
    path = tmp_path / f"table.{kind}"
    if kind == "parquet":
        table.to_parquet(path)
    elif kind == "jsonl":
        table.to_json(path, orient="records", lines=True)
    else:
        table.to_csv(path, sep="\t" if kind == "tsv" else ",", index=False, quoting=3 if kind == "tsv" else 0)
    pandas.testing.assert_frame_equal(load_data(str(path), "test"), table)
    if kind == "csv":
        done = run("report", "--data", path, "--column", "story", "--analyzers", "cosine", *NUMBERS, "--out", tmp_path / "out")
        assert done.exit_code == 0, done.output
        found = lsim.load(tmp_path / "out" / "report.safetensors")["cosine"].provenance
        assert (found.sequences, found.options["pack"]) == (6, False)
        assert "in 6 rows (one text a row)" in done.output


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_a_saved_data_set(tmp_path):
    import datasets

    datasets.DatasetDict({"test": datasets.Dataset.from_dict({"story": lsim.demo_text()[:6]})}).save_to_disk(tmp_path / "set")
    done = run("report", "--data", tmp_path / "set", "--analyzers", "cosine", *NUMBERS, "--out", tmp_path / "out")
    assert done.exit_code == 0, done.output


def test_sites_are_chosen(tmp_path):
    options = ["--at", "attn_out, mlp_out", "--at", "blocks.*.hook_resid_post", "--analyzers", "cosine,contribution"]
    done = run("report", "--max-tokens", 512, "--out", tmp_path, *options)
    assert done.exit_code == 0, done.output
    assert ", at attn_out, mlp_out, blocks.*.hook_resid_post\n" in done.output
    report = lsim.load(tmp_path / "report.safetensors")
    assert report["cosine"].provenance.options["at"] == ["attn_out", "mlp_out", "blocks.*.hook_resid_post"]
    model = lsim.demo_model()
    expected = lsim.analyze(
        model, lsim.Data(lsim.demo_text(), max_tokens=512, pack=True), "cosine", at=["attn_out", "mlp_out"]
    )["cosine"]
    assert report["cosine"].layers[:16] == expected.layers
    assert torch.allclose(report["cosine"].values[:16, :16], expected.values)
    page = (tmp_path / "report.html").read_text()
    assert "Relations between sites of the model" in page
    assert page.count("24 sites: blocks.0.hook_attn_out to blocks.7.hook_attn_out, ") == 1
    assert page.count("25 sites: blocks.0.hook_resid_pre, blocks.0.hook_resid_post to blocks.7.hook_resid_post, ") == 1


@pytest.mark.heavy("seconds, where faster tests reach the same")
def test_heads_are_sites_of_their_own(tmp_path):
    options = ["--at", "z", "--per-head", "--analyzers", "cosine", "--option", "cosine.center=none"]
    done = run("report", "--max-tokens", 512, "--out", tmp_path, *options)
    assert done.exit_code == 0, done.output
    assert ", at z of each head\n" in done.output
    assert "Measured at 32 sites: blocks.0.attn.hook_z[0] to blocks.7.attn.hook_z[3]." in (tmp_path / "report.html").read_text()


def test_sites_are_listed_without_weights(tmp_path):
    demo = run("sites").stdout.splitlines()
    assert demo[0].split() == ["name", "family", "block", "module", "heads"]
    assert len(demo) == 1 + len(lsim.sites(lsim.demo_model()))
    model = tiny_llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "model")
    listed = run("sites", tmp_path / "model").stdout.splitlines()
    assert [line.split()[0] for line in listed[1:]] == list(lsim.sites(model).name)
    assert re.fullmatch(r"ln_final\.hook_normalized +ln_final +- +model\.norm \(output\) +0", listed[-1])
    refused = run("sites", tmp_path / "nothing")
    assert str(refused.exception).startswith("`--model`")


def test_refusals_are_printed_not_traced(tmp_path):
    for arguments, text in (
        (["--analyzers", "cosin"], "`--analyzers` names 'cosin'"),
        (["--data", "./nothing.txt"], "`--data` is ./nothing.txt, which is no file"),
        (["--model", tmp_path], "Error:"),
    ):
        done = run("report", *arguments, "--out", tmp_path)
        assert done.exit_code == 2
        assert text in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.heavy("a browser")
@html_pages.needs_chromium
def test_the_page_in_a_browser(page, tmp_path):
    found = html_pages.drawn(page[0] / "report.html", tmp_path / "profile")
    report = lsim.load(page[0] / "report.safetensors")
    pictures = [picture for result in report.values() for picture in result.pictures]
    drawn = found.split("<body>")[1]
    assert len(re.findall(r'<svg class="main-svg"[^>]*style="[^"]*"', drawn)) >= len(pictures)
    for picture in pictures:
        assert re.search(rf'class="gtitle"[^>]*>{re.escape(picture.title)}<', drawn), picture.title
    # Heatmaps are drawn as an image, lines as paths with points.
    assert drawn.count('class="heatmaplayer mlayer"') >= 2
    assert len(re.findall(r'<path class="point', drawn)) > 20
