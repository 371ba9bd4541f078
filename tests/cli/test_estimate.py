"""`gqaconvert estimate` as a process and as a function: folders, the Hub, the bundled model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_llama
from hub_server import HubServer

import gqaconvert

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11008, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "rope_scaling": None,
    "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": 32000,
}  # fmt: skip
PROMISED = {
    "kv_heads", "context", "batch", "kv_dtype", "tp", "kv_bytes_per_token", "kv_bytes",
    "weights_bytes", "total_bytes", "concurrent_requests", "decode_tokens_per_s_bound",
}  # fmt: skip
HEAVY = "{'torch', 'transformers', 'datasets', 'accelerate', 'matplotlib', 'numpy'}"


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gqaconvert", "estimate", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "100"},
    )


def write_config(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_config(tmp_path / "llama2-7b")


class TestTable:
    def test_a_config_alone_is_enough(self, llama):
        done = run(llama, "--gpu", "a100-80gb")
        assert done.returncode == 0, done.stderr
        assert "6.74B parameters, 12.6 GiB in fp16, counted from its config" in done.stdout
        assert "NVIDIA A100 80GB SXM: 80 GiB, 2,039 GB/s; 8 GiB reserved" in done.stdout
        row = next(line for line in done.stdout.splitlines() if line.startswith("32 MHA"))
        assert row.split()[2:6] == ["512", "KiB", "2", "GiB"]
        assert "note: activations = " in done.stderr

    def test_a_full_grid_fits_into_a_hundred_columns(self, llama):
        done = run(
            llama, "--context", "4k,32k", "--batch", "1,8", "--kv-heads", "32,8,1", "--kv-dtype",
            "fp16,int8", "--gpu", "a100-80gb", "--lengths", "p50=500,p99=8000",
        )  # fmt: skip
        _, *lines = done.stdout.splitlines()  # the first has the name of the folder
        assert max(map(len, lines)) <= 100
        assert sum(line.startswith(("32 MHA", "8 GQA", "1 MQA")) for line in lines) == 24 + 6
        assert "! = more than the GPU has" in lines

    def test_a_row_that_does_not_fit_is_marked(self, llama):
        assert "GiB!" in run(llama, "--context", "32k", "--batch", 8, "--gpu", "24GiB").stdout
        assert "!" not in run(llama, "--gpu", "a100-80gb").stdout

    def test_replicated_heads_are_shown(self, llama):
        done = run(llama, "--kv-heads", "8,1", "--tp", "1,8", "--gpu", "a100-80gb")
        assert "1 copy" in done.stdout
        assert "every GPU keeps one whole head, replicated" in done.stderr

    def test_the_gpus_are_listed_with_their_sources(self):
        done = run("--gpus")
        assert done.returncode == 0
        assert "h100-80gb" in done.stdout
        assert "data sheet" in done.stdout

    def test_a_gpu_of_ones_own(self, llama, tmp_path):
        (tmp_path / "own.yaml").write_text("mine: {memory_gib: 99, bandwidth_gb_s: 1000}")
        done = run(llama, "--gpu", "mine", "--hardware", tmp_path / "own.yaml")
        assert "mine: 99 GiB, 1,000 GB/s" in done.stdout


class TestJson:
    def test_a_list_of_rows_on_stdout_alone(self, llama):
        done = run(llama, "--context", "4k,32k", "--kv-heads", "32,4", "--json")
        answer = json.loads(done.stdout)
        assert [(row["kv_heads"], row["kv_bytes"]) for row in answer] == [
            (32, 2 * 2**30), (32, 16 * 2**30), (4, 268_435_456), (4, 2 * 2**30),
        ]  # fmt: skip
        assert set(answer[0]) >= PROMISED
        assert done.stderr == ""

    def test_the_bundled_model_is_read_from_its_headers(self):
        answer = json.loads(run("tiny", "--json").stdout)
        assert answer[0]["weights_from"] == "headers"

    def test_the_function_gives_the_same(self, llama):
        answer = gqaconvert.estimate(llama, context=["4k"], kv_heads=[8], gpu="a100-80gb", tp=[2])
        told = run(
            llama, "--context", "4k", "--kv-heads", 8, "--gpu", "a100-80gb", "--tp", 2, "--json"
        )
        assert json.loads(told.stdout) == answer.to_json()


class TestContradictions:
    def test_a_count_edited_by_hand_is_told_with_what_will_happen(self, tmp_path):
        write_llama(tmp_path / "model")
        raw = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(
            json.dumps(raw | {"num_key_value_heads": 2})
        )
        done = run(tmp_path / "model")
        assert done.returncode == 0
        assert "warning: config says 2 KV heads, the tensors hold 4" in done.stderr
        assert "loading such a checkpoint fails or leaves K and V random" in done.stderr
        assert "convert the checkpoint" in done.stderr
        assert json.loads(run(tmp_path / "model", "--json").stdout)[0]["faults"]

    def test_a_sound_checkpoint_has_no_faults(self, tmp_path):
        tensors = write_llama(tmp_path / "model", shards=2)
        (row, *_) = json.loads(run(tmp_path / "model", "--json").stdout)
        assert row["faults"] == []
        assert row["weights_bytes"] == sum(array.nbytes for array in tensors.values())
        assert row["weights_from"] == "headers"

    def test_counts_that_cannot_be_right_are_told(self, tmp_path):
        done = run(write_config(tmp_path / "odd", num_key_value_heads=5))
        assert "warning: 32 attention heads cannot share 5" in done.stderr

    def test_damaged_weights_leave_the_config(self, llama):
        (llama / "model.safetensors").write_bytes(b"1234")
        done = run(llama)
        assert done.returncode == 0
        assert "counted from its config" in done.stdout
        assert "note: the weights beside the config cannot be used" in done.stderr


class TestErrors:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--kv-heads", "5"], "cannot share 5 KV heads evenly"),
            (["--kv-heads", "x"], "--kv-heads 'x' is no whole number"),
            (["--tp", "3"], "do not split evenly over 3 GPUs"),
            (["--gpu", "abacus"], "no GPU called 'abacus'"),
            (["--context", "4q"], "'4q' is not a number of tokens"),
            (["--kv-dtype", "int3"], "'int3' is no element type"),
            (["--lengths", "p50=3"], "one percentile"),
            (["--reserve", "100%"], "leaves nothing"),
        ],
    )
    def test_three_lines_and_exit_2(self, llama, arguments, said):
        done = run(llama, *arguments)
        assert done.returncode == 2
        assert said in done.stderr
        assert "try: " in done.stderr
        assert "Traceback" not in done.stderr
        assert done.stdout == ""

    def test_a_model_is_needed(self):
        assert run().returncode == 2

    def test_a_cache_without_formula_is_unsupported(self, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "deepseek_v4"}')
        assert run(tmp_path).returncode == 3


class TestHub:
    @pytest.fixture
    def hub(self):
        with HubServer() as server:
            yield server

    def ask(self, hub: HubServer, cache: Path, *arguments: str) -> list[dict[str, object]]:
        done = hub.run("-m", "gqaconvert", "estimate", *arguments, "--json", cache=cache)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def test_headers_are_read_and_weights_are_not(self, hub, tmp_path):
        tensors = write_llama(tmp_path / "model")
        hub.add("them/model", tmp_path / "model")
        (row, *_) = self.ask(hub, tmp_path / "cache", "them/model")
        assert row["weights_from"] == "headers"
        assert row["weights_bytes"] == sum(array.nbytes for array in tensors.values())

    def test_a_repository_with_a_config_alone_will_do(self, hub, tmp_path):
        hub.add("them/bare", write_config(tmp_path / "bare"))
        (row, *_) = self.ask(hub, tmp_path / "cache", "them/bare", "--context", "4k")
        assert row["weights_from"] == "config"
        assert row["kv_bytes"] == 2 * 2**30
        assert any("headers were not read" in note for note in row["notes"])

    def test_a_repository_that_is_not_there_is_an_error(self, hub, tmp_path):
        done = hub.run("-m", "gqaconvert", "estimate", "them/none", cache=tmp_path / "cache")
        assert done.returncode == 2
        assert "no such model on the Hub" in done.stderr


def test_nothing_heavy_is_imported(llama):
    probe = (
        f"import sys\nsys.argv = ['gqaconvert', 'estimate', {str(llama)!r}, '--gpu', 'l4']\n"
        "from gqaconvert.cli.main import main\nmain_code = None\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('LOADED', *sorted({HEAVY} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "LOADED"
