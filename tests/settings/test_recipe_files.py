"""Recipes by name and path, resolved and described; budgets in steps."""

from __future__ import annotations

import pytest

from gqaconvert.errors import UsageError
from gqaconvert.settings import shipped
from gqaconvert.settings.budget import total_steps, total_tokens
from gqaconvert.settings.recipe import Recipe
from gqaconvert.settings.recipes import (
    accelerate_config,
    find_recipe,
    load_recipe,
    recipe_files,
    recipe_schema,
    recipe_summary,
    resolved_yaml,
)
from gqaconvert.settings.shipped import shipped_files


def recipe_with(budget: dict[str, float], batch_tokens: int = 1024, **source: object) -> Recipe:
    return Recipe.model_validate(
        {
            "version": 1,
            "source": {"model": "tiny", **source},
            "convert": {"kv_heads": 2},
            "uptrain": {
                "data": {"datasets": [{"path": "bundled"}]},
                "budget": budget,
                "batch_tokens": batch_tokens,
                "lr": 1e-3,
            },
        }
    )


class TestFinding:
    def test_by_name_and_by_path(self, tmp_path):
        assert find_recipe("tiny-cpu") == recipe_files()["tiny-cpu"]
        mine = tmp_path / "mine.yaml"
        mine.write_text("version: 1")
        assert find_recipe(str(mine)) == mine
        assert accelerate_config("fsdp2") == shipped_files("accelerate")["fsdp2"]

    def test_a_file_of_that_name_wins(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "tiny-cpu").write_text("version: 1")
        assert find_recipe("tiny-cpu").resolve() == tmp_path / "tiny-cpu"

    def test_unknown_names_say_which_there_are(self):
        with pytest.raises(UsageError, match="no recipe 'tiny-cpuu'; tiny-cpu\\?") as refusal:
            find_recipe("tiny-cpuu")
        assert "llama2-7b-gqa8" in str(refusal.value.remedy)
        with pytest.raises(UsageError, match="no accelerate config 'fsdp'; fsdp2\\?"):
            accelerate_config("fsdp")

    def test_a_path_that_is_nowhere_offers_the_name(self, tmp_path):
        with pytest.raises(UsageError, match="no such file") as refusal:
            find_recipe(str(tmp_path / "recipes" / "tiny-cpu.yaml"))
        assert refusal.value.remedy == "tiny-cpu"

    def test_an_installed_package_uses_only_its_own_files(self, tmp_path, monkeypatch):
        package = tmp_path / "site-packages" / "gqaconvert"
        bundled = package / "bundled" / "recipes"
        bundled.mkdir(parents=True)
        (bundled / "mine.yaml").write_text("version: 1")
        (tmp_path / "site-packages" / "recipes").mkdir()  # of another package
        (tmp_path / "site-packages" / "recipes" / "cake.yaml").write_text("flour: 1")
        monkeypatch.setattr(shipped, "_PACKAGE", package)
        assert list(shipped_files("recipes")) == ["mine"]


class TestLoading:
    def test_the_name_is_that_of_the_file_unless_written(self, tmp_path):
        assert load_recipe("tiny-cpu").name == "tiny-cpu"
        copy = tmp_path / "copy.yaml"
        copy.write_text(recipe_files()["tiny-cpu"].read_text())
        assert load_recipe(copy).name == "copy"
        assert load_recipe(copy, ["name=mine"]).name == "mine"

    def test_a_file_that_cannot_name_a_folder_is_refused(self, tmp_path):
        copy = tmp_path / "my recipe.yaml"
        copy.write_text(recipe_files()["tiny-cpu"].read_text())
        with pytest.raises(UsageError, match="name: string should match") as refusal:
            load_recipe(copy)
        assert "name:" in str(refusal.value.remedy)
        assert load_recipe(copy, ["name=mine"]).name == "mine"

    @pytest.mark.parametrize("name", ["../x", "a/b", ".hidden", ""])
    def test_a_name_leads_nowhere_else(self, name):
        with pytest.raises(UsageError, match="name: string should match"):
            load_recipe("tiny-cpu", [f"name='{name}'"])

    @pytest.mark.parametrize("name", recipe_files())
    def test_resolved_it_is_the_same_recipe(self, tmp_path, name):
        recipe = load_recipe(name, ["uptrain.eps=1e-9", "source.revision='1e10'"])
        (tmp_path / "resolved.yaml").write_text(resolved_yaml(recipe))
        assert load_recipe(tmp_path / "resolved.yaml") == recipe


class TestBudget:
    @pytest.mark.parametrize(
        ("budget", "steps"),
        [
            ({"steps": 7}, 7),
            ({"tokens": 1024}, 1),
            ({"tokens": 1025}, 2),
            ({"tokens": 0.5}, 1),
            ({"alpha": 0.07}, 7),  # 0.07 × 102400 is 7168.000000000001 in floats
        ],
    )
    def test_steps_are_rounded_up(self, budget, steps):
        recipe = recipe_with(budget, pretraining_tokens=102400)
        assert total_steps(recipe) == steps
        assert total_tokens(recipe) == steps * 1024

    def test_alpha_as_in_the_paper(self):
        recipe = recipe_with({"alpha": 0.05}, batch_tokens=2**22, pretraining_tokens=2e12)
        assert total_steps(recipe) == 23842  # 1e11 / 4194304 = 23841.9

    def test_nothing_to_train(self):
        recipe = recipe_with({"steps": 7}).model_copy(update={"uptrain": None})
        assert total_steps(recipe) == total_tokens(recipe) == 0


class TestDescription:
    def test_the_schema_explains_every_key(self):
        schema = recipe_schema()
        sections = [schema, *schema["$defs"].values()]
        assert len(sections) > 10
        for section in sections:
            assert section["additionalProperties"] is False
            assert "Attributes" not in section["description"]
            for name, key in section["properties"].items():
                assert key.get("description"), f"{section['title']}.{name}"
        precision = schema["$defs"]["UptrainSettings"]["properties"]["precision"]["description"]
        assert precision.startswith('"bf16" computes in bfloat16')
        assert precision.endswith("holds all in bfloat16.")

    def test_a_summary_is_the_first_line(self, tmp_path):
        path = tmp_path / "x.yaml"
        path.write_text("# What it is.\n# More.\nversion: 1\n")
        assert recipe_summary(path) == "What it is."
        path.write_text("version: 1\n")
        assert recipe_summary(path) == ""
