"""Greedy tokens by vLLM, run in its own environment: one argument of JSON, one line back."""

import json
import sys

from vllm import LLM, SamplingParams

if __name__ == "__main__":
    question = json.loads(sys.argv[1])
    model = LLM(model=question["model"], dtype="float32", max_model_len=512, enforce_eager=True)
    wanted = SamplingParams(temperature=0.0, max_tokens=question["new_tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in question["prompts"]]
    found = model.generate(prompts, wanted, use_tqdm=False)
    ids = [list(each.outputs[0].token_ids) for each in found]
    sys.stdout.write("\n" + json.dumps({"ids": ids}) + "\n")
