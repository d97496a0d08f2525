"""One cell of `cpu.py`: a tool makes a picture from files in this process, which may be killed.

Every event is written at once as a line of JSON to the file ``events``, so a killed process leaves
its events.

    begin      libraries are imported, no weights are open; bytes of the process
    ready      the tool has opened the pipeline (graphrun: planned it)
    denoise    the scheduler got its timesteps
    step       one denoising step is done
    end        the tool has returned the picture
    picture    its digest
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from cpu_report import GRAPHRUN, REFERENCE  # noqa: E402

from graphrun.systems import request_huge_pages  # noqa: E402

PR_SET_PDEATHSIG = 1  # prctl(2)
RATE_BYTES = 4 * 10**9  # read to measure the disk


class Events:
    """The file of events; each has seconds, CPU seconds and bytes read since the start."""

    def __init__(self, path: Path) -> None:
        self.path, self.meters = path, dict[str, Callable[[], float]]()

    def note(self, event: str, **values: Any) -> None:
        use = resource.getrusage(resource.RUSAGE_SELF)
        row = {
            "event": event,
            "seconds": time.perf_counter(),
            "cpu_seconds": use.ru_utime + use.ru_stime,
            "read_bytes": read_bytes(os.getpid()),
            **{name: meter() for name, meter in self.meters.items()},
            **values,
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_bytes(process: int) -> int:
    """Return the bytes that ``process`` read from block devices."""
    rows = Path(f"/proc/{process}/io").read_text().split()
    return int(rows[rows.index("read_bytes:") + 1])


def end_with(benchmark: int) -> None:
    """Let the kernel kill this process when its parent, the process ``benchmark``, ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != benchmark:
        sys.exit("the benchmark has ended")


def watch_steps(kind: Any, events: Events) -> None:
    """Record when schedulers of the class ``kind`` get timesteps and end steps."""
    set_timesteps, step = kind.set_timesteps, kind.step

    def noted_timesteps(self: Any, *arguments: Any, **options: Any) -> Any:
        events.note("denoise")
        return set_timesteps(self, *arguments, **options)

    def noted_step(self: Any, *arguments: Any, **options: Any) -> Any:
        result = step(self, *arguments, **options)
        events.note("step")
        return result

    # diffusers looks at the signatures, which ``__wrapped__`` shows
    noted_timesteps.__wrapped__, noted_step.__wrapped__ = set_timesteps, step  # type: ignore[attr-defined]
    kind.set_timesteps, kind.step = noted_timesteps, noted_step


def disk_rate(folder: Path, most_bytes: int = RATE_BYTES) -> float:
    """Return bytes per second of direct reads of the weights in ``folder`` by two threads.

    ``most_bytes``: the bytes that are read if the weights have as many.
    """
    from graphrun.runtime.direct_reads import DirectReads, MappedArena, Span, SpanRead
    from graphrun.units import PAGE_BYTES

    span_bytes, depth = 64 << 20, 2
    memory = MappedArena(depth * span_bytes)
    spans = [
        Span(str(file), start, start + nbytes, start + nbytes)
        for file in sorted(folder.rglob("*.safetensors"))
        for start in range(0, file.stat().st_size, span_bytes)
        if (nbytes := min(span_bytes, file.stat().st_size - start) // PAGE_BYTES * PAGE_BYTES)
    ][: most_bytes // span_bytes]
    start, reads = time.perf_counter(), list[SpanRead]()
    with DirectReads(depth) as reader:
        for number, span in enumerate(spans):
            if number >= depth:
                reads[number - depth].wait()
            view = memory.view(number % depth * span_bytes, span.nbytes)
            reads.append(reader.submit(span, view))
        for span_read in reads[-depth:]:
            span_read.wait()
    return sum(span.nbytes for span in spans) / (time.perf_counter() - start)


def main() -> None:
    """Run the cell of the JSON file named by the first argument."""
    job = json.loads(Path(sys.argv[1]).read_text())
    end_with(job["benchmark"])
    if job["tool"] == GRAPHRUN:
        request_huge_pages(os.environ)  # as `graphrun run` does
    warnings.simplefilter("ignore")
    os.environ.update(
        TRANSFORMERS_VERBOSITY="error",
        DIFFUSERS_VERBOSITY="error",
        HF_HUB_OFFLINE="1",
        TOKENIZERS_PARALLELISM="false",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
    )
    import cpu_tools
    import numpy
    import torch
    from cpu_models import MODELS, call, graph_for

    from graphrun.kernel_memory import process_bytes
    from graphrun.modules.build import no_progress_bars, resolve_class

    model, folder = MODELS[job["model"]], Path(job["folder"])
    resolve_class(graph_for(model).pipeline, ())  # imports the pipeline, as `begin` says
    events = Events(Path(job["events"]))
    cell = cpu_tools.Job(
        model, folder, job["cap_bytes"], job["floor_bytes"], Path(job["copies"]), events.note
    )
    with no_progress_bars(), torch.no_grad():
        if job["tool"] == REFERENCE:
            events.note("rate", disk_bytes_per_second=disk_rate(folder))
        watch_steps(resolve_class(graph_for(model).parts["scheduler"].class_path, ()), events)
        events.note("begin", process_bytes=process_bytes().nbytes)
        facts: dict[str, Any] = {}
        if job["tool"] == REFERENCE:
            blockwise = cpu_tools.Blockwise(folder, model)
            events.meters["load_seconds"] = lambda: blockwise.load_seconds
            events.note("ready")
            picture = call(blockwise.pipeline, model)
            facts = {
                "weight_bytes": blockwise.weight_bytes,
                "largest_bytes": blockwise.largest_bytes,
                "calls": blockwise.calls,
            }
        else:
            make = cpu_tools.TOOLS[job["tool"]].open(cell)
            events.note("ready")
            if job["opens_only"]:
                return events.note("end")
            picture = make()
        events.note("end", **facts)
    values = numpy.ascontiguousarray(picture)
    events.note(
        "picture",
        digest=hashlib.sha256(values.tobytes()).hexdigest()[:16],
        finite=bool(numpy.isfinite(values).all()),
    )
    numpy.save(job["output"], values)


if __name__ == "__main__":
    main()
