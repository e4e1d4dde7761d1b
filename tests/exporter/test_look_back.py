"""How far ownership looks back for an operation that is reversed: at the limit, and one operation beyond."""

import itertools

import pytest

from htp_export.exporter.capture.calls import CallLog, Operation, Record
from htp_export.exporter.owners import assign
from htp_export.exporter.owners.assign import Flow


@pytest.mark.parametrize(("between", "is_reversed"), [(assign._LOOK_BACK, True), (assign._LOOK_BACK + 1, False)])
def test_an_operation_that_is_reversed_is_found_up_to_a_number_of_operations_before(between, is_reversed):
    log = CallLog()
    root = log.enter("")
    first, last = log.add("first", root), log.add("last", root)
    names = ["begin", *(f"step_{k}" for k in range(between)), "back"]
    record = Record(log)
    record.inputs, record.outputs = {"x"}, ["back"]
    record.operations = [Operation(first, ("x",), ("begin",))]
    record.operations += [Operation(last, (before,), (after,)) for before, after in itertools.pairwise(names)]
    record.final = {name: name for name in names} | {"begin": "tensor", "back": "tensor"}
    origins = assign.Origins(record, Flow.of(record))
    assert origins.made["tensor"] == ({first} if is_reversed else {first, last})
