"""Command line of the audit; `atropos-tui audit` starts it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atropos_common.protocol.audit import Audit, AuditExit
from trainer_core.errors import TrainerError


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m trainer_core.audit",
        description="Tell whether an engine serves the weights of a folder.",
        epilog="exit codes: 0 serves · 1 does not · 2 usage · 3 cannot tell",
        allow_abbrev=False,
    )
    parser.add_argument("--engine", default="")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--adapter", type=Path)
    parser.add_argument("--older", type=Path)
    parser.add_argument("--rollouts", type=Path)
    parser.add_argument("--model", default="")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--token-env", default="")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--timeout", type=float, default=60.0)
    parser.add_argument("--prompt-logprobs", action="store_true")
    parser.add_argument("--json", action="store_true")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    options = build_parser().parse_args(argv)
    if not options.engine and not options.rollouts:
        return _usage("give --engine URL, --rollouts FILE, or both")
    try:
        result = _audit(options)
    except TrainerError as error:
        return _usage(str(error))
    except ImportError as error:
        return _usage(f'{error.name} is not installed; fix: pip install "atropos-tui[audit]"')
    except KeyboardInterrupt:
        return int(AuditExit.INTERRUPTED)
    except Exception as error:
        # Exit status 1 means "does not serve"; a fault of the program must not say that.
        result = Audit("cannot tell", options.engine, str(options.weights))
        result.evidence = f"internal error: {type(error).__name__}: {error}"
        if os.environ.get("ATROPOS_AUDIT_TRACE"):
            raise
    print(as_json(result) if options.json else as_text(result))
    return int(result.exit_code)


def _usage(message: str) -> int:
    print(f"atropos-tui audit: {message}", file=sys.stderr)
    return int(AuditExit.USAGE)


def _audit(options: argparse.Namespace) -> Audit:
    # torch takes seconds to import; `--help` and a usage error do not wait for it.
    from trainer_core.audit.program import Settings, audit
    from trainer_core.objective.causes.sampling import PLAIN

    return audit(
        Settings(
            weights=options.weights,
            engine=options.engine,
            adapter=options.adapter,
            older=options.older,
            rollouts=options.rollouts,
            model=options.model,
            token=os.environ.get(options.token_env, "") if options.token_env else "",
            dtype=options.dtype,
            device=options.device,
            sampler=PLAIN._replace(temperature=options.temperature),
            seed=options.seed,
            prompt_logprobs=options.prompt_logprobs,
            timeout_s=options.timeout,
        )
    )


def as_json(result: Audit) -> str:
    return json.dumps(_finite(dataclasses.asdict(result)), indent=2)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    return value


def as_text(result: Audit) -> str:
    where = f"{result.engine}\nweights {result.weights}"
    if result.verdict == "serves":
        lines = [f"serves these weights: {result.evidence}"]
    elif result.verdict == "does not":
        lines = [f"does not serve these weights: {result.cause}", f"  {result.evidence}"]
    else:
        lines = ["cannot tell", f"  {result.evidence}"]
    if result.fix:
        lines.append(f"  fix: {result.fix}")
    lines.append("")
    lines += [
        f"  {group.name:<8} {group.tokens:>5} tokens  mean {group.difference:.2g}  "
        f"largest {group.largest:.2g}  bound {group.bound:.2g}"
        for group in result.groups
    ]
    if result.rollouts is not None:
        lines += _rollout_lines(result)
    lines += [f"  note: {note}" for note in result.notes]
    if result.logprobs != "unknown":
        lines.append(f"  logprobs are {result.logprobs}")
    lines.append(f"  {result.requests} requests, {result.tokens} tokens, {result.seconds:.1f} s")
    return "\n".join([where, *lines])


def _rollout_lines(result: Audit) -> list[str]:
    found = result.rollouts
    assert found is not None
    lines = [
        f"  rollouts {found.tokens:>5} tokens  mean {found.difference:.2g}  bound "
        f"{found.bound:.2g}  foreign {found.foreign:.1%}"
    ]
    if found.explained_by:
        lines.append(f"    {found.explained_by} ({found.left:.2g} nats remain)")
    lines += [f"    version {v}: mean {mean:.2g}" for v, mean in found.by_version.items()]
    return lines


if __name__ == "__main__":
    sys.exit(main())
