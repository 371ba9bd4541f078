"""`estimate` for a model by name: finds its config and headers, and checks them against each other.

The arithmetic is in `kv_cache.estimate`; weights are never read.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from gqaconvert.attention.blocks import CONTRADICTION
from gqaconvert.attention.recognise import recognise
from gqaconvert.checkpoint.index import read_index
from gqaconvert.checkpoint.sources import Source, resolve_source
from gqaconvert.checkpoint.tensors import CheckpointIndex
from gqaconvert.errors import CheckpointError, UnsupportedModelError
from gqaconvert.kv_cache.config_faults import config_faults
from gqaconvert.kv_cache.element_types import storage_type
from gqaconvert.kv_cache.estimate import Estimate, estimate_config
from gqaconvert.kv_cache.hardware import find_accelerator
from gqaconvert.kv_cache.lengths import read_lengths
from gqaconvert.kv_cache.model_config import ModelConfig, parse_config, read_config
from gqaconvert.kv_cache.question import Question, Reserve, parse_reserve, parse_tokens
from gqaconvert.kv_cache.weights import StoredWeights
from gqaconvert.units import ELEMENT_TYPES, parse_bytes

Tokens = int | str
Size = int | str


def estimate(
    model: str | Path,
    *,
    context: Iterable[Tokens] = (),
    batch: Iterable[int] = (1,),
    kv_heads: Iterable[int] = (),
    kv_dtype: Iterable[str] = (),
    gpu: str | None = None,
    hardware: Path | None = None,
    bandwidth: Size | None = None,
    weights: str | None = None,
    weights_size: Size | None = None,
    activations: Size | None = None,
    reserve: Size | None = None,
    tp: Iterable[int] = (1,),
    page: int = 16,
    lengths: str | None = None,
    source_tokens: Tokens | None = None,
    revision: str | None = None,
) -> Estimate:
    """Work out memory, concurrency and speed, for every combination of what is asked.

    Args:
        model: folder (a config.json is enough), alias or Hub id.
        context: tokens of a request, prompt and answer together, such as 4096 or "4k".
        batch: requests at a time.
        kv_heads: as if converted to so many; by default as it is, and 8 and 1 where it has more.
        kv_dtype: fp32, fp16, bf16, fp8, int8, int4, int2; by default that of the weights.
        gpu: a name in the table of GPUs, or a size such as "24GiB".
        hardware: a table of your own, which adds to ours.
        bandwidth: bytes a second, such as "2TB", in place of the GPU's.
        weights: element type; by default as they are.
        weights_size: bytes of the weights as they are, such as "14GB".
        activations: bytes, in place of the formula.
        reserve: bytes or a share such as "10%", left to the framework; 10 % of a GPU by default.
        tp: tensor-parallel degrees.
        page: tokens of a page.
        lengths: of mixed requests: "p50=500,p99=8000" or a file.
        source_tokens: that an encoder reads; as many as the context by default.
        revision: branch, tag or commit of a Hub model.

    Raises:
        UsageError: no such model, or values that make no sense for it.
        UnsupportedModelError: its cache does not follow from its config.
        CheckpointError: its config cannot be read.
    """
    question = Question(
        contexts=tuple(_tokens(count) for count in context),
        batches=tuple(batch),
        kv_heads=tuple(dict.fromkeys(kv_heads)),
        kv_types=tuple(storage_type(name) for name in kv_dtype),
        degrees=tuple(tp),
        gpu=None if gpu is None else find_accelerator(gpu, hardware),
        bandwidth=None if bandwidth is None else _size(str(bandwidth).removesuffix("/s")),
        weights=None if weights is None else storage_type(weights),
        activations_bytes=None if activations is None else _size(activations),
        reserve=Reserve() if reserve is None else parse_reserve(str(reserve)),
        page=page,
        lengths=None if lengths is None else read_lengths(lengths),
        source_tokens=None if source_tokens is None else _tokens(source_tokens),
    )
    config, index, unread = _read(resolve_source(str(model), revision))
    answer = estimate_config(
        config,
        question,
        stored=None if index is None else _stored(index),
        weights_bytes=None if weights_size is None else _size(weights_size),
        faults=_contradictions(config, index),
    )
    return answer if unread is None else answer.with_note(unread)


def read_model_config(model: str, revision: str | None = None) -> ModelConfig:
    """Read the config of a folder, alias or Hub id, and nothing else of the model.

    Raises:
        UsageError: no such model.
    """
    return _read(resolve_source(model, revision))[0]


def _read(source: Source) -> tuple[ModelConfig, CheckpointIndex | None, str | None]:
    """Return the config, the headers where there are any, and why there are none."""
    if source.folder is None:
        return _read_remote(str(source.repo_id), source.revision)
    config = read_config(source.folder)
    if not any(path.suffix in (".safetensors", ".bin") for path in source.folder.iterdir()):
        return config, None, None
    try:
        return config, read_index(source.folder), None
    except CheckpointError as error:
        return config, None, f"the weights beside the config cannot be used: {error.what}"


def _read_remote(
    repo_id: str, revision: str | None
) -> tuple[ModelConfig, CheckpointIndex | None, str | None]:
    from huggingface_hub import hf_hub_download  # takes half a second

    from gqaconvert.checkpoint.hub import read_hub_index
    from gqaconvert.checkpoint.hub_errors import HubUnreachable, explained

    at = f"{repo_id}/config.json"
    try:
        found = read_hub_index(repo_id, revision)
        return parse_config(found.config, at), found.index, None
    except (CheckpointError, HubUnreachable) as error:
        # A config alone will do: one without weights beside it, or one that lies in the cache.
        with explained(repo_id, at):
            path = hf_hub_download(repo_id, "config.json", revision=revision)
        return read_config(Path(path)), None, f"headers were not read: {error.what}"


def _stored(index: CheckpointIndex) -> StoredWeights:
    elements = Counter[str]()
    for tensor in index.tensors.values():
        if ELEMENT_TYPES[tensor.dtype].is_weight:
            elements[tensor.dtype] += math.prod(tensor.shape)
    commonest = elements.most_common(1)
    return StoredWeights(
        parameters=elements.total(),
        size_bytes=index.size_bytes,
        dtype=ELEMENT_TYPES[commonest[0][0]].config_name if commonest else None,
    )


def _contradictions(config: ModelConfig, index: CheckpointIndex | None) -> tuple[str, ...]:
    """Return where the tensors say something else than the config."""
    if index is None or config_faults(config):
        return ()
    try:
        recognise(index.tensors, config)
    except UnsupportedModelError:
        return ()  # sound, whether or not it can be converted
    except CheckpointError as error:
        return (f"{error.what}; {error.remedy or CONTRADICTION}",)
    return ()


def _tokens(value: Tokens) -> int:
    return value if isinstance(value, int) else parse_tokens(value)


def _size(value: Size) -> int:
    return value if isinstance(value, int) else parse_bytes(value)
