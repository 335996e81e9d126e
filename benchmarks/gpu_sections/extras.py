"""What LoRA adapters and drafts add to a decoding step.

Adapters are random, for every linear layer, and measured in the executor. Drafts are measured in the decoder alone,
since a shard on a GPU does not verify any: a step with drafts of every row against one without, computed launch by
launch, as any step with several tokens in a row is, and as a replay of a CUDA graph, which would be the least.
A step that takes r times as long pays where rows gain more than r - 1 accepted drafts from it.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from funitel.model_server.device.memory import release_memory
from funitel_testing.tiny_adapters import TinyAdapter, write_adapter
from gpu_sections import checkpoint, engine, timing
from gpu_sections.figures import Facts, Line
from gpu_sections.model import decoding_step, graphed, make_decoder, make_pool, replayed
from gpu_sections.plan import Plan

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MAX_CHARS = 80  # of why a step was not recorded


def measure(plan: Plan, facts: Facts) -> Iterator[Line]:
    """Adapters, then drafts."""
    yield from _adapters(plan)
    with torch.inference_mode():
        yield from _drafts(plan)


def _adapters(plan: Plan) -> Iterator[Line]:
    model, num_rows, count = checkpoint.ensure(plan), plan.adapter_rows, plan.num_adapters
    saved = save_adapter(plan, model)
    executor = engine.load_executor(plan, model)
    engine.warm_up_for(plan, executor, num_rows, plan.context)
    begin, names = time.perf_counter(), [f"adapter-{i}" for i in range(count)]
    for name in names:  # each with memory of its own
        executor.load_adapter(name, str(saved))
    timing.wait(plan)
    loading = (time.perf_counter() - begin) / count
    yield Line("adapter_load", f"loading an adapter of rank {plan.rank}", loading * 1e3, "ms")
    base = engine.decoding_seconds(plan, executor, num_rows, plan.context)
    shared = engine.decoding_seconds(plan, executor, num_rows, plan.context, names[:1])
    spread = engine.decoding_seconds(plan, executor, num_rows, plan.context, names)
    title = f"the executor, {num_rows} rows of {plan.context} tokens"
    yield Line("adapters_none", f"{title}, no adapter", base * 1e3, "ms")
    yield Line("adapters_one", f"{title}, all with one adapter", shared * 1e3, "ms, times none", shared / base)
    yield Line("adapters_many", f"{title}, {count} adapters in turn", spread * 1e3, "ms, times none", spread / base)


def save_adapter(plan: Plan, model: Path) -> Path:
    """Write a random adapter in PEFT's layout for the layers of the checkpoint in `model`; returns its folder."""
    folder, tensors = plan.folder / "adapter", {}
    with safe_open(model / "model.safetensors", "pt") as file:
        shapes = {name.removesuffix(".weight"): file.get_slice(name).get_shape() for name in file.keys()}
    generator = torch.Generator(plan.device).manual_seed(0)
    for name, shape in shapes.items():
        if not name.endswith(TARGETS):
            continue
        outputs, inputs = shape
        for half, size in (("A", (plan.rank, inputs)), ("B", (outputs, plan.rank))):
            drawn = 0.01 * torch.randn(size, generator=generator, device=plan.device)
            tensors[f"base_model.model.{name}.lora_{half}.weight"] = drawn.to(plan.dtype).cpu()
    write_adapter(folder, TinyAdapter(rank=plan.rank, targets=TARGETS).config(), tensors)
    return folder


def _drafts(plan: Plan) -> Iterator[Line]:
    release_memory(plan.device)  # of the executor
    decoder, plain = make_decoder(plan), dict[int, float]()
    for num_rows in plan.drafted_rows:
        cache, tables = make_pool(plan, num_rows, plan.context)
        batch, forward = decoding_step(plan, tables, plan.context), graphed(plan, decoder, num_rows)
        plain[num_rows] = base = timing.seconds_of(plan, lambda: forward(batch, cache))  # noqa: B023 - called at once
        launched = timing.seconds_of(plan, lambda: decoder(batch, cache))  # noqa: B023
        yield Line(f"undrafted_{num_rows}", _title(plan, num_rows, 0), base * 1e3, "ms")
        name = f"{_title(plan, num_rows, 0)}, without graphs"
        yield Line(f"undrafted_launched_{num_rows}", name, launched * 1e3, "ms, times a replay", launched / base)
        for count in plan.drafts:
            drafted = decoding_step(plan, tables, plan.context, count)
            seconds = timing.seconds_of(plan, lambda: decoder(drafted, cache))  # noqa: B023
            name = f"{_title(plan, num_rows, count)}, without graphs"
            yield Line(f"drafted_{num_rows}_{count}", name, seconds * 1e3, "ms, times one without", seconds / base)
    for num_rows in plan.drafted_rows:  # last: a failed recording may leave the device unusable
        cache, tables = make_pool(plan, num_rows, plan.context)
        for count in plan.drafts:
            key, name = f"drafted_replayed_{num_rows}_{count}", f"{_title(plan, num_rows, count)}, as a graph"
            drafted = decoding_step(plan, tables, plan.context, count)
            laid_out = decoder.attention.plan(drafted)
            try:
                replay = replayed(plan, lambda: decoder.run(drafted, cache, laid_out))  # noqa: B023
            except RuntimeError as error:
                yield Line(key, name, None, f"skipped: {str(error)[:MAX_CHARS]}")
                return
            seconds = timing.seconds_of(plan, replay)
            yield Line(key, name, seconds * 1e3, "ms, times one without", seconds / plain[num_rows])


def _title(plan: Plan, num_rows: int, num_drafts: int) -> str:
    drafts = f", {num_drafts} drafts each" if num_drafts else ""
    return f"decoding, {num_rows} rows of {plan.context} tokens{drafts}"
