"""Model shapes and GPUs: published totals, config files, names."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catalog import (
    DTYPE_BITS,
    CatalogError,
    count_parameters,
    gpu_names,
    load_gpu,
    load_model,
    model_names,
    num_active_parameters,
    num_parameters,
    peak_flops,
)
from catalog.lookup import normalize, read_entries

# Totals that the publishers give: the parameter count of the model's safetensors on Hugging Face,
# or the paper's table. Multimodal Gemma 3: embedding + non-embedding of the report's table 1,
# without the vision tower; Llama 4 Scout's 108.6 B include one.
PUBLISHED = {
    "llama-2-7b": 6.738e9,
    "llama-2-13b": 13.016e9,
    "llama-2-70b": 68.977e9,
    "llama-3-8b": 8.030e9,
    "llama-3-70b": 70.554e9,
    "llama-3.1-8b": 8.030e9,
    "llama-3.1-70b": 70.554e9,
    "llama-3.1-405b": 405.85e9,
    "llama-3.2-1b": 1.236e9,
    "llama-3.2-3b": 3.213e9,
    "llama-3.3-70b": 70.554e9,
    "llama-4-scout": 108.64e9,
    "codellama-34b": 33.744e9,
    "yi-34b": 34.389e9,
    "mistral-7b-v0.3": 7.248e9,
    "mistral-7b-v0.1": 7.242e9,
    "mistral-nemo": 12.248e9,
    "mixtral-8x7b": 46.703e9,
    "mixtral-8x22b": 140.63e9,
    "qwen2.5-0.5b": 0.494e9,
    "qwen2.5-1.5b": 1.544e9,
    "qwen2.5-3b": 3.086e9,
    "qwen2.5-7b": 7.616e9,
    "qwen2.5-14b": 14.770e9,
    "qwen2.5-32b": 32.764e9,
    "qwen2.5-72b": 72.706e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-1.7b": 1.721e9,
    "qwen3-4b": 4.022e9,
    "qwen3-8b": 8.191e9,
    "qwen3-14b": 14.768e9,
    "qwen3-32b": 32.762e9,
    "qwen3-30b-a3b": 30.532e9,
    "qwen3-235b-a22b": 235.09e9,
    "gemma-2-2b": 2.614e9,
    "gemma-2-9b": 9.242e9,
    "gemma-2-27b": 27.227e9,
    "gemma-3-1b": 1.000e9,
    "gemma-3-4b": 0.675e9 + 3.209e9,
    "gemma-3-12b": 1.012e9 + 10.759e9,
    "gemma-3-27b": 1.416e9 + 25.600e9,
    "phi-4": 14.660e9,
    "deepseek-v2": 235.74e9,
    "deepseek-v3": 671.03e9,
    "gpt-oss-20b": 20.91e9,
    "gpt-oss-120b": 116.83e9,
    "smollm2-135m": 134.5e6,
}


@pytest.mark.parametrize("name", model_names())
def test_parameters_are_those_published(name: str) -> None:
    assert num_parameters(load_model(name)) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("gpt-oss-20b", 3.61e9),
        ("gpt-oss-120b", 5.13e9),
        ("mixtral-8x7b", 12.9e9),
        ("mixtral-8x22b", 39e9),
        ("deepseek-v2", 21e9),
        ("deepseek-v3", 37e9),
        ("qwen3-235b-a22b", 22e9),
    ],
)
def test_active_parameters_are_those_published(name: str, active: float) -> None:
    # The publishers round, and differ in whether the embedding counts: 2 % covers both.
    assert num_active_parameters(load_model(name)) == pytest.approx(active, rel=0.02)


def test_parameters_by_kind_add_up_by_hand() -> None:
    count = count_parameters(load_model("llama-3.1-8b"))
    assert count.embedding == count.lm_head == 128256 * 4096
    assert count.attention == 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert count.mlp == 32 * 3 * 4096 * 14336
    assert (count.experts, count.shared_experts, count.router) == (0, 0, 0)
    assert count.total == 8_030_261_248  # the published safetensors total, to the last weight


def test_tied_embeddings_are_counted_once() -> None:
    count = count_parameters(load_model("smollm2-135m"))
    assert count.lm_head == 0
    assert count.total == 134_515_008


def test_names_ignore_case_organisation_and_variant() -> None:
    for name in (
        "Llama-3.1-8B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "llama_3.1_8b",
    ):
        assert load_model(name).name == "llama-3.1-8b"
    assert load_model("meta-llama/Llama-2-7b-chat-hf").name == "llama-2-7b"
    assert load_model("mistralai/Mixtral-8x7B-Instruct-v0.1").name == "mixtral-8x7b"
    assert load_model("mistralai/Mistral-Nemo-Instruct-2407").name == "mistral-nemo"
    assert load_model("google/gemma-3-27b-it").name == "gemma-3-27b"
    assert load_gpu("H100").name == "h100-sxm"
    assert load_gpu("RTX 4090").name == "rtx-4090"


@pytest.mark.parametrize("file", ["models.json", "gpus.json"])
def test_no_two_entries_answer_to_one_name(file: str) -> None:
    seen: dict[str, str] = {}
    for name, entry in read_entries(file).items():
        for spelling in {normalize(s) for s in (name, *entry.get("aliases", ()))}:
            assert seen.setdefault(spelling, name) == name, spelling


def test_unknown_names_give_the_closest() -> None:
    with pytest.raises(CatalogError, match=r"unknown model 'lama-2-7b'; closest: llama-2-7b") as e:
        load_model("lama-2-7b")
    assert "config.json" in str(e.value)
    with pytest.raises(CatalogError, match=r"unknown model 'llama-3\.1'.*llama-3\.1-8b"):
        load_model("llama-3.1")
    with pytest.raises(CatalogError, match=r"unknown GPU 'h10'.*h100-sxm"):
        load_gpu("h10")


@pytest.mark.parametrize("name", model_names())
def test_every_model_has_its_source_and_its_layers_add_up(name: str) -> None:
    shape = load_model(name)
    assert "huggingface.co/" in shape.source
    assert sum(group.num_layers for group in shape.attention) == shape.num_layers
    assert shape.native_dtype in DTYPE_BITS


@pytest.mark.parametrize(
    ("name", "full", "sliding", "window"),
    [
        ("gemma-3-27b", 10, 52, 1024),
        ("gemma-3-1b", 4, 22, 512),
        ("gemma-2-27b", 23, 23, 4096),
        ("gpt-oss-20b", 12, 12, 128),
        ("llama-4-scout", 12, 36, 8192),
        ("mistral-7b-v0.1", 0, 32, 4096),
        ("mistral-7b-v0.3", 32, 0, 0),
        ("qwen2.5-7b", 28, 0, 0),
    ],
)
def test_window_layers(name: str, full: int, sliding: int, window: int) -> None:
    groups = {group.kind: group for group in load_model(name).attention}
    assert (groups["full"].num_layers if "full" in groups else 0) == full
    assert (groups["sliding"].num_layers if "sliding" in groups else 0) == sliding
    if window:
        assert groups["sliding"].window == window


# Config files.

BASE = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def write(folder: Path, **changes: Any) -> Path:
    """A config.json like ``BASE`` with keys changed, or taken out where None."""
    config = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def test_config_file_and_its_folder_say_the_same(tmp_path: Path) -> None:
    path = write(tmp_path)
    from_file, from_folder = load_model(path), load_model(f"{tmp_path}/")
    assert from_file == from_folder == load_model(str(path))
    assert from_file.source == str(path)
    (group,) = from_file.attention
    assert (group.kind, group.num_kv_heads, group.head_dim) == ("full", 2, 8)
    assert from_file.assumptions == ()


@pytest.mark.parametrize("name", model_names())
def test_catalogue_models_read_the_same_from_a_config_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(read_entries("models.json")[name]["config"]))
    shape = load_model(name)
    read = load_model(path)
    assert replace(read, name=name, source=shape.source, assumptions=shape.assumptions) == shape


def test_explicit_head_dim_wins(tmp_path: Path) -> None:
    shape = load_model(write(tmp_path, head_dim=32))
    assert shape.attention[0].head_dim == 32


def test_missing_kv_heads_mean_mha_and_it_is_said(tmp_path: Path) -> None:
    shape = load_model(write(tmp_path, num_key_value_heads=None))
    assert shape.attention[0].num_kv_heads == 8
    assert "num_key_value_heads not given: 8, as MHA" in shape.assumptions


def test_unknown_model_type_is_read_and_assumptions_are_said(tmp_path: Path) -> None:
    config = {"model_type": "novel", "tie_word_embeddings": None, "torch_dtype": None}
    shape = load_model(write(tmp_path, **config))
    assert set(shape.assumptions) == {
        "model type novel: a gated MLP",
        "tie_word_embeddings not given: a separate LM head",
        "torch_dtype not given: bf16",
    }


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({"sliding_window": 32}, [("sliding", 4)]),
        ({"model_type": "qwen2", "sliding_window": 32}, [("full", 4)]),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 32,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            [("full", 1), ("sliding", 3)],
        ),
        ({"model_type": "gemma2", "sliding_window": 32}, [("full", 2), ("sliding", 2)]),
        (
            {"model_type": "gemma3_text", "sliding_window": 32, "sliding_window_pattern": 4},
            [("full", 1), ("sliding", 3)],
        ),
        (
            {"sliding_window": 32, "layer_types": ["full_attention"] * 3 + ["sliding_attention"]},
            [("full", 3), ("sliding", 1)],
        ),
    ],
)
def test_windows_by_config_key(
    changes: dict[str, Any], kinds: list[tuple[str, int]], tmp_path: Path
) -> None:
    shape = load_model(write(tmp_path, **changes))
    assert [(group.kind, group.num_layers) for group in shape.attention] == kinds


def test_multimodal_config_is_read_through_text_config(tmp_path: Path) -> None:
    # As published for gemma-3-12b-it: what is missing is the configuration class's default.
    text = {
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
        "sliding_window": 1024,
    }
    path = tmp_path / "config.json"
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    path.write_text(json.dumps({**outer, "torch_dtype": "bfloat16"}))
    shape = load_model(path)
    known = load_model("gemma-3-12b")
    assert shape.attention == known.attention
    assert num_parameters(shape) == num_parameters(known)
    assert "the vision tower is not counted" in shape.assumptions
    assert "head_dim 256: the default of gemma3_text" in shape.assumptions


def test_moe_layers_skip_the_dense_ones(tmp_path: Path) -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    shape = load_model(write(tmp_path, model_type="qwen2_moe", mlp_only_layers=[0], **moe))
    assert shape.num_moe_layers == 3
    assert shape.intermediate_size == 128
    every_other = load_model(write(tmp_path, model_type="qwen3_moe", decoder_sparse_step=2, **moe))
    assert every_other.num_moe_layers == 2


GATED_DELTA = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 48,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def test_recurrent_state_comes_from_the_config(tmp_path: Path) -> None:
    full, recurrent = load_model(write(tmp_path, **GATED_DELTA)).attention
    assert (full.num_layers, recurrent.num_layers) == (12, 36)
    # 32 heads of 128 x 128 in fp32, and three inputs of 8,192 channels in bf16.
    assert recurrent.state_bytes == 32 * 128 * 128 * 4 + 3 * 8192 * 2


def test_hybrid_without_state_keys_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    changes = {**GATED_DELTA, "linear_value_head_dim": None}
    with pytest.raises(CatalogError, match=r"config\.json: no linear_value_head_dim"):
        load_model(write(tmp_path, **changes))
    with pytest.raises(CatalogError, match="no layer_types, expected it: hybrid_override_pattern"):
        load_model(write(tmp_path, hybrid_override_pattern="M-M*"))


@pytest.mark.parametrize(
    ("config", "length"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 2048),
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            2048,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                }
            },
            512,
        ),
        ({"rope_scaling": None}, 512),
    ],
)
def test_context_length_with_its_scaling(
    config: dict[str, Any], length: int, tmp_path: Path
) -> None:
    assert load_model(write(tmp_path, **config)).max_model_len == length


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ({"quant_method": "fp8"}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "awq", "bits": 4}, "int4"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
    ],
)
def test_quantised_checkpoints(quantization: dict[str, Any], dtype: str, tmp_path: Path) -> None:
    shape = load_model(write(tmp_path, quantization_config=quantization))
    assert shape.native_dtype == dtype


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "no hidden_size.*expected a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, expected a positive whole number"),
        ({"num_attention_heads": "8"}, "num_attention_heads is '8', expected"),
        ({"num_attention_heads": True}, "num_attention_heads is True, expected"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, expected a divisor of 8"),
        ({"hidden_size": 63}, "no head_dim, expected it, because hidden_size 63"),
        ({"torch_dtype": "float7"}, "torch_dtype is 'float7', expected one of"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings is 'no', expected true or false"),
        ({"layer_types": ["full_attention"]}, "layer_types is '1 entries', expected a list of 4"),
        ({"layer_types": ["odd"] * 4}, "layer_types is 'odd', expected kinds among"),
        ({"text_config": 3, "num_hidden_layers": None}, "text_config is 3, expected an object"),
    ],
)
def test_bad_config_names_file_key_and_what_was_expected(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = write(tmp_path, **changes)
    with pytest.raises(CatalogError, match=message) as error:
        load_model(path)
    assert str(path) in str(error.value)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('{"a": 1,\n oops')
    with pytest.raises(CatalogError, match=r"bad\.json, line 2: not JSON"):
        load_model(bad)
    bad.write_text("[]")
    with pytest.raises(CatalogError, match="a JSON list, expected an object"):
        load_model(str(bad))
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CatalogError, match="not a text file"):
        load_model(bad)
    with pytest.raises(CatalogError, match=r"missing\.json: cannot read it"):
        load_model(str(tmp_path / "missing.json"))
    with pytest.raises(CatalogError, match=r"config\.json: cannot read it"):
        load_model(tmp_path)


# GPUs.


@pytest.mark.parametrize("name", gpu_names())
def test_every_gpu_has_its_source_and_plausible_rates(name: str) -> None:
    gpu = load_gpu(name)
    assert "memory:" in gpu.source
    assert 15 * 2**30 <= gpu.memory_bytes <= 192 * 2**30
    # FLOPs per byte of any real part: a factor of 1000 in a unit would show.
    assert 60 <= peak_flops(gpu, "bf16").flops / gpu.memory_bandwidth <= 500
    assert gpu.host_bandwidth <= gpu.link_bandwidth


def test_rates_are_dense() -> None:
    assert peak_flops(load_gpu("h100-sxm"), "bf16").flops == 989.4e12
    assert peak_flops(load_gpu("h100-sxm"), "fp8").flops == 1978.9e12
    assert peak_flops(load_gpu("l4"), "bf16").flops == 121e12
    assert peak_flops(load_gpu("a10"), "bf16").flops == 125e12
    assert load_gpu("h100-sxm").memory_bytes == 81_559 * 2**20


@pytest.mark.parametrize("name", ["t4", "v100-sxm2-32gb", "v100-sxm2-16gb"])
def test_gpus_without_bf16_say_so_and_run_at_the_fp16_rate(name: str) -> None:
    gpu = load_gpu(name)
    assert peak_flops(gpu, "bf16") == (gpu.flops["fp16"], "fp16")
    assert "no bf16 tensor cores: bf16 models run at the fp16 rate" in gpu.assumptions


def test_missing_rates_fall_back_to_wider_types() -> None:
    assert peak_flops(load_gpu("a100-80gb"), "fp8").dtype == "bf16"
    assert peak_flops(load_gpu("h100-sxm"), "mxfp4").dtype == "fp8"
    with pytest.raises(ValueError, match="dtype is 'fp7'"):
        peak_flops(load_gpu("a100-80gb"), "fp7")


GPU_FILE = {
    "memory_bytes": 2**30,
    "memory_bandwidth": 1e12,
    "flops": {"bf16": 1e14},
    "host_bandwidth": 3e10,
}


def test_gpu_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mygpu.json"
    path.write_text(json.dumps(GPU_FILE))
    gpu = load_gpu(str(path))
    assert (gpu.name, gpu.link, gpu.link_bandwidth) == ("mygpu", "PCIe", 3e10)
    assert gpu.assumptions == (
        "no link_bandwidth given: peers talk over PCIe",
        "no num_sms given: 132 multiprocessors",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory_bytes": None}, "no memory_bytes, expected a GPU"),
        ({"memory_bandwidth": -1}, "memory_bandwidth is -1, expected a positive number"),
        ({"memory_bandwidth": "1"}, "memory_bandwidth is '1', expected a positive number"),
        ({"memory_bytes": 1.5}, "memory_bytes is 1.5, expected whole bytes"),
        ({"flops": {}}, "flops is {}, expected dense FLOP/s by dtype"),
        ({"flops": {"fp99": 1e12}}, "flops has 'fp99', expected dtypes among"),
        ({"flops": {"bf16": 0}}, "flops.bf16 is 0, expected a positive number"),
        ({"bandwith": 1}, "bandwith is no key of"),
        ({"assumptions": "x"}, "assumptions is 'x', expected a list of strings"),
        ({"usd_per_hour": 0}, "usd_per_hour is 0, expected a positive number"),
    ],
)
def test_bad_gpu_file(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    data = {key: value for key, value in {**GPU_FILE, **changes}.items() if value is not None}
    path.write_text(json.dumps(data))
    with pytest.raises(CatalogError, match=message) as error:
        load_gpu(path)
    assert str(path) in str(error.value)
