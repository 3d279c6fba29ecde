"""Build an image's stages in folders of this machine and run it there, for machines without a container engine.

`unshare --mount python -m tests.docker.scratch_root BUILD.json`: all mounts are of that namespace, and end with it.

As in an engine, every instruction of the Dockerfile is executed in its stage's own root (chroot), whose writes stay
there. The build's context is cut by .dockerignore. ARG, ENV, WORKDIR and USER hold as they should. The server then runs
as the image's user without any capability, as process 1 of its own process and network namespaces. Its root is
read-only, and the image's own command checks its health.

Unlike in an engine, the base image is not used. In place of python:* each stage begins with this machine's /usr, /etc
and /var, and with the Python that runs this module under /usr/local. So the stage may contain more than the image, and
another version of Python. A build's pip has the settings of this machine's pip.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.docker.dockerfile import Ignored, Instruction, Stage, expand, healthcheck, pairs, parse

_FOLDERS = ("dev", "etc", "home", "mnt", "opt", "proc", "root", "run", "srv", "sys", "tmp", "usr", "var")
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _network() -> dict[str, str]:
    """Environment variables that this machine's pip needs to reach an index."""
    wanted = re.compile(r"PIP_|\w*(_PROXY|_proxy|CERT\w*|CA_BUNDLE)$")
    return {name: value for name, value in os.environ.items() if wanted.match(name)}


def _indices() -> set[Path]:
    """Folders that this machine's pip searches for packages."""
    told = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found = {Path(match) for match in re.findall(r"(?<![\w.])/[\w./-]+", told.stdout.replace("file://", ""))}
    return {path for path in found if path.is_dir() and path.parts[1] not in ("etc", "usr", "var")}


@dataclass
class Root:
    """A stage's file system, and the state that its instructions have set so far."""

    folder: Path
    env: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    user: str = "0:0"

    @property
    def path(self) -> Path:
        """Path of its / on this machine."""
        return self.folder / "root"

    def inside(self, path: str) -> Path:
        """Path on this machine of a path of the stage; a relative path begins at its WORKDIR."""
        return self.path / os.path.normpath(os.path.join(self.workdir, path)).lstrip("/")

    def make(self) -> None:
        """Mount the base."""
        for name in _FOLDERS:
            (self.path / name).mkdir(parents=True)
        _run("mount", "--bind", self.path, self.path)  # so that it can be made read-only in the end
        (self.path / "tmp").chmod(0o1777)
        for name in os.listdir("/"):
            if os.path.islink(f"/{name}"):  # bin -> usr/bin, ...
                os.symlink(os.readlink(f"/{name}"), self.path / name)
        for name in ("usr", "etc", "var"):
            self._overlay(Path("/") / name, name)
        if sys.base_prefix != "/usr":
            self._overlay(Path(sys.base_prefix), "usr/local")
        _run("mount", "-t", "proc", "proc", self.path / "proc")
        for name in _DEVICES:
            (self.path / "dev" / name).touch()
            _run("mount", "--bind", f"/dev/{name}", self.path / "dev" / name)
        (self.path / "dev/fd").symlink_to("/proc/self/fd")
        (self.path / "dev/shm").mkdir()
        _run("mount", "-t", "tmpfs", "-o", "size=64m,mode=1777", "shm", self.path / "dev/shm")  # as Docker's
        for index in _indices():
            self.bind(index, str(index), read_only=True)
        _run("chroot", self.path, "/sbin/ldconfig")

    def _overlay(self, lower: Path, name: str) -> None:
        upper, work = (self.folder / kind / name.replace("/", "-") for kind in ("upper", "work"))
        upper.mkdir(parents=True)
        work.mkdir(parents=True)
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        _run("mount", "-t", "overlay", "-o", options, "overlay", self.path / name)

    def bind(self, outside: Path, inside: str, read_only: bool = False) -> Path:
        """Mount a folder of this machine, and return its path in the stage."""
        target = self.inside(inside)
        target.mkdir(parents=True, exist_ok=True)
        _run("mount", "--bind", outside, target)
        if read_only:
            _run("mount", "-o", "remount,bind,ro", target)
        return target

    def command(self, words: Sequence[str]) -> list[str]:
        """Command of a program in this root, as its user, in its WORKDIR; without capabilities unless that is root."""
        user, group = self.user.split(":")
        careful = [] if user == "0" else ["--no-new-privs", "--bounding-set=-all", "--inh-caps=-all"]
        return [
            "chroot", str(self.path), "setpriv", f"--reuid={user}", f"--regid={group}", "--clear-groups", *careful,
            "sh", "-c", 'cd "$0" && exec "$@"', self.workdir, *words,
        ]  # fmt: skip


class Builder:
    """A builder that executes the stages one after the other."""

    def __init__(self, context: Path, scratch: Path, cache: Path, build_args: Mapping[str, str]) -> None:
        self.context, self.scratch, self.cache, self.build_args = context, scratch, cache, build_args
        self.stages: dict[str, Root] = {}
        self.files = Ignored((context / ".dockerignore").read_text()).context(context)

    def build(self, stages: Sequence[Stage]) -> Root:
        """Build the stages, and return the last one's root."""
        for index, stage in enumerate(stages):
            if not re.match(r"python:\d", stage.base):
                raise ValueError(f"FROM {stage.base}: this machine stands in for python:* alone")
            root = Root(self.scratch / f"stage{index}")
            root.make()
            self.stages[stage.name or str(index)] = root
            for instruction in stage.instructions:
                print(f"[{index}] {instruction.word} {instruction.rest}", file=sys.stderr, flush=True)
                self.execute(root, instruction)
        return root

    def execute(self, root: Root, instruction: Instruction) -> None:
        """Execute one instruction; those that only describe the image do nothing.

        CalledProcessError if a command fails.
        """
        rest = expand(instruction.rest, {**root.arguments, **root.env})
        if instruction.word == "ARG":
            name, _, default = rest.partition("=")
            root.arguments[name] = self.build_args.get(name, default.strip('"'))
        elif instruction.word == "ENV":
            root.env |= pairs(rest)
        elif instruction.word == "WORKDIR":
            root.workdir = "/" + str(root.inside(rest).relative_to(root.path))
            root.inside("").mkdir(parents=True, exist_ok=True)
        elif instruction.word == "USER":
            root.user = rest
        elif instruction.word == "COPY":
            self.copy(root, instruction, rest.split())
        elif instruction.word == "RUN":
            self.run(root, instruction)

    def copy(self, root: Root, instruction: Instruction, names: Sequence[str]) -> None:
        """Copy files into a folder under their names, and a folder's contents; root owns the copies."""
        if set(dict(instruction.flags)) - {"from"}:
            raise ValueError(f"COPY with {instruction.flags}")
        *sources, last = names
        target = root.inside(last)
        into_folder = last.endswith("/") or len(sources) > 1
        origin = instruction.flag("from")
        for source in sources:
            if origin is not None:
                self._copy(self.stages[origin].path / source.lstrip("/"), target)
                continue
            files = [one for one in self.files if one == Path(source) or Path(source) in one.parents]
            if not files:
                raise ValueError(f"COPY {source}: not in the context")
            for one in files:
                name = one.relative_to(source) if one != Path(source) else Path(one.name if into_folder else "")
                self._copy(self.context / one, target / name)

    def _copy(self, source: Path, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        _run("cp", "-R", "-T", "--no-dereference", "--preserve=mode,timestamps,links", source, target)

    def run(self, root: Root, instruction: Instruction) -> None:
        """Run a command by /bin/sh; cache mounts are folders that outlive the build."""
        mounted = []
        for name, value in instruction.flags:
            options = dict(one.split("=", 1) for one in value.split(",") if "=" in one)
            if name != "mount" or options.get("type") != "cache":
                raise ValueError(f"RUN --{name}={value}")
            kept = self.cache / options["target"].strip("/").replace("/", "-")
            kept.mkdir(parents=True, exist_ok=True)
            mounted.append(root.bind(kept, options["target"]))
        env = {"HOME": "/root", **_network(), **root.arguments, **root.env}
        # the shell gets the text as it is written, and expands the variables itself
        subprocess.run(root.command(["/bin/sh", "-c", instruction.rest]), env=env, stdout=sys.stderr, check=True)
        for one in mounted:
            _run("umount", one)


_UP = """import fcntl, socket, struct
fcntl.ioctl(socket.socket(), 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))"""  # SIOCSIFFLAGS: UP, RUNNING


class Container:
    """A program that runs on a read-only root with a writable /tmp, as with Docker's --read-only --tmpfs /tmp:OPTIONS.

    Nothing in /tmp can be executed unless the options say so.
    """

    def __init__(self, root: Root, command: Sequence[str], volumes: Mapping[str, str], tmpfs: str) -> None:
        self.root = root
        for outside, inside in volumes.items():
            root.bind(Path(outside), inside, read_only=True)
        _run("mount", "-t", "tmpfs", "-o", f"mode=1777,noexec,nosuid,nodev,{tmpfs}", "tmp", root.path / "tmp")
        for name in ("usr/local", "usr", "etc", "var"):
            if os.path.ismount(root.path / name):
                _run("mount", "-o", "remount,ro", root.path / name)
        _run("mount", "-o", "remount,bind,ro", root.path)
        self.process = subprocess.Popen(
            ["unshare", "--net", "--pid", "--fork", "--kill-child", f"--mount-proc={root.path / 'proc'}",
             *root.command(command)],
            env=root.env,
        )  # fmt: skip
        self.pid = self._first_child()
        _run("nsenter", f"--target={self.pid}", "--net", sys.executable, "-c", _UP)

    def _first_child(self) -> int:
        task = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        while not (children := task.read_text().split()):
            time.sleep(0.01)
        return int(children[0])

    def execute(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in the container, next to its program."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--net", "--pid"]
        command = [*enter, *self.root.command(words)]
        return subprocess.run(command, env=self.root.env, capture_output=True, text=True, check=False, timeout=120)

    def wait_for(self, words: Sequence[str]) -> float:
        """Repeat a command until it succeeds, and return the seconds it took."""
        start = time.monotonic()
        while (done := self.execute(*words)).returncode:
            if self.process.poll() is not None or time.monotonic() - start > 120:
                raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
            time.sleep(0.2)
        return time.monotonic() - start

    def status(self) -> dict[str, str]:
        """Fields of /proc/PID/status of its process 1."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def descendants(self) -> list[int]:
        """Ids of the processes below its process 1."""
        found, pending = [], [self.pid]
        while pending:
            pid = pending.pop()
            below = [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
            found += below
            pending += below
        return found

    def stop(self, seconds: float) -> int:
        """Send SIGTERM to its process 1, and return the exit status."""
        os.kill(self.pid, signal.SIGTERM)
        return self.process.wait(seconds)


_ASK = """import sys, urllib.request
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions", sys.argv[1].encode(),
                                 {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())"""


def main(order: Mapping[str, Any]) -> dict[str, Any]:
    """Build, start, ask and stop; return the observations.

    The keys of `order` are dockerfile, context, scratch, cache, build_args, volumes, tmpfs (options of /tmp), arguments
    (for the entry point) and request (for /v1/completions).
    """
    start = time.monotonic()
    stages = parse(Path(order["dockerfile"]).read_text())
    builder = Builder(Path(order["context"]), Path(order["scratch"]), Path(order["cache"]), order["build_args"])
    root = builder.build(stages)
    built = time.monotonic()
    entry, check = stages[-1].last("ENTRYPOINT"), stages[-1].last("HEALTHCHECK")
    assert entry is not None
    assert check is not None
    container = Container(root, [*(entry.listed or ()), *order["arguments"]], order["volumes"], order["tmpfs"])
    healthy = container.wait_for(healthcheck(check))
    ready = "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready', timeout=4)"
    container.wait_for(["python", "-c", ready])
    status = container.status()
    return {
        "build_seconds": built - start,
        "healthy_after": healthy,
        "answer": json.loads(container.execute("python", "-c", _ASK, json.dumps(order["request"])).stdout),
        "uid": status["Uid"].split()[0],
        "pid_inside": status["NSpid"].split()[-1],
        "capabilities": {status[name] for name in ("CapEff", "CapPrm", "CapBnd")} == {"0" * 16},
        "writable": [place for place in ("/opt/trtspec", "/usr", "/etc", "/models", "/", "/tmp")
                     if container.execute("touch", f"{place}/x").returncode == 0],
        "kernels": any("libtrtspec_cpu" in Path(f"/proc/{pid}/maps").read_text() for pid in container.descendants()),
        "packages": container.execute("python", "-m", "pip", "freeze").stdout.splitlines(),
        "exit_status": container.stop(30),
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(main(json.loads(Path(sys.argv[1]).read_text()))))
