"""scratch_root executes Dockerfiles as an engine does, as far as that can be tested without mounts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docker.dockerfile import parse
from tests.docker.scratch_root import Builder, Root


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    context = tmp_path / "context"
    for name in ("a.txt", "b.txt", "src/one.py", "src/deep/two.py", "src/__pycache__/one.pyc", "secret/key"):
        path = context / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (context / ".dockerignore").write_text("secret\n**/__pycache__\n# said\n*.md\n!README.md\n")
    return Builder(context, tmp_path / "scratch", tmp_path / "cache", {"GIVEN": "from outside"})


def execute(builder: Builder, root: Root, text: str) -> None:
    root.path.mkdir(parents=True, exist_ok=True)
    (stage,) = parse(f"FROM python:3.12.14\n{text}")
    for instruction in stage.instructions:
        builder.execute(root, instruction)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_files_go_where_docker_puts_them(builder: Builder, tmp_path: Path) -> None:
    root = Root(tmp_path / "stage")
    execute(builder, root, "WORKDIR /app\nCOPY a.txt b.txt ./\nCOPY src lib\nCOPY a.txt c.txt\nCOPY a.txt /x/\n")
    wanted = ["app/a.txt", "app/b.txt", "app/c.txt", "app/lib/deep/two.py", "app/lib/one.py", "x/a.txt"]
    assert files(root.path) == wanted
    assert (root.path / "app/c.txt").read_text() == "a.txt"


def test_what_is_ignored_is_not_there_to_be_copied(builder: Builder, tmp_path: Path) -> None:
    assert "secret/key" not in map(str, builder.files)
    with pytest.raises(ValueError, match="secret: not in the context"):
        execute(builder, Root(tmp_path / "stage"), "COPY secret /\n")
    with pytest.raises(ValueError, match=r"a\.md: not in the context"):
        execute(builder, Root(tmp_path / "stage"), "COPY a.md /\n")


def test_folders_come_from_other_stages(builder: Builder, tmp_path: Path) -> None:
    first, second = Root(tmp_path / "first"), Root(tmp_path / "second")
    execute(builder, first, "COPY src /opt/it\n")
    (first.path / "opt/it/link").symlink_to("one.py")
    builder.stages["build"] = first
    execute(builder, second, "COPY --from=build /opt/it /opt/there\n")
    assert files(second.path) == ["opt/there/deep/two.py", "opt/there/link", "opt/there/one.py"]
    assert (second.path / "opt/there/link").is_symlink()


def test_variables_hold_from_where_they_are_set(builder: Builder, tmp_path: Path) -> None:
    root = Root(tmp_path / "stage")
    text = "ARG GIVEN=inside\nARG OTHER=inside\nENV A=1 PATH=/opt/bin:$PATH\nENV B=$A-$OTHER\nWORKDIR /w/$A\nUSER 7:8\n"
    execute(builder, root, text + 'CMD ["x"]\nEXPOSE 1\n')
    assert root.arguments == {"GIVEN": "from outside", "OTHER": "inside"}
    assert (root.env["B"], root.env["PATH"].split(":")[0]) == ("1-inside", "/opt/bin")
    assert (root.workdir, root.user) == ("/w/1", "7:8")
    assert (root.path / "w/1").is_dir()
    command = root.command(["x"])
    assert "--reuid=7" in command
    assert "--bounding-set=-all" in command


@pytest.mark.parametrize(
    "text", ["COPY --chmod=7 a.txt /\n", "RUN --network=none true\n", "RUN --mount=type=ssh true\n"]
)
def test_what_is_not_built_is_refused(builder: Builder, tmp_path: Path, text: str) -> None:
    with pytest.raises(ValueError, match=r"with|--network|--mount"):
        execute(builder, Root(tmp_path / "stage"), text)
    with pytest.raises(ValueError, match="stands in for python"):
        builder.build(parse("FROM debian:12\n"))
