"""What we measure is what a server serves: one run's export through a real vLLM.

    python recipes/serving/proof.py RUN OUT --command "vllm serve TARGET --max-model-len 2048"

1. serve-check: text, tau and survival with the drafter, without it, and in draftsmith's own loop.
2. Known mistakes planted one at a time into a copy of the export: serve-check must name each.
3. verify: the states that vLLM extracts against the run's feature store.
Writes OUT/proof.json. Repeat it with a newer server: nothing here depends on vLLM's version.
"""

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from plant import plant

from draftsmith.drafter.checkpoint import read_shape
from draftsmith.serve_check import drafter_options
from draftsmith.serving.launch import running

MISTAKES = {"taps": "layer ids", "causal": "causality", "theta": "rope", "mask": "mask id"}


def draftsmith(*args: object) -> tuple[int, str]:
    """Run a command; its exit code and what it said."""
    command = [sys.executable, "-m", "draftsmith.cli", *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout + done.stderr, flush=True)
    return done.returncode, done.stderr.strip()


def main() -> None:
    """All three, and a summary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--command", required=True)
    parser.add_argument(
        "--eager", default="", help="options for the planted servers, which need no speed"
    )
    parser.add_argument("--max-prompts", type=int, default=96)
    parser.add_argument("--mistakes", nargs="*", default=list(MISTAKES))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    export = args.run / "export"
    summary: dict = {}

    check = ("serve-check", export, "--command", args.command, "--max-prompts", args.max_prompts)
    if args.max_prompts:
        summary["serve-check"] = draftsmith(*check)
        shutil.copy(args.run / "serve" / "report.json", args.out / "serve.json")

    block_size = read_shape(export).block_size
    for mistake, name in [(m, n) for m, n in MISTAKES.items() if m in args.mistakes]:
        wrong = args.out / f"planted-{mistake}"
        plant(export, wrong, mistake)
        options = drafter_options(str(wrong.absolute()), block_size, sglang=False)
        with running(
            f"{args.command} {args.eager}", options, args.out / f"{mistake}.log", wait_s=300
        ) as url:
            code, said = draftsmith("serve-check", export, "--server", url, "--max-prompts", 32)
        report = json.loads((args.run / "serve" / "report.json").read_text())
        fits = [
            {key: fit[key] for key in ("name", "tau", "distance")}
            for fit in report["acceptance"].get("fits", [])[:4]
        ]
        summary[f"planted {mistake}"] = {
            "exit": code,
            "named": name in said,
            "said": said,
            "fits": fits,
        }
        shutil.rmtree(wrong)

    code, said = draftsmith(
        "verify", args.run / "features", "--engine", "vllm",
        "--command", f"{args.command} {args.eager}", "--samples", 24,
    )  # fmt: skip
    summary["verify"] = {"exit": code, "said": said}
    (args.out / "proof.json").write_text(json.dumps(summary, indent=1))
    print(json.dumps(summary, indent=1))


if __name__ == "__main__":
    main()
