"""Every exception and warning headrace raises, in one tree.

    HeadraceError                       catch this to catch everything
    ├── OptionError        (ValueError) an option has a value it cannot have
    │   ├── SizeError                   a size such as ``"20 GB"`` or ``"lots"``
    │   ├── SelectionError              a name pattern that matches nothing
    │   ├── RuleError                   offload rules that contradict one another or cannot be obeyed
    │   ├── BudgetError                 a budget no plan fits; carries the minimum
    │   ├── LimitError                  a plan this machine has no room for; carries needed and available bytes
    │   └── PlanFileError               a plan file that is missing, damaged or of another schema
    ├── OptionTypeError    (TypeError)  an option of the wrong Python type
    ├── CheckpointError    (ValueError) files that are missing, damaged or for another model
    └── StateError         (RuntimeError) valid arguments, but the state does not allow the call
        ├── ModelChangedError           the model was altered during an active offload
        ├── OutsideAccessError          a weight was used outside of its module's forward
        ├── TransferError               a copy failed (short read, I/O error, closed link)
        ├── PeerError                   another rank failed, ended, or did not come to a shared offload
        ├── SlotConflictError           one slot is needed by two running units at once
        └── RaceError                   ``HEADRACE_DEBUG=1`` found bytes that are not the unit's own

    HeadraceWarning        (UserWarning) something works, but not as asked; given once

Each message names the thing, what was expected, what was found, and the fix.
"""

from __future__ import annotations

import os
import sys
import warnings

# With the separator, because the name of another package may begin with this one's.
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

# The fix for a RuntimeError of Python that says only "can't start new thread".
MORE_THREADS = "raise this process's limits of threads (ulimit -u) and of memory (ulimit -v)"


class HeadraceError(Exception):
    """Root of the tree."""


class OptionError(HeadraceError, ValueError):
    """An option has a value it cannot have."""


class SizeError(OptionError):
    """A size that is not of the form ``"20GiB"``."""


class SelectionError(OptionError):
    """A name pattern that matches no tensor."""


class RuleError(OptionError):
    """Offload rules that contradict one another or cannot be obeyed."""


class BudgetError(OptionError):
    """No plan fits the budget.

    Attributes:
        minimum_bytes: the smallest budget, in bytes, for which a plan exists.
    """

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes


class LimitError(OptionError):
    """A plan that this machine has no room for, found before anything was allocated.

    Attributes:
        limit: which one: ``"device memory"``, ``"host memory"``, ``"disk space"``, ...
        needed_bytes: what carrying out the plan would add to what is in use.
        available_bytes: what the limit leaves.
        budget_bytes: a device-memory budget that should fit: an estimate, not a search; ``None`` if there is none.
    """

    def __init__(
        self, message: str, limit: str, needed_bytes: int, available_bytes: int, budget_bytes: int | None = None
    ) -> None:
        super().__init__(message)
        self.limit = limit
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.budget_bytes = budget_bytes


class PlanFileError(OptionError):
    """A plan file that is missing, damaged, or of another schema."""


class OptionTypeError(HeadraceError, TypeError):
    """An option of the wrong Python type."""


class CheckpointError(HeadraceError, ValueError):
    """Checkpoint files that are missing, damaged, or belong to another model."""


class StateError(HeadraceError, RuntimeError):
    """The arguments are valid, but the state does not allow the call."""


class ModelChangedError(StateError):
    """A tensor headrace manages was moved, replaced or written while offloaded."""


class OutsideAccessError(StateError):
    """A weight was used outside of the forward of its module, and its bytes could not be copied to the device."""


class TransferError(StateError):
    """The bytes of a unit could not be copied."""


class PeerError(StateError):
    """Another rank of a shared offload failed, ended, or did not come."""


class SlotConflictError(StateError):
    """A slot is needed by a unit while another unit that is still running occupies it."""


class RaceError(StateError):
    """A checksum mismatch found under ``HEADRACE_DEBUG=1``."""


class HeadraceWarning(UserWarning):
    """Something works, but not as asked."""


def warn_user(message: str) -> None:
    """Warn with a :class:`HeadraceWarning` that points at the first frame outside of this package."""
    # A fixed stacklevel would point into headrace, whose public functions call each other at different depths.
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, HeadraceWarning, stacklevel=level)
