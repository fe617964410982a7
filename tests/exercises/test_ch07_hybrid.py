"""Checks of chapter 7's exercises. See AUTHORS.md in exercises/."""

import numpy as np
from checks import AtLeast, Case
from scored_chats import share_saved


def test_7_1_match_hybrid(ex):
    def case(page_hit, snapshots, num_tokens, want, note):
        return Case({"page_hit": page_hit, "snapshots": snapshots, "num_tokens": num_tokens}, want, note)

    ex.check("match_hybrid", [
        case(16, [], 24, 0, "pages, but no state: it must begin at the beginning"),  # fault A1
        case(0, [], 1, 0, "nothing is known"),
        case(16, [16], 24, 16, "a state just where the pages end"),
        case(19, [16], 24, 16, "a page hit that goes on a bit"),
        case(15, [16], 24, 0, "that state has seen a token of somebody else's"),
        case(16, [16], 16, 0, "the very same prompt: its last token must be run"),  # fault A3
        case(16, [16], 17, 16, "one token to run"),
        case(24, [8, 16, 24], 24, 16, "the very same prompt: from an earlier state"),
        case(20, [8, 16, 24], 30, 16, "the last state is past the hit"),
        case(12, [8, 16, 24], 30, 8, "two states are past the hit"),
        case(7, [8, 16], 30, 0, "all states are past the hit"),
        case(30, [8, 16, 24], 40, 24, "the deepest of three"),
        case(9, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 9, 8, "a state at every count, and the same prompt"),
        case(9, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], 12, 9, "a state at every count"),
    ])  # fmt: skip


def test_7_2_place_snapshots(ex):
    def case(start, num_tokens, want, note, every=8, page_size=4):
        args = {"start": start, "num_tokens": num_tokens, "every": every, "page_size": page_size}
        return Case(args, want, note)

    ex.check("place_snapshots", [
        case(0, 3, [], "shorter than a page"), case(0, 1, [], "one token", page_size=1),  # fault A13
        case(0, 4, [], "a page, of which one token must be run"), case(0, 5, [4], "a page and a token"),
        case(0, 7, [4], "a page and a half"), case(0, 8, [4, 8], "two pages: one for this prompt, one for longer ones"),
        case(0, 9, [8], "the boundary is a multiple"), case(0, 20, [8, 16], "the boundary is a multiple again"),
        case(0, 30, [8, 16, 24, 28], "three multiples and a boundary"),
        case(8, 30, [16, 24, 28], "from a snapshot on"), case(28, 30, [], "from the last boundary on"),
        case(28, 33, [32], "a continuation"), case(10, 30, [16, 24, 28], "a start that is no multiple"),
        case(20, 23, [], "nothing lies between"), case(20, 24, [24], "the end alone"),
        case(0, 20, [6, 12, 15, 18], "pages of five", every=6, page_size=5),
        case(0, 9, [8], "spaced more widely than it is long", every=100),
        case(3, 9, [4, 6, 8], "a state at every second token", every=2, page_size=3),
    ])  # fmt: skip


def replies(SnapshotStore, num_slots, calls):
    """For each call what came back, and what is kept after it."""
    store, found = SnapshotStore(num_slots), []
    for name, tokens in calls:
        answer = getattr(store, name)(tokens)
        found.append(f"{name} {tokens}: {answer}; kept {list(store.kept)}")
    return found


def some_calls(num_slots, num_calls, seed):
    """Random calls about words of two letters, and the right replies, from the time at which each word was used."""
    rng, calls, used, want = np.random.default_rng(seed), [], {}, []
    for time in range(num_calls):
        name, tokens = str(rng.choice(["put", "hit"])), "".join(rng.choice(["a", "b"], int(rng.integers(1, 6))))
        answer = None
        if name == "put":
            if tokens not in used and len(used) == num_slots:
                del used[sorted(used, key=used.get)[0]]
            used[tokens] = time
        else:
            known = sorted((word for word in used if tokens.startswith(word) and tokens != word), key=len)
            answer = len(known[-1]) if known else 0
            used |= dict.fromkeys(known[-1:], time)
        calls.append((name, tokens))
        want.append(f"{name} {tokens}: {answer}; kept {sorted(used, key=used.get)}")
    return calls, want


def test_7_3_snapshot_store(ex):
    def case(num_slots, note, *rows):
        """Rows of (call, what came back, what is kept), as in "put ab"."""
        calls = [tuple(row[0].split()) for row in rows]
        want = [f"{call}: {answer}; kept {kept.split()}" for call, answer, kept in rows]
        return Case({"num_slots": num_slots, "calls": calls}, want, note, run=replies)

    ab, abcd = ("put ab", None, "ab"), ("put abcd", None, "ab abcd")
    cases = [
        case(2, "one is put in", ab),
        case(2, "nothing is kept", ("hit ab", 0, "")),
        case(2, "a request that goes on from it", ab, ("hit abc", 2, "ab")),
        case(2, "two are put in", ab, abcd),
        case(2, "a request that turns off before it", ("put abcd", None, "abcd"), ("hit abxy", 0, "abcd")),
        case(2, "the very same tokens", ab, ("hit ab", 0, "ab")),  # fault A3
        case(2, "shorter than what is kept", ab, ("hit a", 0, "ab")),
        case(1, "one slot", ab, ("put x", None, "x")),
        case(2, "the longest of two", ab, abcd, ("hit abcde", 4, "ab abcd")),
        case(2, "the same tokens as the longer one", ab, abcd, ("hit abcd", 2, "abcd ab")),
        case(2, "one has to go", ab, ("put x", None, "ab x"), ("put y", None, "x y")),
        case(2, "put in again", ab, ("put x", None, "ab x"), ("put ab", None, "x ab")),
        case(2, "a hit is a use", ab, ("put x", None, "ab x"), ("hit abc", 2, "x ab"), ("put y", None, "ab y")),
        case(2, "the shorter one goes", ab, abcd, ("put x", None, "abcd x"), ("hit abcde", 4, "x abcd")),
        # fault A15: two chats from one beginning, of which one is cold
        case(3, "the longer one was used, not the one on the way", ab, ("put x", None, "ab x"),
             ("put abcd", None, "ab x abcd"), ("hit abcde", 4, "ab x abcd"), ("put y", None, "x abcd y")),
        case(3, "the shorter one was used", ab, abcd, ("put x", None, "ab abcd x"), ("hit abx", 2, "abcd x ab"),
             ("put y", None, "x ab y")),
    ]  # fmt: skip
    for num_slots, num_calls, seed in [(2, 12, 0), (3, 24, 1), (5, 60, 2)]:
        calls, want = some_calls(num_slots, num_calls, seed)
        cases.append(Case({"num_slots": num_slots, "calls": calls}, want, f"{num_calls} calls", run=replies))
    ex.check("SnapshotStore", cases)


class Broken(Exception):
    """What a pool raises that does not work."""


class Caches:
    """A tree and two pools in one, which note what they are asked for, in order; one call may be broken."""

    def __init__(self, node_pages, free_pages, free_slots, broken):
        self.node_pages, self.free_pages, self.free_slots, self.broken = node_pages, free_pages, free_slots, broken
        self.notes = []

    def note(self, call, what=""):
        """Note a call; raise if it is the broken one."""
        self.notes.append(f"{call} {what}".strip() + (", which raises" if call == self.broken else ""))
        if call == self.broken:
            raise Broken

    def lock(self, node):
        self.note("lock", node)

    def unlock(self, node):
        self.note("unlock", node)

    def pages(self, node):
        return self.node_pages

    def share(self, pages):
        self.note("share", pages)

    def release(self, held):
        self.note("release", f"slot {held}" if isinstance(held, int) else list(held))

    def take(self, num=None):
        """`num` pages from 20 on, or the last slot."""
        self.note("take a slot" if num is None else "take pages", "" if num is None else num)
        if num is None:
            return self.free_slots - 1 if self.free_slots else None
        return list(range(20, 20 + num)) if num <= self.free_pages else None


def admitted(admit_or_undo, num_new, **sizes):
    """What came out, and what was done; that the tree's own list of pages is as it was."""
    caches, before = Caches(**sizes), list(sizes["node_pages"])
    try:
        answer = admit_or_undo(tree=caches, node="A", allocator=caches, states=caches, num_new=num_new)
    except Broken:
        answer = "what was raised"
    done = caches.notes + ["(and changes the tree's own list of pages)"] * (caches.node_pages != before)
    return {"out": answer, "done": ", then ".join(done)}


def test_7_4_admit_or_undo(ex):
    lock, share, slot, pages = "lock A", "share [5, 6]", "take a slot", "take pages 2"
    back = {lock: "unlock A", share: "release [5, 6]", slot: "release slot 0"}

    def case(note, num_taken, out=None, free_pages=9, free_slots=1, broken=None):
        """So many things are tried; unless it ends well, all but the last of them are given back."""
        tried = [lock, share, slot, pages][:num_taken]
        done = tried[:-1] + [tried[-1] + (", which raises" if broken else "")]
        done += [back[thing] for thing in tried[-2::-1]] if out is None or broken else []
        args = {"node_pages": [5, 6], "num_new": 2, "free_pages": free_pages, "free_slots": free_slots,
                "broken": broken}  # fmt: skip
        return Case(args, {"out": out, "done": ", then ".join(done)}, note, run=admitted)

    def small(note, node_pages, num_new, out):
        done = f"lock A, then share {node_pages}, then take a slot, then take pages {num_new}"
        args = {"node_pages": node_pages, "num_new": num_new, "free_pages": 2, "free_slots": 3, "broken": None}
        return Case(args, {"out": out, "done": done}, note, run=admitted)

    raised = "what was raised"
    ex.check("admit_or_undo", [
        small("there is room", [5, 6], 2, ([5, 6, 20, 21], 2)), small("nothing matched", [], 1, ([20], 2)),
        small("no page is needed", [5, 6], 0, ([5, 6], 2)),
        case("slot 0 is a slot like any other", 4, ([5, 6, 20, 21], 0)),
        case("no slot is free", 3, free_slots=0), case("one page is free, of two", 4, free_pages=1),  # fault A7
        case("no page is free", 4, free_pages=0),
        case("pages cannot be shared", 2, raised, broken="share"),
        case("the lock raises", 1, raised, broken="lock"),
        case("to take a slot raises", 3, raised, broken="take a slot"),
        case("to take pages raises", 4, raised, broken="take pages"),
    ])  # fmt: skip


def test_7_5_snapshot_worth(ex):
    def case(layers, kv_bytes, state_bytes, every, memory_gb, want, note):
        model = ex.Hybrid(*layers, kv_bytes, state_bytes)
        names = ("snapshot_gb", "times_kv", "tokens")
        return Case({"model": model, "every": every, "memory_gb": memory_gb}, dict(zip(names, want, strict=True)), note)

    ex.check("snapshot_worth", [
        case((1, 1), 1000, 8000, 8, 2e-3, (8e-6, 1.0, 1000), "a snapshot as dear as its tokens: half of it is theirs"),
        case((1, 3), 1000, 8000, 8, 2e-3, (24e-6, 3.0, 500), "three layers of four have a state"),
        case((2, 1), 500, 8000, 4, 3e-3, (8e-6, 2.0, 1000), "two layers of three have keys and values"),
        case((1, 1), 1000, 8000, 2, 2.5e-3, (8e-6, 4.0, 500), "at every second token"),
        case((1, 1), 1000, 7000, 10, 9e-4, (7e-6, 0.7, 529), "a snapshot cheaper than its tokens"),
        case((2, 6), 2048, 50_000, 16, 1.0, (3e-4, 300_000 / 65_536, 43_771), "one GB, for a small model"),
        case((23, 69), 4096, 8_511_488, 256, 100.0, (0.587292672, 24.3515625, 41_870), "Qwen3.8-2.4T in 100 GB"),
        case((23, 69), 4096, 8_511_488, 2080, 100.0, (0.587292672, 2.9971153846153844, 265_561), "and sparser"),
    ])  # fmt: skip


def test_7_6_drop_snapshot(ex):
    def share(drop_snapshot, loads):
        return float(np.mean([share_saved(drop_snapshot, ex.Kept, *load) for load in loads]))

    loads = [(12, 30.0, 0), (24, 30.0, 1), (24, 60.0, 2)]
    ex.check("drop_snapshot", [Case({"loads": loads}, AtLeast(0.8), "slots, thinking time in s, seed", run=share)])
