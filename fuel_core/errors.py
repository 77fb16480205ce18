"""Every exception fuel raises on purpose. Imports nothing of ours.

A message names what was expected, what was found and what to do next, in one line.

    FuelError                          base: catch this to catch everything below
    ├── CheckpointError                something about files on disk
    │   ├── CheckpointNotFoundError    the path holds no checkpoint (or an incomplete download)
    │   ├── CheckpointCorruptError     a header, offset or length contradicts the bytes
    │   └── UnsupportedCheckpointError readable, but in a form fuel refuses (quantised, pickle, ...)
    ├── ConfigError                    a config value is missing, contradictory or out of range
    ├── WeightsError                   tensors and parameters do not match one to one
    ├── FamilyError                    which plugin serves a checkpoint
    │   ├── FamilyNotFoundError        no installed family handles the model_type
    │   ├── FamilyConflictError        two distributions claim the same name
    │   └── FamilyBrokenError          the plugin that should serve it did not import
    ├── TokenizerError                 no usable tokenizer, or text that cannot be encoded
    ├── ChatTemplateError              no chat template, or the template refused
    ├── DecodeError                    a decode step was refused; the cache did not move
    │   ├── CapacityError              more positions asked for than the KV cache has
    │   ├── GeometryError              cache and model disagree (layers, heads, head_dim, dtype, device)
    │   ├── CacheStateError            the cache is in a state this call cannot use
    │   └── PlanError                  something about a held plan
    │       ├── RecordingError         the step cannot be recorded as it is written
    │       └── TopologyChanged        a held plan no longer is what was built
    ├── ConversationError              a saved conversation that cannot be read or written
    ├── BackendUnavailableError        the plan backend asked for cannot run here
    ├── ConformanceError               a family's declaration to the conformance kit cannot be used
    ├── NewFamilyError                 a new family package cannot be written: its name, or the folder for it
    └── GenerationError                generation parameters or logits that cannot be used
        └── NonFiniteLogitsError       NaN or infinite logits where a token had to be chosen
"""

from __future__ import annotations

__all__ = [
    "BackendUnavailableError",
    "CacheStateError",
    "CapacityError",
    "ChatTemplateError",
    "CheckpointCorruptError",
    "CheckpointError",
    "CheckpointNotFoundError",
    "ConfigError",
    "ConformanceError",
    "ConversationError",
    "DecodeError",
    "FamilyBrokenError",
    "FamilyConflictError",
    "FamilyError",
    "FamilyNotFoundError",
    "FuelError",
    "GenerationError",
    "GeometryError",
    "NewFamilyError",
    "NonFiniteLogitsError",
    "PlanError",
    "RecordingError",
    "TokenizerError",
    "TopologyChanged",
    "UnsupportedCheckpointError",
    "WeightsError",
]


class FuelError(Exception):
    """Base of every error fuel raises on purpose."""


class CheckpointError(FuelError):
    """Something about the files of a checkpoint."""


class CheckpointNotFoundError(CheckpointError):
    """The path holds no checkpoint, or only part of one."""


class CheckpointCorruptError(CheckpointError):
    """A header, offset, count or length contradicts the bytes of the file."""


class UnsupportedCheckpointError(CheckpointError):
    """The checkpoint is readable, but in a form fuel refuses by name."""


class ConfigError(FuelError):
    """A config value is missing, contradictory, of the wrong type or out of range."""


class WeightsError(FuelError):
    """Checkpoint tensors and model parameters do not match one to one."""


class FamilyError(FuelError):
    """Which plugin serves a checkpoint could not be decided."""


class FamilyNotFoundError(FamilyError):
    """No installed family handles this model_type or GGUF architecture."""


class FamilyConflictError(FamilyError):
    """Two distributions claim the same family, model_type or architecture."""


class FamilyBrokenError(FamilyError):
    """The plugin that should serve a checkpoint could not be imported or registered."""


class TokenizerError(FuelError):
    """No usable tokenizer, or text that it cannot encode."""


class ChatTemplateError(FuelError):
    """The checkpoint has no chat template, or the template refused the messages."""


class ConversationError(FuelError):
    """A saved conversation cannot be read, is none, or cannot be written."""


class ConformanceError(FuelError):
    """A declaration to the conformance kit is misspelt, incomplete, or lacks its oracle."""


class NewFamilyError(FuelError):
    """A new family package cannot be written: its name cannot be used, or the folder for it cannot. Nothing was."""


class DecodeError(FuelError):
    """A decode step was refused. The cache, the context and every session are as before."""


class CapacityError(DecodeError):
    """A step needs more positions than the KV cache was allocated with."""


class GeometryError(DecodeError):
    """The KV cache and the model disagree in layers, heads, head_dim, dtype or device."""


class CacheStateError(DecodeError):
    """The KV cache is in a state that this call cannot use (torn rolling state, bad length)."""


class PlanError(DecodeError):
    """Something about a held plan."""


class RecordingError(PlanError):
    """The step cannot be recorded as written; the message names the family and the layer."""


class TopologyChanged(PlanError):
    """A held plan's op list, or its backend, is no longer the one that was built."""


class BackendUnavailableError(FuelError):
    """The plan backend that was asked for cannot run on this machine or in this release."""


class GenerationError(FuelError):
    """Generation parameters, a prompt or logits that cannot be used."""


class NonFiniteLogitsError(GenerationError):
    """The model returned NaN or infinite logits where a token had to be chosen."""
