"""Bytes of single parts of a training step, from widths alone: what `memory` adds up.

Activations are what autograd saves. They were counted tensor by tensor on Llama and are compared
with measurements in the tests; other classes follow the same rules as far as their norms,
feed-forward blocks and projections differ.
"""

from __future__ import annotations

from dataclasses import dataclass

from gqaconvert.settings.uptrain import LossSettings, UptrainSettings
from gqaconvert.training.model_facts import ModelFacts

GATHERED_LAYERS = 3
"""Layers whole at a time under FSDP2: the one that runs, the next one, and the buffer it arrives
in."""


@dataclass(frozen=True, slots=True)
class ElementBytes:
    """Bytes an element takes, by what it is part of.

    Attributes:
        weights: as the optimiser changes them.
        gradients: as the optimiser reads them.
        states: both of AdamW's averages together.
        compute: operands of matrix products.
        stream: hidden states between layers.
        casts: products read copies of weights and inputs made by autocast.
    """

    weights: int
    gradients: int
    states: int
    compute: int
    stream: int
    casts: bool


def element_bytes(settings: UptrainSettings, *, sharded: bool) -> ElementBytes:
    """Return what elements take at a precision.

    "bf16" keeps weights in float32. Autocast then casts them for each product, and hidden states
    stay in float32; under FSDP2 weights are cast as they are gathered, and no float32 is left
    between layers.
    """
    if settings.precision == "fp32":
        return ElementBytes(4, 4, 8, 4, 4, casts=False)
    if settings.precision == "pure-bf16":
        return ElementBytes(2, 2, 4, 2, 2, casts=False)
    return ElementBytes(4, 4, 8, 2, 2 if sharded else 4, casts=not sharded)


def trained_parameters(settings: UptrainSettings, facts: ModelFacts) -> int:
    """Count the parameters that get gradients in the stage that trains most of them."""
    if settings.lora is not None:
        return _adapters(settings, facts)
    norms = facts.num_layers * facts.hidden_size
    counts = {"all": facts.parameters, "attention": facts.attention, "kv": facts.kv + norms}
    return max(counts[stage.train] for stage in settings.stages)


def added_parameters(settings: UptrainSettings, facts: ModelFacts) -> int:
    """Count the parameters that adapters add to the model."""
    lora = settings.lora
    if lora is None:
        return 0
    return _adapters(settings, facts) - (facts.kv if lora.train_kv else 0)


def trains_head(settings: UptrainSettings) -> bool:
    """Whether the output head gets a gradient in any stage."""
    trained = settings.lora is None and any(stage.train == "all" for stage in settings.stages)
    return trained and bool(settings.loss.next_token or settings.loss.distill)


def saved_a_token(facts: ModelFacts, size: ElementBytes, settings: UptrainSettings) -> int:
    """Bytes that one layer saves of each token for its backward pass.

    For Llama under autocast, with inputs in float32 (M hidden size, F intermediate size, D head
    size, H and K heads):

        two norms        2 × (4 M input, 4 M scaled)
        their outputs    (3 + 2) × 2 M: every product casts its own copy
        attention        2 H D queries + 2 × 2 K D keys and values + 2 H D output + 4 H sums
        feed-forward     4 × 2 F: gate, its activation, up, their product

    Without autocast the outputs of a norm are saved once for all products. Hidden states in
    bfloat16 are widened for the norm's sake: 4 M for its input, then 2 M scaled. With a mask (of
    windows or of documents kept apart) sdpa repeats keys and values for every query head. Eager
    attention keeps scores: T × H elements a token.
    """
    hidden, width, compute = facts.hidden_size, facts.intermediate_size, size.compute
    norms = facts.norms * norm_saved(facts, size)
    readers = facts.attention_inputs + facts.mlp_inputs
    outputs = readers * compute * hidden if size.casts else min(readers, 2) * size.stream * hidden
    query, value = facts.num_heads * facts.head_dim, facts.num_heads * facts.v_head_dim
    repeated = settings.attention == "eager" or is_masked(facts, settings)
    kv_heads = facts.num_heads if repeated else facts.num_kv_heads
    attention = compute * (query + value + kv_heads * (facts.head_dim + facts.v_head_dim))
    if settings.attention == "eager":
        attention += (6 if compute == 2 else 4) * facts.num_heads * settings.data.context
    else:
        attention += 4 * facts.num_heads
    if facts.qk_norm:
        attention += (4 + compute) * facts.head_dim * (facts.num_heads + facts.num_kv_heads)
    return norms + outputs + attention + (4 if facts.gated else 2) * compute * width


def norm_saved(facts: ModelFacts, size: ElementBytes) -> int:
    """Bytes that one norm saves of each token."""
    kinds = {"rms": 4 + size.stream, "layer": size.stream, "bare": 4}
    return kinds[facts.norm] * facts.hidden_size


def working_a_token(facts: ModelFacts, size: ElementBytes) -> int:
    """Bytes of gradients that exist of each token while a layer runs backward.

    The widest moment is inside the feed-forward block, where two gradients of its width exist
    beside those of hidden states.
    """
    return 2 * size.compute * facts.intermediate_size + 2 * size.stream * facts.hidden_size


def is_masked(facts: ModelFacts, settings: UptrainSettings) -> bool:
    """Whether sdpa gets a mask, rather than a word that attention is causal."""
    if settings.attention != "sdpa":
        return False
    context = settings.data.context
    windows = any(window is not None and window < context for window in facts.windows)
    return settings.data.separate_documents or windows


def matched_a_token(loss: LossSettings, facts: ModelFacts, size: ElementBytes) -> int:
    """Bytes a token that matching of hidden states and attention outputs keeps in the student.

    Of each layer the output itself, where nothing else keeps it, and its difference from the
    source's in float32.
    """
    one = (size.stream + 4) * facts.hidden_size * facts.num_layers
    return one * (bool(loss.hidden) + bool(loss.attention))


def logits_bytes(
    settings: UptrainSettings,
    facts: ModelFacts,
    size: ElementBytes,
    chunk_tokens: int,
    teacher_size: int,
) -> int:
    """Bytes of a chunk's logits and of what is computed from them, with its gradients.

    First logits of the student, of the teacher, and float32 buffers as large: two for the next
    token, three for a divergence, four for both. Then the student's logits, their gradient, cast
    where they are in bfloat16, and the gradient of the head where it trains, which autocast makes
    in bfloat16 first. All the while the sum of the head's gradients in float32.

    Args:
        settings: what is minimised, and what trains.
        facts: of the student.
        size: of its elements.
        chunk_tokens: positions at a time.
        teacher_size: bytes an element of the teacher's logits; 0 without a teacher here.
    """
    loss = settings.loss
    buffers = 2 if not loss.distill else 3 + bool(loss.next_token)
    of_logits = size.compute + teacher_size + 4 * buffers
    of_gradients = size.compute + 4 + (2 if size.compute == 2 else 0)
    of_head = trains_head(settings) * facts.head_matrix
    elements = chunk_tokens * facts.vocab_size
    backward = elements * of_gradients + of_head * (6 if size.casts else size.compute)
    return max(elements * of_logits, backward) + 4 * of_head


def teacher_bytes(
    loss: LossSettings, facts: ModelFacts, size: int, tokens: int, processes: int
) -> int:
    """Bytes of a teacher that runs beside the student, and of what is kept of its last run.

    Args:
        loss: what of it is compared.
        facts: of the teacher.
        size: bytes an element.
        tokens: read at once on this device.
        processes: that its layers are divided among; 1 for a whole teacher everywhere.
    """
    ends = facts.embeddings + facts.head
    layers = facts.parameters - ends
    weights = size * (ends + layers // processes)
    if processes > 1:
        weights += size * GATHERED_LAYERS * facts.layer
    # Last hidden states, and those of them that count.
    states = 2 + facts.num_layers * (bool(loss.hidden) + bool(loss.attention))
    return weights + size * tokens * facts.hidden_size * states


def _adapters(settings: UptrainSettings, facts: ModelFacts) -> int:
    lora = settings.lora
    if lora is None:
        return 0
    query, value = facts.num_heads * facts.head_dim, facts.num_heads * facts.v_head_dim
    widths = query + value + 2 * facts.hidden_size  # q in and out, o in and out
    if not lora.train_kv:
        widths += 2 * facts.hidden_size + facts.num_kv_heads * (facts.head_dim + facts.v_head_dim)
    if lora.target == "all":
        matrices = 3 if facts.gated else 2
        widths += matrices * (facts.hidden_size + facts.intermediate_size)
    return facts.num_layers * lora.rank * widths + (facts.kv if lora.train_kv else 0)
