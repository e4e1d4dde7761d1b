"""A region in a notebook: its nodes, and the tensors of its boundary; names are text, never markup."""

import copy

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


def test_a_deep_copy_of_regions_is_of_one_copy_of_the_model():
    tagged = htp_export.load(encoder(4))
    regions = {path: tagged[path] for path in ("layer.0", "layer.1")}
    copied = copy.deepcopy(regions)
    for path, region in regions.items():
        names = [node.name for node in region.nodes]
        assert [node.name for node in copied[path].nodes] == names
        assert [value.name for value in copied[path].inputs] == [
            each.name for each in region.inputs
        ]
        assert not set(copied[path].nodes) & set(region.nodes)
    assert len({node.graph for region in copied.values() for node in region.nodes}) == 1
