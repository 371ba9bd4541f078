"""The notebook: what is stored in it is clean, and (slowly) it runs and says what it claims."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

nbformat = pytest.importorskip("nbformat")

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"
LARGEST_BYTES = 200_000
MEASURED = re.compile(r"^(source|averaged|calibrated|uptrained): ([\d.]+)$", re.MULTILINE)


@pytest.fixture
def notebook() -> Any:
    return nbformat.read(NOTEBOOK, as_version=4)


def printed(notebook: Any) -> str:
    """All that its cells print."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def perplexities(notebook: Any) -> dict[str, float]:
    return {name: float(value) for name, value in MEASURED.findall(printed(notebook))}


def check_what_it_claims(notebook: Any) -> None:
    found = perplexities(notebook)
    assert list(found) == ["source", "averaged", "calibrated", "uptrained"]
    assert found["source"] < found["uptrained"] < found["calibrated"] < found["averaged"]
    assert found["averaged"] > 5 * found["source"]
    assert found["calibrated"] < 2 * found["source"]
    assert "KV heads 8:  256.0 MiB" in printed(notebook)
    assert "KV heads 2:   64.0 MiB" in printed(notebook)
    pictures = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output.output_type == "display_data"
    ]
    assert len(pictures) == 1


def test_it_is_small_and_well_formed(notebook):
    nbformat.validate(notebook)
    assert NOTEBOOK.stat().st_size < LARGEST_BYTES
    assert notebook.metadata.kernelspec.name == "python3"


def test_no_trace_of_a_machine_is_stored(notebook):
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert not re.search(r"/(root|home|Users|work|tmp|var|usr)/", text)
    assert {output.name for cell in notebook.cells for output in cell.get("outputs", ())
            if output.output_type == "stream"} == {"stdout"}  # fmt: skip
    for cell in notebook.cells:
        assert "execution" not in cell.metadata


def test_what_is_stored_is_what_it_claims(notebook):
    check_what_it_claims(notebook)
    counts = [cell.execution_count for cell in notebook.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))


def test_its_lines_fit_a_page_and_compile(notebook):
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert max(map(len, cell.source.splitlines())) <= 120
            compile(cell.source, "cell", "exec")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_runs_and_its_figures_come_out(notebook, tmp_path, monkeypatch):
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    # A kernel of this very Python, whatever kernels are registered elsewhere.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client.NotebookClient(
        notebook,
        timeout=600,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()
    check_what_it_claims(notebook)
    assert list(tmp_path.iterdir()) == []
