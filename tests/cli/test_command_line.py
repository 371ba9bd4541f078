"""The command line as a process: streams, three-line errors, exit codes, no torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from checkpoints import llama_tensors, write_llama, write_safetensors

VERBS = [
    "inspect", "estimate", "calibrate", "convert", "verify", "expand", "uptrain", "evaluate",
    "bench", "sweep", "report", "run", "recipes", "env",
]  # fmt: skip


def run(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gqaconvert", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


def heavy_modules(code: str) -> set[str]:
    """Run code in a process of its own and return which heavy modules it imported."""
    heavy = "{'torch', 'transformers', 'datasets', 'accelerate', 'lm_eval', 'matplotlib'}"
    probe = f"import sys\n{code}\nprint('LOADED', *sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def command(*arguments: object) -> str:
    """Code that runs the command line inside a process and survives its exit."""
    words = ["gqaconvert", *map(str, arguments)]
    return (
        f"sys.argv = {words!r}\nfrom gqaconvert.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
    )


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model", shards=2)
    return tmp_path / "model"


class TestImports:
    @pytest.mark.parametrize("verb", [None, *VERBS])
    def test_help_imports_nothing_heavy(self, verb):
        words = [verb, "--help"] if verb else ["--help"]
        assert heavy_modules(command(*words)) == set()

    def test_help_needs_no_numbers_library_either(self):
        probe = f"import sys\n{command('convert', '--help')}\nprint('numpy' in sys.modules)"
        done = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, text=True, check=True
        )
        assert done.stdout.splitlines()[-1] == "False"

    def test_planning_and_converting_import_nothing_heavy(self, model, tmp_path):
        assert heavy_modules(command("inspect", model)) == set()
        assert heavy_modules(command("convert", model, "--kv-heads", 2, "--dry-run")) == set()
        assert heavy_modules(command("convert", model, tmp_path / "out", "--kv-heads", 2)) == set()
        assert (tmp_path / "out" / "config.json").is_file()

    def test_importing_the_package_imports_nothing_heavy(self):
        assert heavy_modules("import gqaconvert; gqaconvert.convert; gqaconvert.inspect") == set()

    def test_the_probe_can_see_torch(self):
        assert "torch" in heavy_modules("import torch")


class TestInspect:
    def test_json_has_the_promised_keys(self, model):
        found = json.loads(run("inspect", model, "--json").stdout)
        assert found["attention"] == "MHA"
        assert found["num_layers"] == 2
        assert found["num_heads"] == found["num_kv_heads"] == 4
        assert found["head_dim"] == 8
        assert found["kv_bytes_per_token"] == 2 * 2 * 4 * 8 * 2
        assert found["parameters"] == sum(array.size for array in llama_tensors().values())
        assert found["legal_kv_heads"] == [2, 1]
        assert found["convertible"] is True
        assert found["reason"] is None

    @pytest.mark.parametrize(("kv_heads", "kind"), [(4, "MHA"), (2, "GQA"), (1, "MQA")])
    def test_names_the_kind(self, tmp_path, kv_heads, kind):
        write_llama(tmp_path / "model", kv_heads=kv_heads)
        assert (
            f"{kind}: 4 query and {kv_heads} KV heads of 8"
            in run("inspect", tmp_path / "model").stdout
        )

    def test_says_why_a_model_cannot_be_converted(self, model):
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(
            json.dumps(config | {"quantization_config": {"quant_method": "gptq"}})
        )
        done = run("inspect", model, "--json")
        found = json.loads(done.stdout)
        assert done.returncode == 0
        assert found["convertible"] is False
        assert "quantised (gptq)" in found["reason"]

    def test_a_config_edited_by_hand_is_told_what_will_happen(self, model):
        text = (model / "config.json").read_text()
        (model / "config.json").write_text(
            text.replace('"num_key_value_heads": 4', '"num_key_value_heads": 2')
        )
        found = json.loads(run("inspect", model, "--json").stdout)
        assert found["convertible"] is False
        assert "config says 2 KV heads, the tensors hold 4" in found["reason"]
        assert "convert" in found["remedy"]

    def test_aliases_are_listed(self):
        assert "meta-llama/Llama-2-7b-hf" in run("inspect", "--aliases").stdout


class TestConvert:
    def test_reports_on_stdout_and_talks_on_stderr(self, model, tmp_path):
        done = run("convert", model, tmp_path / "out", "--kv-heads", 2)
        assert done.returncode == 0, done.stderr
        assert "KV heads" in done.stdout
        assert "wrote" in done.stderr
        assert "verified: untouched tensors" in done.stderr
        assert "\x1b" not in done.stdout + done.stderr

    def test_json_is_all_of_stdout(self, model, tmp_path):
        found = json.loads(
            run("convert", model, tmp_path / "out", "--kv-heads", 2, "--json").stdout
        )
        assert found["written"] is True
        assert found["kv_heads"] == {"before": 4, "after": 2}
        assert found["kv_bytes_per_token"] == {"before": 256, "after": 128}
        pooled = [tensor["name"] for tensor in found["tensors"] if tensor["action"] == "pool"]
        assert len(pooled) == 4

    def test_dry_run_prints_the_plan_and_its_digest_is_that_of_the_run(self, model, tmp_path):
        dry = json.loads(
            run("convert", model, tmp_path / "out", "--kv-heads", 2, "--dry-run", "--json").stdout
        )
        assert dry["written"] is False
        assert not (tmp_path / "out").exists()
        wet = json.loads(run("convert", model, tmp_path / "out", "--kv-heads", 2, "--json").stdout)
        assert dry["plan_sha256"] == wet["plan_sha256"]
        assert dry["files"] == {
            name: (tmp_path / "out" / name).stat().st_size for name in wet["files"]
        }

    def test_equal_count_is_fine_and_says_so(self, model):
        done = run("convert", model, "--kv-heads", 4)
        assert done.returncode == 0
        assert "4 KV heads already; nothing to do" in done.stderr


class TestErrors:
    def check(self, done: subprocess.CompletedProcess[str], code: int, what: str) -> None:
        assert done.returncode == code, done.stderr
        lines = done.stderr.splitlines()
        assert lines[0].startswith("error: ")
        assert what in lines[0]
        assert all(line.startswith(("at: ", "try: ")) for line in lines[1:])
        assert len(lines) <= 3
        assert "Traceback" not in done.stderr

    def test_impossible_count_is_usage(self, model):
        done = run("convert", model, "--kv-heads", 3)
        self.check(done, 2, "4 KV heads cannot be pooled into 3")
        assert done.stderr.splitlines()[1] == f"at: {model}/config.json num_key_value_heads=4"
        assert done.stderr.splitlines()[2] == "try: --kv-heads 2 or 1"

    def test_unknown_model_is_usage(self, tmp_path):
        self.check(run("convert", "llama2-7bb", "--kv-heads", 8), 2, "neither a folder")
        self.check(run("inspect", tmp_path / "nowhere"), 2, "no such folder")

    def test_unsupported_model(self, model):
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(
            json.dumps(config | {"kv_lora_rank": 4, "model_type": "deepseek_v3"})
        )
        self.check(run("convert", model, "--kv-heads", 2), 3, "multi-head latent attention")

    def test_existing_output_is_refused(self, model, tmp_path):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "x").write_text("")
        self.check(run("convert", model, tmp_path / "out", "--kv-heads", 2), 4, "not empty")

    @pytest.mark.parametrize(
        "damage", ["truncated", "missing shard", "no config", "bad json", "duplicate key"]
    )
    def test_damaged_input_fails_and_leaves_nothing(self, model, tmp_path, damage):
        shard = model / "model-00002-of-00002.safetensors"
        config = model / "config.json"
        if damage == "truncated":
            shard.write_bytes(shard.read_bytes()[:-1])
        elif damage == "missing shard":
            shard.unlink()
        elif damage == "no config":
            config.unlink()
        elif damage == "bad json":
            config.write_text("{")
        else:
            config.write_text(config.read_text().replace("{", '{"model_type": "mistral",', 1))
        done = run("convert", model, tmp_path / "out", "--kv-heads", 2)
        self.check(done, 1, "")
        assert len(done.stderr.splitlines()) >= 2
        assert list(tmp_path.iterdir()) == [model]

    def test_a_nan_names_its_tensor(self, tmp_path):
        write_llama(tmp_path / "model")
        tensors = llama_tensors()
        tensors["model.layers.0.self_attn.k_proj.weight"][3, 3] = float("nan")
        write_safetensors(tmp_path / "model" / "model.safetensors", tensors)
        done = run("convert", tmp_path / "model", tmp_path / "out", "--kv-heads", 2)
        self.check(done, 1, "not finite")
        assert "model.layers.0.self_attn.k_proj.weight" in done.stderr

    def test_vv_shows_the_traceback(self, model):
        done = run("convert", model, "--kv-heads", 3, "-vv")
        assert done.returncode == 2
        assert "Traceback" in done.stderr

    def test_a_missing_option_is_usage(self, model):
        assert run("convert", model).returncode == 2

    def test_interruption_exits_130_and_can_be_resumed(self, tmp_path):
        write_llama(tmp_path / "model", shards=2)
        small_pieces = (
            "import sys, time\nfrom gqaconvert.surgery import execute\nexecute.PIECE_BYTES = 4096\n"
        )
        slow = (
            "from gqaconvert.checkpoint.staging import StagedFolder\nrecord = StagedFolder.record\n"
            "def slow(self, step, facts):\n    record(self, step, facts)\n"
            "    time.sleep(5 if len(self.done) == 2 else 0)\n"
            "StagedFolder.record = slow\n"
        )
        words = ["convert", tmp_path / "model", tmp_path / "out", "--kv-heads", 2, "--workers", 1]
        first = small_pieces + slow + command(*words).replace("assert not stop.code", "sys.exit")
        first = first.replace("sys.exit, stop.code", "sys.exit(stop.code)")
        process = subprocess.Popen(
            [sys.executable, "-c", first],
            stderr=subprocess.PIPE,
            text=True,
            # Shells let what runs in the background ignore it, and children inherit that.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        staged = tmp_path / ".out.partial" / "journal.jsonl"
        while not staged.is_file() or len(staged.read_text().splitlines()) < 3:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == 130
        assert "--resume" in said
        assert not (tmp_path / "out").exists()
        # A version that cuts the work otherwise must not go on with this journal.
        self.check(run(*words, "--resume"), 4, "other options")
        again = small_pieces + command(*words, "--resume")
        subprocess.run([sys.executable, "-c", again], check=True, capture_output=True)
        assert (tmp_path / "out" / "config.json").is_file()


class TestVersionAndHelp:
    def test_version(self):
        import gqaconvert

        assert run("--version").stdout == f"gqaconvert {gqaconvert.__version__}\n"

    @pytest.mark.parametrize("verb", VERBS)
    def test_every_verb_has_help(self, verb):
        done = run(verb, "--help")
        assert done.returncode == 0
        assert "Usage: gqaconvert" in done.stdout
