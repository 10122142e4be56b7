"""Plants mistakes into copies of the code, one at a time, and says which of them the tests of CI
let live.

python tests/mutations/run.py [--list] [--jobs=N] [--write=KIND] [id ...]

The mistakes are data: the .toml files beside this one. For each, the files that git tracks are
copied to a temporary directory, the text is replaced there, and the tests that must fail run on the
copy. The working tree is never touched. The same tests run on an unchanged copy first: where they
fail without the mistake, they prove nothing.

Of the named tests only those run that CI selects (tests/tiers.py). A mistake with none of them is
"not in CI".

The mistakes in kernels (tests/pallas_kernels/kernel_mutations.toml) are planted by a test of their
own, which passes if each is found. They are judged by that test here, so that one record has all.
Their ids begin with "kernels/".
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tiers
from mutations import planted
from mutations.copies import ACCEPTED, KILLED, NOT_IN_CI, SURVIVED, Copies, Verdict
from mutations.planted import Mutation


def judge(mutations: Sequence[Mutation], jobs: int) -> dict[str, Verdict]:
    """The verdict of each by its id, printed as it comes."""
    in_kernels = [mutation for mutation in mutations if mutation.planted_by_test]
    in_copies = [mutation for mutation in mutations if not mutation.planted_by_test]
    verdicts: dict[str, Verdict] = {}
    with (
        tempfile.TemporaryDirectory(prefix="mesh_lm-mutations-") as where,
        Copies(Path(where), jobs) as copies,
        ThreadPoolExecutor(jobs) as pool,
    ):
        unchanged: dict[tuple[str, ...], Verdict] = {}
        for batch in pool.map(
            copies.run_unchanged, batches([mutation.tests for mutation in in_copies], jobs)
        ):
            unchanged |= batch
        for tests, alone in unchanged.items():
            if alone.status != SURVIVED:
                print(f"without any mutation: {' '.join(tests)}: {alone.of_unchanged}", flush=True)

        def judge_one(mutation: Mutation) -> Verdict:
            alone = unchanged[mutation.tests]
            if alone.status == NOT_IN_CI:
                return alone
            if alone.status != SURVIVED:
                return alone.proves_nothing()
            return copies.run(mutation.tests, mutation)

        judged = pool.map(judge_one, in_copies)
        of_kernels = pool.submit(copies.run_kernels, in_kernels) if in_kernels else None
        for mutation, verdict in zip(in_copies, judged, strict=True):
            verdicts[mutation.id] = verdict
            show(mutation, verdict)
        if of_kernels:
            verdicts |= of_kernels.result()
            for mutation in in_kernels:
                show(mutation, verdicts[mutation.id])
    return verdicts


def batches(sets: Iterable[tuple[str, ...]], jobs: int) -> Iterator[list[tuple[str, ...]]]:
    """Divides sets of tests into one batch per job, but never those that CI selects by different
    expressions. Files stay together."""
    by_expression: dict[str, list[tuple[str, ...]]] = {}
    for tests in sorted(set(sets)):
        by_expression.setdefault(tiers.ci_selects(tests[0].partition("::")[0]), []).append(tests)
    for batch in by_expression.values():
        size = -(-len(batch) // jobs)
        for start in range(0, len(batch), size):
            yield batch[start : start + size]


def show(mutation: Mutation, verdict: Verdict) -> None:
    """Prints a verdict."""
    more = f": {verdict.why}" if verdict.why and verdict.status not in ACCEPTED else ""
    print(f"{verdict.status:14} {verdict.seconds:6.1f} s  {mutation.id}{more}", flush=True)
    if verdict.status == SURVIVED:
        print(f"  {mutation.file}: {mutation.plants}\n  {' '.join(mutation.tests)}", flush=True)


def summary(statuses: Sequence[str], seconds: float) -> str:
    """A line: how many mutations there were, of each verdict how many, and how long it took."""
    counts = {
        status: statuses.count(status) for status in dict.fromkeys([KILLED, SURVIVED, *statuses])
    }
    return (
        f"{len(statuses)} mutations: {', '.join(f'{n} {status}' for status, n in counts.items())}; "
        f"{seconds:.0f} s"
    )


def write(kind: str, verdicts: dict[str, Verdict]) -> Path:
    """Leaves the verdicts in benchmarks/results, with the machine and the versions; those that it
    holds of others stay."""
    sys.path.insert(0, str(planted.ROOT))
    from benchmarks.record import RESULTS, Record

    record = Record("mutations", RESULTS, kind=kind)
    record.data["command"] = f"python tests/mutations/run.py --write={kind}"
    before = RESULTS / f"{record.stem}.json"
    rows = (
        {
            row["id"]: row
            for row in json.loads(before.read_text(encoding="utf-8"))["tables"]["Verdicts"]["rows"]
        }
        if before.exists()
        else {}
    )
    mutations = planted.load()
    for mutation in mutations:
        if verdict := verdicts.get(mutation.id):
            rows[mutation.id] = {
                "id": mutation.id, "file": mutation.file, "verdict": verdict.status,
                "wall_s": round(verdict.seconds, 1),
                "plants": mutation.plants, "said": verdict.why,
            }  # fmt: skip
    kept = [rows[mutation.id] for mutation in mutations if mutation.id in rows]
    record.data["summary"] = summary(
        [row["verdict"] for row in kept], sum(row["wall_s"] for row in kept)
    )
    note = (
        "wall_s: of the tests of the mutation, up to the first that failed; of those in kernels, "
        "of its test alone."
    )
    record.table("Verdicts", kept, note, show=False)
    return record.write()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python tests/mutations/run.py",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument(
        "ids", nargs="*", metavar="id", help="of mutations, or how they begin; none: all"
    )
    parser.add_argument("--list", action="store_true", help="say what each plants, and run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="mutations at once")
    parser.add_argument(
        "--write",
        metavar="KIND",
        default="",
        help="write benchmarks/results/mutations_<date>_<KIND>.json and .md",
    )
    arguments = parser.parse_args(argv)
    mutations = [
        m for m in planted.load() if not arguments.ids or m.id.startswith(tuple(arguments.ids))
    ]
    if unknown := [
        each for each in arguments.ids if not any(m.id.startswith(each) for m in mutations)
    ]:
        parser.error(f"no mutation {', '.join(unknown)}; --list says which there are")
    if arguments.jobs < 1:
        parser.error(f"--jobs={arguments.jobs} must be at least 1")
    if arguments.list:
        print("\n".join(f"{m.id} ({m.file}): {m.plants}" for m in mutations))
        return 0
    before = time.monotonic()
    verdicts = judge(mutations, arguments.jobs)
    print(summary([verdict.status for verdict in verdicts.values()], time.monotonic() - before))
    if arguments.write:
        print(write(arguments.write, verdicts).relative_to(planted.ROOT))
    return 0 if all(verdict.status in ACCEPTED for verdict in verdicts.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
