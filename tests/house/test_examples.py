"""The scripts in examples/ run by themselves, are short, and print what they promise."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = {
    path.stem: path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if "sys.argv" in path.read_text(encoding="utf-8")
}


def run(name: str, folder: Path) -> str:
    """What an example prints, and its notes of errors if it fails."""
    ended = subprocess.run(
        [sys.executable, SCRIPTS[name], folder],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=600,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_short_says_how_it_is_run_and_is_linked(name):
    text = SCRIPTS[name].read_text(encoding="utf-8")
    assert len(text.splitlines()) < 80
    assert f"    python examples/{name}.py [FOLDER]\n" in text
    assert f"(examples/{name}.py)" in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_all_but_the_head_is_quantized(tmp_path):
    printed = run("quantize_all_but_the_head", tmp_path)
    errors = [float(number) for number in re.findall(r"of the scores ([\d.]+)", printed)]
    assert 0 < errors[1] < errors[0] < 0.1, printed
    rows = {
        line.split()[0]: line.split()[1:]
        for line in printed.splitlines()
        if line.endswith("nodes changed")
    }
    assert rows["head"] == ["fp32", "0", "of", "1", "nodes", "changed"]
    assert rows["encoder.layers.0"][0] == "int8"
    assert {path.name for path in tmp_path.glob("*.onnx")} == {
        "float.onnx",
        "int8.onnx",
        "int8_but_head.onnx",
    }


@pytest.mark.slow
def test_formats_by_module_are_at_least_as_good_as_by_class_at_equal_bits(tmp_path):
    """The table of docs/search.md, and the same sentences about it."""
    printed = run("search_fixed_point", tmp_path)
    trained = float(re.search(r"fp32: ([\d.]+)%", printed)[1])
    rows = {}
    for line in printed.splitlines():
        if line.startswith(("| class |", "| module |")):
            by, sampler, *cells = line.strip("|").split("|")
            rows[by.strip(), sampler.strip()] = [float(cell.strip().rstrip("%")) for cell in cells]
    assert [*rows] == [
        ("class", "grid"),
        ("class", "random"),
        ("class", "tpe"),
        ("module", "random"),
        ("module", "tpe"),
    ]
    for narrow, wide, *_ in rows.values():
        assert narrow < 20 < trained - 0.5 < wide
    for sampler in ("random", "tpe"):
        both = [*zip(rows["class", sampler], rows["module", sampler], strict=True)][2:]
        assert all(by_module > by_class - 0.5 for by_class, by_module in both)
        assert any(by_module > by_class + 1 for by_class, by_module in both)


@pytest.mark.slow
def test_the_wrong_layers_are_found_and_repaired(tmp_path):
    printed = run("find_the_wrong_layer", tmp_path).splitlines()
    assert printed[0].startswith("exported: 26 of 26 modules agree")
    assert [line.partition(";")[0] for line in printed[1:-1]] == [
        "first wrong: 5.up",
        "first wrong: 5.down",
    ]
    assert all(line.endswith("in the file, transposed") for line in printed[1:-1])
    assert printed[-1].startswith("repaired: 26 of 26 modules agree")


@pytest.mark.slow
def test_two_stages_generate_the_tokens_of_pytorch(tmp_path):
    pytest.importorskip("transformers.exporters")
    printed = run("split_a_decoder", tmp_path).splitlines()
    assert printed[0].endswith("transformer.h.0, transformer.h.1; caches of layers 0, 1")
    assert printed[1].startswith("stage 1: transformer.h.2, transformer.h.3")
    assert printed[1].endswith("caches of layers 2, 3")
    stages, pytorch = (line.split(":")[1].split() for line in printed[2:])
    assert stages == pytorch
    assert len(stages) == 4 + 20
    assert (tmp_path / "stages" / "stage1.onnx").exists()


@pytest.mark.slow
def test_the_slowest_blocks_are_printed_and_drawn(tmp_path):
    printed = run("show_the_slowest_blocks", tmp_path).splitlines()
    shares = [
        (line.split(":")[0].strip(), int(re.findall(r"(\d+)% of the time", line)[0]))
        for line in printed[1:-1]
    ]
    assert {path for path, _ in shares} == {f"stages.{number}" for number in range(4)}
    assert [share for _, share in shares] == sorted((share for _, share in shares), reverse=True)
    assert 90 <= sum(share for _, share in shares) <= 101
    assert "stages.0" in (tmp_path / "net.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_smaller_bert_is_found_that_still_classifies(tmp_path):
    pytest.importorskip("optuna")
    printed = run("search_a_small_bert", tmp_path).splitlines()
    before, after = re.findall(r"[\d,]+", printed[-1])[:2]
    assert int(after.replace(",", "")) < int(before.replace(",", ""))
    assert float(re.findall(r"([\d.]+)% right", printed[-1])[0]) > 80
    assert any("on the front" in line for line in printed)
