"""What is asked of an engine in each phase."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phase:
    """So many groups at once."""

    num_groups: int = 48
    num_samples: int = 8
    num_tokens: int = 256
    """Of each response."""
    max_num_seqs: int = 64

    @classmethod
    def small(cls) -> "Phase":
        """To see that it works."""
        return cls(num_groups=4, num_samples=2, num_tokens=16, max_num_seqs=8)

    @property
    def total_tokens(self) -> int:
        """Sampled in a phase."""
        return self.num_groups * self.num_samples * self.num_tokens
