"""A small server that speaks NDIF's protocol, in one process: python tests/remote/small_ndif.py PORT

Requests run beside the weights. It can be told to fail in the ways in which servers fail, by a POST to /control.
This package and its type checkers are missing here, as they are on a server.
"""

from __future__ import annotations

import asyncio
import functools
import io
import json
import linecache
import sys
import threading
import traceback
import uuid
from importlib.abc import MetaPathFinder


class Missing(MetaPathFinder):
    """Finds nothing for what a server has not got."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("tl_layersim", "jaxtyping", "beartype", "tests"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


assert not {"tl_layersim", "jaxtyping", "beartype"} & set(sys.modules)
sys.meta_path.insert(0, Missing())

import nnsight
import torch
import uvicorn
import zstandard
from nnsight.modeling.mixins.remotable import Remotable
from nnsight.schema.request import RequestModel
from nnsight.schema.response import ResponseModel, Status
from nnsight.tracing.globals import BLOCKS, SOURCES
from nnsight.tracing.tracer import _saves, dec, inc
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute

PLAIN = {
    "key": None,
    "most_batches": None,
    "faults": [],
    "job_limit": None,
    "versions": {},
    "deny": "",
    "bad_words": [],
    "bad_results": [],
    # Python code that changes a result, `kept`; `sums` is whether it holds sums.
    "mutate": "",
    # Python expression of the bytes of a result, with `kept` and `packed(value)`.
    "raw_result": "",
    # Python expression of the last message of a job, with `job` and `data`.
    "raw_status": "",
    # Answers to HTTP requests by name: body and status; a body that begins with "eval:" is Python code.
    "raw_http": {},
    # What a new websocket does: "close", "silent", or the text that it sends.
    "socket": "",
}
SETTINGS = dict(PLAIN)
MODELS, SOCKETS, RESPONSES, RESULTS = {}, {}, {}, {}
ONE_AT_A_TIME = threading.Lock()
COUNT = {"requests": 0, "completed": 0}


def execute(request, payload):
    """What the actor of a real server does with a request."""
    with ONE_AT_A_TIME:
        if request.model_key not in MODELS:
            MODELS[request.model_key] = Remotable.from_model_key(request.model_key, dispatch=True, dtype=torch.float32)
            MODELS[request.model_key]._module.requires_grad_(False)
        model = MODELS[request.model_key]
        before = [(store, dict(store)) for store in (linecache.cache, SOURCES, BLOCKS)]
        try:
            tracer = RequestModel.deserialize(payload, model._remoteable_persistent_objects(), compress=request.compress)
            frame = tracer.info.frame
            most = SETTINGS["most_batches"]
            if most is not None and len(frame.f_locals.get("work", ())) > most:
                raise TimeoutError
            inc()
            try:
                tracer.execute(tracer.info.code)
                kept = {name: value for name, value in frame.f_locals.items() if id(value) in _saves()}
            finally:
                dec()
        finally:
            model.interleaver.cancel()
            for store, old in before:
                store.clear()
                store.update(old)
        known = {"kept": kept, "sums": holds_sums(kept), "torch": torch}
        known |= {"packed": packed, "zstandard": zstandard, "OLD": OLD, "walk": walk}
        exec(SETTINGS["mutate"], known)
        if SETTINGS["raw_result"]:
            return eval(SETTINGS["raw_result"], known)
        return packed(known["kept"], request.compress)


def holds_sums(kept):
    """Whether a result holds sums of analyzers; the first request asks for facts about the server."""
    values = list(kept.values())
    is_sealed = len(values) == 1 and isinstance(values[0], tuple) and len(values[0]) == 3
    value = values[0][2] if is_sealed else None
    return isinstance(value, list) and bool(value) and isinstance(value[0], tuple)


# Earlier results, for code in SETTINGS.
OLD = []


def packed(value, compress=True):
    """The bytes of a result."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return zstandard.ZstdCompressor(level=3).compress(buffer.getvalue()) if compress else buffer.getvalue()


def walk(value, change):
    """Nested containers, with `change` of each tensor in place of the tensor."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: walk(item, change) for name, item in value.items()}
    return type(value)(walk(item, change) for item in value) if isinstance(value, (list, tuple)) else value


async def tell(job, request, status, text="", **more):
    socket = SOCKETS.get(request.session_id)
    if SETTINGS["raw_status"] and status == Status.COMPLETED and socket is not None:
        raw = eval(SETTINGS["raw_status"], {"job": job, "json": json, "torch": torch, "packed": packed, **more})
        return await (socket.send_bytes(raw) if isinstance(raw, bytes) else socket.send_text(raw))
    response = ResponseModel(id=job, status=status, description=text, **more)
    RESPONSES[job] = response
    if socket is not None:
        if isinstance(response.data, bytes):
            await socket.send_bytes(response.pickle())
        else:
            await socket.send_text(response.model_dump_json())


async def work(job, request, payload, fault):
    await tell(job, request, Status.QUEUED, "Added to Queue at position 1.")
    await tell(job, request, Status.RUNNING, "Your job has started running.")
    if fault == "evicted":
        return await tell(job, request, Status.ERROR, "Replica was evicted while processing your request.")
    if fault == "silent":
        return None
    try:
        data = await asyncio.to_thread(execute, request, payload)
    except TimeoutError:
        return await tell(job, request, Status.ERROR, "Your job exceeded the execution timeout of 4s.")
    except Exception as error:
        return await tell(job, request, Status.ERROR, "".join(traceback.format_exception(error)))
    COUNT["completed"] += 1
    if fault == "cut":
        # The work is done, and the line is cut before the answer.
        return await SOCKETS[request.session_id].close()
    if fault == "lost":
        return RESPONSES.pop(job)
    if request.session_id in SOCKETS:
        return await tell(job, request, Status.COMPLETED, data=data)
    RESULTS[job] = data
    return await tell(job, request, Status.COMPLETED, data=f"http://127.0.0.1:{PORT}/result/{job}")


def raw(name):
    """The answer in SETTINGS to a kind of HTTP requests, or None."""
    if name not in SETTINGS["raw_http"]:
        return None
    body, code = SETTINGS["raw_http"][name]
    return Response(eval(body[5:]) if body.startswith("eval:") else body, code, media_type="application/json")


async def take(http):
    if (answer := raw("request")) is not None:
        return answer
    key = http.headers.get("ndif-api-key")
    if SETTINGS["key"] and key != SETTINGS["key"]:
        if key and len(key) != 36:
            # As the real server does, which repeats what it was sent.
            return JSONResponse({"detail": f"Invalid API key format: '{key}'."}, 400)
        return JSONResponse({"detail": "Missing or invalid API key." if not key else "Invalid API key."}, 403 if key else 401)
    if SETTINGS["deny"]:
        return JSONResponse({"detail": SETTINGS["deny"]}, 400)
    fault = SETTINGS["faults"].pop(0) if SETTINGS["faults"] else ""
    if fault == "unavailable":
        return JSONResponse({"detail": "Service temporarily unavailable: compute backend is reconnecting."}, 503)
    COUNT["requests"] += 1
    async with http.form() as form:
        request, payload = RequestModel.model_validate_json(form["data"]), await form["blob"].read()
    job = uuid.uuid4().hex
    asyncio.get_running_loop().create_task(work(job, request, payload, fault))
    return Response(ResponseModel(id=job, status=Status.RECEIVED).model_dump_json(), media_type="application/json")


async def subscribe(socket):
    await socket.accept()
    if SETTINGS["socket"] == "close":
        return await socket.close()
    if SETTINGS["socket"] == "silent":
        await asyncio.sleep(20)
    if SETTINGS["socket"]:
        return await socket.send_text(SETTINGS["socket"])
    session = uuid.uuid4().hex
    SOCKETS[session] = socket
    await socket.send_json({"session_id": session})
    try:
        await socket.receive()
    finally:
        SOCKETS.pop(session, None)


async def word(http):
    if SETTINGS["bad_words"]:
        return Response("<html>busy</html>", SETTINGS["bad_words"].pop(0))
    response = RESPONSES.get(http.path_params["job"])
    if response is None:
        return JSONResponse({"detail": "No response."}, 404)
    return Response(response.model_dump_json(), media_type="application/json")


async def result(http):
    if (answer := raw("result")) is not None:
        return answer
    if SETTINGS["bad_results"]:
        return Response("no", SETTINGS["bad_results"].pop(0))
    return Response(RESULTS[http.path_params["job"]], media_type="application/octet-stream")


async def status(http):
    if (answer := raw("status")) is not None:
        return answer
    deployments = {
        key: {
            "model_key": key,
            "repo_id": json.loads(key.split(":", 1)[1])["repo_id"],
            "application_state": "RUNNING",
            "deployment_level": "HOT",
            "dtype": "float32",
            "execution_timeout_seconds": SETTINGS["job_limit"],
        }
        for key in MODELS
    }
    return JSONResponse({"deployments": deployments})


@functools.cache
def local_env():
    """Read once: nnsight reads the files of every installed package for it."""
    return nnsight.ndif.get_local_env()


async def environment(http):
    if (answer := raw("env")) is not None:
        return answer
    found = local_env()
    return JSONResponse(found | {"packages": found["packages"] | SETTINGS["versions"]})


async def control(http):
    SETTINGS.update(PLAIN | {"faults": []} | await http.json())
    counted = dict(COUNT)
    COUNT.update(requests=0, completed=0)
    return JSONResponse(counted)


async def ping(http):
    return JSONResponse("pong")


app = Starlette(
    routes=[
        Route("/request", take, methods=["POST"]),
        WebSocketRoute("/subscribe", subscribe),
        Route("/response/{job}", word),
        Route("/result/{job}", result),
        Route("/status", status),
        Route("/env", environment),
        Route("/ping", ping),
        Route("/control", control, methods=["POST"]),
    ]
)

if __name__ == "__main__":
    PORT = int(sys.argv[1])
    torch.set_num_threads(1)
    uvicorn.run(app, host="127.0.0.1", port=PORT, log_level="warning", ws_max_size=1 << 30)
