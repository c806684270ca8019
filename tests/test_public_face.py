"""What a stranger sees first: workflows and forms, pages and their links, a release's metadata."""

from __future__ import annotations

import logging
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from nvt_torchrec import __all__ as public_names
from nvt_torchrec import __version__
from nvt_torchrec.etl.__main__ import main as etl
from tests import release
from tests.shell import ROOT

FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("[!c]*.yml"))
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
#: Its references to names are resolved by the site's generator.
API = ROOT / "docs" / "site" / "api.md"


def read_yaml(path: Path) -> Any:
    """Return what a file of YAML holds; tags of other programs are left out."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)
    return yaml.load(path.read_text(encoding="utf-8"), Loader)


# ---------------------------------------------------------------------------- workflows and forms


def steps(path: Path) -> list[dict[str, Any]]:
    return [step for job in read_yaml(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_targets_of_the_makefile_alone(path: Path) -> None:
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony
    runs = [step["run"] for step in steps(path) if "run" in step]
    commands = [shlex.split(re.sub(r"\$\{\{.*?\}\}", "value", run)) for run in runs]
    assert commands
    for program, target, *variables in commands:
        assert program == "make"
        assert target in phony[1].split(), f"{path.name}: the Makefile has no target {target}"
        for variable in variables:
            name = variable.partition("=")[0]
            assert name in {"PYTHON", "DEMO_FLAGS"}, f"{path.name}: {variable}"
    assert read_yaml(path)["permissions"] == {"contents": "read"}


def test_ci_runs_what_a_change_may_break() -> None:
    [ci] = (path for path in WORKFLOWS if path.stem == "ci")
    jobs = read_yaml(ci)["jobs"]
    targets = {step["run"].split()[1] for step in steps(ci) if "run" in step}
    assert targets == {"lint", "test", "demo", "docs", "release"}
    assert jobs["test"]["strategy"]["matrix"]["python"] == list(release.PYTHONS)
    assert all("timeout-minutes" in job for job in jobs.values())


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues_can_be_filled_in(path: Path) -> None:
    form = read_yaml(path)
    assert {"name", "description", "body"} <= form.keys()
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    names = [field["id"] for field in fields]
    assert len(set(names)) == len(names) > 0
    for field in form["body"]:
        assert field["type"] in {"markdown", "textarea", "input", "dropdown", "checkboxes"}
        assert field["attributes"].get("value" if field["type"] == "markdown" else "label")
    required = [field for field in fields if field["validations"]["required"]]
    assert required
    if path.stem == "bug":
        assert any("nvt-etl doctor" in field["attributes"]["label"] for field in required)


# ------------------------------------------------------------------------------------------ pages


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as they are made where repositories are hosted."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
    # [0.2.0]: #020---2026-11-28
    links += re.findall(r"^\[[^\]]+\]: (\S+)$", text, re.MULTILINE)
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_relative_to(ROOT), link
        assert target.is_file(), f"{link}: no such file; a site has no page for a directory"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_the_site_shows_every_page_once() -> None:
    def leaves(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        parts = value.values() if isinstance(value, dict) else value
        return [leaf for part in parts for leaf in leaves(part)]

    shown = leaves(read_yaml(ROOT / "mkdocs.yml")["nav"])
    assert sorted(shown) == sorted(
        str(page.relative_to(ROOT)) for page in [*PAGES, ROOT / "examples" / "notebook.ipynb"]
    )


def test_the_api_page_has_every_public_name() -> None:
    text = API.read_text(encoding="utf-8")
    described = re.findall(r"^::: nvt_torchrec\.(\w+)$", text, re.MULTILINE)
    assert sorted(described) == sorted(set(public_names) - {"__version__"})
    for name in described:
        assert f"[{name}][nvt_torchrec.{name}]" in text


def test_the_page_of_guess_shows_what_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "clicks.csv").write_bytes((ROOT / "examples" / "clicks.csv").read_bytes())
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO):
        assert etl(["guess", "clicks.csv", "--output", "spec.toml"]) == 0
    page = (ROOT / "docs" / "guess.md").read_text(encoding="utf-8")
    shown = dict(re.findall(r"^```(text|toml)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    assert shown["toml"] == (tmp_path / "spec.toml").read_text(encoding="utf-8")
    printed = "\n".join(caplog.messages).replace("python -m etl", "nvt-etl")
    assert shown["text"] == f"{printed}\n"


# ---------------------------------------------------------------------------------------- release

_METADATA = """\
Metadata-Version: 2.4
Name: nvt-torchrec
Version: {version}
Requires-Python: >=3.11,<3.13
Classifier: Programming Language :: Python :: 3.11
Classifier: Programming Language :: Python :: 3.12
Classifier: Typing :: Typed
Description-Content-Type: text/markdown

See [there](https://example.org/).
"""


def metadata(before: str = "", after: str = "") -> bytes:
    return _METADATA.format(version=__version__).replace(before, after, 1).encode()


def test_versions_agree() -> None:
    """Of the code, CHANGELOG's first section and CITATION.cff."""
    if release.changelog_version() == "Unreleased":
        pytest.skip("the next release has no number yet; `make release` refuses it")
    release.check_metadata(metadata())


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("https://example.org/", "docs/etl.md", "the link docs/etl.md"),
        ("Classifier: Typing", "Project-URL: Home, /docs\nClassifier: Typing", "URL Home"),
        ("Classifier: Typing :: Typed\n", "", "Typing :: Typed"),
        ("3.12\n", "3.13\n", "let the three agree"),
        ("<3.13", "<3.14", "let the three agree"),
        (f"Version: {__version__}", "Version: 9.9", "versions differ"),
    ],
)
def test_a_release_with_wrong_metadata_is_refused(before: str, after: str, said: str) -> None:
    with pytest.raises(release.ReleaseError, match=re.escape(said)):
        release.check_metadata(metadata(before, after))


def test_a_release_is_tried_with_readmes_commands() -> None:
    programs = [command.split()[:2] for command in release.readme_commands()]
    assert programs[:2] == [["nvt-etl", "guess"], ["nvt-etl", "run"]]
    assert [program for program, _ in programs[2:]] == ["nvt-train", "nvt-infer"]
