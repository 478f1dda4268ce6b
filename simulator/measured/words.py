"""What ``validate`` prints: a table for a log, or the whole of docs/validation.md."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simulator.cost.factors import fitted
from simulator.measured.logs import RequestLog
from simulator.measured.validate import (
    STAGE_S,
    Compared,
    Everything,
    KernelRow,
    SeriesErrors,
    median_error,
)


def seconds(value: float) -> str:
    return f"{value * 1e3:.4g} ms" if value < 1 else f"{value:.4g} s"


def log_as_text(log: RequestLog, row: Compared, series: Sequence[SeriesErrors]) -> str:
    """One log for a terminal."""
    lines = [
        f"{row.name}: {len(log.ids)} requests, step times: {row.group}",
        f"  {'':<12} {'measured':>11} {'predicted':>11} {'error':>8}",
    ]
    for metric, value in row.measured.items():
        lines.append(
            f"  {metric:<12} {seconds(value):>11} {seconds(row.predicted[metric]):>11} "
            f"{row.error(metric):>+8.1%}"
        )
    lines += [
        f"  {errors.name:<12} {errors.mean:>11.4g} {errors.predicted:>11.4g}          on average; "
        f"{errors.distance:.3g} apart at a second"
        for errors in series
    ]
    return "\n".join([*lines, *(f"  note: {note}" for note in row.notes)])


def everything_as_markdown(found: Everything) -> str:
    """docs/validation.md."""
    sections = [
        _head(),
        _kernels(found.kernels),
        _logs(found),
        _experiments(found.experiments),
        _loops(found.loops),
        _residuals(),
    ]
    return "\n\n".join(sections) + "\n"


def _head() -> str:
    sources = "\n".join(f"- {source}" for source in fitted()["sources"])
    return f"""# Predicted and measured

Made by `python -m simulator validate --all FOLDER`, which prints this page; FOLDER holds the public
measurements named here, none of which this project made. An error is predicted / measured - 1; a median is
that of its size. What was fitted on what is said for each table.

What the factors of `simulator/cost/factors.json` were fitted on (`python -m simulator.measured.fit`):

{sources}"""


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'|'.join('---' for _ in head)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _kernels(rows: Sequence[KernelRow]) -> str:
    return f"""## Kernels

Held out are one of each three weight shapes, pairs of head counts, or places in a grid; of the products of a
layer, the model named, predicted by a fit to the others. 16-bit unless fp8 is named. Sources:
ai-dynamo/aiconfigurator (vLLM 0.24 kernels, H100 and H200), microsoft/vidur (A100, and H100's layers).

{
        _table(
            (
                "GPU",
                "what",
                "held out",
                "rows",
                "median error",
                "p90",
                "median of the signed error",
            ),
            (
                (
                    row.gpu,
                    row.what,
                    row.held_out,
                    f"{row.quality.rows:,}",
                    f"{row.quality.median:.1%}",
                    f"{row.quality.p90:.1%}",
                    f"{row.quality.bias:+.1%}",
                )
                for row in rows
            ),
        )
    }"""


def _logs(found: Everything) -> str:
    parts = [
        "## Logs of requests\n\n"
        "vLLM 0.19, Llama-3.1-8B in bf16, 300 ShareGPT requests at some 10 a second, output lengths forced "
        "(casys-kaist/LLMServingSim). Times are the engine's own."
    ]
    for row, (before, after, calibration), series in zip(
        found.log_rows, found.halves, found.series, strict=True
    ):
        parts.append(
            f"### {row.name}\n\n"
            f"All requests with factors fitted elsewhere ({row.group}), and the odd half of them before and "
            "after calibration on the even half.\n\n"
            + _table(
                ("", "measured", "predicted", "error", "odd half", "before", "after"),
                (
                    (
                        metric,
                        seconds(value),
                        seconds(row.predicted[metric]),
                        f"{row.error(metric):+.1%}",
                        *(
                            (
                                seconds(after.measured[metric]),
                                f"{before.error(metric):+.1%}",
                                f"{after.error(metric):+.1%}",
                            )
                            if metric in after.measured
                            else ("", "", "")
                        ),
                    )
                    for metric, value in row.measured.items()
                ),
            )
            + f"\n\nCalibration: bandwidth of products x {calibration.weights:g}, arithmetic x "
            f"{calibration.compute:g}, bandwidth of attention x {calibration.kv:g}, between steps "
            f"{(calibration.step_s or 0) * 1e3:.3g} ms."
            + (
                "\n\nOver time, after calibration: "
                + "; ".join(
                    f"{errors.name} {errors.mean:.4g} on average (predicted {errors.predicted:.4g}), "
                    f"{errors.distance:.3g} apart at a second"
                    for errors in series
                )
                + "."
                if series
                else ""
            )
        )
    return "\n\n".join(parts)


def _experiments(rows: Sequence[Compared]) -> str:
    metrics = ("E2E mean", "TTFT mean", "ITL mean", "ITL of asked", "E2E p99", "TTFT p99")
    notes = "\n".join(f"- {row.name}: {note}" for row in rows for note in row.notes)
    medians = ", ".join(f"{metric} {median_error(rows, metric):.1%}" for metric in metrics)
    return f"""## 18 experiments on H100

vLLM 0.15.1, chats with shared system prompts at constant rates, times of the client inference-perf
(inference-sim/sim-to-real-accuracy-validation). Each is predicted by serving factors that were fitted without
it. The first {
        STAGE_S:g} s of each stage (twice that for the reasoning load) are simulated. ITL is theirs:
(mean E2E - mean TTFT) / (mean output tokens, counted by the client from the text, - 1); "of asked"
divides by the tokens that were asked for, and generated.

The best published simulators reach median errors of 6.8 % (E2E), 18.4 % (TTFT) and 6.5 % (ITL) on 38
such runs.

Median errors: {medians}.

{
        _table(
            ("experiment", *(f"{metric}: measured, error" for metric in metrics)),
            (
                (
                    row.name,
                    *(
                        f"{seconds(row.measured[metric])}, {row.error(metric):+.1%}"
                        for metric in metrics
                    ),
                )
                for row in rows
            ),
        )
    }

{notes}"""


def _loops(rows: Sequence[Compared]) -> str:
    parts = [
        "## Closed loops\n\n"
        "Mean TTFT and TPOT at a fixed concurrency (ai-dynamo/aiconfigurator, silicon data). Each row is "
        "predicted by host times that were fitted without it, but with its neighbours: neither model nor tp "
        "is held out. What is not recorded was chosen on the same "
        "rows: 8 requests a user, 2 ms between two that a client sends at once, 2,048 tokens a step, "
        "asynchronous scheduling off."
    ]
    for group in dict.fromkeys(row.group for row in rows):
        members = [row for row in rows if row.group == group]
        parts.append(
            f"### {group}: {len(members)} rows\n\n"
            f"Median errors: TPOT {median_error(members, 'TPOT mean'):.1%}, TTFT "
            f"{median_error(members, 'TTFT mean'):.1%}.\n\n"
            + _table(
                ("run", "TTFT: measured, error", "TPOT: measured, error"),
                (
                    (
                        row.name,
                        *(
                            f"{seconds(row.measured[metric])}, {row.error(metric):+.1%}"
                            for metric in ("TTFT mean", "TPOT mean")
                        ),
                    )
                    for row in members
                ),
            )
        )
    return "\n\n".join(parts)


def _residuals() -> str:
    return """## What is left

- fp8 closed loops: the rows cannot be what one server of the named size did. With 80 users, 4,000
  prompt and 100 output tokens on 8 GPUs they are 89 requests a second, 357,000 prompt tokens a
  second, whose all-reduces alone fill the links; the load per server, or how far prompts repeat, is
  not recorded. They are printed for completeness.
- TTFT of closed loops depends on how the users drift apart, which is not recorded either.
- Two experiments of Llama-2-7B count their output tokens from text that the tokenizer joins
  differently: their ITL is off by that (see the notes), their E2E is not.
- RTX 4090 before calibration: no kernel of its generation was measured, and its tensor cores, which
  add in 32 bits at half rate, come closer to their datasheet than the A100's, whose shares are
  used. The knee of its queue turns a step time 13 % too long into a TTFT 18 to 26 % too long."""
