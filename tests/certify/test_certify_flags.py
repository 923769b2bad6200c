"""What `slotstream certify` makes of vllm serve's flags, and of a model's config.json. Starts no engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from slotstream.certify import load, sizes
from slotstream.certify.flags import Flags
from slotstream.certify.kinds import kind_of
from slotstream.certify.report import Report
from slotstream.certify.run import backend_gaps, gaps_of, layers_of, load_gaps, prepare, refused, transport_gap
from slotstream.certify.sizes import Sizes
from slotstream.truth.compare import Truth
from slotstream.wire.errors import ConfigError

TRANSFER = {"kv_connector": "SlotStreamConnector", "kv_connector_module_path": "slotstream.connector", "kv_role": "kv_producer"}


def transfer(**extra: Any) -> str:
    return json.dumps({**TRANSFER, "kv_connector_extra_config": extra})


def flags(*words: str, **extra: Any) -> Flags:
    return Flags(["model", *words, "--kv-transfer-config", transfer(**{"layers": [2, "final"], **extra})])


@pytest.mark.parametrize(
    ("words", "model"),
    [
        (["m", "--max-model-len", "8192"], "m"),
        (["vllm", "serve", "m"], "m"),
        (["--enforce-eager", "--model", "m"], "m"),
        (["--model=m", "-tp", "2"], "m"),
    ],
)
def test_the_model_stands_first_or_has_its_flag(words: list[str], model: str) -> None:
    assert Flags(words).model == model


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--enforce-eager"], "name the model first"),
        ([], "name the model first"),
        (["m", "n"], "'n' is no flag of vLLM's"),
        (["m", "--config", "/nowhere/x.yaml"], "--config /nowhere/x.yaml: "),
        (["m", "--kv-transfer-config.kv_connector", "x"], "write --kv-transfer-config as one JSON object"),
    ],
)
def test_what_is_not_understood_is_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Flags(words)


def test_flags_are_found_however_they_are_written() -> None:
    found = Flags(
        ["m", "--max_model_len=8k", "-tp", "2", "--max-num-seqs", "1K", "-O3", "--no-enable-prefix-caching", "--seed", "-1"]
    )
    assert (found.number("--max-model-len"), found.number("--tensor-parallel-size")) == (8000, 2)
    assert found.number("--max-num-seqs") == 1024
    assert found.value("--seed") == "-1"
    assert sizes.is_off(found, "--enable-prefix-caching")
    assert not sizes.is_off(found, "--enable-chunked-prefill")
    assert found.words() == [
        "--max_model_len=8k",
        "-tp",
        "2",
        "--max-num-seqs",
        "1K",
        "-O3",
        "--no-enable-prefix-caching",
        "--seed",
        "-1",
    ]
    with pytest.raises(ConfigError, match="--block-size 'x' is not a whole number"):
        Flags(["m", "--block-size", "x"]).number("--block-size")
    with pytest.raises(ConfigError, match="is not JSON"):
        Flags(["m", "--kv-transfer-config", "{"]).connector()


def test_a_config_file_of_vllms_is_read_and_the_command_line_counts_first(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "model: m\nmax-model-len: 4096\nenforce_eager: true\nenable-prefix-caching: false\nport: 8000\n"
        "cudagraph-capture-sizes: [1, 2]\nkv-transfer-config:\n  kv_connector: SlotStreamConnector\n"
        "  kv_connector_extra_config: {layers: [1]}\n"
    )
    found = Flags(["--config", str(path), "--max-model-len", "2048"])
    assert (found.model, found.number("--max-model-len"), found.connector()) == ("m", 2048, {"layers": [1]})
    assert found.has("--enforce-eager")
    assert sizes.is_off(found, "--enable-prefix-caching")
    assert found.value("--cudagraph-capture-sizes") == "1 2"
    found.drop_what_is_of_the_real_model()
    assert not found.has("--port", "--config")


def test_false_in_a_config_file_is_a_flag_only_where_vllm_has_one(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "enable-prefix-caching: false\nenforce_eager: false\ndisable-log-stats: false\nheadless: false\n"
        "aggregate-engine-logging: false\ndata-parallel-multi-port-external-lb: false\n"
    )
    assert Flags(["m", "--config", str(path)]).words() == ["--no-enable-prefix-caching"]


def test_what_is_of_the_real_model_goes_and_the_rest_stays() -> None:
    given = [
        *("--tokenizer", "t", "--hf-overrides", "{}", "--quantization", "fp8", "--limit-mm-per-prompt", '{"image": 1}'),
        *(
            "--enable-expert-parallel",
            "--port=8000",
            "--api-key",
            "secret",
            "--chat-template",
            "x.jinja",
            "--disable-log-stats",
        ),
        *("--enforce-eager", "--dtype", "float16", "--gpu-memory-utilization", "0.5", "--kv-cache-dtype", "fp8"),
        *("--speculative-config", '{"method": "eagle3", "model": "draft", "num_speculative_tokens": 3}'),
    ]
    found = flags(*given)
    prepare(found, kind_of({"num_hidden_layers": 36}), gpu=True)
    gone = {one.flag for one in found.overrides if one.ours is None}
    assert gone == {
        *("--tokenizer", "--hf-overrides", "--quantization", "--limit-mm-per-prompt", "--enable-expert-parallel", "--port"),
        *("--api-key", "--chat-template", "--disable-log-stats", "--speculative-config"),
    }
    assert all(one.why for one in found.overrides)
    kept = found.words()
    for words in (
        ["--enforce-eager"],
        ["--dtype", "float16"],
        ["--gpu-memory-utilization", "0.5"],
        ["--kv-cache-dtype", "fp8"],
    ):
        at = kept.index(words[0])
        assert kept[at : at + len(words)] == words
    assert not {"secret", "8000", "draft"} & {word for word in kept if not word.startswith("{")}


def test_what_runs_otherwise_than_the_users_engine_is_no_part_of_the_proof() -> None:
    found = flags("--enable-expert-parallel", "--attention-backend", "FLASHMLA")
    stood = kind_of({"num_hidden_layers": 6, "kv_lora_rank": 512})
    gaps = gaps_of(found, {}, stood)
    prepare(found, stood, gpu=True)
    told = {gap.what: gap.why for gap in gaps + backend_gaps(found)}
    assert "expert parallelism" in told
    assert "TRITON_MLA" in told["attention backend"]
    on_cpu = flags("--attention-backend", "FLASHMLA")
    prepare(on_cpu, stood, gpu=False)
    assert backend_gaps(on_cpu) == []


@pytest.mark.parametrize(
    ("asked", "used", "fallbacks", "needed", "said"),
    [
        (None, {"nixl"}, 0, False, "rows came over nixl, by a socket of this host"),
        ("auto", {"grpc"}, 3, False, "rows came over grpc"),
        ("nixl", {"nixl"}, 0, False, "rows came over nixl"),
        ("nixl", {"nixl", "grpc"}, 0, True, "nixl was asked for, and did not always work; rows came over grpc and nixl"),
        ("nixl", {"nixl"}, 1, True, "nixl was asked for, and did not always work"),
        ("nixl", set(), 0, True, "rows came over an unknown transport"),
    ],
)
def test_how_rows_came_is_said_and_nixl_that_fell_back_stops_a_pass(
    asked: str | None, used: set[str], fallbacks: float, needed: bool, said: str
) -> None:
    gap = transport_gap(asked, used, fallbacks)
    assert (gap.what, gap.needed) == ("transport", needed)
    assert said in gap.why


def test_the_report_holds_no_secret_of_the_users() -> None:
    found = flags(
        *("--api-key", "sk-SECRET", "--hf-token=hf-SECRET", "--ssl-keyfile-password", "SECRET"),
        *("--model-loader-extra-config", '{"aws_secret_access_key": "SECRET"}', "--api-key", "more-SECRET"),
    )
    prepare(found, kind_of({"num_hidden_layers": 36}), gpu=True)
    report = Report("m", "dense", 36, ["final"], command=found.words(), overrides=found.overrides)
    assert {one.yours for one in found.overrides if one.ours is None} == {"set"}
    assert "SECRET" not in json.dumps(report.as_json())
    assert "SECRET" not in "\n".join(report.lines())


@pytest.mark.parametrize(
    ("config", "stays"),
    [
        ({"method": "ngram", "num_speculative_tokens": 3}, True),
        ({"method": "suffix"}, True),
        (
            {
                "method": "extract_hidden_states",
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [4, 1]}},
            },
            True,
        ),
        ({"method": "mtp"}, False),
        ({"model": "draft"}, False),
    ],
)
def test_a_drafter_stays_where_it_needs_no_weights(config: dict[str, Any], stays: bool) -> None:
    found = flags("--speculative-config", json.dumps(config))
    told = gaps_of(found, {}, kind_of({"num_hidden_layers": 6}))
    assert ("speculative decoding" in {gap.what for gap in told}) is not stays
    found.drop_what_is_of_the_real_model()
    assert found.has("--speculative-config") is stays


def test_the_layers_are_those_of_the_connector_or_of_the_extraction() -> None:
    truth = Truth("dense", 36)
    assert layers_of(flags(layers=["final", 18, 2]), truth) == [2, 18, 37]
    assert layers_of(flags(layers="eagle3"), truth) == [2, 18, 33, 36]
    draft = {
        "method": "extract_hidden_states",
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [4, 1]}},
    }
    assert layers_of(Flags(["m", "--speculative-config", json.dumps(draft), "--kv-transfer-config", transfer()]), truth) == [
        1,
        4,
    ]
    with pytest.raises(ConfigError, match="name the layers to capture"):
        layers_of(Flags(["m", "--kv-transfer-config", transfer()]), truth)
    with pytest.raises(ConfigError, match="must be layer ids from 0 to 36"):
        layers_of(flags(layers=[37]), truth)
    with pytest.raises(ConfigError, match="slotstream flags MODEL prints one"):
        layers_of(Flags(["m"]), truth)
    with pytest.raises(ConfigError, match="SlotStreamConnector 0 times"):
        layers_of(Flags(["m", "--kv-transfer-config", '{"kv_connector": "X"}']), truth)


def test_the_connector_sends_to_this_commands_server_alone() -> None:
    found = flags(
        server="storage:50151", tls_ca="/ca.pem", token_file="/t", spool_dir="/spool", chunk_bytes=8192, sender="thread"
    )
    found.connect_to("unix:/x/s", "/x/spool")
    own = found.connector()
    assert own == {
        **{"layers": [2, "final"], "chunk_bytes": 8192, "sender": "thread"},
        **{"server": "unix:/x/s", "spool_dir": "/x/spool"},
    }
    changed = {one.flag: (one.yours, one.ours) for one in found.overrides}
    assert changed == {
        "connector option server": ("storage:50151", "unix:/x/s"),
        "connector option spool_dir": ("/spool", "/x/spool"),
        "connector option tls_ca": ("/ca.pem", None),
        "connector option token_file": ("/t", None),
    }


def test_a_connector_among_others_is_found() -> None:
    ours = {**TRANSFER, "kv_connector_extra_config": {"layers": [1], "server": "a:1"}}
    many = {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [{"kv_connector": "X"}, ours]}}
    found = Flags(["m", "--kv-transfer-config", json.dumps(many)])
    found.connect_to("b:2", "/spool")
    assert found.connector() == {"layers": [1], "server": "b:2"}
    assert found.json("--kv-transfer-config")["kv_connector_extra_config"]["connectors"][0] == {"kv_connector": "X"}


def test_a_connector_of_the_users_own_counts_as_ours() -> None:
    own = {
        **TRANSFER,
        "kv_connector": "Mine",
        "kv_connector_module_path": "my.own",
        "kv_connector_extra_config": {"layers": [3]},
    }
    assert Flags(["m", "--kv-transfer-config", json.dumps(own)]).connector() == {"layers": [3]}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], Sizes(2560, 2048, 256, 402)),
        (["--max-model-len=131072", "--max-num-batched-tokens=8192"], Sizes(10240, 8192, 256, 1602)),
        (
            ["--max-model-len=1024", "--max-num-batched-tokens=64", "--max-num-seqs=16", "--block-size=32"],
            Sizes(576, 64, 16, 47),
        ),
        (["--max-model-len=4096", "--max-num-batched-tokens=8192"], Sizes(2560, 2048, 256, 402)),
        (["--max-model-len=1000", "--max-num-seqs=2"], Sizes(1000, 500, 2, 84)),
        (["--no-enable-chunked-prefill", "--max-model-len=4096"], Sizes(2048, None, 256, 322)),
        (["--num-gpu-blocks-override=99"], Sizes(2560, 2048, 256, None)),
    ],
)
def test_sizes_let_happen_what_must(words: list[str], wanted: Sizes) -> None:
    assert sizes.sizes_of(flags(*words), "dense", gpu=True) == wanted


@pytest.mark.parametrize("words", [["--max-model-len=63"], ["--max-num-batched-tokens=63", "--no-enable-chunked-prefill"]])
def test_requests_that_are_too_short_for_the_load_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="at most 63 tokens, and the load needs 64"):
        sizes.sizes_of(flags(*words), "dense", gpu=True)


@pytest.mark.parametrize("seqs", ["1", "16", "256"])
def test_the_shortest_requests_make_a_load(seqs: str) -> None:
    planned = sizes.sizes_of(flags("--max-model-len=64", "--max-num-seqs", seqs), "dense", gpu=True)
    for seed in range(20):
        rng = random.Random(seed)
        sent = load.mixed(rng, 36, planned) + [one for turn in load.alike(rng, planned) for one in turn]
        sent += [one for turn in range(load.ROUNDS) for one in load.long_texts(rng, turn, 200, planned)]
        assert all(r.prompt and r.max_tokens >= 1 and len(r.prompt) + r.max_tokens <= 64 for r in sent)


def test_sizes_are_written_into_the_flags_and_named() -> None:
    found = flags("--max-model-len", "131072", "--kv-cache-memory-bytes", "1G", "--attention-backend", "FLASHMLA")
    prepare(found, kind_of({"num_hidden_layers": 6, "kv_lora_rank": 512}), gpu=True)
    changed = {one.flag: (one.yours, one.ours) for one in found.overrides}
    assert changed == {
        "--served-model-name": (None, "truth"),
        "--max-model-len": ("131072", "2560"),
        "--max-num-batched-tokens": (None, "2048"),
        "--num-gpu-blocks-override": (None, "402"),
        "--kv-cache-memory-bytes": ("1G", None),
        "--attention-backend": ("FLASHMLA", None),
        "--attention-config": (None, '{"backend": "TRITON_MLA"}'),
    }


def test_flags_in_parts_are_one_flag_behind_all_others() -> None:
    found = flags(
        *(
            "--compilation-config.pass_config.fuse",
            "true",
            "--compilation_config.mode=3",
            "--compilation_config.max_size",
            "8k",
        ),
        *("--compilation-config.splitting_ops+", "a,b", "--compilation-config.splitting_ops+=c"),
        *("--attention-config", '{"x": 1}', "-ac.y=1", "-ac.z=2", "--enforce-eager"),
    )
    assert found.json("--compilation-config") == {
        "pass_config": {"fuse": True},
        "mode": 3,
        "splitting_ops": ["a", "b", "c"],
        "max_size": 8000,
    }
    assert found.json("--attention-config") == {"y": 1, "z": 2}  # The last one counts, and vLLM puts what it joined last.
    assert not [word for word in found.words() if word.startswith("-") and "." in word]
    assert found.has("--enforce-eager")
    assert flags("--attention-config.x", "1", "-ac.y", "1").json("--attention-config") == {"y": 1}  # Joined by spelling.
    with pytest.raises(ConfigError, match=r"--eplb-config.x has no value"):
        flags("--eplb-config.x")


def test_a_flag_in_parts_undoes_no_override() -> None:
    found = flags("--attention-config.backend", "FLASHMLA", "--eplb-config.window_size", "9", "--generation-config.x", "1")
    prepare(found, kind_of({"num_hidden_layers": 6, "kv_lora_rank": 512}), gpu=True)
    changed = {one.flag: (one.yours, one.ours) for one in found.overrides}
    assert changed["--attention-config"] == ('{"backend": "FLASHMLA"}', '{"backend": "TRITON_MLA"}')
    assert changed["--eplb-config"] == ('{"window_size": 9}', None)
    assert changed["--generation-config"] == ('{"x": 1}', None)
    assert not {"FLASHMLA", "9"} & set(found.words())
    gdn = flags("--additional-config.mine", "1")
    prepare(gdn, kind_of({"num_hidden_layers": 6, "linear_num_key_heads": 4}), gpu=True)
    assert gdn.json("--additional-config") == {"mine": 1, "gdn_prefill_backend": "triton"}
    assert sum("additional-config" in word for word in gdn.words()) == 1


def test_a_flag_that_is_set_again_is_named_once_with_what_the_user_gave() -> None:
    found = flags("--max-model-len", "4096")
    for value in ("47", "94"):
        found.set("--num-gpu-blocks-override", value, "why")
        found.set("--max-model-len", value, "why")
    assert [(one.flag, one.yours, one.ours) for one in found.overrides] == [
        ("--num-gpu-blocks-override", None, "94"),
        ("--max-model-len", "4096", "94"),
    ]


@pytest.mark.parametrize(
    ("config", "kind", "close"),
    [
        ({"model_type": "llama"}, "dense", False),
        ({"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False}, "dense", False),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 6, "sliding_window": 4096}, "dense", False),
        ({"model_type": "llama", "sliding_window": None}, "dense", False),
        ({"model_type": "mistral", "sliding_window": 4096}, "swa", False),
        ({"model_type": "gpt_oss", "layer_types": ["sliding_attention", "full_attention"]}, "swa", False),
        ({"model_type": "gemma3", "text_config": {"sliding_window": 512, "num_hidden_layers": 6}}, "swa", False),
        ({"model_type": "llama4_text", "attention_chunk_size": 8192, "layer_types": ["chunked_attention"]}, "swa", True),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "mla", False),
        ({"model_type": "qwen3_next", "linear_num_key_heads": 16, "layer_types": ["linear_attention"]}, "gdn", False),
        ({"model_type": "kimi_linear", "kv_lora_rank": 512, "linear_attn_config": {"x": 1}}, "gdn", True),
        ({"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16}, "gdn", True),
    ],
)
def test_the_kind_is_that_of_the_config(config: dict[str, Any], kind: str, close: bool) -> None:
    found = kind_of({"num_hidden_layers": 6, **config})
    assert (found.kind, found.layers, bool(found.close)) == (kind, 6, close)


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 0}, {"num_hidden_layers": 257}, {"num_hidden_layers": "6"}])
def test_a_config_without_layers_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        kind_of(config)


def test_the_load_has_what_must_happen() -> None:
    planned = Sizes(576, 64, 16, 47)
    mixed = load.mixed(random.Random(1), 36, planned)
    assert len({request.name for request in mixed}) == 36
    assert all(len(r.prompt) >= 1 and len(r.prompt) + r.max_tokens <= 576 for r in mixed)
    assert sum(len(request.prompt) > 64 for request in mixed) >= 12
    assert {request.outputs for request in mixed} == {True, False}
    first, *turns = load.alike(random.Random(1), planned)
    assert all(request.prompt[:300] == first[0].prompt[:300] for turn in turns for request in turn)
    assert {request.capture for turn in turns for request in turn} == {True, False}
    for turn in range(load.ROUNDS):
        long = load.long_texts(random.Random(1), turn, 47 * 32, planned)
        assert len(long) == 16
        assert all(len(r.prompt) + r.max_tokens < 576 for r in long)
        assert sum(len(r.prompt) + r.max_tokens for r in long) > 47 * 32


@pytest.mark.parametrize(
    ("planned", "counts", "caching", "needed", "others"),
    [
        (Sizes(576, 64, 16, 47), (3, 9, 100), "True", set(), set()),
        (Sizes(576, 64, 16, 47), (0, 9, 100), "True", {"preemption"}, set()),
        (Sizes(576, 64, 16, 47), (3, 0, 0), "True", {"chunked prompts", "shared prefixes"}, set()),
        (Sizes(576, None, 16, 47), (3, 0, 0), "False", set(), {"chunked prompts", "shared prefixes"}),
    ],
)
def test_what_did_not_happen_is_said_and_what_is_needed_stops_a_pass(
    planned: Sizes, counts: tuple[int, int, int], caching: str, needed: set[str], others: set[str]
) -> None:
    found = load_gaps(planned, *counts, caching)
    assert {gap.what for gap in found if gap.needed} == needed
    assert {gap.what for gap in found if not gap.needed} == others


def test_vllms_page_of_counts() -> None:
    page = 'vllm:num_preemptions_total{engine="0"} 2.0\nvllm:num_preemptions_total{engine="1"} 3.0\n'
    page += "vllm:num_preemptions_created 9\n"
    page += 'vllm:cache_config_info{block_size="32",enable_prefix_caching="True",num_gpu_blocks="47"} 1.0\n'
    assert load.counted(page, "vllm:num_preemptions_total") == 5
    assert load.counted(page, "vllm:none") == 0
    assert load.label(page, "vllm:cache_config_info", "num_gpu_blocks") == "47"
    assert load.label(page, "vllm:cache_config_info", "none") is None


def test_the_connectors_own_sentence_is_found_in_vllms_log() -> None:
    log = "INFO 1\nERROR [x.py:1] slotstream cannot start: unknown connector options ['chunk_bites']\nTraceback\n"
    assert refused(log) == "slotstream cannot start: unknown connector options ['chunk_bites']"
    assert refused("Traceback\n") == ""


def test_a_cache_without_room_is_told_from_other_failures() -> None:
    said = "ValueError: To serve at least one request with the model's max seq len (2048), (1 GiB KV cache is needed, which"
    assert sizes.without_room(said + " is larger than the available KV cache memory (0.5 GiB).")
    assert not sizes.without_room("CUDA out of memory")
