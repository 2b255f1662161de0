"""Models that take turns on one device: which requests run now, which wait for a switch, and the switch.

A model is *running* (on the device), *parked* (its bytes are in host memory), or *unloaded* (they are in its files).
Requests of the running model begin as they come. Where one waits for another model, a switch begins as soon as nothing
runs. Once that one has waited for ``switch_after_s`` of the running model's turn, no further request of the running
model begins, and the switch waits for those that run. The next model is that of the request that has waited longest,
and all that wait for it begin with its turn. So no model waits longer than the turns of the others, each of which is
``switch_after_s``, the longest answer, and a switch.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf

import torch

from headrace.api import Handle
from headrace.errors import LimitError
from headrace.memory.system import DEVICE, trim_heap
from headrace.serving.endpoint import Endpoint, ServedModel
from headrace.serving.request_body import RequestError
from headrace.stores.store import Progress

_log = logging.getLogger(__name__)
_CHECK_S = 1.0


@dataclass(eq=False)
class Hosted:
    """One of the models of a server.

    Attributes:
        names: in requests; answers contain the first.
        longest: tokens of the longest sequence, prompt and answer.
        load: loads it from its files onto the device; ``None``: it is loaded, and stays.
        host_bytes: host memory of its stores, and of its residents while it is parked.
        served, handle: ``None``: it is unloaded; without a handle alone, it cannot be parked.
        error: why it could not run when it was wanted last.
        entering: requests whose turn it is, and that are not in its engine yet.
        used_s: when it was used last.
        keep_alive_s: by its last request, for how long it stays on the device without one; ``None``: for good.
        expiry: ends that time.
        ended: counts of engines that it has had.
    """

    names: Sequence[str]
    longest: int
    load: Callable[[Progress], tuple[ServedModel, Handle]] | None = None
    host_bytes: int = 0
    served: ServedModel | None = None
    handle: Handle | None = None
    error: str | None = None
    entering: int = 0
    used_s: float = 0.0
    keep_alive_s: float | None = None
    expiry: asyncio.TimerHandle | None = None
    ended: Counter[str] = field(default_factory=Counter)

    @property
    def is_busy(self) -> bool:
        """Whether requests of it run."""
        return self.entering > 0 or (self.served is not None and self.served.engine.is_busy)

    @property
    def problem(self) -> str | None:
        """Why its requests fail; ``None``: they do not."""
        return (self.served.engine.why_dead() if self.served is not None else None) or self.error

    def counts(self) -> Counter[str]:
        """Tokens, bytes moved and others, since the server began."""
        found = Counter(self.ended)
        if self.served is not None:
            engine = self.served.engine
            found.update(prompt_tokens=engine.prompt_tokens, generated_tokens=engine.generated_tokens)
        if (handle := self.handle) is not None:
            stats = handle.stats()
            found.update(moved_bytes=stats.bytes_moved, stalls=stats.stalls)
            if (guessed := stats.speculation) is not None:
                found.update(speculation_passes=guessed.passes, speculation_tokens=guessed.tokens)
        return found

    def release(self) -> None:
        """Give all its memory back: it is in its files."""
        assert self.served is not None
        self.ended = self.counts()
        self.served.engine.engine.stop()
        self.served = self.handle = None
        gc.collect()  # an offload that nothing holds ends, in a cycle with its model
        trim_heap()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@dataclass(eq=False)
class _Ticket:
    """A request that waits until ``model`` is running, or, if it ``parks``, until it is not."""

    model: Hosted
    parks: bool
    ready: list[Endpoint]
    admitted: asyncio.Future[None]
    since_s: float
    has_entered: bool = False


class Switch:
    """Lets models take turns; belongs to one event loop, once the server runs.

    Args:
        models: of which one may be loaded.
        host_limit_bytes: what their ``host_bytes`` together stay within.
        switch_after_s: see above.

    Attributes:
        running: the model on the device.
        max_waiting: answers that may wait for each model.
        observe: called after a switch with its kind, ``load``, ``resume`` or ``park``, and its seconds.
    """

    def __init__(
        self, models: Sequence[Hosted], max_waiting: int, host_limit_bytes: float = inf, switch_after_s: float = 10.0
    ) -> None:
        self.models, self.max_waiting, self._switch_after_s = models, max_waiting, switch_after_s
        self._host_limit_bytes = host_limit_bytes
        self.running = next((model for model in models if model.served is not None), None)
        self.observe: Callable[[str, float], None] = lambda kind, seconds: None
        self._waiting: list[_Ticket] = []
        self._task: asyncio.Task[None] | None = None  # of the switch to ``_target`` that runs
        self._target: Hosted | None = None
        self._since_s = 0.0  # when the turn began
        self._is_stopping = False
        for model in models:
            self._watch(model)

    @classmethod
    def of(cls, served: ServedModel, handle: Handle | None) -> Switch:
        """Switch of one model that is loaded."""
        model = Hosted(served.names, served.engine.longest, served=served, handle=handle)
        return cls([model], served.engine.engine.max_waiting)

    def first(self) -> list[Hosted]:
        """Models for which host memory has room together, from the first one on."""
        totals = accumulate(model.host_bytes for model in self.models)
        return [*self.models[: max(1, sum(total <= self._host_limit_bytes for total in totals))]]

    def find(self, name: object) -> Hosted:
        """The model of a request whose field ``model`` is ``name``; ``None``: the only one.

        Raises:
            RequestError: there is none.
        """
        if len(self.models) == 1 and not isinstance(name, str):
            return self.models[0]  # the reader of the request refuses another type
        for model in self.models:
            if name in model.names:
                return model
        served = ", ".join(repr(model.names[0]) for model in self.models)
        if not isinstance(name, str):
            raise RequestError(f"model: expected one of {served}, found {name!r:.200}", "model")
        text = f"model {name[:200]!r} is not served here, {served} {'are' if ', ' in served else 'is'}"
        raise RequestError(text, "model", 404)

    def state_of(self, model: Hosted) -> str:
        """State of ``model``: where it is, in a word."""
        if self._task is not None and self._target is model:
            return "loading"
        return "running" if self.running is model else "unloaded" if model.served is None else "parked"

    def waiting_for(self, model: Hosted) -> int:
        """Answers that wait for the turn of ``model``, as far as their requests have been read."""
        waiting = [ticket for ticket in self._waiting if ticket.model is model]
        return sum(len(ticket.ready[0].answers) if ticket.ready else 1 for ticket in waiting)

    # -- waiting -------------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def turn(self, model: Hosted, ready: list[Endpoint], *, parks: bool = False) -> AsyncIterator[None]:
        """Within, requests may be given to the engine of ``model``, which stays on the device until they have ended.

        Args:
            ready: the request as it was read with the model; emptied if that is loaded again meanwhile.
            parks: the opposite: within, ``model`` is not on the device.

        Raises:
            RequestError: too many wait (429), or the model cannot run (503).
        """
        if self._is_stopping:
            raise RequestError("the server stops", status=503)
        if (waiting := self.waiting_for(model)) >= self.max_waiting:
            text = f"{waiting} requests wait for {model.names[0]!r}, the limit of --max-queue; try again later"
            raise RequestError(text, status=429)
        ticket = _Ticket(model, parks, ready, asyncio.get_running_loop().create_future(), time.monotonic())
        self._waiting.append(ticket)
        try:
            self._advance()
            while not ticket.admitted.done():
                done, _ = await asyncio.wait([ticket.admitted], timeout=_CHECK_S)
                if not done and self.running is not None and self.running.served is not None:
                    self.running.served.engine.require_alive()
            ticket.admitted.result()
            if ready and ready[0].served is not model.served:
                ready.clear()
            yield
        finally:  # also of a client that leaves, perhaps just when its turn begins
            if ticket in self._waiting:
                self._waiting.remove(ticket)
            model.entering -= ticket.has_entered
            self._after(model)

    def _fits(self, ticket: _Ticket) -> bool:
        return (self.running is ticket.model) is not ticket.parks

    def _admit(self) -> None:
        """Let all that wait for the running model begin."""
        for ticket in [ticket for ticket in self._waiting if self._fits(ticket)]:
            self._waiting.remove(ticket)
            ticket.has_entered = not ticket.parks
            ticket.model.entering += ticket.has_entered
            ticket.model.used_s = time.monotonic()
            ticket.admitted.set_result(None)

    def _advance(self) -> None:
        """Admit those that may run now; where nothing runs, switch to the model that is waited for longest."""
        if self._task is not None:
            return
        others = [ticket for ticket in self._waiting if not self._fits(ticket)]
        if not others or time.monotonic() - max(self._since_s, others[0].since_s) < self._switch_after_s:
            self._admit()
        if others and not (self.running is not None and self.running.is_busy):
            self._begin(None if others[0].parks else others[0].model)

    def _after(self, model: Hosted) -> None:
        """Requests of ``model`` may have ended."""
        if model.expiry is not None:
            model.expiry.cancel()
        if not model.is_busy and model.keep_alive_s is not None and model.handle is not None:
            model.used_s = time.monotonic()
            loop = asyncio.get_running_loop()
            model.expiry = loop.call_later(model.keep_alive_s, self._expire, model, model.used_s)
        self._advance()

    def _expire(self, model: Hosted, used_s: float) -> None:
        if self.running is model and model.used_s == used_s and self._task is None and not self._is_stopping:
            self._begin(None)

    def _watch(self, model: Hosted) -> None:
        if model.served is not None:
            model.served.engine.on_idle = partial(self._after, model)

    def stop(self) -> None:
        """End the engines; requests that wait fail, and so does a model that is being loaded."""
        self._is_stopping = True
        for ticket in self._waiting:
            ticket.admitted.set_exception(RequestError("the server stops", status=503))
        self._waiting.clear()
        for served in [model.served for model in self.models if model.served is not None]:
            served.engine.stop()

    # -- the switch ----------------------------------------------------------------------------------------------------

    def _begin(self, to: Hosted | None) -> None:
        self._target = to
        self._task = asyncio.get_running_loop().create_task(self._switch(to))

    async def _switch(self, to: Hosted | None) -> None:
        kind = "park" if to is None else "load" if to.served is None else "resume"
        begin_s, blamed = time.perf_counter(), to or self.running
        assert blamed is not None
        blamed.error = None
        try:
            await asyncio.to_thread(self.bring, to, self._on_progress)
            self.observe(kind, time.perf_counter() - begin_s)
        except Exception as error:
            name, why = blamed.names[0], f"{type(error).__name__}: {error}"
            _log.error("%s of %s failed", kind, name, exc_info=error)
            text = f"{kind} of {name!r} failed, and its next request tries it again: {why}"
            blamed.error = None if blamed is self.running else text  # it runs on
            for ticket in [each for each in self._waiting if each.model is blamed and each.parks is (to is None)]:
                self._waiting.remove(ticket)
                ticket.admitted.set_exception(RequestError(text, status=503))
        self._task, self._since_s = None, time.monotonic()
        self._admit()  # however long the others have waited
        self._advance()

    def _on_progress(self, done: int, total: int) -> None:
        if self._is_stopping:
            raise RequestError("the server stops", status=503)

    def bring(self, to: Hosted | None, progress: Progress) -> None:
        """Put ``to`` on the device in place of the model that is there; takes as long as it takes.

        Args:
            to: ``None``: none is to be there.
            progress: called while weights are loaded.

        Raises:
            Exception: of any type, with no model on the device; or with the only one, which could not be parked.
        """
        held = [model for model in self.models if model.served is not None and model is not to]
        held.sort(key=lambda model: model.used_s)
        gone = list[Hosted]()
        while to is not None and held and sum(each.host_bytes for each in (to, *held)) > self._host_limit_bytes:
            gone.append(held.pop(0))
        if (leaving := self.running) is not None and leaving.served is not None:
            leaving.served.engine.engine.rest()
            if leaving not in gone and not self._is_parked(leaving):
                gone.append(leaving)
                held.remove(leaving)
            self.running = None
        for model in gone:
            self._release(model)
        if to is None:
            return
        if to.served is None:
            to.served, to.handle = self._load(to, held, progress)
            self._watch(to)
        elif to.handle is not None:
            to.handle.resume()
        self.running, to.used_s = to, time.monotonic()

    def _is_parked(self, model: Hosted) -> bool:
        """Park ``model``; ``False``: it cannot be, and has to be loaded again."""
        if model.handle is None:
            return True
        try:
            model.handle.park()
        except Exception as error:
            if model.load is None:
                self.running = None
                model.handle.resume()  # an error in the middle leaves it parked
                self.running = model
                raise
            _log.warning("%s is not parked, and is loaded again when it is wanted: %s", model.names[0], error)
            return False
        return True

    def _load(self, to: Hosted, held: list[Hosted], progress: Progress) -> tuple[ServedModel, Handle]:
        assert to.load is not None
        while True:
            try:
                return to.load(progress)
            except LimitError as error:  # other programs have taken memory meanwhile
                if error.limit == DEVICE or not held:
                    raise
            self._release(held.pop(0))

    def _release(self, model: Hosted) -> None:
        for ticket in [ticket for ticket in self._waiting if ticket.model is model]:
            ticket.ready.clear()  # it holds the model
        _log.info("%s leaves host memory", model.names[0])
        model.release()
