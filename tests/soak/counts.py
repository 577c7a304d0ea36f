"""What a campaign of random calls counts, and how its ranks hand it on."""

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path


@dataclass
class Counts:
    """
    calls: fused ones, of all groups and ranks
    rounds: on GPUs, of a collective of NCCL and some fused calls, of all ranks
    late: pauses of stragglers
    killed: ranks that were killed
    unnamed: survivors whose error did not name a rank that has ended
    wrong: results that were not exact
    hangs: episodes that did not end in time
    raised: episodes in which a rank raised though none was killed
    """

    calls: int = 0
    rounds: int = 0
    late: int = 0
    killed: int = 0
    unnamed: int = 0
    wrong: int = 0
    hangs: int = 0
    raised: int = 0

    def __iadd__(self, other: "Counts") -> "Counts":
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.hangs or self.raised or self.unnamed)

    def write(self, directory: str, rank: int) -> None:
        Path(directory, f"{rank}.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(directory: str) -> "Counts":
        """The sums over all ranks that wrote theirs."""
        total = Counts()
        for path in Path(directory).glob("*.json"):
            total += Counts(**json.loads(path.read_text()))
        return total
