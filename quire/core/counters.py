"""What the scheduler has done so far."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """What has happened since the start."""

    steps: int = 0
    preemptions: int = 0
    admissions: int = 0
    cached_tokens: int = 0
    dropped_chunks: int = 0  # results of sequences that had ended or lost their slot
