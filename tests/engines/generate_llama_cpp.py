"""Greedy tokens by llama.cpp, run in its own environment: one argument of JSON, one line back."""

import itertools
import json
import sys

from llama_cpp import Llama

question = json.loads(sys.argv[1])
model = Llama(question["model"], n_ctx=512, n_threads=1, verbose=True)
ids = []
for prompt in question["prompts"]:
    model.reset()
    ids.append(list(itertools.islice(model.generate(prompt, temp=0.0), question["new_tokens"])))
sys.stdout.write("\n" + json.dumps({"ids": ids}) + "\n")
