"""The recipes and configs that ship: they load, their numbers fit, their headers are true."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gqaconvert.checkpoint.sources import ALIASES, resolve_source
from gqaconvert.settings.budget import total_steps, total_tokens
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.recipes import load_recipe, recipe_files
from gqaconvert.settings.shipped import shipped_files

ROOT = Path(__file__).resolve().parent.parent
RECIPES = recipe_files()
CONFIGS = shipped_files("accelerate")
LLAMA_7B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "tie_word_embeddings": False, "torch_dtype": "float16",
    "vocab_size": 32000,
}  # fmt: skip
SOURCES = {
    "llama2-7b": LLAMA_7B,
    "llama2-7b-chat": LLAMA_7B,
    "llama2-13b": LLAMA_7B
    | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 40,
    },
    "olmo2-7b": LLAMA_7B
    | {
        "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "vocab_size": 100352,
        "torch_dtype": "float32",
    },
    "qwen1.5-7b": LLAMA_7B
    | {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": LLAMA_7B
    | {
        "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_hidden_layers": 30, "num_key_value_heads": 3, "tie_word_embeddings": True,
        "torch_dtype": "bfloat16", "vocab_size": 49152,
    },
    "tiny": json.loads((ROOT / "gqaconvert" / "bundled" / "tiny" / "config.json").read_text()),
}  # fmt: skip
"""What counts in the sources' config.json."""


def header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    comments = lines[: next(n for n, line in enumerate(lines) if not line.startswith("#"))]
    return "\n".join(comments)


def said(recipe: Recipe) -> str:
    """A recipe's header as running text."""
    return " ".join(header(RECIPES[recipe.name]).replace("#", " ").split())


def processes(recipe: Recipe) -> int:
    """Processes of the config that a recipe's header names."""
    named = re.search(r"--accelerate-config (\w+)", said(recipe))
    return yaml.safe_load(CONFIGS[named[1]].read_text())["num_processes"] if named else 1


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    return load_recipe(request.param)


class TestRecipes:
    def test_those_promised_are_there(self):
        assert {
            "llama2-7b-gqa8", "llama2-7b-mqa", "llama2-13b-gqa8", "olmo2-7b-gqa8",
            "qwen1.5-7b-gqa8", "smollm2-135m-mqa", "tiny-cpu", "llama2-7b-chat-gqa8",
        } <= set(RECIPES)  # fmt: skip

    def test_the_model_can_be_found_and_its_heads_divided(self, recipe):
        source = resolve_source(recipe.source.model)
        assert source.kind == "bundled" or recipe.source.model in ALIASES or source.repo_id
        kv_heads = SOURCES[recipe.source.model]["num_key_value_heads"]
        assert recipe.convert.kv_heads < kv_heads
        assert kv_heads % recipe.convert.kv_heads == 0

    def test_a_step_divides_among_the_devices_of_its_header(self, recipe):
        training = recipe.uptrain
        assert training.batch_sequences % (processes(recipe) * training.micro_batch) == 0

    def test_the_budget_makes_sense(self, recipe):
        assert 50 <= total_steps(recipe) <= 5000
        if recipe.source.pretraining_tokens:
            assert total_tokens(recipe) < 0.05 * recipe.source.pretraining_tokens
        held_out = recipe.uptrain.held_out
        assert held_out.every_steps < total_steps(recipe)

    def test_what_is_measured_is_not_what_is_trained_on(self, recipe):
        held_out = recipe.uptrain.held_out.text
        # "bundled" is two splits; a data set says its split.
        assert held_out == "bundled" or held_out not in {
            each.path for each in recipe.uptrain.data.datasets
        }
        for text in [held_out, *(each.path for each in recipe.uptrain.data.datasets)]:
            assert text == "bundled" or re.fullmatch(r"dataset:[\w.-]+/[\w.-]+:[\w.-]+:\w+", text)

    def test_the_suite_exists(self, recipe):
        assert recipe.evaluate.suite in shipped_files("eval")

    def test_its_header_says_what_how_and_on_what(self, recipe):
        assert f"gqaconvert uptrain recipes/{recipe.name}.yaml" in said(recipe)
        assert "Devices: " in said(recipe)

    def test_memory_and_disk_are_what_the_header_says(self, recipe, tmp_path):
        from gqaconvert.training.memory import Devices
        from gqaconvert.training.resources import estimate_resources

        (tmp_path / "config.json").write_text(json.dumps(SOURCES[recipe.source.model]))
        there = load_recipe(recipe.name, [f"source.model={tmp_path}"])
        number = processes(recipe)
        kind = "cpu" if recipe.source.model == "tiny" else "cuda"
        devices = Devices(number, sharded=number > 1, kind=kind)
        resources = estimate_resources(there, devices, None)
        memory_gib = float(re.search(r"about ([\d.]+)\s*GiB", said(recipe))[1])
        disk_gb = float(re.search(r"Disk: about\s+([\d.]+) GB", said(recipe))[1])
        assert resources.memory.total / 2**30 == pytest.approx(memory_gib, rel=0.1)
        disk = resources.disk
        assert (disk.converted + disk.states + disk.export) / 1e9 == pytest.approx(disk_gb, rel=0.1)
        if number > 1:
            assert memory_gib < 0.8 * 80e9 / 2**30

    def test_the_readme_lists_it(self, recipe):
        readme = (ROOT / "recipes" / "README.md").read_text()
        assert f"[{recipe.name}]({recipe.name}.yaml)" in readme


class TestHeaders:
    @pytest.mark.parametrize("name", CONFIGS)
    def test_configs_are_listed_and_open_with_a_header(self, name):
        readme = (ROOT / "configs" / "README.md").read_text()
        assert f"[{name}](accelerate/{name}.yaml)" in readme
        assert f"{name}" in header(CONFIGS[name])

    def test_commands_name_recipes_and_configs_that_exist(self):
        texts = [*RECIPES.values(), *CONFIGS.values()]
        texts += [ROOT / "recipes" / "README.md", ROOT / "configs" / "README.md"]
        found = 0
        for path in texts:
            for named in re.findall(r"(?:recipes|configs/\w+)/[\w.-]+\.yaml", path.read_text()):
                found += 1
                assert (ROOT / named).is_file() or "NAME" in named, f"{path.name}: {named}"
        assert found > 10

    def test_a_wheel_holds_them(self):
        pyproject = (ROOT / "pyproject.toml").read_text()
        for folder, place in (
            ("recipes", "recipes"),
            ("configs/accelerate", "accelerate"),
            ("configs/eval", "eval"),
        ):
            assert f'"{folder}" = "gqaconvert/bundled/{place}"' in pyproject


@pytest.fixture(scope="module", params=CONFIGS)
def launched(request: pytest.FixtureRequest) -> tuple[str, argparse.Namespace]:
    """What `accelerate launch --config_file` makes of a config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser

    words = ["--config_file", str(CONFIGS[request.param]), "script.py"]
    if request.param == "multi_node":
        words = ["--main_process_ip", "10.0.0.1", "--machine_rank", "1", *words]
    arguments, _, _ = _validate_launch_command(launch_command_parser().parse_args(words))
    return request.param, arguments


class TestAccelerateConfigs:
    def test_those_promised_are_there(self):
        assert set(CONFIGS) == {
            "cpu", "single_gpu", "ddp", "fsdp2", "deepspeed_zero3", "multi_node"
        }  # fmt: skip

    def test_accelerate_knows_every_key(self, launched):
        from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
        from accelerate.commands.launch import launch_command_parser

        name, _ = launched
        load_config_from_file(str(CONFIGS[name]))  # refuses unknown keys at the top
        known = vars(launch_command_parser().parse_args(["script.py"]))
        for section, keys in yaml.safe_load(CONFIGS[name].read_text()).items():
            assert section in ClusterConfig.__dataclass_fields__
            # Below the top accelerate takes whatever is written, and drops what it does not know.
            assert set(keys if isinstance(keys, dict) else ()) <= set(known)

    def test_it_launches_what_it_says(self, launched):
        name, arguments = launched
        kind = {
            "cpu": arguments.use_cpu,
            "ddp": arguments.multi_gpu,
            "fsdp2": arguments.use_fsdp,
            "multi_node": arguments.use_fsdp,
            "deepspeed_zero3": arguments.use_deepspeed,
            "single_gpu": not arguments.use_cpu,
        }[name]
        assert kind
        expected = {"cpu": 1, "single_gpu": 1, "multi_node": 16}.get(name, 8)
        assert arguments.num_processes == expected
        assert arguments.num_machines == (2 if name == "multi_node" else 1)
        assert arguments.mixed_precision == ("no" if name == "cpu" else "bf16")

    def test_sharded_ones_become_fsdp2_with_every_layer_wrapped(self, launched, monkeypatch):
        from accelerate.utils import FullyShardedDataParallelPlugin
        from accelerate.utils.launch import prepare_multi_gpu_env

        _, arguments = launched
        if not arguments.use_fsdp:
            pytest.skip("no FSDP config")
        for key, value in prepare_multi_gpu_env(arguments).items():
            monkeypatch.setenv(key, value)
        plugin = FullyShardedDataParallelPlugin()
        assert plugin.fsdp_version == 2
        assert plugin.reshard_after_forward is True
        assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
        assert plugin.transformer_cls_names_to_wrap is None  # the model's class names them
        assert plugin.state_dict_type.name == "SHARDED_STATE_DICT"
        assert plugin.cpu_ram_efficient_loading is False
        assert not plugin.activation_checkpointing

    def test_deepspeed_is_stage_3_without_offload(self, launched):
        name, arguments = launched
        if name != "deepspeed_zero3":
            pytest.skip("no DeepSpeed config")
        assert arguments.zero_stage == 3
        assert arguments.offload_param_device == arguments.offload_optimizer_device == "none"
        assert arguments.gradient_accumulation_steps == "auto"
