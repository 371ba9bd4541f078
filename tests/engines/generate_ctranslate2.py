"""Greedy tokens by CTranslate2, run in its own environment: one argument of JSON, one line back."""

import json
import sys

import ctranslate2

question = json.loads(sys.argv[1])
generator = ctranslate2.Generator(question["model"], compute_type="float32", intra_threads=1)
results = generator.generate_batch(
    question["tokens"],
    max_length=question["new_tokens"],
    min_length=question["new_tokens"],
    sampling_topk=1,
    include_prompt_in_result=False,
    max_batch_size=1,
)
ids = [result.sequences_ids[0] for result in results]
sys.stdout.write(json.dumps({"ids": ids}) + "\n")
