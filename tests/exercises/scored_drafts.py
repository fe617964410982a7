"""The load on which chapter 8's scored exercise is tried: four prompts and their answers, written byte by byte."""

FIX_PROMPT = '''\
Rename the argument `n` to `num_pages`, and refuse a negative one.

class Pool:
    """Pages that are handed out and come back."""

    def __init__(self, n):
        self.free = list(range(n))
        self.held = set()

    def take(self):
        page = self.free.pop()
        self.held.add(page)
        return page

    def release(self, page):
        self.held.remove(page)
        self.free.append(page)
'''

FIX = '''
class Pool:
    """Pages that are handed out and come back."""

    def __init__(self, num_pages):
        if num_pages < 0:
            raise ValueError("num_pages must not be negative")
        self.free = list(range(num_pages))
        self.held = set()

    def take(self):
        page = self.free.pop()
        self.held.add(page)
        return page

    def release(self, page):
        self.held.remove(page)
        self.free.append(page)
'''

RECORDS_PROMPT = """\
As JSON: Anna, born 1981 in Graz, a nurse; Bela, born 1975 in Pecs, a printer; Cora, born 1990 in Bern, a nurse;
Dario, born 1968 in Bari, a cook; Edda, born 1981 in Kiel, a printer.
"""

RECORDS = """
[
  {"name": "Anna", "born": {"year": 1981, "place": "Graz"}, "profession": "nurse"},
  {"name": "Bela", "born": {"year": 1975, "place": "Pecs"}, "profession": "printer"},
  {"name": "Cora", "born": {"year": 1990, "place": "Bern"}, "profession": "nurse"},
  {"name": "Dario", "born": {"year": 1968, "place": "Bari"}, "profession": "cook"},
  {"name": "Edda", "born": {"year": 1981, "place": "Kiel"}, "profession": "printer"}
]
"""

ANSWER_PROMPT = """\
The lock gate was built in 1911 and raised twice, in 1934 and in 1962. It is kept shut from the first of November to
the last day of March, unless the level of the upper basin is above 4.20 m; then the keeper opens the sluices, and only
if that is not enough, the gate. The keeper lives on the eastern bank, and can be called at any hour.

When is the gate opened in winter, and who opens it?
"""

ANSWER = """
The gate is kept shut from the first of November to the last day of March, unless the level of the upper basin is above
4.20 m. Even then the gate is not the first thing to be opened: the keeper opens the sluices, and only if that is not
enough, the gate. So it is opened in winter only if the level of the upper basin is above 4.20 m and opening the sluices
is not enough. It is the keeper who opens it. The keeper lives on the eastern bank, and can be called at any hour.
"""

TABLE_PROMPT = "The first ten squares and cubes, as a table.\n"

TABLE = "\n| number | square | cube |\n|--------|--------|------|\n" + "".join(
    f"| {n:6d} | {n**2:6d} | {n**3:4d} |\n" for n in range(1, 11)
)

TEXTS = ((FIX_PROMPT, FIX), (RECORDS_PROMPT, RECORDS), (ANSWER_PROMPT, ANSWER), (TABLE_PROMPT, TABLE))


def tokens_per_step(draft, most):
    """Write each text as a greedy model would that verifies the drafts of `draft`; its tokens per step, all in all.

    A step gives the drafts that are right, up to the first that is not, and one token more.
    """
    num_tokens, num_steps = 0, 0
    for prompt, text in TEXTS:
        tokens, output = list(prompt.encode()), list(text.encode())
        done = 0
        while done < len(output):
            drafts = list(draft(tokens + output[:done], most))[:most]
            right = 0
            while right < len(drafts) and output[done + right : done + right + 1] == drafts[right : right + 1]:
                right += 1
            done, num_steps = done + right + 1, num_steps + 1
        num_tokens += len(output)
    return num_tokens / num_steps
