"""JSON with bounds: what metadata may state, and what files of other programs have."""

import json

import pytest

from htp_export.files.text_files import read_json
from htp_export.format.json_text import parse_json

LARGE = 1000000000000000019884624838656
"""What transformers writes for a length without a limit: ``int(1e30)``."""


@pytest.mark.parametrize("number", [0, -1, 2**63 - 1, -(2**63)])
def test_integers_of_64_bits_are_read(number):
    assert parse_json(f'{{"a": [{number}]}}') == {"a": [number]}


@pytest.mark.parametrize("number", [str(2**63), str(-(2**63) - 1), str(LARGE), "9" * 5000])
def test_metadata_has_no_larger_integers(number):
    with pytest.raises(ValueError, match=r"is too large|digits"):
        parse_json(f"[{number}]")


def test_files_of_other_programs_have_larger_ones_as_floats(tmp_path):
    file = tmp_path / "config.json"
    file.write_text(
        json.dumps({"model_max_length": LARGE, "seed": 2**64 - 1, "least": -(2**63)}),
        encoding="utf-8",
    )
    assert read_json(file) == {
        "model_max_length": 1e30,
        "seed": float(2**64 - 1),
        "least": -(2**63),
    }
    assert type(read_json(file)["least"]) is int


def test_not_of_any_length():
    with pytest.raises(ValueError, match="a number has 5,000 digits"):
        parse_json("9" * 5000, finite=False)
