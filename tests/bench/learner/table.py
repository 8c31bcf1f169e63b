"""The learner bench's results as text."""

from tests.bench.peers import workload


def numbers(sides: dict[str, dict]) -> str:
    """Loss and gradient norm of each side on one batch."""
    parts = []
    for name, r in sides.items():
        mark = "" if r["right"] else f" WRONG by {max(r['difference'].values()):.1%}"
        parts.append(f"{name} {r['loss']:.7f} {r['grad_norm']:.6f}{mark}")
    return "loss, gradient norm: " + "; ".join(parts)


def batch_line(name: str, sides: dict[str, dict]) -> str:
    """Each side's seconds on one batch."""
    times = (f"{side} {r['s']:.2f} s ({r['clean_rounds']}/{r['rounds']} clean)" for side, r in sides.items())
    return f"{name}: " + ", ".join(times)


def markdown(results, values, aims, profiles, *, machine: str, rounds: int) -> str:
    """The whole page."""
    first = next(iter(results.values()))
    lines = [
        "# Learner: one GRPO update, side by side",
        "",
        f"`python -m tests.bench.learner`, on {machine}, float32, two threads a side, {rounds} rounds in turns, "
        "medians. Seconds are one update: forward, backward, AdamW. `x` is a side's seconds over ours.",
        "",
        "Versions: " + "; ".join(f"{side} {r['version']}" for side, r in first.items()) + ".",
        "",
        *_aims(aims),
        *_times(results),
        *_numbers(results),
        *_memory(first),
        *_shapes(values),
        *(line for profile in profiles for line in _profile(profile)),
    ]
    return "\n".join(lines)


def _aims(aims: dict) -> list[str]:
    lines = ["| key | value | aim | met | |", "|---|---|---|---|---|"]
    for key, a in aims.items():
        remark = a.get("remark", "") or (f"fill {a['fill']:.0%}" if "fill" in a else "")
        lines.append(f"| `{key}` | {a['value']:.3g} | {a['aim']:g} | {'yes' if a['met'] else '**no**'} | {remark} |")
    return [*lines, ""]


def _times(results: dict[str, dict]) -> list[str]:
    lines = [
        "## Time",
        "",
        "Fill is real tokens over the slots of the padded shape, 512 a sequence; slots are what a side computes. A "
        "timing during which others used more than 15% of the two cores is repeated up to twice; medians are over the "
        "clean ones, and `disturbed` marks those with fewer than three. Foreign is the median share others used.",
        "",
        "| batch | real tokens | fill | side | slots | s (min - max) | real tokens/s | x | clean | foreign | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, sides in results.items():
        batch = workload.make_batch(name)
        for side, r in sides.items():
            marks = "" if r["right"] else " (numbers wrong)"
            marks += " (disturbed)" if r["disturbed"] else ""
            lines.append(
                f"| {name} | {batch.num_real_tokens} | {batch.fill:.0%} | {side}{marks} | {r['slots']} | "
                f"{r['s']:.3f} ({r['s_min']:.3f} - {r['s_max']:.3f}) | {batch.num_real_tokens / r['s']:.0f} | "
                f"{r['s'] / sides['ours']['s']:.2f} | {r['clean_rounds']}/{r['rounds']} | {r['foreign']:.0%} | "
                f"{r['load']:.1f} |"
            )
    return [*lines, ""]


def _numbers(results: dict[str, dict]) -> list[str]:
    lines = [
        "## The same update",
        "",
        "From the same weights: loss and gradient norm of the first update, and the loss after it, which shows the "
        "optimizer. Differences are relative to torch_packed; over 1e-3 is wrong.",
        "",
        "| batch | side | loss | gradient norm | loss after | largest difference | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, sides in results.items():
        for side, r in sides.items():
            lines.append(
                f"| {name} | {side} | {r['loss']:.7f} | {r['grad_norm']:.6f} | {r['loss_after']:.7f} | "
                f"{max(r['difference'].values()):.1e} | {'' if r['right'] else '**wrong**'} |"
            )
    if not all(sides["tunix_packed"]["right"] for sides in results.values() if "tunix_packed" in sides):
        lines += ["", "Tunix's Qwen3 drops the mask of packed rows where it has no splash attention (TPU only), so its"]
        lines[-1] += " packed numbers are right on no CPU: its ratio says what its program costs, not what it is worth."
    return [*lines, ""]


def _memory(first: dict[str, dict]) -> list[str]:
    lines = [
        "## Memory",
        "",
        "Resident set, GB, on the first batch. Start: weights, optimizer moments and batch in place, no gradients. "
        "Peak: high-water mark of an update after the first ones. Empty: before the weights were loaded.",
        "",
        "| side | peak over start | peak over empty |",
        "|---|---|---|",
    ]
    for side, r in first.items():
        lines.append(f"| {side} | {r['peak_over_start_gb']:.2f} | {r['peak_over_empty_gb']:.2f} |")
    return [*lines, ""]


def _shapes(values: dict) -> list[str]:
    seconds = ", ".join(f"{n} layers {s:.2f} s" for n, s in values["compile_s"].items())
    return [
        "## Shapes and compilations",
        "",
        f"- Compile time of accumulate and apply: {seconds}; 28 over 8: {values['compile_28_over_8_layers']:.2f}, "
        f"28 over 2: {values['compile_28_over_2_layers']:.2f} (foreign {values['compile_foreign']:.0%}).",
        f"- {values['num_updates']} updates of lognormal lengths in {values['num_micro_batches']} micro-batches: "
        f"{values['num_train_shapes']} shape, {values['num_compilations']} compilations (accumulate and apply), "
        f"{values['xla_compilations_after_first_update']} after the first update.",
        f"- Computed slots a real token: {values['computed_per_real_token']:.3f} when an update's groups are there, "
        f"{values['computed_per_real_token_in_bursts']:.3f} when a waiting learner takes every 8 as they come.",
        "",
    ]


def _profile(p: dict) -> list[str]:
    least, model_least = (p[key] / p["ceiling_gflops"] for key in ("gflop", "model_gflop"))
    lines = [
        "## Where our update's time goes",
        "",
        f"Batch {p['batch']}, {p['slots']} slots, {p['real_tokens']} real tokens. Matmuls of the update's shapes "
        f"sustain {p['ceiling_gflops']:.0f} GFLOP/s on two threads (weighted by their FLOPs), so the {p['gflop']:.0f} "
        f"GFLOP of an update take at least {least:.2f} s; it takes {p['update_s']:.2f} s, {least / p['update_s']:.0%} "
        f"of the ceiling (load {p['load']:.1f}, foreign {p['foreign']:.0%}). GFLOP counts what runs, recomputation and "
        f"padding included; without them, over real tokens and causal pairs only, it is {p['model_gflop']:.0f} "
        f"({model_least / p['update_s']:.0%} of the ceiling).",
        "",
        "| part | GFLOP | least s | traced s | of the update |",
        "|---|---|---|---|---|",
    ]
    for part in p["parts"]:
        lines.append(
            f"| {part['name']} | {part['gflop']:.1f} | {part['least_s']:.3f} | {part['s']:.3f} | "
            f"{part['s'] / p['traced_s']:.0%} |"
        )
    if p["top"]:
        lines += ["", "The longest operations:", "", "| s | calls | operation | from |", "|---|---|---|---|"]
        lines += [f"| {o['s']:.3f} | {o['calls']} | `{o['name']}` | {o['where']} |" for o in p["top"]]
    return [*lines, ""]
