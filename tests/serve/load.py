"""A locust file: clients that ask for pictures of mixed shapes, one after another, until `REQUESTS`
were asked for.

    locust -f tests/serve/load.py --headless -u 32 -r 32 --host http://127.0.0.1:8000

KEY, REQUESTS, MIXED and RESULTS are from the environment: after the first MIXED requests all are of
one shape; RESULTS is the file for a JSON line per answer. SEED, by default 0, gives another
mixture.
"""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import random
from typing import Any

from locust import HttpUser, task
from locust.exception import StopUser
from PIL import Image

REQUESTS = int(os.environ["REQUESTS"])
MIXED, SEED = int(os.environ["MIXED"]), int(os.environ.get("SEED", "0"))
NUMBERS = itertools.count()
SHAPES: tuple[dict[str, Any], ...] = (
    {"size": "32x32"},
    {"size": "32x32"},
    {"size": "64x32"},
    {"size": "32x32", "steps": 5},
)
CHEAP = SHAPES[0]


class Client(HttpUser):
    """Asks for one picture at a time, tries again where it is told to, and notes how each request
    ended."""

    network_timeout = connection_timeout = 3600.0

    @task
    def picture(self) -> None:
        number = next(NUMBERS)
        if number >= REQUESTS:
            raise StopUser
        shape = random.Random(number + SEED).choice(SHAPES) if number < MIXED else CHEAP
        request = {"prompt": f"request {number}", "seed": number, **shape}
        record: dict[str, Any] = {"number": number, "asked": request, "statuses": []}
        while True:
            headers = {"Authorization": f"Bearer {os.environ['KEY']}"}
            with self.client.post(
                "/v1/images/generations", json=request, headers=headers, catch_response=True
            ) as answer:
                record["statuses"].append(answer.status_code)
                answer.success()
            if answer.status_code not in (429, 503):
                break
        body = answer.json()
        if answer.status_code == 200:
            picture = Image.open(io.BytesIO(base64.b64decode(body["data"][0]["b64_json"])))
            record |= {
                "made": json.loads(picture.info["graphrun"])["inputs"],
                "size": picture.size,
                "figures": body["graphrun"],
            }
        with open(os.environ["RESULTS"], "a") as file:
            file.write(json.dumps(record) + "\n")
