"""A real NDIF server on loopback, started and ended by the tests: redis, an object store, Ray, the controller, the API.

with Server(python=".venv-ndif/bin/python", folder=folder, hub="http://127.0.0.1:1234") as server:
lsim.analyze(model, data, [...], remote=server.url)
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Ray rewrites 127.0.0.1 to the machine's own address; another loopback address is left as it is.
RAY_IP = "127.0.0.2"


class Server:
    """One NDIF, with its own ports, folder and processes.

    Args:
        python: the interpreter of the environment that holds the server.
        folder: for logs and temporary files; a short path, because Ray puts sockets below it.
        hub: what HF_ENDPOINT shall be there.
        dtype: in which models are loaded.
        job_limit: seconds that a job may take, None for no limit.
    """

    def __init__(self, python: str, folder: Path, hub: str, dtype: str = "float32", job_limit: float | None = None) -> None:
        self.folder = folder
        self._bin = Path(python).absolute().parent
        names = ("api", "redis", "store", "gcs", "client", "dashboard", "agent")
        self._port = dict(zip(names, free_ports(len(names)), strict=True))
        self.url = f"http://127.0.0.1:{self._port['api']}"
        self._mark = f"TL_LAYERSIM_NDIF={folder}"
        self._env = {
            "PATH": f"{self._bin}:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": str(folder),
            "PYTHONPATH": str(HERE),
            "HF_HOME": str(folder / "hf"),
            "HF_ENDPOINT": hub,
            "HF_HUB_DISABLE_XET": "1",
            "NDIF_HOME": str(folder / "home"),
            "NDIF_REDIS_URL": f"redis://127.0.0.1:{self._port['redis']}",
            "NDIF_OBJECT_STORE_URL": f"http://127.0.0.1:{self._port['store']}",
            "NDIF_API_PORT": str(self._port["api"]),
            "NDIF_API_URL": self.url,
            "GUNICORN_CMD_ARGS": f"--bind 127.0.0.1:{self._port['api']}",
            "NDIF_RAY_ADDRESS": f"ray://{RAY_IP}:{self._port['client']}",
            "NDIF_MODEL_IMPORT_PATH": "actors.SandboxActor",
            "NDIF_CONTROLLER_IMPORT_PATH": "actors.Controller",
            "NDIF_SANDBOX_POOL_SIZE": "1",
            "NDIF_DEFAULT_DTYPE": dtype,
            "NDIF_DEFAULT_PADDING_BIAS": "0",
            "NDIF_MINIMUM_DEPLOYMENT_TIME_SECONDS": "0",
            "NDIF_STATUS_TTL_S": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray's own advice is to leave this off where its client is used.
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "AWS_ACCESS_KEY_ID": "none",
            "AWS_SECRET_ACCESS_KEY": "none",
            "AWS_DEFAULT_REGION": "us-east-1",
            **dict([self._mark.split("=", 1)]),
        }
        if job_limit is not None:
            self._env["NDIF_DEFAULT_EXECUTION_TIMEOUT_SECONDS"] = str(job_limit)
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Server:
        # Ray gives up where its own processes take more than 30 s to find each other, as on a loaded machine.
        for last in (False, False, True):
            try:
                self.start()
                return self
            except BaseException as error:
                # What did start would outlive the tests.
                self.kill()
                if last or not isinstance(error, RuntimeError):
                    raise
        raise AssertionError

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, wait: float = 900.0) -> None:
        """Start all of it, and return when requests are taken."""
        for name in ("home", "hf", "ray"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        self._spawn("redis", "redis-server", "--port", self._port["redis"], "--bind", "127.0.0.1", "--save", "")
        self._wait_for_port("redis", "127.0.0.1", self._port["redis"], 150)
        self._spawn("store", "moto_server", "-H", "127.0.0.1", "-p", self._port["store"])
        # Each actor takes one of the logical CPUs; the GPU and its memory are made up, see actors.py.
        self._spawn(
            "ray",
            *("ray", "start", "--head", "--block", "--disable-usage-stats", f"--node-ip-address={RAY_IP}"),
            *(f"--port={self._port['gcs']}", f"--ray-client-server-port={self._port['client']}"),
            *("--num-cpus=8", "--num-gpus=1", "--object-store-memory=200000000", f"--temp-dir={self.folder / 'ray'}"),
            '--resources={"head":10,"cuda_memory_bytes":4000000000,"cpu_memory_bytes":8000000000}',
            *("--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={self._port['dashboard']}"),
            f"--dashboard-agent-listen-port={self._port['agent']}",
        )
        self._wait_for_port("ray", RAY_IP, self._port["client"], 450)
        self._run("controller", "python", "-m", "ndif.services.ray.deployments.controller.controller")
        self._spawn(
            "api",
            "gunicorn",
            "--config",
            "python:ndif.services.api.gunicorn_conf",
            "ndif.services.api.app:app",
            NDIF_SERVICE="api",
        )
        end = time.monotonic() + wait
        while time.monotonic() < end:
            # The flag behind /connected outlives a connection; the log line does not.
            if "Connected to Ray" in self._log("api") and self._answers("/connected"):
                return
            time.sleep(0.2)
        raise RuntimeError(f"NDIF did not come up in {wait} s:\n{self.tail()}")

    def stop(self) -> None:
        """End every process that this object started, and no other."""
        for send, wait in ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
            for pid in self.processes():
                try:
                    os.kill(pid, send)
                except ProcessLookupError:
                    continue
            end = time.monotonic() + wait
            while self.processes() and time.monotonic() < end:
                time.sleep(0.1)
        for process in self._started:
            process.wait(timeout=10)
        self._started = []

    def kill(self) -> None:
        """As a power cut would: nothing is told."""
        for pid in self.processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self._started:
            process.wait(timeout=10)
        self._started = []
        # What a new start waits for must be its own.
        shutil.rmtree(self.folder / "ray", ignore_errors=True)
        for path in self.folder.glob("*.log"):
            path.unlink()

    def processes(self) -> list[int]:
        """Ids of the processes that carry this server's mark, or are of a session that it opened."""
        sessions = {process.pid for process in self._started}
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) == os.getpid():
                continue
            try:
                # Some programs overwrite their environment with a title, but stay in the session.
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                state, session = fields[0], int(fields[3])
                marked = self._mark.encode() in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if state != "Z" and (marked or session in sessions):
                found.append(int(entry.name))
        return found

    def tail(self, lines: int = 15) -> str:
        """The ends of all logs, for a message."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"== {path.name}\n" + "\n".join(self._log(path.stem).splitlines()[-lines:]) for path in logs)

    def _spawn(self, name: str, program: str, *args: object, **env: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            command = [shutil.which(program, path=self._env["PATH"]) or program, *map(str, args)]
            self._started.append(
                subprocess.Popen(
                    command,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**self._env, **env},
                    cwd=self.folder,
                    start_new_session=True,
                )
            )

    def _run(self, name: str, program: str, *args: str) -> None:
        with open(self.folder / f"{name}.log", "wb") as log:
            subprocess.run(
                [str(self._bin / program), *args],
                check=True,
                timeout=900,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._env, "NDIF_SERVICE": "ray", "RAY_ADDRESS": f"{RAY_IP}:{self._port['gcs']}"},
                cwd=self.folder,
            )

    def _wait_for_port(self, name: str, ip: str, port: int, wait: float) -> None:
        end = time.monotonic() + wait
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex((ip, port)) == 0:
                    return
            if self._started[-1].poll() is not None:
                break
            time.sleep(0.1)
        raise RuntimeError(f"{name} ended, or did not come up in {wait} s:\n{self.tail()}")

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self.url + path, timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.HTTPError):
            return False

    def _log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on, at the moment of asking."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for item in sockets:
            item.bind(("127.0.0.1", 0))
        return [item.getsockname()[1] for item in sockets]
    finally:
        for item in sockets:
            item.close()
