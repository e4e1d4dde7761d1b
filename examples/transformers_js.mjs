// Generate text with a folder that `htp-export export --transformers-js` wrote; nothing is fetched from the hub.
//
//     ONNXRUNTIME_NODE_INSTALL=skip npm install @huggingface/transformers
//     node transformers_js.mjs FOLDER "text" [fp32|q4|...] [number of tokens]
//
// Run it where the package is installed. It prints the token ids and the new text. A decoder's ids begin with those of
// the text, those of an encoder-decoder (T5, BART) with its start token.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const [folder, text, dtype = "fp32", count = "20"] = process.argv.slice(2);
const require = createRequire(path.join(process.cwd(), "package.json"));
const { AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, env } = require("@huggingface/transformers");

env.allowRemoteModels = false;
env.localModelPath = path.dirname(path.resolve(folder)) + path.sep;
const name = path.basename(path.resolve(folder));
const tokenizer = await AutoTokenizer.from_pretrained(name);
const { is_encoder_decoder: encodes } = JSON.parse(readFileSync(path.join(folder, "config.json"), "utf8"));
const model = await (encodes ? AutoModelForSeq2SeqLM : AutoModelForCausalLM).from_pretrained(name, { dtype });
const inputs = await tokenizer(text);
const tokens = Number(count);
const made = await model.generate({ ...inputs, do_sample: false, max_new_tokens: tokens, min_new_tokens: tokens });
const [ids] = made.tolist();
console.log(JSON.stringify({ ids: ids.map(Number), text: tokenizer.decode(ids, { skip_special_tokens: true }) }));
