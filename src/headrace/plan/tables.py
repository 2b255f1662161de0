"""Tables of plans and of predictions for them. They need rich, so nothing imports this module before it prints."""

from __future__ import annotations

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from headrace.formatting import format_rate, format_size, format_time, in_unit, pluralize, size_unit
from headrace.plan.cached_experts import host_memory_bytes
from headrace.plan.kinds import HOST, StoreKind, Unit, kind_of
from headrace.plan.plan import Plan
from headrace.plan.prediction import CachePoint, PlanPrediction

# Mechanisms; for a plan with two stores, prefetched from files is one of its own.
_REACHED = ("resident", "prefetched", "from files", "in place", "cached")

# Norms and biases have dozens of roles of a few KiB each; they share a row.
_MAX_ROLE_ROWS = 12
_MAX_RUNS = 6
_LAYERS_WIDTH = 16
# Without a terminal; the command line's is the same.
_PIPE_WIDTH = 120

_STYLE: Mapping[str, Any] = {
    "title_justify": "left", "title_style": "bold", "header_style": "dim", "box": box.SIMPLE_HEAD, "show_edge": False,
    "pad_edge": False, "collapse_padding": True,
}  # fmt: skip
_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def plan_table(plan: Plan) -> RenderableType:
    """The output of ``headrace plan`` and ``print(plan)``: the plan, or the weights alone, and its predictions."""
    name, prediction = plan.model_name or "model", plan.prediction
    if not isinstance(prediction, PlanPrediction):
        return render(plan, name)
    if prediction.least_budget_bytes is not None:
        return render_weights(plan, name, prediction.least_budget_bytes)
    refusals = [Text(f"\nThis plan {prediction.shortage}.", style="bold red")] if prediction.shortage else []
    if plan.kind.remark:
        refusals.append(Text(f"\n{plan.kind.remark}"))
    return Group(render(plan, name), render_prediction(prediction), *refusals)


def text_of(plan: Plan, html: bool = False) -> str:
    """:func:`plan_table` as plain text as wide as the terminal (``COLUMNS``), or as HTML for notebooks."""
    width = _PIPE_WIDTH if html else shutil.get_terminal_size((_PIPE_WIDTH, 24)).columns
    console = Console(file=StringIO(), width=width, record=True)
    console.print(plan_table(plan))
    if html:
        return console.export_html(inline_styles=True, code_format='<pre style="line-height:1.2">{code}</pre>')
    return "\n".join(line.rstrip() for line in console.export_text().splitlines())


def render(plan: Plan, name: str) -> RenderableType:
    """``plan`` of a model called ``name``: summary, memory by store, units, roles."""
    share = 100 * plan.device_bytes / max(1, plan.weight_bytes)
    summary = Text.assemble(
        (name, "bold"),
        f": {format_size(plan.weight_bytes)} of weights in ",
        (f"{format_size(plan.device_bytes)} of device memory ({share:.0f} %)", "bold"),
        f"; {format_size(plan.moved_bytes)} moved per forward",
        f", {format_size(plan.read_bytes)} of them read from files" if plan.spilled_bytes and plan.read_bytes else "",
    )
    return Group(summary, _places(plan), *([_units(plan)] if plan.units else []), _roles(plan))


def render_weights(plan: Plan, name: str, minimum_bytes: int) -> RenderableType:
    """The size of the model and its smallest budget; ``plan`` has everything resident."""
    lines = Text.assemble(
        (name, "bold"),
        f" weighs {format_size(plan.weight_bytes)} in {len(plan.resident)} tensors; nothing would be offloaded.\n",
        f"The smallest budget is --device-memory {-(-minimum_bytes // 2**20)}MiB ({format_size(minimum_bytes)}); ",
        "anything from there to the full weight works, and more is faster.",
    )
    return Group(lines, _roles(plan))


def role_of(name: str) -> str:
    """``name`` with ``*`` for the numbers of layers and experts: the same in every layer."""
    return _NUMBER.sub("*", name)


def compress_indices(indices: Iterable[int]) -> str:
    """``0-3, 7, 9-11``; evenly spaced ones as ``3, 7, ... 27``; long irregular lists are cut."""
    ordered = sorted(set(indices))
    # Within a run the index and its position grow together.
    grouped = groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0])
    runs = [[index for _, index in run] for _, run in grouped]
    if len(runs) <= _MAX_RUNS:
        return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{ordered[0]}, {ordered[1]}, {ordered[2]}, ... {ordered[-1]}"


class _Name:
    """A dotted name that is wrapped after dots, and not inside words."""

    def __init__(self, name: str) -> None:
        self._parts = re.findall(r"[^.]*\.|[^.]+$", name)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(max(map(len, self._parts)), sum(map(len, self._parts)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = ""
        for part in self._parts:
            if line.strip() and len(line + part) > options.max_width:
                yield Text(line)
                line = "  "
            line += part
        yield Text(line)


def titled_table(title: str, *columns: str) -> Table:
    """The first column is text, the others are numbers."""
    table = Table(title=f"\n{title}", **_STYLE)
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table


def _places(plan: Plan) -> Table:
    """Bytes by store."""
    # Host and files always have a column, after those of other stores of units.
    beside = [kind_of(name).label for name in plan.kind.beside if kind_of(name) in plan.units_by_kind]
    always = ("host", "file")
    stores = [*(label for label in beside if label not in always), *always]
    stores = list(dict.fromkeys([*stores, plan.kind.label]))
    unit = size_unit(plan.weight_bytes)
    table = titled_table(f"Memory, {unit}", "what", "count", "device", *stores)
    totals = dict.fromkeys(("device", *stores), 0)

    def add(what: str, count: str, place: str, num_bytes: int) -> None:
        table.add_row(what, count, *(in_unit(num_bytes, unit) if place == column else "" for column in totals))
        totals[place] += num_bytes

    add("resident", pluralize(len(plan.resident), "tensor"), "device", plan.resident_bytes)
    # On a GPU bytes of files pass through, or stay in, pinned memory.
    staged = plan.reads_files and plan.made_for is not None and plan.made_for.device != "cpu"
    if plan.units:
        add("slots", pluralize(plan.num_slots, "slot"), "device", sum(plan.slot_bytes))
        if plan.decoding_bytes:
            add("decoded", "1 unit", "device", plan.decoding_bytes)
        if staged:
            add("staging ring", "", "host", plan.ring_bytes)
        for kind, units in sorted(plan.units_by_kind.items(), key=lambda item: item[0].name):  # cpu before disk, peer
            if units:
                num_bytes = sum(unit.link_bytes for unit in units)
                add("prefetched", pluralize(len(units), "unit"), kind.label, num_bytes)
    if plan.uva:
        place = HOST.label if staged and plan.kind.in_files else plan.kind.label
        add("read in place", pluralize(len(plan.uva), "tensor"), place, plan.uva_bytes)
    if plan.cached:
        _add_experts(plan, add, on_gpu=staged)
    table.add_section()
    sums = (in_unit(num_bytes, unit) if num_bytes else "" for num_bytes in totals.values())
    table.add_row("total", "", *sums, style="bold")
    return table


def _add_experts(plan: Plan, add: Callable[[str, str, str, int], None], on_gpu: bool) -> None:
    counts, last = sorted({layer.num_slots for layer in plan.cached}), plan.cached[-1]
    slots = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    overflow_rows = max(layer.overflow_rows for layer in plan.cached)
    more = f", {overflow_rows} for overflow" if overflow_rows else ""
    add("slots for experts", f"{slots} of {plan.cached[0].num_experts}{more}", "device", plan.cache_bytes)
    if on_gpu and last.host_slots is not None:
        num_bytes = host_memory_bytes(plan.cached, on_gpu=True)
        add("experts above files", f"{last.host_slots} of {last.num_experts}", "host", num_bytes)
    add("cached experts", pluralize(len(plan.cached), "layer"), plan.kind.label, plan.cached_bytes)


def _units(plan: Plan) -> Table:
    alike: defaultdict[tuple[str, int, StoreKind], list[Unit]] = defaultdict(list)
    for unit in plan.units:
        alike[role_of(unit.module_fqn), len(unit.entries), unit.kind].append(unit)
    size = size_unit(plan.weight_bytes)
    table = titled_table("Units", "module", "stored in", "units", "layers", "tensors", f"{size} each")
    table.columns[3].max_width = _LAYERS_WIDTH  # it breaks between words, and names would have to inside them
    for (fqn, tensors, kind), units in alike.items():
        low, high = (in_unit(bound(unit.num_bytes for unit in units), size) for bound in (min, max))
        table.add_row(
            _Name(fqn or "(the model)"),
            kind.label,
            str(len(units)),
            # The first number of a name is its layer's; later ones are experts or blocks inside it.
            compress_indices(int(number) for unit in units for number in _NUMBER.findall(unit.module_fqn)[:1]),
            str(tensors),
            low if low == high else f"{low} to {high}",
        )
    return table


def _roles(plan: Plan) -> Table:
    """The largest roles, then the others as one."""
    counts: Counter[str] = Counter()
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name, placement in plan.placements.items():
        counts[role_of(name)] += 1
        sizes[role_of(name)][_reached(plan, name)] += placement.num_bytes
    rows = sorted(counts, key=lambda role: (-sizes[role].total(), role))
    if len(rows) > _MAX_ROLE_ROWS:
        rows, small = rows[: _MAX_ROLE_ROWS - 1], rows[_MAX_ROLE_ROWS - 1 :]
        rows.append(others := f"{len(small)} smaller roles")
        counts[others] = sum(counts[role] for role in small)
        for role in small:
            sizes[others] += sizes[role]
    shown = [column for column in _REACHED if column == "resident" or any(size[column] for size in sizes.values())]
    unit = size_unit(plan.weight_bytes)
    table = titled_table(f"Tensors by role, {unit}", "role", "count", "total", *shown)
    for role in rows:
        cells = (in_unit(sizes[role][column], unit) if sizes[role][column] else "" for column in shown)
        table.add_row(_Name(role), str(counts[role]), in_unit(sizes[role].total(), unit), *cells)
    return table


def _reached(plan: Plan, name: str) -> str:
    """The one of ``_REACHED`` for a storage."""
    placement = plan.placements[name]
    if placement.mechanism == "prefetch":
        from_files = placement.kind is not None and placement.kind.in_files and not plan.kind.in_files
        return "from files" if from_files else "prefetched"
    return {"uva": "in place", "cache": "cached"}.get(placement.mechanism, "resident")


# -- predictions -------------------------------------------------------------------------------------------------------


def render_prediction(prediction: PlanPrediction) -> RenderableType:
    """A table of predicted steps, and the alternatives below."""
    unit = size_unit(max(prediction.device_bytes + use.total_bytes for use in prediction.memory))
    counted = ("rows", "step", "steps/s") if prediction.is_pipeline else ("batch", "step", "tokens/s")
    table = titled_table("Predicted steps", *counted, "floor", "share of floor", "bound by", f"device {unit}")
    for forecast, use in zip(prediction.forecasts, prediction.memory, strict=True):
        table.add_row(
            str(forecast.rows),
            format_time(forecast.step_s),
            format_rate(1 / forecast.step_s if prediction.is_pipeline else forecast.rows_per_s),
            format_time(forecast.floor_s),
            f"{forecast.floor_s / forecast.step_s:.0%}",
            forecast.bound,
            in_unit(prediction.device_bytes + use.total_bytes, unit),
        )
    hint = "" if prediction.is_measured else "; run `headrace probe` on that machine for predictions that hold"
    lines = [f"\nRates of {prediction.machine}{hint}."]
    if prediction.context:
        largest = max(prediction.memory, key=lambda use: use.batch)
        lines.append(
            f"Batch {largest.batch} at {prediction.context} tokens: {format_size(largest.cache_bytes)} of KV cache, "
            f"{format_size(largest.activation_bytes)} of activations; device memory above includes both."
        )
    lines += [
        f"• {text}" for text in (*(alternative.text for alternative in prediction.alternatives), *prediction.notes)
    ]
    return Group(table, *([_caches(prediction.caches)] if prediction.caches else []), Text("\n".join(lines)))


def _caches(caches: Sequence[CachePoint]) -> Table:
    """Tokens per second by slots for experts, with the expected hit rate and with others."""
    unit = size_unit(max(cache.device_bytes for cache in caches))
    given = [f"{share:.0%}" for share, _ in caches[0].at_hits]
    shared = [] if caches[0].cpu_rows_per_s is None else ["with CPU"]
    table = titled_table("Cached experts, tokens/s", "slots", f"device {unit}", "hits", "tokens/s", *shared, *given)
    for cache in caches:
        rates = [format_rate(rows_per_s) for _, rows_per_s in cache.at_hits]
        if shared:  # none where all experts have slots
            rates.insert(0, format_rate(cache.cpu_rows_per_s) if cache.cpu_rows_per_s else "")
        size, expected = in_unit(cache.device_bytes, unit), format_rate(cache.rows_per_s)
        table.add_row(str(cache.num_slots), size, f"{cache.hits:.0%}", expected, *rates)
    return table
