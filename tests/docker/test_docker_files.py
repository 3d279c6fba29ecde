"""The files of docker/, checked without running them: hadolint's and our rules, compose's schema, dashboard queries."""

from __future__ import annotations

import collections
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.docker.dockerfile import Ignored, Stage, expand, healthcheck, pairs, parse
from trtspec.serve.engine.client import EngineClient
from trtspec.serve.engine.wire import Delta
from trtspec.serve.http.metrics import HTTPMetrics

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker"
FILES = sorted(FOLDER.glob("Dockerfile.*"))
DASHBOARD = FOLDER / "grafana" / "dashboards" / "trtspec.json"


def tool(name: str) -> str:
    """Path of a program of this venv, or of the machine. Skips the test if there is none."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; pip install -e '.[dev]' has it where there are wheels")
    return found


# -- Dockerfiles ------------------------------------------------------------------------------------------------------

GOOD = """FROM python:3.12.14-slim-bookworm AS build
RUN make
FROM python:3.12.14-slim-bookworm
COPY --from=build /a /a
USER 10001:10001
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=5s CMD ["python", "-c", "urlopen('http://127.0.0.1/health')"]
ENTRYPOINT ["trtspec", "serve"]
"""


def _pinned(stages: list[Stage]) -> bool:
    """Whether bases are pinned, to a version of three numbers or to a release of NVIDIA's, which never changes.

    The tag `latest` is no pin.
    """
    return all(re.search(r":(\d+\.\d+\.\d+[\w.-]*(@sha256:[0-9a-f]{64})?|\d\d\.\d\d-py3)$", one.base) for one in stages)


def _leaves_root(stages: list[Stage]) -> bool:
    user = stages[-1].last("USER")
    return user is not None and re.fullmatch(r"[1-9]\d*:[1-9]\d*", user.rest) is not None


def _takes_signals(stages: list[Stage]) -> bool:
    """Whether the entry point has exec form: then there is no shell between a signal and the server."""
    entry, stop = stages[-1].last("ENTRYPOINT"), stages[-1].last("STOPSIGNAL")
    return entry is not None and entry.listed is not None and stop is not None and stop.rest == "SIGTERM"


def _is_checked(stages: list[Stage]) -> bool:
    check = stages[-1].last("HEALTHCHECK")
    return check is not None and "/health" in healthcheck(check)[-1] and check.flag("timeout") is not None


def _compiles_elsewhere(stages: list[Stage]) -> bool:
    """Whether the last stage runs neither pip nor a compiler: these stay in a stage that is thrown away."""
    runs = [one.rest for one in stages[-1].instructions if one.word == "RUN"]
    return len(stages) > 1 and not any(re.search(r"\b(pip|g\+\+|make|build_plugins\.py)\b", one) for one in runs)


def _holds_no_model(stages: list[Stage]) -> bool:
    """Whether no model is copied, as models are mounted."""
    copies = [one.rest for stage in stages for one in stage.instructions if one.word == "COPY"]
    return not any(re.search(r"(^|\s)(\.\s|\S*examples|\S*\.safetensors)", one) for one in copies)


RULES: dict[str, tuple[Callable[[list[Stage]], bool], str, str]] = {  # name -> rule, what is good in GOOD, what is bad
    "pinned": (_pinned, "FROM python:3.12.14-slim-bookworm\n", "FROM python:3.12\n"),
    "not latest": (_pinned, "FROM python:3.12.14-slim-bookworm AS", "FROM python:latest AS"),
    "not root": (_leaves_root, "USER 10001:10001\n", "USER 0:0\n"),
    "no user": (_leaves_root, "USER 10001:10001\n", ""),
    "exec form": (_takes_signals, 'ENTRYPOINT ["trtspec", "serve"]', "ENTRYPOINT trtspec serve"),
    "stop": (_takes_signals, "SIGTERM", "SIGKILL"),
    "health": (_is_checked, "/health", "/"),
    "no timeout": (_is_checked, " --timeout=5s", ""),
    "no compiler": (_compiles_elsewhere, "COPY --from=build /a /a\n", "RUN pip install trtspec\n"),
    "no model": (_holds_no_model, "/a /a", "examples/demo /models"),
    "not everything": (_holds_no_model, "--from=build /a /a", ". /src"),
}


@pytest.mark.parametrize("name", RULES)
def test_a_rule_finds_what_breaks_it(name: str) -> None:
    rule, good, bad = RULES[name]
    assert good in GOOD
    assert rule(parse(GOOD))
    assert not rule(parse(GOOD.replace(good, bad)))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _, _ in RULES.values()), ids=lambda rule: rule.__name__)
def test_our_rules_hold(path: Path, rule: Callable[[list[Stage]], bool]) -> None:
    assert rule(parse(path.read_text()))


def lint(path: Path) -> set[str]:
    """The rules that hadolint finds broken."""
    done = subprocess.run([tool("hadolint"), "-f", "json", path], capture_output=True, text=True, check=False)
    return {one["code"] for one in json.loads(done.stdout)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path: Path) -> None:
    assert lint(path) == set()


def test_hadolint_finds_what_is_bad(tmp_path: Path) -> None:
    bad = tmp_path / "Dockerfile"
    bad.write_text(
        "FROM python:latest\nRUN cd /tmp && sudo ls\nRUN apt-get update && apt-get install g++\nRUN pip install torch\n"
        "WORKDIR here\nCOPY a b /c\nUSER root\nCMD trtspec serve\n"
    )
    wanted = {"DL3007", "DL3003", "DL3004", "DL3008", "DL3009", "DL3014", "DL3015", "DL3013", "DL3042", "DL3000"}
    assert wanted | {"DL3002", "DL3021", "DL3025"} <= lint(bad)


def test_there_are_three() -> None:
    assert [path.suffix for path in FILES] == [".cpu", ".cuda", ".triton"]


def test_a_server_that_listens_to_all_is_one_in_a_container() -> None:
    for path in FILES[:2]:
        entry = parse(path.read_text())[-1].last("ENTRYPOINT")
        assert entry is not None
        assert entry.listed == ["trtspec", "serve", "--host", "0.0.0.0", "--port", "8000"]


# -- what the parser reads -------------------------------------------------------------------------------------------


def test_dockerfiles_are_read_as_docker_does() -> None:
    (stage,) = parse('# x\nFROM a AS b\nRUN --mount=type=cache,target=/c one \\\n  # said\n  && two\nCMD ["x", "y"]\n')
    run, command = stage.instructions
    assert (stage.base, stage.name) == ("a", "b")
    assert (run.flag("mount"), run.rest.split(), run.line) == ("type=cache,target=/c", ["one", "&&", "two"], 3)
    assert (run.listed, command.listed) == (None, ["x", "y"])
    assert expand("$a ${b} ${c:-d} $e", {"a": "1", "b": "2"}) == "1 2 d "
    assert pairs("A=1 B='x y'") == {"A": "1", "B": "x y"}
    for wrong in ("RUN x\n", "FROM a\nADD x y\n", "FROM a b c\n"):
        with pytest.raises(ValueError, match="line"):
            parse(wrong)


def test_a_build_gets_sources_alone() -> None:
    ignored = Ignored((ROOT / ".dockerignore").read_text())
    for path in (".git/config", "examples/demo/target/model.safetensors", "tests/conftest.py", "docker/compose.yaml"):
        assert ignored(path)
    assert ignored("plugins/cpu/_build/libtrtspec_cpu-0.so")
    assert ignored("trtspec/__pycache__/llm.cpython-312.pyc")
    for path in ("trtspec/llm.py", "plugins/cpu/src/kernels.cpp", "pyproject.toml", "docker/constraints.txt"):
        assert not ignored(path)


def test_what_is_copied_is_there() -> None:
    context = [path.as_posix() for path in Ignored((ROOT / ".dockerignore").read_text()).context(ROOT)]
    for path in FILES:
        for stage in parse(path.read_text()):
            for copy in stage.instructions:
                if copy.word == "COPY" and copy.flag("from") is None:
                    for source in copy.rest.split()[:-1]:
                        assert any(one == source or one.startswith(f"{source}/") for one in context), (path, source)


def test_packages_are_pinned() -> None:
    lines = [line for line in (FOLDER / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    pinned = dict(line.lower().split("==") for line in lines)
    ours = dict(re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pinned["torch"] == ours["torch"]


# -- compose ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return loaded


def check_schema(path: Path) -> int:
    command = [tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, capture_output=True, check=False).returncode


def test_compose_is_what_its_specification_says(tmp_path: Path) -> None:
    assert check_schema(FOLDER / "compose.yaml") == 0
    bad = tmp_path / "compose.yaml"
    bad.write_text((FOLDER / "compose.yaml").read_text().replace("stop_grace_period:", "stop_after:"))
    assert check_schema(bad) == 1


def test_services_are_careful(compose: Mapping[str, Any]) -> None:
    for service in compose["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        assert "privileged" not in service
        name, tag = service["image"].split(":")
        assert name == "trtspec" or re.fullmatch(r"v?\d+\.\d+\.\d+", tag)
    assert compose["services"]["server"]["volumes"][0].endswith(":/models:ro")


def test_what_compose_mounts_is_there(compose: Mapping[str, Any]) -> None:
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = re.sub(r"^\$\{\w+:-(.*?)\}", r"\1", volume).split(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).exists(), volume
    assert (FOLDER / compose["services"]["server"]["build"]["context"]).resolve() == ROOT


def test_prometheus_asks_the_server_and_grafana_asks_prometheus(compose: Mapping[str, Any]) -> None:
    (job,) = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    assert job["static_configs"] == [{"targets": ["server:8000"]}]
    assert "server" in compose["services"]
    provisioning = FOLDER / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert {panel["datasource"]["uid"] for panel in panels() if "datasource" in panel} == {source["uid"]}
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "trtspec.yaml").read_text())["providers"]
    mounted = dict(volume.split(":")[:2] for volume in compose["services"]["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]


# -- the dashboard ----------------------------------------------------------------------------------------------------


def panels() -> list[dict[str, Any]]:
    loaded: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return loaded


def measured() -> dict[str, set[str]]:
    """Labels by name of the metrics that a server's /metrics has once every counted event has happened."""
    metrics = HTTPMetrics(EngineClient({}), "model")
    metrics.requests.labels("/v1/completions", "200").inc()
    metrics.count(Delta(0, 0, "a", [1, 2], [1, 3], 1, False, "stop"))
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def unknown(expression: str, known: Mapping[str, set[str]]) -> set[str]:
    """Metrics and labels that a query asks for and that do not exist."""
    names = set(re.findall(r"\btrtspec_\w+", expression))
    labels: set[str] = set().union(*(known.get(name, set()) for name in names))
    asked = {label.strip() for group in re.findall(r"\bby \(([^)]*)\)", expression) for label in group.split(",")}
    asked |= set(re.findall(r"[{,]\s*(\w+)\s*[=!]", expression))
    return (names - set(known)) | (asked - labels)


def test_an_unknown_metric_is_found() -> None:
    known = measured()
    assert unknown("sum by (status) (rate(trtspec_requests_total[5m]))", known) == set()
    assert unknown("rate(trtspec_requests[5m])", known) == {"trtspec_requests"}
    assert unknown("sum by (code) (rate(trtspec_requests_total[5m]))", known) == {"code"}
    assert unknown('trtspec_draft_tokens_total{place="0"}', known) == {"place"}


def test_the_dashboard_divides_by_the_steps_that_it_names() -> None:
    """Two of four steps have drafts, of which three are accepted."""
    metrics, offered = HTTPMetrics(EngineClient({}), "model"), [(2, 2), (2, 1), (0, 0), (0, 0)]
    for drafted, accepted in offered:
        metrics.count(Delta(0, 0, "a", [1] * (accepted + 1), [1] * drafted, accepted, False))
    samples = [one for family in text_string_to_metric_families(metrics.text().decode()) for one in family.samples]
    totals = collections.Counter[str]()
    for sample in samples:
        totals[sample.name] += sample.value
    (panel,) = [one for one in panels() if one["title"] == "Acceptance length"]
    shown = {}
    for target in panel["targets"]:
        formula = re.sub(r"sum\(rate\((\w+)\[\$__rate_interval\]\)\)", r"totals['\1']", target["expr"])
        shown[target["legendFormat"]] = eval(formula, {"totals": totals})
    assert shown == {"acceptance length": 1 + 3 / 2, "tokens per step": 1 + 3 / 4}


@pytest.mark.parametrize("panel", [one for one in panels() if "targets" in one], ids=lambda panel: panel["title"])
def test_what_the_dashboard_shows_is_measured(panel: dict[str, Any]) -> None:
    known = measured()
    for target in panel["targets"]:
        assert re.search(r"\btrtspec_\w+", target["expr"])
        assert unknown(target["expr"], known) == set()
        assert target["expr"].count("(") == target["expr"].count(")")


def test_all_that_is_measured_is_shown() -> None:
    shown = " ".join(target["expr"] for panel in panels() for target in panel.get("targets", ()))
    for name in measured():
        stem = re.sub(r"_(created|sum|count|bucket)$", "", name)
        assert stem in shown, name
