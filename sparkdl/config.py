"""The settings of every stage as frozen dataclasses, validated where they are made, with units in their names.

Enters: numbers and names that a user chose. Leaves: values that no stage has to check again.
"""

from __future__ import annotations

from dataclasses import dataclass

from sparkdl.errors import ConfigError

__all__ = ["SyncConfig"]


def require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """How gradients travel between ranks.

    Attributes:
        bucket_mib: gradients are fused until a message has this size, MiB; None lets the collective choose.
        compression: ``"fp16"`` or ``"bf16"`` halves the bytes of float32 gradients on the wire; None sends them whole.
        sync_batch_norm: replace BatchNorm layers by ones whose statistics run over the global batch.
        tune: measure a few settings during the first steps and keep the best.
    """

    bucket_mib: float | None = None
    compression: str | None = None
    sync_batch_norm: bool = False
    tune: bool = False

    def __post_init__(self) -> None:
        require(
            self.bucket_mib is None or self.bucket_mib > 0,
            f"bucket_mib={self.bucket_mib} must be above 0 MiB: leave it out to let sparkdl choose",
        )
        require(
            self.compression in (None, "fp16", "bf16"),
            f"compression={self.compression!r} is not one of None, 'fp16', 'bf16': choose one of these",
        )
