# SPDX-License-Identifier: Apache-2.0
"""Shapes from names, configs and modules, with exact parameter counts."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from lightning_3d.errors import ModelError
from lightning_3d.models import known_models, load_shape, shape_from_config, shape_of_module
from lightning_3d.models.catalogue import _FOLDER
from lightning_3d.models.parameters import active_parameters, total_parameters
from tests.models import decoder

PUBLISHED = {
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
    "gpt-oss-120b": 116_829_156_672,
    "gpt2": 124_439_808,
    "bloom": 176_247_271_424,
}
ONE_OF_EACH_FAMILY = [
    "bloom-560m", "command-r", "deepseek-v2-lite", "falcon-7b", "gemma-2-2b", "gemma-3-1b", "glm-4.5-air",
    "gpt-neox-20b", "gpt-oss-20b", "gpt2", "llama-3.2-1b", "llama-4-scout", "mistral-7b", "mixtral-8x7b", "mpt-7b",
    "nemotron-4-340b", "olmo-2-7b", "opt-1.3b", "phi-3-mini", "qwen2.5-0.5b", "qwen3-0.6b", "qwen3-30b-a3b",
    "smollm3-3b", "starcoder2-3b",
]  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    assert total_parameters(load_shape(name)) == PUBLISHED[name]


def test_active_parameters_of_experts():
    assert active_parameters(load_shape("mixtral-8x7b")) == 12_879_925_248
    assert active_parameters(load_shape("deepseek-v3")) / 1e9 == pytest.approx(37.55, abs=0.01)
    assert active_parameters(load_shape("llama-3-8b")) == total_parameters(load_shape("llama-3-8b"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ONE_OF_EACH_FAMILY)
def test_counts_are_those_of_the_hugging_face_module(name):
    transformers = pytest.importorskip("transformers")
    values = json.loads((_FOLDER / f"{name}.json").read_text())
    own = {"_hub", "model_type", "sliding_window_pattern"}
    kind = values["model_type"]
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in values.items() if k not in own})
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    count = sum(parameter.numel() for parameter in module.parameters())
    assert total_parameters(load_shape(name)) == count
    assert total_parameters(shape_from_config(config)) == count
    assert total_parameters(shape_of_module(module)) == count


def test_hub_names_are_found_whatever_the_variant():
    for name, stem in {
        "meta-llama/Meta-Llama-3-8B-Instruct": "llama-3-8b",
        "meta-llama/Llama-3.1-405B": "llama-3.1-405b",
        "mistralai/Mixtral-8x22B-Instruct-v0.1": "mixtral-8x22b",
        "google/gemma-3-27b-it": "gemma-3-27b",
        "mistralai/Mistral-Small-24B-Base-2501": "mistral-small-24b",
    }.items():
        assert load_shape(name).name == stem


def test_config_file_and_folder(tmp_path):
    content = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(
        json.dumps({**content, "intermediate_size": 128, "vocab_size": 100})
    )
    assert load_shape(tmp_path) == load_shape(tmp_path / "config.json")
    assert load_shape(tmp_path).num_key_value_heads == 4


def test_text_model_of_a_multimodal_config_is_taken():
    text = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 9,
    }
    assert shape_from_config({"model_type": "llava", "text_config": text}).hidden_size == 64


def test_unknown_names_and_broken_configs_are_refused(tmp_path):
    with pytest.raises(ModelError, match=r"neither a file nor a known name.*llama-3-8b"):
        load_shape("llama-9-900b")
    with pytest.raises(ModelError, match="num_hidden_layers"):
        shape_from_config({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4})
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        load_shape(tmp_path)


def test_module_without_config():
    module = decoder()
    shape = shape_of_module(module)
    assert shape.num_layers == 4
    assert (shape.hidden_size, shape.num_attention_heads, shape.num_key_value_heads) == (32, 4, 2)
    assert (shape.vocab_size, shape.intermediate_size) == (64, 64)
    assert total_parameters(shape) == sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_a_feed_forward_as_wide_as_the_vocabulary_is_no_head(tied):
    shape = shape_of_module(decoder(tied=tied))
    assert shape.vocab_size == shape.intermediate_size
    assert shape.tied_embeddings == tied


def test_module_without_blocks_is_refused():
    with pytest.raises(ModelError, match="no ModuleList"):
        shape_of_module(nn.Linear(2, 2))


def test_every_known_model_reads():
    for name in known_models():
        assert total_parameters(load_shape(name)) > 0


def test_impossible_dimensions_are_refused():
    shape = load_shape("llama-3-8b")
    with pytest.raises(ModelError, match="does not divide"):
        replace(shape, num_attention_heads=33, head_dim=0)
    with pytest.raises(ModelError, match="experts_per_token"):
        replace(load_shape("mixtral-8x7b").experts, experts_per_token=9)
