"""Checks of chapter 4's exercises. See AUTHORS.md in exercises/."""

from collections import Counter

import numpy as np
import torch
from checks import AtLeast, Case
from one_at_a_time import attended, random
from scored_loads import share_finished
from touched import Meter


def test_4_1_slots(ex):
    def case(pages, start, stop, page_size, want, note):
        return Case({"pages": pages, "start": start, "stop": stop, "page_size": page_size}, want, note)

    ex.check("slots", [
        case([0], 0, 2, 4, [0, 1], "the first page of all"),
        case([5], 0, 2, 4, [20, 21], "page 5 begins at slot 20"),
        case([5], 2, 2, 4, [], "no position"),
        case([5], 1, 4, 4, [21, 22, 23], "from position 1 on"),
        case([7, 2], 3, 6, 4, [31, 8, 9], "across two pages"),
        case([7, 2], 4, 5, 4, [8], "the second page alone"),
        case([3, 9, 0, 1], 5, 10, 3, [29, 0, 1, 2, 3], "pages of three"),
        case([6, 4, 5], 0, 3, 1, [6, 4, 5], "pages of one"),
    ])  # fmt: skip


WORK_PER_ENTRY = 20


def said(answer, num_free, counts):
    """What one call of an allocator came to, in a line."""
    return f"{answer}; {num_free} free, references {counts}"


def answers(PageAllocator, num_pages, calls):
    """For each call what came back, then how many pages are free and the references of each page that is held.

    Pages are named by the order in which they were taken, for an allocator may hand them out in any order.
    """
    allocator, meter, taken, held, found = PageAllocator(num_pages), Meter(), [], {}, []
    for name, what in calls:
        meter.watch(allocator)
        meter.num_touched, limit = 0, WORK_PER_ENTRY * (1 + (what if name == "take" else len(what)))
        try:
            pages = getattr(allocator, name)(what if name == "take" else [taken[i] for i in what])
            answer = "done" if name != "take" else "None" if pages is None else f"{len(pages)} taken"
        except ValueError:
            pages, answer = [], "ValueError"
        num_free = allocator.num_free
        if meter.num_touched > limit:
            answer += f", after a look at {meter.num_touched / num_pages:.0f} x the pool"
        pages = pages or []
        if len({*pages} - {*held.values()}) < len(pages) or not {*pages} <= {*range(num_pages)}:
            answer += ", some of them nobody's to give"
        held |= dict(enumerate(pages, start=len(taken)))
        taken += pages
        held = {i: page for i, page in held.items() if allocator.ref_count(page)}
        try:
            allocator.check()
        except ValueError:
            answer += ", and check() fails"
        found.append(said(answer, num_free, [allocator.ref_count(page) for page in held.values()]))
    return found


def some_calls(num_pages, num_calls, seed):
    """Random calls, at times for too much, and the right answers, from a count for each page ever taken."""
    rng, calls, counts, want = np.random.default_rng(seed), [], [], []
    for _ in range(num_calls):
        held = [i for i, count in enumerate(counts) if count]
        if not held or rng.random() < 0.4:
            num = int(rng.integers(0, num_pages // 2 + 1))
            fits = num <= num_pages - len(held)
            counts += [1] * num if fits else []
            calls, answer = [*calls, ("take", num)], f"{num} taken" if fits else "None"
        else:
            name = str(rng.choice(["share", "release"], p=[0.3, 0.7]))
            some = rng.choice(held, rng.integers(1, len(held) + 1)).tolist()
            fits = name == "share" or all(counts[i] >= num for i, num in Counter(some).items())
            for i in some if fits else []:
                counts[i] += 1 if name == "share" else -1
            calls, answer = [*calls, (name, some)], "done" if fits else "ValueError"
        held = [count for count in counts if count]
        want.append(said(answer, num_pages - len(held), held))
    return calls, want


def test_4_2_page_allocator(ex):
    def case(num_pages, note, *rows):
        """Rows of (call, its argument, what came back, free pages, references of those held)."""
        calls, want = [row[:2] for row in rows], [said(*row[2:]) for row in rows]
        args = {"num_pages": num_pages, "calls": calls}
        return Case(args, want, f"{note}; page [0] is the one taken first", run=answers)

    one, two = ("take", 1, "1 taken", 3, [1]), ("take", 2, "2 taken", 2, [1, 1])
    shared = ("share", [0], "done", 3, [2])
    cases = [
        case(1, "all of a pool of one", ("take", 1, "1 taken", 0, [1])),
        case(4, "three pages", ("take", 3, "3 taken", 1, [1, 1, 1])),
        case(4, "all pages", ("take", 4, "4 taken", 0, [1] * 4)),
        case(4, "no page", ("take", 0, "0 taken", 4, [])),
        case(4, "more than there are", ("take", 5, "None", 4, [])),
        case(4, "more than are free", ("take", 3, "3 taken", 1, [1] * 3), ("take", 2, "None", 1, [1] * 3)),
        case(4, "given back", one, ("release", [0], "done", 4, [])),
        case(4, "given back and taken again", ("take", 4, "4 taken", 0, [1] * 4),
             ("release", [1, 3], "done", 2, [1, 1]), ("take", 2, "2 taken", 0, [1] * 4)),
        case(4, "shared", one, shared),
        case(4, "shared twice in one call", one, ("share", [0, 0], "done", 3, [3])),
        case(4, "shared, and one holder leaves", one, shared, ("release", [0], "done", 3, [1])),
        case(4, "both holders leave", one, shared, ("release", [0], "done", 3, [1]), ("release", [0], "done", 4, [])),
        case(4, "a free page is shared", one, ("release", [0], "done", 4, []), ("share", [0], "ValueError", 4, [])),
        case(4, "given back twice", one, ("release", [0], "done", 4, []), ("release", [0], "ValueError", 4, [])),
        # fault B1: the same page twice in one call, with one, two and three references
        case(4, "twice in one call, one reference", one, ("release", [0, 0], "ValueError", 3, [1])),
        case(4, "twice in one call, two references", one, shared, ("release", [0, 0], "done", 4, [])),
        case(4, "twice in one call, three references", one, ("share", [0, 0], "done", 3, [3]),
             ("release", [0, 0], "done", 3, [1])),
        case(4, "the second is given back too often", two, ("release", [0, 1, 1], "ValueError", 2, [1, 1])),
        case(4, "the second is free", two, ("release", [1], "done", 3, [1]), ("share", [0, 1], "ValueError", 3, [1])),
    ]  # fmt: skip
    cases.append(case(2000, "a large pool, of which little is asked", ("take", 3, "3 taken", 1997, [1, 1, 1]),
                      ("share", [0], "done", 1997, [2, 1, 1]), ("release", [0, 1], "done", 1998, [1, 1]),
                      ("take", 2, "2 taken", 1996, [1] * 4), ("release", [0, 2], "done", 1998, [1, 1])))  # fmt: skip
    for num_pages, num_calls, seed in [(4, 9, 0), (6, 20, 1), (9, 40, 2)]:
        calls, want = some_calls(num_pages, num_calls, seed)
        cases.append(Case({"num_pages": num_pages, "calls": calls}, want, f"{num_calls} calls", run=answers))
    ex.check("PageAllocator", cases)


def test_4_3_pages_needed(ex):
    def case(num_tokens, num_new, want, note, page_size=4, max_tokens=100):
        args = {"num_tokens": num_tokens, "num_new": num_new, "page_size": page_size, "max_tokens": max_tokens}
        return Case(args, want, note)

    ex.check("pages_needed", [
        case(0, 1, 1, "the first token"), case(0, 4, 1, "just one page"), case(0, 5, 2, "a page and one token"),
        case(4, 1, 1, "the last page is full"), case(5, 1, 0, "there is room in the last page"),
        case(5, 3, 0, "the last page gets full"), case(5, 4, 1, "one token more than there is room for"),
        case(5, 12, 3, "a chunk"), case(4, 0, 0, "nothing new"), case(5, 0, 0, "nothing new, half a page"),
        case(8, 4, 1, "a token and three drafts, two of them too far", max_tokens=10),  # fault B7
        case(9, 4, 0, "a token and three drafts, all of these too far", max_tokens=10),
        case(6, 3, 1, "just the longest", page_size=3, max_tokens=9), case(6, 9, 3, "pages of one", 1, 9),
    ])  # fmt: skip


class SomePages:
    """An allocator that notes what it was asked for: its pages are 100, 101 and so on."""

    def __init__(self, num_free):
        self.num_free, self.num_taken, self.shared = num_free, 0, Counter()

    def take(self, num):
        """The next pages; None when too few are free."""
        if num > self.num_free:
            return None
        self.num_free, self.num_taken = self.num_free - num, self.num_taken + num
        return list(range(100 + self.num_taken - num, 100 + self.num_taken))

    def share(self, pages):
        """Note one more reference for each."""
        self.shared.update(pages)

    def release(self, pages):
        """Note one reference less for each."""
        self.shared.subtract(pages)
        self.num_free += sum(page >= 100 for page in pages)

    def __repr__(self):
        return f"<allocator with {self.num_free} free pages>"


def forked(fork, allocator, pages, **args):
    """What a fork made, with new pages named by the first place where they appear."""
    num_free, made = allocator.num_free, fork(allocator, pages, **args)
    tables, copies = made or ([], [])
    names = {page: page for page in pages}
    for page in [page for table in tables for page in table]:
        names.setdefault(page, f"new {len(names) - len(pages) + 1}")
    return {
        "tables": None if made is None else [[names[page] for page in table] for table in tables],
        "copies": [f"{source} to {names.get(target, 'a page of nobody')}" for source, target in copies],
        "references added": [allocator.shared[page] for page in pages], "pages taken": num_free - allocator.num_free,
    }  # fmt: skip


def test_4_4_fork(ex):
    def case(pages, num_tokens, num_branches, tables, copies, shares, note, num_free=9, page_size=4):
        args = {"allocator": SomePages(num_free), "pages": pages, "num_tokens": num_tokens, "page_size": page_size,
                "num_branches": num_branches}  # fmt: skip
        want = {"tables": tables, "copies": copies, "references added": shares, "pages taken": len(copies)}
        return Case(args, want, note, run=forked, may_change=("allocator",))

    three = [[7, 5], [7, "new 1"], [7, "new 2"]]
    ex.check("fork", [
        case([7], 3, 1, [[7]], [], [0], "one branch: it goes on as it is"),
        case([7], 4, 2, [[7], [7]], [], [1], "a full page"),
        case([7], 3, 2, [[7], ["new 1"]], ["7 to new 1"], [0], "a partial page"),
        case([7], 3, 2, None, [], [0], "a partial page, and none is free", num_free=0),
        case([7, 5], 6, 2, [[7, 5], [7, "new 1"]], ["5 to new 1"], [1, 0], "a full and a partial page"),
        case([7, 5], 6, 3, three, ["5 to new 1", "5 to new 2"], [2, 0], "three branches"),  # fault B4
        case([7, 5], 6, 3, None, [], [0, 0], "three branches, and one page is free", num_free=1),
        case([7, 5], 4, 2, [[7, 5], [7]], [], [1, 0], "a full page, and one for the next token"),
        case([7, 5, 2], 5, 2, [[7, 5, 2], [7, "new 1"]], ["5 to new 1"], [1, 0, 0], "a page ahead"),
        case([7, 5], 8, 3, [[7, 5]] * 3, [], [2, 2], "two full pages, and none is free", num_free=0),
        case([3, 1, 4, 2], 10, 4, [[3, 1, 4, 2], *([3, 1, 4, f"new {i}"] for i in (1, 2, 3))],
             [f"2 to new {i}" for i in (1, 2, 3)], [3, 3, 3, 0], "pages of three", page_size=3),
    ])  # fmt: skip


def test_4_5_paged_attention(ex):
    def case(page_table, num_tokens, num_queries, note, page_size=2, heads=1, kv_heads=1, dim=1):
        q = random(num_queries, heads, dim, seed=1)
        k, v = random(2, num_tokens, kv_heads, dim, seed=2)
        want = attended(q, k, v, [0, num_queries], [0, num_tokens])
        k_pages, v_pages = torch.full((2, max(page_table) + 2, page_size, kv_heads, dim), torch.nan).double()
        for position in range(num_tokens):
            page, offset = page_table[position // page_size], position % page_size
            k_pages[page, offset], v_pages[page, offset] = k[position], v[position]
        args = {"q": q, "k_pages": k_pages, "v_pages": v_pages, "page_table": page_table, "num_tokens": num_tokens}
        return Case(args, want, note)

    ex.check("paged_attention", [
        case([0], 2, 1, "one page, full"), case([0], 1, 1, "nobody has written the page's tail"),
        case([1], 2, 1, "page 1"), case([0], 2, 2, "two queries"), case([0, 1], 3, 1, "two pages"),
        case([1, 0], 3, 1, "page 1 comes first"), case([1, 0], 4, 1, "page 1 comes first, both full"),
        case([1, 0, -1], 3, 2, "an entry that is not in use"), case([0], 2, 1, "heads of two", dim=2),
        case([1, 0], 3, 2, "four heads share two KV heads", 2, 4, 2), case([2, 0, 1], 5, 3, "a chunk", 2, 2, 1, 2),
        case([1, 0], 2, 1, "pages of one, two heads", 1, 2, 2),
        case([5, 1, 3, 0, 4], 13, 4, "five pages", 3, 6, 2, 4), case([4, 2], 7, 7, "a prompt at once", 5, 4, 4, 3),
    ])  # fmt: skip


def test_4_6_choose_page_size(ex):
    def case(num_tokens, page_sizes, bytes_per_token, bytes_per_page, want=None, note=""):
        args = {"num_tokens": num_tokens, "page_sizes": page_sizes, "bytes_per_token": bytes_per_token,
                "bytes_per_page": bytes_per_page}  # fmt: skip
        shares = {}
        for size in page_sizes:  # each number of unused tokens once, for each request
            tries = [(num, unused) for num in num_tokens for unused in range(size)]
            bytes_each = [unused * bytes_per_token + (num + unused) / size * bytes_per_page for num, unused in tries]
            shares[size] = sum(bytes_each) / size / (sum(num_tokens) * bytes_per_token)
        best = sorted(shares, key=lambda size: shares[size])[0]
        return Case(args, want or (best, shares[best]), note)

    ex.check("choose_page_size", [
        case([8], [4], 10.0, 0.0, (4, 15 / 80), "1.5 of 4 tokens stay unused; pages cost nothing"),
        case([9], [3], 10.0, 6.0, (3, (10 + 20) / 90), "1 of 3 tokens stays unused, and (9 + 1) / 3 pages"),
        case([8], [2, 4], 10.0, 1.0, note="pages that cost little"),
        case([8], [2, 4], 1.0, 10.0, note="pages that cost much"),
        case([40, 2], [4, 16], 1.0, 6.0, note="a long and a short request"),
        case([100, 3, 3, 3], [1, 4, 16], 1.0, 5.0, note="a long and three short requests"),
        case([2000, 700, 9000], [1, 4, 16, 64, 256], 512.0, 4096.0, note="three chats"),
    ])  # fmt: skip


def test_4_7_admit(ex):
    def share(admit, pools):
        return float(np.mean([share_finished(admit, *pool, seed=1) for pool in pools]))

    pools = [(40, 16, 600), (80, 8, 400), (100, 4, 500)]
    ex.check("admit", [
        Case({"pools": pools}, want=AtLeast(0.57), run=share, note="pages, page size, steps"),
    ])  # fmt: skip
