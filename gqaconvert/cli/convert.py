"""`gqaconvert convert`: fewer KV heads, in an ordinary checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gqaconvert.cli.conversion_options import (
    AsJson,
    DryRun,
    Hash,
    Model,
    Out,
    Overwrite,
    Resume,
    Revision,
    Workers,
)
from gqaconvert.cli.convert_calibrated import ModelWork, convert_with_model
from gqaconvert.cli.push import Public, PushToHub, check_push, push
from gqaconvert.cli.terminal import byte_progress, say, show_json, show_table
from gqaconvert.units import format_bytes, format_memory

if TYPE_CHECKING:
    from gqaconvert.checkpoint.hub_upload import UploadTarget
    from gqaconvert.surgery.convert import Conversion
    from gqaconvert.surgery.layer_heads import LayerReport
    from gqaconvert.surgery.plan import ConversionPlan


def convert_command(
    model: Model,
    out: Out = None,
    kv_heads: Annotated[
        int,
        typer.Option(
            min=1, help="KV heads wanted; `inspect` lists the legal counts.", show_default=False
        ),
    ] = ...,  # type: ignore[assignment]
    method: Annotated[
        Literal["mean", "first", "random", "procrustes", "svd"] | None,
        typer.Option(
            help="How a group becomes one head: its average, its first head, a fresh one; aligned"
            " and averaged (procrustes), or fitted to what goes in (svd, the default with a"
            " calibration; else mean).",
            show_default=False,
        ),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="What `calibrate` gathered of this model, or a text to gather it from; svd needs"
            " it.",
            show_default=False,
        ),
    ] = None,
    grouping: Annotated[
        Literal["adjacent", "similarity"],
        typer.Option(help="Which KV heads share: neighbours, or those that lose least (svd)."),
    ] = "adjacent",
    fit_steps: Annotated[
        int, typer.Option(min=0, help="Then train each layer's attention to do what it did.")
    ] = 0,
    distill_steps: Annotated[
        int, typer.Option(min=0, help="Then train the whole model on its source's predictions.")
    ] = 0,
    data: Annotated[
        str | None,
        typer.Option(
            help="Text for fit and distillation. Default: that of --calibration.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of a calibration text.")] = 131072,
    context: Annotated[int, typer.Option(min=2, help="Tokens a window of text.")] = 512,
    fit_windows: Annotated[int, typer.Option(min=2, help="Of text that the fit reads.")] = 128,
    device: Annotated[str, typer.Option(help="cpu or cuda, where the model is run.")] = "cpu",
    seed: Annotated[int, typer.Option(help="For --method random.")] = 0,
    dtype: Annotated[str, typer.Option(help="keep, or a type for all floating tensors.")] = "keep",
    max_shard_size: Annotated[
        str | None,
        typer.Option(
            help="Largest weight file, such as 5GB. Default: the source's files.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel degree to check the head counts against.")
    ] = 1,
    revision: Revision = None,
    dry_run: DryRun = False,
    resume: Resume = False,
    overwrite: Overwrite = False,
    workers: Workers = None,
    hash_files: Hash = False,
    push_to_hub: PushToHub = None,
    public: Public = False,
    as_json: AsJson = False,
) -> None:
    """Pool the KV heads of a checkpoint into fewer.

    The output is an ordinary checkpoint of the same class, and loads wherever the source did.
    """
    work = ModelWork(
        calibration, tokens, data, fit_steps, fit_windows, distill_steps, context, device
    )
    options: dict[str, Any] = {
        "num_kv_heads": kv_heads, "method": method, "grouping": grouping, "seed": seed,
        "dtype": dtype, "max_shard_size": max_shard_size, "tensor_parallel": tp,
        "revision": revision, "dry_run": dry_run, "resume": resume, "overwrite": overwrite,
        "workers": workers, "hash_files": hash_files,
    }  # fmt: skip
    target = check_push(push_to_hub, public=public, overwrite=overwrite)
    conversion: Conversion | None
    if work.runs_the_model:
        finished, conversion = convert_with_model(model, out, work, options)
    else:
        from gqaconvert.surgery.convert import convert  # without torch

        with byte_progress("converting") as progress:
            conversion = convert(model, out, statistics=calibration, progress=progress, **options)
        finished = conversion.out
    if conversion is not None:
        report_conversion(conversion, as_json=as_json, target=target)
        _recommend(conversion, model, kv_heads, as_json=as_json)
    if target is not None and (conversion is None or conversion.written):
        push(
            finished,
            target,
            message=f"Convert to {kv_heads} KV head{'s' * (kv_heads > 1)} with gqaconvert",
        )


def _recommend(conversion: Conversion, model: str, kv_heads: int, *, as_json: bool) -> None:
    averaged = conversion.plan is not None and conversion.plan.options.method == "mean"
    if averaged and conversion.written and not as_json:
        say(
            "note: averaging costs much quality; the calibrated method keeps far more:\n"
            f"  gqaconvert convert {model} --kv-heads {kv_heads} --calibration TEXT --fit-steps 96"
        )


def report_conversion(
    conversion: Conversion, *, as_json: bool, target: UploadTarget | None = None
) -> None:
    """Print what a conversion did or would do, and where its output would be uploaded."""
    for notice in conversion.notices:
        say(f"note: {notice}")
    plan = conversion.plan
    if as_json:
        hub = {} if target is None else {"hub": {"url": target.url, "private": target.private}}
        show_json({**_as_json(conversion), **hub})
        return
    if plan is None:
        return
    if not conversion.written:
        _show_plan(plan)
        if conversion.layers:
            show_losses(conversion.layers)
    _show_change(conversion, plan)
    if conversion.written:
        for check in conversion.checks:
            say(f"verified: {check.name}: {check.covered}")
        rate = plan.size_bytes / conversion.seconds
        say(
            f"wrote {conversion.out} ({format_bytes(plan.size_bytes)}"
            f" in {conversion.seconds:.1f} s, {format_bytes(rate)}/s)"
        )
    else:
        if target is not None:
            beside = len(conversion.sidecars.copied)
            say(
                f"would upload {len(plan.shards)} weight files, {format_bytes(plan.size_bytes)},"
                f" config.json, the model card, gqaconvert.json and {beside} other files"
                f" to {target.describe()}"
            )
        say("dry run: nothing was written")


def _show_change(conversion: Conversion, plan: ConversionPlan) -> None:
    before, after = plan.attention.num_kv_heads, plan.options.num_kv_heads
    context = conversion.source.config.max_position_embeddings or 4096
    kv_before, kv_after = plan.kv_bytes_per_token(before), plan.kv_bytes_per_token(after)
    parameters = sum(math.prod(tensor.output.shape) for tensor in plan.tensors)
    rows = [
        ["KV heads", str(before), str(after)],
        ["KV cache a token", format_memory(kv_before), format_memory(kv_after)],
        [
            f"KV cache at {context} tokens",
            format_memory(kv_before * context),
            format_memory(kv_after * context),
        ],
        ["parameters", f"{conversion.source.index.parameters:,}", f"{parameters:,}"],
        [
            "weights",
            format_bytes(conversion.source.index.size_bytes),
            format_bytes(plan.size_bytes),
        ],
    ]
    show_table(["", conversion.source.identity.name, conversion.out.name], rows)


def _show_plan(plan: ConversionPlan) -> None:
    rows = []
    for action in ("pool", "repeat", "fold", "cast", "derive", "copy"):
        chosen = [tensor for tensor in plan.tensors if tensor.action == action]
        if chosen:
            size = sum(tensor.output.size_bytes for tensor in chosen)
            rows.append(
                [action, str(len(chosen)), format_bytes(size), _example(chosen[0].output.name)]
            )
    show_table(["action", "tensors", "output", "such as"], rows, (0, 3))
    typer.echo("")
    for edit in plan.config_edits:
        typer.echo(f"config.json {'.'.join(edit.path)}: {edit.before} → {edit.after}")
    for shard in plan.shards:
        typer.echo(f"{shard.name}  {format_bytes(shard.size_bytes)}  {len(shard.tensors)} tensors")
    typer.echo("")


def show_losses(layers: Mapping[str, LayerReport]) -> None:
    """Print what pooling each layer would lose."""
    rows = [
        [
            module,
            f"{100 * report.key_energy_lost:.1f} %",
            f"{100 * report.value_energy_lost:.1f} %",
            "" if report.output_error is None else f"{100 * report.output_error:.1f} %",
        ]
        for module, report in layers.items()
    ]
    show_table(["layer", "K lost", "V lost", "output error"], rows)
    for note in dict.fromkeys(note for report in layers.values() for note in report.notes):
        say(f"note: {note}")
    typer.echo("")


def _as_json(conversion: Conversion) -> dict[str, object]:
    plan = conversion.plan
    if plan is None:
        return {"out": str(conversion.out), "written": False, "notices": list(conversion.notices)}
    before, after = plan.attention.num_kv_heads, plan.options.num_kv_heads
    return {
        "out": str(conversion.out),
        "written": conversion.written,
        "kv_heads": {"before": before, "after": after},
        "kv_bytes_per_token": {
            "before": plan.kv_bytes_per_token(before),
            "after": plan.kv_bytes_per_token(after),
        },
        "size_bytes": plan.size_bytes,
        "plan_sha256": plan.digest(),
        "tensors": [
            {
                "name": tensor.output.name,
                "action": tensor.action,
                "dtype": tensor.output.dtype,
                "shape": list(tensor.output.shape),
                "file": tensor.output.file,
                "sources": [source.name for source in tensor.sources],
            }
            for tensor in plan.tensors
        ],
        "config": [
            {"key": ".".join(edit.path), "before": edit.before, "after": edit.after}
            for edit in plan.config_edits
        ],
        "files": {shard.name: shard.size_bytes for shard in plan.shards},
        "layers": {module: asdict(report) for module, report in conversion.layers.items()},
        "checks": {check.name: check.covered for check in conversion.checks},
        "notices": list(conversion.notices),
        "seconds": round(conversion.seconds, 3),
    }


def _example(name: str) -> str:
    return name if len(name) <= 60 else f"…{name[-59:]}"
