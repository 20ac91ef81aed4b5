"""What a profile of a server that computes has recorded."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from lost_requests import SHORT
from serving import Server


def recorded(server: Server) -> dict[str, set[str]]:
    """Take a profile while requests are computed; return the names of spans by track."""
    with ThreadPoolExecutor(1) as pool:
        profile = pool.submit(lambda: server.admin.post("/profile", json={"seconds": 1.0}))
        while not profile.done():
            server.http.post("/v1/completions", json=SHORT).raise_for_status()
    response = profile.result()
    assert response.status_code == 200, response.text
    events = response.json()["traceEvents"]
    tracks = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    found: dict[str, set[str]] = {name: set() for name in tracks.values()}
    for one in events:
        if one["ph"] == "X":
            found[tracks[one["tid"]]].add(one["name"])
    return found
