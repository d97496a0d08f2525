"""Compare graphrun's server with a plain one under one cap on the simulated accelerator.

    python benchmarks/serve.py [--requests 120] [--caps 6M 10M]    writes results/serve.json

Figures: pictures per virtual second, and failures. Both serve the small FLUX to the same clients,
who ask for pictures of mixed sizes, one after another. The plain server is FastAPI around
diffusers' pipeline with ``enable_model_cpu_offload()`` and a lock. If a call fails, it answers 500
and frees the hooks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = 32
STEPS = 3
SIZES = (32, 32, 128, 256)  # pixels a side; half of the requests are small
MODEL = "flux-tiny"
os.environ.update(
    TRANSFORMERS_VERBOSITY="error",
    DIFFUSERS_VERBOSITY="error",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
)


def plain(cap_bytes: int) -> None:
    """Run the plain server, in a process of its own."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import torch
    import uvicorn
    from fastapi import FastAPI, Response
    from peers_cell import Subject
    from peers_machine import Sim

    subject, instrument_sim, lock, app = (
        Subject("flux", "sim", STEPS),
        Sim(cap_bytes),
        threading.Lock(),
        FastAPI(),
    )
    pipeline = subject.pipeline()
    pipeline.enable_model_cpu_offload(device=instrument_sim.device)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(f"graphrun_clock_seconds {instrument_sim.seconds()}\n")

    @app.post("/v1/images/generations")
    def generations(body: dict[str, Any]) -> Response:
        width, height = (int(number) for number in body["size"].split("x"))
        arguments = {
            "num_inference_steps": body["steps"],
            "max_sequence_length": body["max_sequence_length"],
        }
        with lock, instrument_sim.open(), torch.no_grad():
            instrument_sim.reset_peak()
            try:
                generator = torch.Generator().manual_seed(body["seed"])
                pipeline(
                    body["prompt"], height=height, width=width, generator=generator, **arguments
                )
            except torch.OutOfMemoryError:
                pipeline.maybe_free_model_hooks()
                return Response(status_code=500)
            return Response(json.dumps({"peak_bytes": instrument_sim.peak_bytes()}))

    config = uvicorn.Config(app, port=0, log_level="error")
    sockets = [config.bind_socket()]
    print(f"on http://127.0.0.1:{sockets[0].getsockname()[1]}", file=sys.stderr, flush=True)
    uvicorn.Server(config).run(sockets)


@contextlib.contextmanager
def started(name: str, cap_bytes: int, folder: Path) -> Iterator[str]:
    """Start the server ``name``, and return its address."""
    graphrun_arguments = [
        str(ROOT / f"graphs/{MODEL}.yaml"),
        "--device",
        "sim",
        "--vram",
        str(cap_bytes),
        "--ram",
        "8G",
        "--port",
        "0",
    ]
    command = {
        "graphrun": [
            sys.executable,
            "-m",
            "graphrun",
            "serve",
            *graphrun_arguments,
            "--reuse",
            "none",
            "--queue",
            "10h",
        ],
        "plain": [sys.executable, __file__, "--plain", str(cap_bytes)],
    }[name]
    log = folder / f"{name}-{cap_bytes}"
    with log.open("wb") as err:
        process = subprocess.Popen(
            command, stderr=err, stdout=err, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        while not (match := re.search(r"on (http://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            time.sleep(0.2)
        yield match[1]
    finally:
        process.terminate()
        process.wait()


def asked(address: str, requests: int) -> dict[str, Any]:
    """Return the outcome of ``requests`` requests of `CLIENTS` clients."""
    import httpx

    client = httpx.Client(base_url=address, timeout=3600)

    def clock() -> float:
        return float(
            re.findall(r"^graphrun_clock_seconds (\S+)", client.get("/metrics").text, re.MULTILINE)[
                0
            ]
        )

    def ask(number: int) -> tuple[int, int, int]:
        side = random.Random(number).choice(SIZES)
        body = {
            "prompt": f"request {number}",
            "seed": number,
            "size": f"{side}x{side}",
            "steps": STEPS,
            "max_sequence_length": 64,
        }
        answer = client.post("/v1/images/generations", json=body)
        while answer.status_code in (429, 503):
            time.sleep(1)
            answer = client.post("/v1/images/generations", json=body)
        peak = (
            answer.json().get("graphrun", answer.json())["peak_bytes"]
            if answer.status_code == 200
            else 0
        )
        return side, answer.status_code, peak["measured"] if isinstance(peak, dict) else peak

    while client.get("/readyz").status_code == 503:
        time.sleep(0.5)
    start_seconds = clock()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(ask, range(requests)))
    seconds = clock() - start_seconds
    served = sum(status == 200 for _, status, _ in answers)
    return {
        "requests": requests,
        "served": served,
        "answers by side and status": {
            f"{side}: {status}": n
            for (side, status), n in sorted(Counter(a[:2] for a in answers).items())
        },
        "virtual_seconds": seconds,
        "served_per_virtual_second": served / seconds if seconds else 0.0,
        "peak_bytes": max(peak for _, _, peak in answers),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--caps", nargs="*", default=["6M", "10M"])
    parser.add_argument("--plain", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/serve.json")
    options = parser.parse_args()
    if options.plain is not None:
        plain(options.plain)
        return
    from graphrun.units import parse_size

    results: dict[str, Any] = {
        "date": datetime.now(UTC).date().isoformat(),
        "command": f"benchmarks/serve.py --requests {options.requests} --caps "
        f"{' '.join(options.caps)}",
        "versions": {
            name: version(name) for name in ("torch", "diffusers", "transformers", "fastapi")
        },
        "model": MODEL,
        "clients": CLIENTS,
    }
    with tempfile.TemporaryDirectory() as folder:
        for cap in options.caps:
            results[cap] = {}
            for name in ("graphrun", "plain"):
                with started(name, parse_size(cap), Path(folder)) as address:
                    results[cap][name] = asked(address, options.requests)
                print(cap, name, json.dumps(results[cap][name]), flush=True)
    options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
