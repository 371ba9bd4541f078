"""The training data of one process: micro-batches of one global order of sequences.

Sequences are numbered 0, 1, 2, … by data and seed alone. A step takes the next `batch_sequences`
of them, and each process those whose number leaves its own index when divided by the number of
processes. Every process therefore draws and tokenises all documents, which costs little beside
training, needs no communication, and lets a run go on with any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from types import TracebackType
from typing import Any

from gqaconvert.errors import UsageError
from gqaconvert.settings.uptrain import DataSettings
from gqaconvert.training.batch import Batch
from gqaconvert.training.chats import check_chats
from gqaconvert.training.cursor import check_cursor, identify, make_cursor
from gqaconvert.training.mixture import open_mixture
from gqaconvert.training.packing import make_batch, pack
from gqaconvert.training.prefetch import Ahead
from gqaconvert.training.tokens import Encoder, pieces, refuse_empty_sources, tokenise

_STEPS_AHEAD = 2


class Batches(Iterator[Batch]):
    """Micro-batches without end, to be closed after use.

    Args:
        steps: the micro-batches of each step.
        steps_ahead: steps made ahead in a thread; 0 to make each when it is asked for.
    """

    def __init__(self, steps: Iterator[list[Batch]], steps_ahead: int) -> None:
        self._steps = Ahead(steps, steps_ahead)
        self._ready: list[Batch] = []

    @property
    def wait_seconds(self) -> float:
        """How long training waited for data, in all."""
        return self._steps.wait_seconds

    def __next__(self) -> Batch:
        if not self._ready:
            self._ready = next(self._steps)[::-1]
        return self._ready.pop()

    def close(self) -> None:
        """Stop reading ahead."""
        self._ready = []
        self._steps.close()

    def __enter__(self) -> Batches:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_batches(
    settings: DataSettings,
    tokenizer: Any,  # noqa: ANN401
    *,
    batch_sequences: int,
    micro_batch: int,
    process_index: int = 0,
    num_processes: int = 1,
    cursor: Mapping[str, Any] | None = None,
) -> Batches:
    """Open the data of one process.

    Args:
        settings: what is read and how it is packed.
        tokenizer: of transformers.
        batch_sequences: sequences a step, over all processes.
        micro_batch: sequences a batch; the last of a step may hold fewer.
        process_index: of this process, from 0.
        num_processes: in all.
        cursor: that of the last batch of a step, to go on after it; None to begin.

    Returns:
        Batches; the cursor of each is that of the last step it completes.

    Raises:
        UsageError: data that does not exist or cannot be read; sequences that cannot be shared
            out evenly. What is wrong inside a document is raised when it is reached.
        RefusedError: the cursor is of other data.
        GqaconvertError: `datasets` cannot load it.
    """
    if batch_sequences % num_processes:
        raise UsageError(
            f"{batch_sequences} sequences a step cannot be shared by {num_processes} processes",
            at="uptrain.batch_tokens",
            remedy=f"a multiple of {num_processes * settings.context} tokens",
        )
    if not (0 <= process_index < num_processes and micro_batch >= 1 and batch_sequences >= 1):
        raise UsageError(
            f"no batches of {micro_batch} of {batch_sequences} sequences"
            f" for process {process_index} of {num_processes}"
        )
    for dataset in settings.datasets:
        if dataset.messages is not None:
            check_chats(tokenizer, dataset.loss_on, dataset.path)
    mixture = open_mixture(settings)
    identity = identify(settings, mixture, tokenizer)
    done = 0
    part: Mapping[str, Any] = {"mixture": mixture.place, "piece": 0, "tokens": 0}
    if cursor is not None:
        check_cursor(cursor, identity)
        done, part = int(cursor["sequences"]), cursor["place"]
        mixture.go_to(part["mixture"])
    drawn = pieces(mixture, first_piece=part["piece"], skip_tokens=part["tokens"])
    encoders = [Encoder(tokenizer, settings.datasets) for _ in range(max(1, settings.workers))]
    tokens = tokenise(drawn, encoders, settings.workers)
    found = refuse_empty_sources(tokens, [each.path for each in settings.datasets])

    def steps() -> Iterator[list[Batch]]:
        sequences = pack(found, settings.context, done)
        reached = make_cursor(identity, done, part)
        try:
            while step := list(islice(sequences, batch_sequences)):
                after = make_cursor(identity, step[-1].number + 1, step[-1].place)
                own = [each for each in step if each.number % num_processes == process_index]
                groups = [own[at : at + micro_batch] for at in range(0, len(own), micro_batch)]
                cursors = [*[reached] * (len(groups) - 1), after]
                yield [
                    make_batch(group, separate_documents=settings.separate_documents, cursor=state)
                    for group, state in zip(groups, cursors, strict=True)
                ]
                reached = after
        finally:
            tokens.close()

    return Batches(steps(), _STEPS_AHEAD if settings.workers else 0)
