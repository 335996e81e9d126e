"""Install third-party clients at pinned versions, each in an environment of its own, and run their tests.

    python integration-tests/clients/third_party/run.py [--only NAME ...] [--write] [--keep FOLDER] [-- FLAG ...]

Prints a table: client, version, passed, failed, and for each failure whether the model or the server is to blame.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent.resolve()
ROOT = HERE.parents[2]
REQUIREMENTS = HERE.parent / "requirements-third-party.txt"
NPM = "npm"  # the folder of Node's packages
PAGE = ROOT / "docs" / "clients.md"
BEGIN, END = "<!-- table -->", "<!-- end of table -->"
# The servers that clients find under FUNITEL_CLIENTS_URL, _ENCODER_URL and _LONG_URL, by their flags.
DEMO = ("--model-id", "smollm2-135m-instruct", "--max-batch-total-tokens", "16384")
ENCODER = ("--model-id", "all-minilm-l6-v2")
LONG_CONTEXT = 131_072  # tokens: agents send tens of thousands before the first word of a user
MAX_SECONDS = 1800.0  # of one client
MAX_CHARACTERS = 240  # of a reason

sys.path.insert(0, str(ROOT / "testing"))

from recorder import Recorder  # noqa: E402

from funitel_testing.cache import demo_folder  # noqa: E402
from funitel_testing.servers import serving  # noqa: E402
from funitel_testing.tiny import save_tiny  # noqa: E402


@dataclass
class Client:
    """One section of the requirements: `packages` in the environment `name`, tested by `test_<name>.py`."""

    name: str
    packages: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)

    @property
    def python(self) -> Path:
        """The interpreter of its environment."""
        return ROOT / ".venv-clients" / self.name / "bin" / "python"

    def install(self) -> None:
        """Make its environment, unless it is there with the same packages."""
        wanted = "\n".join([*self.options, *self.packages, package_json() if self.name in USES_NPM else ""])
        stamp = self.python.parents[1] / ".installed"
        if stamp.is_file() and stamp.read_text() == wanted:
            return
        print(f"==> installing {self.name}", flush=True)
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", self.python.parents[1]], check=True)
        pip = [self.python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *" ".join(self.options).split(), *self.packages], check=True)
        if self.name in USES_NPM:
            install_npm()
        stamp.write_text(wanted)


USES_NPM = ("ai_sdk", "coding_agents")


def package_json() -> str:
    """Node's packages and their versions."""
    return (HERE / NPM / "package.json").read_text()


def install_npm() -> None:
    """Install Node's packages, and put the scripts beside them."""
    folder = ROOT / ".venv-clients" / NPM
    folder.mkdir(parents=True, exist_ok=True)
    for path in (HERE / NPM).iterdir():
        shutil.copy(path, folder)
    subprocess.run(["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"], cwd=folder, check=True)


def clients() -> list[Client]:
    """The sections of the requirements: `# [name]`, then a package a line."""
    found: list[Client] = []
    for line in REQUIREMENTS.read_text().splitlines():
        section = re.fullmatch(r"# \[(\w+)\]", line)
        if section:
            found.append(Client(section[1]))
        elif line.startswith("--"):
            found[-1].options.append(line)
        elif line and not line.startswith("#"):
            found[-1].packages.append(line)
    return found


@dataclass
class Outcome:
    """What became of the tests of one client."""

    name: str
    versions: str
    passed: int = 0
    skipped: int = 0
    failures: list[tuple[str, str, str]] = field(default_factory=list)  # test, blame, reason

    def read(self, report: Path) -> None:
        """Take the results of a report of pytest."""
        for case in ElementTree.parse(report).iter("testcase"):
            noted = {each.get("name"): each.get("value") or "" for each in case.iter("property")}
            problem = case.find("failure")
            problem = case.find("error") if problem is None else problem
            if problem is not None:
                reason = noted.get("reason") or (problem.get("message") or "")[:400]
                self.failures.append((case.get("name") or "", noted.get("blame", "server"), reason))
            elif case.find("skipped") is not None:
                self.skipped += 1
            else:
                self.passed += 1


def save_long_model(folder: Path) -> Path:
    """Save a small random model with a long context, and the tokenizer and template of the demo model."""
    demo = demo_folder()
    config = json.loads((demo / "config.json").read_text())
    save_tiny(
        "llama",
        folder,
        vocab_size=config["vocab_size"],
        max_position_embeddings=LONG_CONTEXT,
        bos_token_id=config["bos_token_id"],
        eos_token_id=config["eos_token_id"],
    )
    for path in demo.glob("tokenizer*"):
        shutil.copy(path, folder)
    # Random text would go on to the end of the context: every 24th token ends it.
    ends = [config["eos_token_id"], *range(0, config["vocab_size"], 24)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    return folder


@contextmanager
def serve_all(folder: Path, flags: list[str]) -> Iterator[dict[str, str]]:
    """The addresses of the servers, by the names of their variables; `flags` are for the first."""
    with ExitStack() as stack:
        long = ("--model-id", str(save_long_model(folder / "long")), "--max-batch-total-tokens", str(LONG_CONTEXT))
        found = {}
        for name, given in (("", (*DEMO, *flags)), ("ENCODER_", ENCODER), ("LONG_", long)):
            where = folder / f"server-{name}"
            where.mkdir(parents=True, exist_ok=True)
            found[f"FUNITEL_CLIENTS_{name}URL"] = stack.enter_context(serving(where, *given)).url
        yield found


def run(client: Client, urls: dict[str, str], calls: Path) -> Outcome:
    """Run the tests of one client."""
    with ExitStack() as stack:
        recorders = {name: stack.enter_context(Recorder(url, calls)) for name, url in urls.items()}
        return _run(client, {name: recorder.url for name, recorder in recorders.items()}, calls)


def _run(client: Client, urls: dict[str, str], calls: Path) -> Outcome:
    report = calls.with_suffix(".xml")
    report.unlink(missing_ok=True)
    options = ("-q", "-p", "no:cacheprovider", f"--junitxml={report}")
    beside = HERE.parent / f"test_{client.name}.py"
    if beside.is_file():  # a test of the project's, which finds the environment of the client by itself
        command = [sys.executable, "-m", "pytest", *options, "-n", "0", beside]
        environ, folder = dict(os.environ), ROOT
    else:
        confined = ("-c", HERE / "pytest.ini", "--rootdir", HERE, "--confcutdir", HERE)
        command = [client.python, "-m", "pytest", *options, *confined, HERE / f"test_{client.name}.py"]
        environ, folder = _environment(urls, calls), calls.parent
    outcome = Outcome(client.name, versions(client))
    try:
        subprocess.run(command, env=environ, timeout=MAX_SECONDS, cwd=folder)
    except subprocess.TimeoutExpired:
        outcome.failures.append(("all", "server", f"no end after {MAX_SECONDS:g} s"))
    if report.is_file():
        outcome.read(report)
    else:
        outcome.failures.append(("all", "server", "pytest wrote no report"))
    return outcome


def _environment(urls: dict[str, str], calls: Path) -> dict[str, str]:
    """What a client finds in its environment: neither the accounts nor the settings of this user."""
    kept = ("PATH", "LANG", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "TMPDIR")
    return {name: os.environ[name] for name in kept if name in os.environ} | {
        **urls,
        "HOME": str(calls.parent),
        "FUNITEL_CLIENTS_TOKENIZER": str(demo_folder()),
        "FUNITEL_CLIENTS_CALLS": str(calls),
        "FUNITEL_CLIENTS_NPM": str(ROOT / ".venv-clients" / NPM),
    }


def versions(client: Client) -> str:
    """The packages that a client is made of, with their versions."""
    if client.name in USES_NPM:
        section = json.loads(package_json())["clients"][client.name]
        packages = json.loads(package_json())["dependencies"]
        return ", ".join(f"{name} {packages[name]}" for name in section)
    pins = [re.sub(r"\[.*\]", "", package).replace("==", " ") for package in client.packages]
    return ", ".join(pin for pin in pins if not pin.startswith(("pytest", "torch")))


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """The outcomes as Markdown."""
    yield "| client | versions | passed | failed: model | failed: server | skipped |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for each in outcomes:
        by = [sum(blame == whom for _, blame, _ in each.failures) for whom in ("model", "server")]
        yield f"| {each.name} | {each.versions} | {each.passed} | {by[0]} | {by[1]} | {each.skipped} |"
    failures = [(each.name, *failure) for each in outcomes for failure in each.failures]
    if failures:
        yield ""
        yield "| client | test | to blame | reason |"
        yield "| --- | --- | --- | --- |"
        for name, test, blame, reason in failures:
            words = " ".join(reason.split()).replace("|", "\\|").replace("<", "&lt;")[:MAX_CHARACTERS]
            yield f"| {name} | `{test}` | {blame} | {words} |"


def main() -> int:
    """Install, serve, run, print; 1 where the server is to blame for a failure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], help="names of clients")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.relative_to(ROOT)}")
    parser.add_argument("--keep", type=Path, help="folder for the calls, the reports and the log of the server")
    parser.add_argument("flags", nargs="*", help="further flags of funitel, after --")
    wishes = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped
    known = {client.name: client for client in clients()}
    if unknown := set(wishes.only) - known.keys():
        parser.error(f"--only: must be of {', '.join(known)}. Given: {', '.join(sorted(unknown))}")
    chosen = [known[name] for name in wishes.only or known]
    for client in chosen:
        client.install()
    outcomes: list[Outcome] = []
    with ExitStack() as stack:
        folder = (wishes.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        urls = stack.enter_context(serve_all(folder, wishes.flags))
        for client in chosen:
            print(f"==> {client.name}", flush=True)
            calls = folder / f"{client.name}.jsonl"
            calls.unlink(missing_ok=True)
            outcomes.append(run(client, urls, calls))
    lines = list(table(outcomes))
    print("\n".join(lines))
    if wishes.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text("\n".join([before + BEGIN, "", *lines, "", END + rest.partition(END)[2]]))
    return any(blame == "server" for each in outcomes for _, blame, _ in each.failures)


if __name__ == "__main__":
    sys.exit(main())
