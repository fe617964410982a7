"""Write exercises/*.py from solutions/*.py by dropping the marked bodies.

    python exercises/sync.py                 write the stubs; a stub that somebody has edited is left alone
    python exercises/sync.py --check         write nothing; fail when a stub is behind its solution
    python exercises/sync.py --force NAME    start NAME (say ch01_serving) afresh; what was written there is lost

A body in a solution stands between two comments of the same indentation:

    # solution: 1.4 [5 min, easy] a hint that the reader sees
    ...
    # end

`.generated.json` keeps a hash of each stub as it was last generated. A file that still has this hash is nobody's work,
and may be written over; any other file is a reader's.
"""

import argparse
import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MARKER = re.compile(r"^( *)# solution: (\d+\.\d+) \[(\d+) min, (easy|medium|hard|open)\] (.+)$", re.M)
_BODY = re.compile(MARKER.pattern + r"\n(?:.*\n)*?\1# end\n", re.M)
_HEADER = """\
# Write your code where it says YOUR CODE, in place of the line that raises. Check it with: pytest tests/exercises
# ruff: noqa: F401
"""


def stub(text: str) -> str:
    """The exercise of a solution: the same file, without the bodies.

    Raises ValueError when a body is not marked as this module's docstring says.
    """
    num_marked, num_found = len(re.findall(r"# solution\b", text)), len(_BODY.findall(text))
    if num_marked != num_found or num_marked != len(re.findall(r"# end\b", text)):
        raise ValueError(f"{num_marked} bodies begin with '# solution', {num_found} are marked as sync.py expects")
    return _HEADER + _BODY.sub(_without_body, text)


def _without_body(body: re.Match) -> str:
    """What stands in place of a body."""
    indent, number, minutes, level, hint = body.groups()
    return (
        f"{indent}# YOUR CODE ({minutes} min, {level}): {hint}\n"
        f'{indent}raise NotImplementedError("exercise {number}")\n'
    )


def sync(root: Path = ROOT, check: bool = False, force: str | None = None) -> dict[str, str]:
    """Bring every stub up to date, or with `check` only say how it is.

    Returns {file name: state}: "fresh"; "stale" (its solution has changed since it was generated, or is gone);
    "written"; "edited" (a reader's work: never written unless `force` names it).
    """
    record = root / "exercises" / ".generated.json"
    hashes = json.loads(record.read_text("utf-8")) if record.exists() else {}
    states = {name: "stale" for name in hashes}
    new_hashes = {}
    for solution in sorted((root / "solutions").glob("ch*.py")):
        path, text = root / "exercises" / solution.name, stub(solution.read_text("utf-8"))
        new_hashes[path.name] = wanted = _hash(text)
        recorded, present = hashes.get(path.name), _hash(path.read_text("utf-8")) if path.exists() else None
        edited = present not in (None, recorded, wanted)
        if check:
            states[path.name] = "stale" if recorded != wanted or not present else "edited" if edited else "fresh"
        elif edited and force not in (path.name, path.stem):
            states[path.name] = "edited"
        else:
            states[path.name] = "fresh" if present == wanted else "written"
            path.write_text(text, "utf-8")
    if not check:
        record.write_text(json.dumps(new_hashes, indent=1) + "\n", "utf-8")
    return states


def _hash(text: str) -> str:
    """A short fingerprint of a file's text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def main() -> None:
    """Run it as a command; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a stub is behind its solution")
    parser.add_argument("--force", metavar="NAME", help="start NAME afresh, even if it was edited")
    arguments = parser.parse_args()
    states = sync(check=arguments.check, force=arguments.force)
    for name, state in states.items():
        kept = f"  (somebody's work, kept; --force {name} starts it afresh)" if state == "edited" else ""
        print(f"exercises/{name}: {state}{kept}")
    if arguments.force and not {arguments.force, arguments.force + ".py"} & states.keys():
        sys.exit(f"there is no exercises/{arguments.force}")
    if arguments.check and "stale" in states.values():
        sys.exit("stale stubs: run python exercises/sync.py and commit what it writes")


if __name__ == "__main__":
    main()
