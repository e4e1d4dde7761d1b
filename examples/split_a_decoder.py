"""Cut a decoder with a key/value cache into two stages, and generate text with them.

    python examples/split_a_decoder.py [FOLDER]

Each stage is a file of its own, for a device or a machine of its own, and keeps the cache of its own layers. The tokens
are those of PyTorch's `generate`. It needs transformers 5.23 or later.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

import htp_export
from htp_export.huggingface import example_call, load_model

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
size = {
    "n_layer": 4,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 500,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
model = load_model("gpt2", task="text-generation-with-past", random_weights=True, overrides=size)

# One file for the prompt and for each next token: its dimensions are open, and it takes and returns the cache.
call = example_call(model)
with call.exporting():
    program = htp_export.export(call.model, verbose=False, **call.options)
call.name_dimensions(program.model.graph)

parts = htp_export.partition(program, ["transformer.h.2"], folder / "stages")
for number, stage in enumerate(parts.stages):
    caches = sorted(
        {name.split(".")[1] for name in stage.inputs if name.startswith("past_key_values.")}
    )
    print(f"stage {number}: {', '.join(stage.modules)}; caches of layers {', '.join(caches)}")

prompt, new_tokens = np.array([[11, 42, 7, 99]]), 20
past = {
    value.name: np.zeros((1, 4, 0, 16), np.float32)  # batch, heads, tokens, size of a head
    for value in program.model.graph.inputs
    if value.name.startswith("past_key_values.")
}
tokens, step = prompt, prompt
with parts.open() as stages:  # both stay loaded
    for _ in range(new_tokens):
        length = tokens.shape[1]
        positions = np.arange(length - step.shape[1], length)[None]
        mask = np.ones((1, length), np.int64)
        outputs = stages.run(
            {"input_ids": step, "attention_mask": mask, "position_ids": positions, **past}
        )
        past = {
            f"past_key_values{name[7:]}": each
            for name, each in outputs.items()
            if name.startswith("present")
        }
        step = outputs["logits"][:, -1:].argmax(-1)
        tokens = np.concatenate([tokens, step], axis=1)

expected = model.generate(
    torch.from_numpy(prompt),
    max_new_tokens=new_tokens,
    do_sample=False,
    eos_token_id=None,
    pad_token_id=0,
)
print("two stages:", *tokens[0])
print("PyTorch:   ", *expected[0].tolist())
assert tokens.tolist() == expected.tolist()
