"""headrace's own keys, which an engine has no flags for, together with the engine's flags -> one policy."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.config import Rules
from headrace.errors import OptionError, OptionTypeError
from headrace.figures import parse_size
from headrace.flags import OffloadFlags, Surface, parse_rules

if TYPE_CHECKING:
    from headrace.offloaders.layerwise import EnginePolicy

__all__ = ["EngineKeys"]


@dataclass(frozen=True)
class EngineKeys:
    """The keys of one engine.

    Attributes:
        prefix: of a key in errors, ``"headrace"`` of ``headrace.batch``.
        place: where keys are written, for errors.
        form: how to write them, for errors.
        flag_of_key: keys that have the meaning of a flag of headrace's command line.
        others: keys that the adapter reads itself.
        surface: what the engine allows.
    """

    prefix: str
    place: str
    form: str
    flag_of_key: Mapping[str, str]
    surface: Surface
    others: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """All keys."""
        return (*self.flag_of_key, *self.others)

    def known(self, given: Any) -> Mapping[str, Any]:
        """``given``, an object that has none but these keys.

        Raises:
            OptionError, OptionTypeError: it is none, or has another key.
        """
        if not isinstance(given, Mapping):
            raise OptionTypeError(
                f"{self.prefix}: expected an object, found {type(given).__name__} {given!r}; {self.form}"
            )
        for key in given:
            if key not in self.names:
                nearest = difflib.get_close_matches(str(key), self.names, n=1, cutoff=0.4)
                hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
                raise OptionError(f"{self.prefix}.{key} is unknown: expected one of {', '.join(self.names)}{hint}")
        return given

    def merged(self, keys: Mapping[str, Any], flags: OffloadFlags) -> OffloadFlags:
        """``flags`` with those of ``keys``.

        Raises:
            OptionError, OptionTypeError: an invalid value, or one that is given twice.
        """
        values: dict[str, Any] = {}
        for key, flag in self.flag_of_key.items():
            if key not in keys:
                continue
            values[flag] = self._checked(key, keys[key])
            if flags.given(flag) and getattr(flags, flag) != values[flag]:
                raise OptionError(
                    f"{self.prefix}.{key} is given twice: {keys[key]!r} in {self.place} and "
                    f"{getattr(flags, flag)!r} as a flag; leave one of them out"
                )
        return replace(flags, **values)

    def policy(self, keys: Mapping[str, Any], merged: OffloadFlags, spelling: Mapping[str, str]) -> EnginePolicy | None:
        """The policy of the merged flags; errors name those of ``keys`` as keys, and others by ``spelling``.

        Raises:
            OptionError: options that contradict one another or have no effect, or an invalid pattern.
        """
        names = {flag: f"{self.prefix}.{key}" for key, flag in self.flag_of_key.items() if key in keys}
        policy = merged.policy(replace(self.surface, spelling={**spelling, **names}))
        assert not isinstance(policy, Rules)  # rules need a budget in an engine
        rules = getattr(policy, "rules", ())
        # An invalid regular expression is refused before an engine starts; whether it matches depends on the model.
        if patterns := [*(policy.params if policy is not None else ()), *(pattern for pattern, _ in rules)]:
            from headrace.model.patterns import compile_pattern

            for pattern in patterns:
                compile_pattern(pattern)
        return policy

    def _checked(self, key: str, value: Any) -> Any:
        """The value of ``key`` as the flag of the same meaning has it."""
        name, surface = f"{self.prefix}.{key}", self.surface
        if key == "measure_stalls":
            if not isinstance(value, bool):
                raise OptionTypeError(f"{name}: expected true or false, found {value!r}; {self.form}")
            return value
        if key == "mode":
            if value not in surface.modes:
                raise OptionError(
                    f"{name} {value!r}: expected one of {', '.join(surface.modes)}{surface.inside}; leave it out for "
                    f"cpu"
                )
            return value
        if key == "expert_slots":
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise OptionError(f"{name}: expected a number of experts, at least 1, found {value!r}")
            return value
        if key == "batch":
            sizes = value if isinstance(value, list) else [value]
            numbers = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
            if not sizes or not numbers:
                raise OptionError(
                    f"{name}: expected numbers of sequences, each at least 1, such as [1, 16, 256], found {value!r}"
                )
            return ",".join(map(str, sizes))
        strings = isinstance(value, list) and all(isinstance(text, str) for text in value)
        if key != "device_memory" and not strings:
            raise OptionTypeError(f'{name}: expected a list of strings such as ["mlp"], found {value!r}')
        try:
            if key == "device_memory":
                parse_size(value)
            elif key == "rules":
                parse_rules(value)
        except (OptionError, OptionTypeError) as error:  # names a flag of headrace's command line
            raise type(error)(f"{name}: {str(error).removeprefix('--offload-rule ')}") from None
        return value
