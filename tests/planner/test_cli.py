# SPDX-License-Identifier: Apache-2.0
"""The commands, as a user types them."""

import json
from dataclasses import replace

import pytest

from lightning_3d.cli import main
from lightning_3d.errors import PlanError
from lightning_3d.hardware import load_cluster
from lightning_3d.models import load_shape
from lightning_3d.serving import cache_bytes_of_request, cache_bytes_per_token, plan_serving

PLAN = ["plan", "--model", "llama-3-8b", "--cluster", "8xH100", "--seq", "8192", "--global-batch", "64"]
TINY = {
    "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256,
}  # fmt: skip


def test_plan_prints_layouts_memory_traffic_and_reasons(capsys):
    assert main(PLAN) == 0
    text = capsys.readouterr().out
    for words in (
        "llama-3-8b, 8.0B parameters",
        "tok/s/GPU",
        "Memory of a rank",
        "Traffic of a rank",
        "Chosen:",
        "Not ",
    ):
        assert words in text


def test_plan_of_a_config_file_shows_memory_by_category(tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY))
    assert (
        main(
            [
                "plan",
                "--model",
                str(path),
                "--cluster",
                "4xL4",
                "--seq",
                "128",
                "--global-batch",
                "16",
                "--json",
            ]
        )
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    stage = report["layouts"][0]["memory_bytes"][0]
    assert {"parameters", "gradients", "optimizer", "activations", "device"} <= set(stage)
    assert report["parameters"] == 4 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128 + 128) + 2 * 256 * 64 + 64


def test_json_html_and_yaml(tmp_path, capsys):
    page, config = tmp_path / "plan.html", tmp_path / "plan.yaml"
    assert main([*PLAN, "--json", "--html", str(page), "--yaml", str(config)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["layouts"][0]["fits"]
    assert report["layouts"][0]["time"]["mfu"] > 0.2
    html = page.read_text()
    assert html.count("<svg") == 3
    assert "stage 0" in html
    assert "http" not in html.replace("http://www.w3.org", "")
    assert 'class_path: "lightning_3d.ThreeDStrategy"' in config.read_text()


def test_explain_judges_a_layout(capsys):
    assert (
        main(["explain", "--model", "llama-3-8b", "--cluster", "2x8xH100", "--tp", "16", "--seq", "8192"])
        == 0
    )
    text = capsys.readouterr().out
    assert "below the best layout" in text
    assert "leaves the island of 8" in text


def test_explain_says_that_it_does_not_fit(capsys):
    assert main(["explain", "--model", "llama-3-70b", "--cluster", "8xL4", "--tp", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--model", "llama-9", "--cluster", "8xH100"], "neither a file nor a known name"),
        (["plan", "--model", "llama-3-8b", "--cluster", "8xZ80"], "is unknown"),
        (["plan", "--model", "llama-3-8b", "--cluster", "8xH100", "--tp", "3"], "no legal layout"),
        (["plan", "--model", "llama-3-8b", "--cluster", "8xH100", "--pp", "64"], "no legal layout"),
        (["plan", "--model", "llama-3-8b", "--cluster", "8xH100", "--precision", "int3"], "precision='int3'"),
        (["plan", "--model", "llama-3-8b", "--cluster", "8xH100", "--states", "huge"], "--states 'huge'"),
        (["explain", "--model", "llama-3-8b", "--cluster", "8xH100", "--tp", "3"], "ranks"),
        (["explain", "--model", "qwen2.5-7b", "--cluster", "8xH100", "--tp", "8"], "tp=8 does not divide"),
        (["explain", "--model", "qwen2.5-0.5b", "--cluster", "8xH100", "--tp", "7"], "ranks"),
        (["explain", "--model", "llama-3-8b", "--cluster", "64xH100", "--pp", "64"], "64 pipeline stages"),
        (["explain", "--model", "llama-3-8b", "--cluster", "8xH100", "--global-batch", "9"], "do not divide"),
        (
            ["plan", "--serve", "--model", "llama-3-70b", "--cluster", "1xT4", "--context", "8192"],
            "do not fit",
        ),
    ],
)
def test_bad_arguments_are_one_line(arguments, words, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_lists(capsys):
    assert main(["models"]) == 0
    assert "llama-3.1-405b" in capsys.readouterr().out
    assert main(["gpus"]) == 0
    assert "H100-SXM" in capsys.readouterr().out


def test_serve_prints_the_arguments_of_vllm(capsys):
    assert (
        main(["plan", "--serve", "--model", "llama-3.1-70b", "--cluster", "8xH100", "--context", "8192"]) == 0
    )
    text = capsys.readouterr().out
    assert "vllm serve <model> --tensor-parallel-size 8 --max-model-len 8192" in text


@pytest.mark.parametrize(
    ("name", "kib"),
    [("llama-3-8b", 128), ("llama-3-70b", 320), ("llama-3.1-405b", 504), ("deepseek-v3", 68.625)],
)
def test_cache_bytes_per_token(name, kib):
    assert cache_bytes_per_token(load_shape(name)) / 1024 == pytest.approx(kib)


def test_windows_bound_the_cache():
    shape = replace(load_shape("gemma-3-27b"), max_seq_len=None)
    assert cache_bytes_of_request(shape, 65536) < 0.3 * 65536 * cache_bytes_per_token(shape)


def test_quantization_before_a_hop():
    advice = plan_serving(load_shape("llama-3.1-405b"), load_cluster("2x8xH100"), context=8192)
    assert advice.chosen.pp == 1
    assert advice.chosen.quantization == "fp8"
    assert any("bf16 would need pp=2" in reason for reason in advice.reasons)


def test_serving_refuses_what_cannot_be():
    with pytest.raises(PlanError, match="max_seq_len"):
        plan_serving(load_shape("llama-3-8b"), load_cluster("8xH100"), context=100_000)
    with pytest.raises(PlanError, match="do not fit"):
        plan_serving(load_shape("llama-3.1-405b"), load_cluster("2xL4"), context=8192)


def test_explain_knows_the_levers_of_a_plan(capsys):
    layout = "explain --model llama-3-8b --cluster 8xH100 --seq 2048 --global-batch 64".split()
    assert main([*layout, "--recompute", "0.5", "--offload", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "recompute=0.5 offload=parameters" in text
    assert " host " in text
    for lever, value in (("--recompute", "most"), ("--offload", "disk")):
        assert main([*layout, lever, value]) == 2
        assert f"{value!r} is unknown" in capsys.readouterr().err
