"""Look the locked versions up among the known vulnerabilities: `make audit`.

Exit status 1 if there are any. Where the package index does not tell of them, this says so, and
that nothing was checked, with status 0: on such a machine nobody could do more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

LOCKS = ("build.txt", "torch.txt", "cuda.txt", "cpu.txt", "gpu.txt", "tools.txt")
#: Advisories that do not concern this project, and why.
ACCEPTED: dict[str, str] = {}
#: How pip-audit's last line begins, or a traceback's, where the package index cannot be reached.
_NO_CONNECTION = re.compile(
    r"(ERROR:[\w.]+:)?Could not connect to "
    r"|([\w.]+\.)?(ConnectionError|ConnectTimeout|ConnectTimeoutError|ReadTimeout|MaxRetryError|"
    r"NameResolutionError|NewConnectionError|ProxyError|SSLError|ConnectionRefusedError|"
    r"ConnectionResetError)(:|$)"
)


def pins() -> list[str]:
    """Every pin of every lock, once."""
    texts = [(Path(__file__).parent / name).read_text() for name in LOCKS]
    return sorted(set(re.findall(r"^[a-z][^ \\\n]*", "\n".join(texts), re.MULTILINE)))


def report(output: str, error: str) -> int:
    """Print what pip-audit found, from its JSON and its stderr; the exit status."""
    # Advice follows an error; a traceback's last line names the error, lines before may name any.
    lines = [line for line in error.splitlines() if line.strip() and "Tip: " not in line]
    last = lines[-1].strip() if lines else ""
    if not output and not _NO_CONNECTION.match(last):
        print(f"audit: pip-audit failed: {error.strip()}")
        return 1
    found = json.loads(output)["dependencies"] if output else []
    checked = [one for one in found if "vulns" in one]
    for one in checked:
        for vulnerability in one["vulns"]:
            told = [vulnerability["id"], *vulnerability.get("aliases", ())]
            reason = next((ACCEPTED[name] for name in told if name in ACCEPTED), None)
            if reason is None:
                fixed = ", ".join(vulnerability["fix_versions"]) or "no version"
                print(f"audit: {one['name']} {one['version']}: {' '.join(told)}, fixed in {fixed}")
                one["open"] = True
    if not checked:
        reason = last or "no package is known there"
        print(f"audit: NOTHING WAS CHECKED: advisories cannot be had from here ({reason})")
        return 0
    wrong = sum("open" in one for one in checked)
    print(f"audit: {len(checked)} of {len(found)} packages checked, {wrong} with vulnerabilities")
    return 1 if wrong else 0


def main() -> int:
    """Run pip-audit, which lies beside the running Python."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(pins()))
        file.flush()
        command = [Path(sys.executable).with_name("pip-audit"), "--requirement", file.name]
        command += ["--no-deps", "--disable-pip", "--format=json", "--progress-spinner=off"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return report(done.stdout, done.stderr if done.returncode else "")


if __name__ == "__main__":
    sys.exit(main())
