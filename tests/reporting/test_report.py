"""Reports on saved runs: what they say, that they say it again, and what they do without."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser
from pathlib import Path

import pytest
from saved_runs import PERPLEXITY, heads, manifest, write_json, write_run

from gqaconvert.errors import CheckpointError, RefusedError, UsageError
from gqaconvert.reporting.cautions import cautions_of
from gqaconvert.reporting.report import report, write_whole
from gqaconvert.reporting.saved import read_run
from gqaconvert.reporting.subjects import subjects_of
from gqaconvert.reporting.table import main_table
from gqaconvert.reporting.words import summary_of

FIGURES = {
    "memory", "uptraining", "trade-off", "cache-bytes", "latency", "heads-keys", "heads-values",
    "losses",
}  # fmt: skip
_VOID = {"meta", "link", "br", "path", "rect", "use", "image"}


class Page(HTMLParser):
    """What a browser would make of a page: faults in nesting, ids, texts of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.scripts = 0
        self.rows: list[list[str]] = []
        self.titles: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "id" in values:
            self.ids.append(values["id"])
        for key in ("href", "src", "xlink:href"):
            if key in values:
                target = self.links if values[key].startswith("#") else self.addresses
                target.append(values[key])
        self.scripts += tag == "script"
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
            self.titles.append(values.get("title", ""))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in _VOID:
            return
        assert self.open, tag
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, text):
        if {"td", "th"} & set(self.open) and self.rows and self.rows[-1]:
            self.rows[-1][-1] += text


def files(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes()
            for p in sorted(folder.rglob("*")) if p.is_file()}  # fmt: skip


def sheet(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / name).open(encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="module")
def made(run):
    return report([run])


@pytest.fixture(scope="module")
def html(made):
    return (made.folder / "report.html").read_text(encoding="utf-8")


class TestWhole:
    def test_the_same_files_give_the_same_bytes(self, made, tmp_path):
        elsewhere = write_run(tmp_path / "another place")
        again = report([elsewhere], tmp_path / "out")
        assert files(again.folder) == files(made.folder)

    def test_every_figure_is_there_with_a_title_and_words(self, made):
        found = {path.stem: path for path in (made.folder / "figures").glob("*.svg")}
        assert set(found) == FIGURES
        for path in found.values():
            root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
            names = [child.tag.rpartition("}")[2] for child in root[:3]]
            assert names == ["title", "desc", "rect"], path
            assert root[0].text
            assert root[1].text

    def test_the_page_is_well_formed_and_needs_nothing_else(self, html):
        page = Page(html)
        assert len(page.ids) == len(set(page.ids))
        assert {link[1:] for link in page.links} <= set(page.ids)
        assert all(address.startswith("data:") for address in page.addresses)
        assert page.scripts == 0
        assert not re.search(r"https?://|@import|url\((?!#)", html)
        assert html.count("<svg ") == len(FIGURES)

    def test_figures_take_the_colours_of_the_page(self, html):
        assert "currentColor" in html
        for fixed in ("#1a1b1c", "#fefdfc", "#000000"):
            assert fixed not in html

    def test_an_earlier_report_is_replaced_and_nothing_else(self, made, run, tmp_path):
        out = tmp_path / "report"
        shutil.copytree(made.folder, out)
        (out / "old.txt").write_text("stale")
        report([run / "sweep"], out)
        assert not (out / "old.txt").exists()
        assert not (out / "figures/latency.svg").exists()
        assert [path.name for path in tmp_path.iterdir()] == ["report"]

    def test_what_is_no_report_is_kept(self, run, tmp_path):
        other = tmp_path / "thesis"
        other.mkdir()
        (other / "chapter.md").write_text("mine")
        with pytest.raises(RefusedError, match="not a report"):
            report([run], other)
        assert (other / "chapter.md").read_text() == "mine"

    def test_a_crash_leaves_the_earlier_report_whole(self, tmp_path, monkeypatch):
        out = tmp_path / "report"
        write_whole(out, {"report.html": "old", "figures/a.svg": "old"})

        def full(*_args, **_options):
            raise OSError("no space left")

        monkeypatch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="no space"):
            write_whole(out, {"report.html": "new"})
        assert files(out) == {"report.html": b"old", "figures/a.svg": b"old"}

    def test_a_crash_between_two_renames_is_mended(self, tmp_path):
        write_whole(tmp_path / "report", {"report.html": "old"})
        (tmp_path / "report").rename(tmp_path / ".report.replaced")
        write_whole(tmp_path / "report", {"report.html": "new"})
        assert [path.name for path in tmp_path.iterdir()] == ["report"]
        assert (tmp_path / "report/report.html").read_text() == "new"


class TestTable:
    def test_numbers_are_those_that_were_saved(self, made):
        rows = {row["model"]: row for row in sheet(made.folder, "models.csv")}
        assert [row["role"] for row in rows.values()] == ["source", "converted", "uptrained"]
        for model, value in PERPLEXITY.items():
            assert float(rows[model]["perplexity"]) == value
            assert float(rows[model]["perplexity_stderr"]) == value / 16
        assert rows["tiny"]["kl_from_source_nats"] == ""
        assert float(rows["model"]["kl_from_source_nats"]) == 0.75
        assert float(rows["model"]["top1_agreement"]) == 0.625
        assert float(rows["model"]["top1_agreement_stderr"]) == 0.03125
        assert [rows[m]["kv_bytes_per_token"] for m in rows] == ["4096", "1024", "1024"]
        assert [rows[m]["requests_that_fit"] for m in rows] == ["5120", "20480", "20480"]
        assert float(rows["tiny"]["decode_tokens_per_s"]) == 1 / (0.002 + 512 * 8e-6)
        assert rows["model"]["decode_tokens_per_s"] == ""

    def test_the_page_shows_them_with_their_errors(self, html):
        page = Page(html)
        source, converted, uptrained = page.rows[1:4]
        assert source[0] == "Sourcetiny, 8 query, 8 KV heads"
        assert source[5].startswith("17.2 ± 1.1")
        assert converted[2].startswith("1 KiB")
        assert converted[2].endswith("÷4")
        assert "×10.2" in converted[5]
        assert uptrained[7].startswith("62.5 ± 3.1 %")
        assert uptrained[8].startswith("50.0 ± 12.5 %")
        assert source[6].startswith("–")  # its distance from itself is not a measurement
        assert uptrained[9].startswith("–")

    def test_every_number_says_where_it_is_from(self, html):
        page = Page(html)
        told = [title for title in page.titles if title.startswith("25.75")]
        assert len(told) == 2  # over whole windows, and through the ordinary cache
        for word in ("standard error 1.609375", "4 windows of 256 tokens of bundled",
                     "stage evaluate"):  # fmt: skip
            assert word in told[0]
        notes = html[html.index('<ol class="notes">') : html.index("</ol>")]
        for word in ("4 windows of 256 tokens", "the first 10 examples", "on 24 GiB",
                     "Decoding with 512 tokens", "has the same shape"):  # fmt: skip
            assert word in notes

    def test_the_sentence_is_worked_out(self, html):
        lede = re.search(r'<p class="lede">(.*?)</p>', html)[1].replace("\N{NO-BREAK SPACE}", " ")
        for word in ("8 key and value heads", "averaged into 2", "from 4 KiB to 1 KiB a token",
                     "20,480 requests of 1,024 tokens instead of 5,120", "from 17.25 to 176.5",
                     "and to 25.75 after uptraining on 32.8k tokens", "62.5 %"):  # fmt: skip
            assert word in lede, word
        back = (math.log(176.5) - math.log(25.75)) / (math.log(176.5) - math.log(17.25))
        assert f"wins back {100 * back:.0f} %" in lede

    def test_caches_layers_bench_and_losses_are_in_tables(self, made):
        caches = sheet(made.folder, "caches.csv")
        assert len(caches) == 6
        int4 = next(
            r for r in caches if (r["model"], r["cache_kind"]) == ("tiny", "quantised:int4")
        )
        assert float(int4["quality_kept"]) == 0.8
        assert float(int4["share_of_source_bytes"]) == 0.5
        layers = sheet(made.folder, "layers.csv")
        assert {row["series"] for row in layers} == {"keys", "values"}
        assert float(layers[1]["share_lost"]) == 1 - 0.26
        assert len(sheet(made.folder, "bench.csv")) == 4
        losses = sheet(made.folder, "losses.csv")
        assert len(losses) == 11
        assert float(losses[-1]["source_loss_nats"]) == math.log(17.25)

    def test_stages_tell_what_they_came_to(self, html):
        page = Page(html)
        command = "gqaconvert evaluate tiny converted model --results results"
        assert ["evaluate", "two models", "2.5 s", command] in page.rows
        assert "report" not in {row[0] for row in page.rows if row}

    def test_markdown_says_the_same(self, made):
        text = (made.folder / "report.md").read_text(encoding="utf-8")
        assert text.startswith("# A small run\n")
        for word in ("| Uptrained<br>model, 8 query, 2 KV heads |", "25.8 ± 1.6 (×1.49)",
                     "(figures/trade-off.svg)", "`gqaconvert run small`"):  # fmt: skip
            assert word in text, word
        for link in re.findall(r"\]\((.*?)\)", text):
            assert (made.folder / link).is_file()


def cautions(folder: Path) -> list[str]:
    subjects = subjects_of(read_run(folder))
    return cautions_of(subjects, main_table(subjects))


class TestCautions:
    def test_collapse_is_told(self, made):
        assert any("converted (small) is 10.2" in each for each in made.warnings)
        assert not any("model (small) is" in each for each in made.warnings)

    def test_other_settings_are_told(self, tmp_path):
        folder = write_run(tmp_path / "run")
        path = folder / "results/model/perplexity.json"
        content = json.loads(path.read_text())
        content["settings"]["context"] = 512
        write_json(path, content)
        assert any("perplexity of tiny" in each and "context 256 and 512" in each
                   for each in cautions(folder))  # fmt: skip
        # A ratio of the two would mean nothing.
        run = read_run(folder)
        assert "wins back" not in summary_of(run, subjects_of(run))

    def test_results_of_other_weights_are_told(self, tmp_path):
        folder = write_run(tmp_path / "run")
        path = folder / "results/model/perplexity.json"
        content = json.loads(path.read_text())
        content["weights_sha256"] = "e" * 64
        write_json(path, content)
        assert any("model" in each and "eeeeeeeeeeee (perplexity)" in each
                   for each in cautions(folder))  # fmt: skip

    def test_notes_of_the_bench_are_told(self, run):
        assert "bench: a note of the bench" in cautions(run)


class TestPieces:
    @pytest.mark.parametrize(
        ("part", "names"),
        [
            ("results", {"models.csv", "caches.csv"}),
            ("bench", {"models.csv", "bench.csv"}),
            ("sweep", {"models.csv"}),
        ],
    )
    def test_a_folder_of_one_verb_is_enough(self, run, tmp_path, part, names):
        done = report([run / part], tmp_path / "out")
        assert {path.name for path in (done.folder / "tables").iterdir()} == names
        Page((done.folder / "report.html").read_text(encoding="utf-8"))

    def test_the_baseline_is_known_without_roles(self, run, tmp_path):
        done = report([run / "results"], tmp_path / "out")
        rows = sheet(done.folder, "models.csv")
        assert [row["model"] for row in rows] == ["tiny", "converted", "model"]
        assert "×10.2" in (done.folder / "report.md").read_text(encoding="utf-8")

    def test_a_hub_id_is_one_model_though_its_folder_has_no_slash(self, run, tmp_path):
        store = tmp_path / "results"
        for old, new in (("tiny", "org-tiny"), ("model", "model")):
            for path in (run / "results" / old).iterdir():
                text = path.read_text().replace('"source": "tiny"', '"source": "org/tiny"')
                (store / new).mkdir(parents=True, exist_ok=True)
                (store / new / path.name).write_text(text)
        subjects = subjects_of(read_run(store))
        assert [(each.model, each.is_baseline) for each in subjects] == [
            ("org/tiny", True), ("model", False),
        ]  # fmt: skip
        assert subjects[0].value("perplexity") == PERPLEXITY["tiny"]

    def test_what_is_missing_is_named_with_its_reason(self, tmp_path):
        folder = write_run(tmp_path / "run")
        for name in ("estimate.json", "heads.json", "metrics.jsonl", "bench/bench.json"):
            (folder / name).unlink()
        text = (report([folder]).folder / "report.md").read_text(encoding="utf-8")
        for word in ("metrics.jsonl", "bench.json", "heads.json", "no estimate was saved"):
            assert word in text.replace("\\", ""), word
        assert "| 0 |" not in text

    def test_a_pipeline_alone_makes_a_report(self, tmp_path):
        folder = write_run(tmp_path / "run")
        alone = tmp_path / "alone"
        write_json(alone / "pipeline.json", json.loads((folder / "pipeline.json").read_text()))
        done = report([alone])
        assert (done.folder / "report.html").is_file()

    def test_losses_of_a_calibrated_conversion_are_those_recorded(self, tmp_path):
        folder = write_run(tmp_path / "run")
        layers = [
            {"module": f"layers.{n}", "layer": n, "key_energy_lost": 0.125 * n,
             "value_energy_lost": 0.25, "output_error": 0.5 if n else None}
            for n in range(2)
        ]  # fmt: skip
        write_json(folder / "converted/gqaconvert.json", manifest("svd", layers=layers))
        rows = sheet(report([folder]).folder, "layers.csv")
        found = {(row["layer"], row["series"]): row["share_lost"] for row in rows}
        assert found["1", "keys"] == "0.125"
        assert found["1", "attention output"] == "0.5"
        assert found["0", "attention output"] == ""

    def test_thirty_layers_of_three_heads(self, tmp_path):
        folder = write_run(tmp_path / "run")
        write_json(folder / "heads.json", heads(30, 3))
        for part in ("results", "bench", "sweep"):
            shutil.rmtree(folder / part)
        done = report([folder])
        drawn = (done.folder / "figures/heads-keys.svg").read_text(encoding="utf-8")
        for label in (">28<", ">1–2<", ">keys, as they are<"):
            assert label in drawn, label
        assert len(sheet(done.folder, "layers.csv")) == 60

    def test_perplexity_beyond_bounds_is_shown_as_such(self, tmp_path):
        folder = write_run(tmp_path / "run")
        path = folder / "results/converted/perplexity.json"
        content = json.loads(path.read_text())
        content["value"], content["stderr"] = math.inf, None
        write_json(path, content)
        text = (report([folder / "results"]).folder / "report.md").read_text(encoding="utf-8")
        assert "∞" in text


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    base = tmp_path_factory.mktemp("both")
    first = write_run(base / "first", "first")
    second = write_run(base / "second", "second")
    path = second / "results/model/perplexity.json"
    content = json.loads(path.read_text())
    content["value"] = 20.0
    write_json(path, content)
    return report([first, second], base / "out")


class TestComparison:
    def test_rows_are_grouped_by_run(self, both):
        rows = sheet(both.folder, "models.csv")
        assert [row["run"] for row in rows] == ["first"] * 3 + ["second"] * 3
        assert [float(row["perplexity"]) for row in rows][2::3] == [25.75, 20.0]
        page = Page((both.folder / "report.html").read_text(encoding="utf-8"))
        assert ["first"] in page.rows
        assert ["second"] in page.rows
        assert len(page.ids) == len(set(page.ids))

    def test_figures_hold_both(self, both):
        for name in ("trade-off", "uptraining", "memory"):
            text = (both.folder / f"figures/{name}.svg").read_text(encoding="utf-8")
            assert "first" in text, name
            assert "second" in text, name
        assert (both.folder / "figures/latency-2.svg").is_file()

    def test_runs_of_one_recipe_are_called_by_their_folders(self, run, tmp_path):
        slower = tmp_path / "a slower one with a name that no line of a legend has room for"
        shutil.copytree(run, slower)
        done = report([run, slower], tmp_path / "out")
        names = {row["run"] for row in sheet(done.folder, "models.csv")}
        assert names == {run.name, slower.name}
        drawn = (done.folder / "figures/memory.svg").read_text(encoding="utf-8")
        texts = re.findall(r"<(?:text|tspan)[^>]*>([^<]+)<", drawn)
        assert any("a slower one" in text for text in texts)
        assert max(map(len, texts)) <= 62

    def test_runs_of_one_name_are_told_apart(self, run, tmp_path):
        bench = run / "bench"
        write_json(tmp_path / "bench/bench.json", json.loads((bench / "bench.json").read_text()))
        done = report([bench, tmp_path / "bench"], tmp_path / "out")
        assert {row["run"] for row in sheet(done.folder, "models.csv")} == {"bench", "bench (2)"}


class TestBadInput:
    def test_names_and_titles_are_not_trusted(self, tmp_path):
        folder = write_run(tmp_path / "run")
        hostile = "</title><script>alert(1)</script> | [x](javascript:1) \"' & <img src=x>"
        done = report([folder], title=hostile)
        html = (done.folder / "report.html").read_text(encoding="utf-8")
        page = Page(html)
        assert page.scripts == 0
        assert "<img" not in html
        text = (done.folder / "report.md").read_text(encoding="utf-8")
        assert "<script" not in text.replace("\\<", "")

    def test_hostile_model_names_stay_text(self, tmp_path):
        folder = write_run(tmp_path / "run")
        content = json.loads((folder / "bench/bench.json").read_text())
        bad = "<b onmouseover=alert(1)>$x_$|"
        for each in (*content["models"], *content["rows"]):
            key = "name" if "name" in each else "model"
            if each[key] == "converted":
                each[key] = bad
                if "label" in each:
                    each["label"] = bad
        write_json(folder / "bench/bench.json", content)
        done = report([folder])
        html = (done.folder / "report.html").read_text(encoding="utf-8")
        Page(html)
        assert "<b onmouseover" not in html
        ElementTree.fromstring((done.folder / "figures/latency.svg").read_text(encoding="utf-8"))

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("results/model/perplexity.json", "{"),
            ("results/model/perplexity.json", '{"metric": "perplexity"}'),
            ("bench/bench.json", '{"rows": []}'),
            ("estimate.json", "{}"),
            ("heads.json", "[1]"),
            ("pipeline.json", '{"name": 3}'),
            ("metrics.jsonl", '{"kind": "step"\n{"kind": "step", "tokens": 1}\n'),
            ("converted/gqaconvert.json", '{"plan": null}'),
        ],
    )
    def test_damage_is_named_with_its_file(self, tmp_path, name, text):
        folder = write_run(tmp_path / "run")
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError) as error:
            report([folder])
        assert error.value.at == str(folder / name)
        assert error.value.remedy
        assert not (folder / "report").exists()

    def test_a_torn_last_line_of_metrics_is_left_out(self, tmp_path):
        folder = write_run(tmp_path / "run")
        with (folder / "metrics.jsonl").open("a") as stream:
            stream.write('{"kind": "st')
        assert len(sheet(report([folder]).folder, "losses.csv")) == 11

    def test_nothing_to_report_on_says_what_was_looked_for(self, tmp_path):
        write_json(tmp_path / "converted/config.json", {"model_type": "llama"})
        with pytest.raises(UsageError, match="nothing here") as error:
            report([tmp_path])
        assert "pipeline.json" in error.value.remedy
        with pytest.raises(UsageError, match="no such folder"):
            report([tmp_path / "nowhere"])
