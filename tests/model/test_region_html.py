"""A region in a notebook: its nodes, and the tensors of its boundary; names are text, never markup."""

import htp_export
from tests.handmade import encoder


def test_a_region_shows_its_nodes_its_inputs_and_its_outputs():
    model = encoder(4)
    region = htp_export.load(model)["layer.0"]
    region.nodes[0].name = "<b>first</b>"
    html = region._repr_html_()
    assert "&lt;b&gt;first&lt;/b&gt;" in html
    assert "<b>first" not in html
    for value in (*region.inputs, *region.outputs):
        assert str(value.name) in html
    assert html.count("<tr>") == len(region.nodes) + 1
