"""Random faults for `tools/fuzz.py`: one to three in the bytes or the fields of a model.

Every fault is one that has been seen in files, or that a file from elsewhere may have.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import onnx
from google.protobuf.message import DecodeError
from onnx import AttributeProto, TensorProto, helper

__all__ = ["BOMB", "mutated"]

BOMB = b"bomb_size"
"""What stands in a file that asks for very many values, or for a loop without end."""

_HOSTILE = (
    "",
    " ",
    "/etc/passwd",
    "../../x.data",
    "a\0b",
    "\x1b[31mred\x1b[0m\x1b]0;title\x07",
    "\x9b2J\x85",
    "\u202eevil\u2066\u200f",
    "line\nbreak\r\t",
    "..",
    "a..b",
    "." * 2000,
    "n" * 100_000,
    "<script>alert(1)</script>",
    "[red]x[/red]",
    "folder",
    "pipe",
    "%s{0}",
)
_NUMBERS = (-(1 << 63), -1, 0, 1, 7, 255, 1 << 31, 300_000_000, 10**12, (1 << 63) - 1)
_TEXTS = (
    "",
    "[",
    "[" * 100_000,
    '{"a":' * 20_000,
    "null",
    "[]",
    "{}",
    "1",
    "1" * 5000,
    "-1",
    "NaN",
    "1e999",
    '"\\ud800"',
    '{"": {"class": "\\ud800", "calls": 1, "fate": "computed"}, "\\udfff": {"class": "", "calls": 1, "fate": "dead"}}',
    '{"": {"class": "net.Net", "calls": 1000000000000, "fate": "computed"}}',
    '{"": 3}',
    '[["a", 0]]',
    "\u0663",
)
_TEXT = "a name of the model"


def mutated(proto: onnx.ModelProto, chance: random.Random) -> bytes:
    """The bytes of a model with faults.

    Args:
        proto: The model; it is not changed.
        chance: Where randomness comes from: the same state gives the same bytes.
    """
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    if chance.random() < 0.8:
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            fault = chance.choice(_FAULTS)
            try:
                fault(copy, chance)
            except (
                IndexError,
                ValueError,
                TypeError,
                DecodeError,
            ):  # no such place, or protobuf refuses it
                continue
        data = copy.SerializeToString()
        return data if chance.random() < 0.9 else _bytes(data, chance)
    return _bytes(copy.SerializeToString(), chance)


def _bytes(data: bytes, chance: random.Random) -> bytes:
    """Bytes changed without a look at what they mean."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at, length = chance.randrange(len(changed)), chance.randint(1, 40)
        match chance.randrange(6):
            case 0:
                changed[at] ^= 1 << chance.randrange(8)
            case 1:
                changed[at] = chance.choice((0, 0x7F, 0x80, 0xFF))
            case 2:
                del changed[at : at + length]
            case 3:
                changed[at:at] = chance.randbytes(length)
            case 4:
                changed[at:at] = changed[at : at + length]
            case 5:
                if chance.random() < 0.1:
                    del changed[max(at, 1) :]
                else:
                    changed[at] = 0xFF
        if not changed:
            return b"\0"
    return bytes(changed)


# --- places ---------------------------------------------------------------------------------------------------


def _graphs(proto: onnx.ModelProto) -> list[onnx.GraphProto]:
    found, waiting = list[onnx.GraphProto](), [proto.graph]
    while waiting:
        graph = waiting.pop()
        found.append(graph)
        waiting += [
            each.g
            for node in graph.node
            for each in node.attribute
            if each.type == AttributeProto.GRAPH
        ]
    return found


def _graph(proto: onnx.ModelProto, chance: random.Random) -> onnx.GraphProto:
    return chance.choice(_graphs(proto))


def _nodes(proto: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [
        *(node for graph in _graphs(proto) for node in graph.node),
        *(n for f in proto.functions for n in f.node),
    ]


def _node(proto: onnx.ModelProto, chance: random.Random) -> onnx.NodeProto:
    return chance.choice(_nodes(proto))


def _tensor(proto: onnx.ModelProto, chance: random.Random) -> onnx.TensorProto:
    tensors = [tensor for graph in _graphs(proto) for tensor in graph.initializer]
    tensors += [
        each.t
        for node in _nodes(proto)
        for each in node.attribute
        if each.type == AttributeProto.TENSOR
    ]
    return chance.choice(tensors)


def _typed(proto: onnx.ModelProto, chance: random.Random) -> onnx.ValueInfoProto:
    return chance.choice([v for g in _graphs(proto) for v in (*g.input, *g.output, *g.value_info)])


def _name(proto: onnx.ModelProto, chance: random.Random) -> str:
    """A name: of a tensor of the model, or one that nobody should have."""
    names = [name for node in _nodes(proto) for name in (*node.input, *node.output)]
    return chance.choice(names) if names and chance.random() < 0.5 else chance.choice(_HOSTILE)


# --- faults ---------------------------------------------------------------------------------------------------


def _renames_an_output(proto: onnx.ModelProto, chance: random.Random) -> None:
    outputs = _node(proto, chance).output
    outputs[chance.randrange(len(outputs))] = _name(proto, chance)


def _renames_an_input(proto: onnx.ModelProto, chance: random.Random) -> None:
    inputs = _node(proto, chance).input
    inputs[chance.randrange(len(inputs))] = _name(proto, chance)


def _renames_everywhere(proto: onnx.ModelProto, chance: random.Random) -> None:
    """A name that is strange, but the same wherever it stands."""
    old, new = (
        chance.choice([name for node in _nodes(proto) for name in node.output]),
        chance.choice(_HOSTILE),
    )
    for node in _nodes(proto):
        for names in (node.input, node.output):
            names[:] = [new if name == old else name for name in names]
    for graph in _graphs(proto):
        for named in (*graph.output, *graph.input, *graph.value_info, *graph.initializer):
            named.name = new if named.name == old else named.name


def _changes_how_many(proto: onnx.ModelProto, chance: random.Random) -> None:
    node = _node(proto, chance)
    names = chance.choice((node.input, node.output))
    if chance.random() < 0.6:
        del names[chance.randrange(len(names))]
    else:
        names.extend([_name(proto, chance)] * chance.choice((1, 1, 50)))


def _empties_a_node(proto: onnx.ModelProto, chance: random.Random) -> None:
    node = _node(proto, chance)
    node.ClearField(
        chance.choice(("input", "output", "attribute", "op_type", "name", "metadata_props"))
    )


def _changes_the_operator(proto: onnx.ModelProto, chance: random.Random) -> None:
    node, other = _node(proto, chance), _node(proto, chance)
    node.op_type = chance.choice(
        (other.op_type, "Transpose", "Concat", "Loop", "If", "Split", "NoSuch", *_HOSTILE)
    )
    if chance.random() < 0.3:
        node.domain = chance.choice(
            ("ai.onnx", "com.microsoft", "pkg", "htp", other.domain, *_HOSTILE)
        )


def _renames_a_node(proto: onnx.ModelProto, chance: random.Random) -> None:
    _node(proto, chance).name = chance.choice((_node(proto, chance).name, *_HOSTILE))


def _moves_nodes(proto: onnx.ModelProto, chance: random.Random) -> None:
    nodes = _graph(proto, chance).node
    shuffled = list(nodes)
    match chance.randrange(4):
        case 0:
            chance.shuffle(shuffled)
        case 1:
            del shuffled[chance.randrange(len(shuffled))]
        case 2:
            shuffled.append(chance.choice(shuffled))
        case 3:
            shuffled.insert(0, shuffled.pop())
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in shuffled]
    del nodes[:]
    nodes.extend(kept)


def _makes_a_cycle(proto: onnx.ModelProto, chance: random.Random) -> None:
    nodes = _graph(proto, chance).node
    first, last = sorted((chance.randrange(len(nodes)), chance.randrange(len(nodes))))
    nodes[first].input[chance.randrange(len(nodes[first].input))] = chance.choice(
        nodes[last].output
    )


def _changes_an_attribute(proto: onnx.ModelProto, chance: random.Random) -> None:
    holding = [node for node in _nodes(proto) if node.attribute]
    node = chance.choice(holding)
    attribute = chance.choice(node.attribute)
    match chance.randrange(7):
        case 0:
            attribute.type = chance.choice(AttributeProto.AttributeType.values())
        case 1:
            value: Any = chance.choice(
                (
                    [],
                    [1, -1],
                    [1.5],
                    ["text"],
                    3,
                    -1,
                    2.5,
                    "text",
                    [10**12],
                    b"\xff\xfe",
                    float("nan"),
                )
            )
            name = attribute.name
            attribute.CopyFrom(
                helper.make_attribute(
                    name, value, attr_type=AttributeProto.INTS if value == [] else None
                )
            )
        case 2:
            attribute.ref_attr_name = chance.choice(("alpha", *_HOSTILE))
        case 3:
            attribute.name = chance.choice(("axis", "perm", "to", "value", "body", *_HOSTILE))
        case 4:
            node.attribute.append(attribute)
        case 5:
            attribute.i = chance.choice(_NUMBERS)
            attribute.ints[:] = [chance.choice(_NUMBERS) for _ in range(chance.randrange(5))]
        case 6:
            node.attribute.remove(attribute)


def _adds_an_attribute(proto: onnx.ModelProto, chance: random.Random) -> None:
    name = chance.choice(
        (
            "axis",
            "axes",
            "perm",
            "to",
            "keepdims",
            "epsilon",
            "shape",
            "value",
            "group",
            "alpha",
            "mode",
        )
    )
    _node(proto, chance).attribute.append(
        helper.make_attribute(name, chance.choice((1, 1.5, "text", [1, 2], [0.5])))
    )


def _nests_graphs(proto: onnx.ModelProto, chance: random.Random) -> None:
    graph = helper.make_graph([], "deepest", [], [])
    # protobuf reads no more than 100 messages in each other
    for level in range(chance.choice((3, 15, 30))):
        node = helper.make_node("If", ["condition"], [f"out_{level}"])
        node.attribute.append(
            AttributeProto(name="then_branch", type=AttributeProto.GRAPH, g=graph)
        )
        node.attribute.append(AttributeProto(name="else_branch", type=AttributeProto.GRAPH))
        graph = onnx.GraphProto(name="branch", node=[node])
    _graph(proto, chance).node.extend(graph.node)


def _changes_a_tensor(proto: onnx.ModelProto, chance: random.Random) -> None:
    tensor = _tensor(proto, chance)
    match chance.randrange(7):
        case 0:
            tensor.data_type = chance.choice((*range(30), 999, -1))
        case 1:
            tensor.dims[:] = [chance.choice(_NUMBERS) for _ in range(chance.randrange(5))]
        case 2:
            tensor.raw_data = tensor.raw_data[: chance.randrange(len(tensor.raw_data) + 1)]
        case 3:
            tensor.name = _name(proto, chance)
        case 4:
            tensor.ClearField(chance.choice(("raw_data", "dims", "data_type", "name")))
        case 5:
            tensor.string_data.append(b"\xff")
        case 6:
            tensor.raw_data = b"\xff" * len(tensor.raw_data)


def _moves_data_out(proto: onnx.ModelProto, chance: random.Random) -> None:
    tensor = _tensor(proto, chance)
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    del tensor.external_data[:]
    entries = {
        "location": chance.choice(
            ("weights.data", "pipe", "folder", "model.onnx", "gone", *_HOSTILE)
        ),
        "offset": str(chance.choice((0, 4, 3, *_NUMBERS))),
        "length": str(chance.choice((4, 8, 256, *_NUMBERS))),
    }
    for key, value in entries.items():
        if chance.random() < 0.8:
            tensor.external_data.add(
                key=key, value=chance.choice((value, value, value, value, "abc", "1.5", ""))
            )


def _changes_a_type(proto: onnx.ModelProto, chance: random.Random) -> None:
    info = _typed(proto, chance)
    match chance.randrange(7):
        case 0:
            info.type.tensor_type.elem_type = chance.choice((*range(30), 999, -1))
        case 1:
            del info.type.tensor_type.shape.dim[:]
            for number in (chance.choice(_NUMBERS) for _ in range(chance.randrange(6))):
                info.type.tensor_type.shape.dim.add(dim_value=number)
        case 2:
            info.ClearField("type")
        case 3:
            info.name = _name(proto, chance)
        case 4:
            for _ in range(chance.randrange(3)):
                inner = onnx.TypeProto.FromString(info.type.SerializeToString())
                info.type.sequence_type.elem_type.CopyFrom(inner)
        case 5:
            info.type.tensor_type.shape.dim.add(dim_param=chance.choice(_HOSTILE))
        case 6:
            info.type.map_type.key_type = chance.choice((1, 7, 8, 99))


def _changes_the_ends(proto: onnx.ModelProto, chance: random.Random) -> None:
    graph = _graph(proto, chance)
    values = chance.choice((graph.input, graph.output, graph.initializer))
    match chance.randrange(3):
        case 0:
            del values[chance.randrange(len(values))]
        case 1:
            values.append(chance.choice(values))
        case 2:
            graph.output.add(name=_name(proto, chance))


def _changes_imports(proto: onnx.ModelProto, chance: random.Random) -> None:
    match chance.randrange(5):
        case 0:
            del proto.opset_import[:]
        case 1:
            chance.choice(proto.opset_import).version = chance.choice((*_NUMBERS, 6, 9, 13, 999))
        case 2:
            proto.opset_import.add(
                domain=chance.choice(("", "ai.onnx", "htp", *_HOSTILE)), version=1
            )
        case 3:
            proto.ir_version = chance.choice((1, 3, 4, 7, 13, 99, 1 << 40))
        case 4:
            proto.graph.name = chance.choice(_HOSTILE)


def _changes_a_function(proto: onnx.ModelProto, chance: random.Random) -> None:
    function = chance.choice(proto.functions)
    match chance.randrange(6):
        case 0:  # it calls itself
            node = chance.choice(function.node)
            node.op_type, node.domain = function.name, function.domain
        case 1:
            function.ClearField(
                chance.choice(("input", "output", "node", "opset_import", "name", "domain"))
            )
        case 2:
            function.name = chance.choice((chance.choice(proto.functions).name, "Relu", *_HOSTILE))
        case 3:
            proto.functions.append(function)
        case 4:
            names = chance.choice((function.input, function.output))
            names[chance.randrange(len(names))] = _name(proto, chance)
        case 5:
            proto.functions.remove(function)


def _changes_metadata(proto: onnx.ModelProto, chance: random.Random) -> None:
    entry = chance.choice(proto.metadata_props)
    match chance.randrange(4):
        case 0:
            entry.value = chance.choice(_TEXTS)
        case 1 | 2:
            entry.value = json.dumps(_other(json.loads(entry.value), chance))
        case 3:
            entry.key = chance.choice((*(each.key for each in proto.metadata_props), *_HOSTILE))


def _changes_tags(proto: onnx.ModelProto, chance: random.Random) -> None:
    node = chance.choice([node for node in _nodes(proto) if node.metadata_props])
    entry = chance.choice(node.metadata_props)
    if chance.random() < 0.3:
        entry.key = chance.choice(
            ("htp.owners", "htp.calls", "htp.call", "htp.module", "htp.reason", "namespace")
        )
    entry.value = chance.choice(
        (*_TEXTS, *_HOSTILE, '["", "layer"]', "999999999999", '{"layer":[999999999999]}')
    )


def _adds_a_bomb(proto: onnx.ModelProto, chance: random.Random) -> None:
    """A few bytes that compute very many."""
    size = chance.choice((300_000_000, 10**12, 70_000))
    number = helper.make_tensor("bomb_size", TensorProto.INT64, [1], [size])
    scalar = helper.make_tensor("bomb_scalar", TensorProto.INT64, [], [size])
    zero, one = (helper.make_tensor(f"bomb_{n}", TensorProto.INT64, [], [n]) for n in (0, 1))
    match chance.randrange(5):
        case 0:
            nodes = [helper.make_node("ConstantOfShape", ["bomb_size"], ["bomb"])]
        case 1:
            nodes = [helper.make_node("Range", ["bomb_0", "bomb_scalar", "bomb_1"], ["bomb"])]
        case 2:
            nodes = [helper.make_node("Expand", ["bomb_scalar", "bomb_size"], ["bomb"])]
        case 3:
            nodes = [helper.make_node("Tile", ["bomb_size", "bomb_size"], ["bomb"])]
        case _:
            body = helper.make_graph(
                [
                    helper.make_node("Identity", ["c"], ["d"]),
                    helper.make_node("Add", ["s", "bomb_1"], ["t"]),
                ],
                "body",
                [
                    helper.make_tensor_value_info("i", TensorProto.INT64, []),
                    helper.make_tensor_value_info("c", TensorProto.BOOL, []),
                    helper.make_tensor_value_info("s", TensorProto.INT64, []),
                ],
                [
                    helper.make_tensor_value_info("d", TensorProto.BOOL, []),
                    helper.make_tensor_value_info("t", TensorProto.INT64, []),
                ],
            )
            nodes = [helper.make_node("Loop", ["bomb_scalar", "", "bomb_0"], ["bomb"], body=body)]
    nodes.append(helper.make_node("ReduceSum", ["bomb"], ["bomb_sum"], keepdims=0))
    proto.graph.initializer.extend((number, scalar, zero, one))
    proto.graph.node.extend(nodes)
    proto.graph.output.add(name="bomb_sum").type.tensor_type.elem_type = TensorProto.INT64


def _other(data: Any, chance: random.Random) -> Any:
    """JSON in which one thing is another one."""
    if isinstance(data, dict) and data and chance.random() < 0.85:
        key = chance.choice(list(data))
        if chance.random() < 0.2:
            return {
                chance.choice(_HOSTILE) if name == key else name: value
                for name, value in data.items()
            }
        return {**data, key: _other(data[key], chance)}
    if isinstance(data, list) and data and chance.random() < 0.85:
        at = chance.randrange(len(data))
        return [*data[:at], _other(data[at], chance), *data[at + 1 :]]
    return chance.choice(
        (None, True, -1, 0, 10**12, 1.5, "", _TEXT, [], {}, [[]], {"": []}, *_HOSTILE)
    )


_FAULTS: tuple[Callable[[onnx.ModelProto, random.Random], None], ...] = (
    _renames_an_output,
    _renames_an_input,
    _renames_everywhere,
    _changes_how_many,
    _empties_a_node,
    _changes_the_operator,
    _renames_a_node,
    _moves_nodes,
    _makes_a_cycle,
    _changes_an_attribute,
    _changes_an_attribute,
    _adds_an_attribute,
    _nests_graphs,
    _changes_a_tensor,
    _changes_a_tensor,
    _moves_data_out,
    _changes_a_type,
    _changes_a_type,
    _changes_the_ends,
    _changes_imports,
    _changes_a_function,
    _changes_metadata,
    _changes_metadata,
    _changes_tags,
    _changes_tags,
    _adds_a_bomb,
)
